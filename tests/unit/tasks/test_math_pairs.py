"""The answer pairs of tests/math_pairs.py: right where a person says so, but for the disagreements that are listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from math_pairs import DISAGREEMENTS, PAIRS
from sparroll import records
from sparroll.tasks.math.pool import Pool
from sparroll.tasks.math.reward import MathReward

ROOT = Path(__file__).parents[3]
ROWS = [row for rows in PAIRS.values() for row in rows]


@pytest.fixture(scope="module")
def statuses() -> Iterator[dict[tuple[str, str], str]]:
    pool = Pool(2)
    verdicts = MathReward(pool).grade_answers([(gold, answer) for gold, answer, _ in ROWS])
    yield {(gold, answer): verdict.status for (gold, answer, _), verdict in zip(ROWS, verdicts, strict=True)}
    pool.close()


def test_there_are_at_least_200_different_pairs() -> None:
    assert len({(gold, answer) for gold, answer, _ in ROWS}) == len(ROWS) >= 200


def test_the_disagreements_are_pairs_of_the_table() -> None:
    assert DISAGREEMENTS.keys() <= {(gold, answer) for gold, answer, _ in ROWS}


@pytest.mark.parametrize("subject", PAIRS)
def test_verdicts_are_the_known_ones_but_for_the_listed(subject: str, statuses: dict[tuple[str, str], str]) -> None:
    found = {(gold, answer): statuses[gold, answer] == "right" for gold, answer, _ in PAIRS[subject]}
    expected = {(gold, answer): right ^ ((gold, answer) in DISAGREEMENTS) for gold, answer, right in PAIRS[subject]}
    assert found == expected


def test_no_pair_runs_into_a_limit(statuses: dict[tuple[str, str], str]) -> None:
    assert set(statuses.values()) == {"right", "wrong", "no_answer"}


def test_the_docs_state_what_was_recorded() -> None:
    found = records.read(ROOT / "benchmarks" / "results" / "verdicts-math-cpu.json", kind="verdicts-math")["results"]
    memory_mib = {row["verdicts"]: max(row["workers_rss_mib"]) for row in found["rows"]}
    load = f"{found['load_average_before'][0]:.0f} to {found['load_average_after'][0]:.0f}"
    stated = (
        f"{found['verdicts_per_second']:.0f} verdicts a second on two cores with nothing else to do "
        f"(load average {load}), and {memory_mib[500]:.1f} MiB a worker after 500 verdicts, "
        f"{memory_mib[5000]:.1f} MiB after 5,000 and {memory_mib[10000]:.1f} MiB after 10,000."
    )
    assert found["load_average_before"][0] < 0.5
    assert found["verdicts"] == 10_000 and found["wrong_verdicts"] == 0
    assert stated in " ".join((ROOT / "docs" / "math.md").read_text(encoding="utf-8").split())


def test_the_docs_list_every_disagreement_with_its_reason() -> None:
    known = {(gold, answer): right for gold, answer, right in ROWS}
    word = {True: "right", False: "wrong"}
    rows = [
        f"| `{gold}` | `{answer}` | {word[known[gold, answer]]} | {word[not known[gold, answer]]} | {why} |"
        for (gold, answer), why in DISAGREEMENTS.items()
    ]
    page = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
    table = page.partition("| gold | answer |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == rows
