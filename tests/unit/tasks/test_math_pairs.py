"""The graded pairs in tests/graded_pairs/: judged as a careful person does, but for those that the record lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark_scripts import benchmark
from sparroll import records
from sparroll.tasks.math.grading.magnitude import attempted
from sparroll.tasks.math.pool import Pool
from sparroll.tasks.math.reward import MathReward

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
FILES = (
    "ordinary",
    "families",
    "unseen",
    "more",
    "first_sight",
    "examiner",
    "examiner_again",
    "examiner_third",
    "examiner_last",
)


def recorded(name: str) -> Any:
    return records.read(RESULTS / f"{name}.json", kind="verdicts-math")["results"]


@pytest.fixture(scope="module")
def verdicts() -> ModuleType:
    return benchmark("verdicts")


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    pool = Pool(2)
    yield MathReward(pool)
    pool.close()


def test_there_are_two_thousand_pairs_and_every_family_has_wrong_answers(verdicts: ModuleType) -> None:
    assert verdicts.FILES == FILES
    pairs = [repr(pair) for name in FILES for rows in verdicts.graded_pairs(name).values() for pair in rows]
    assert len(set(pairs)) >= 2000
    for name in FILES:
        for family, rows in verdicts.graded_pairs(name).items():
            assert not all(right for _, _, right in rows), (name, family)


@pytest.mark.parametrize("name", FILES)
def test_verdicts_are_the_known_ones_but_for_those_that_the_record_lists(
    name: str, verdicts: ModuleType, math: MathReward
) -> None:
    found = verdicts.judged(math, name)
    known = recorded("verdicts-math-cpu")["graded"][name]
    assert found["misjudged"] == known["misjudged"]
    # Only the golds that are no answers have no verdict.
    assert found["neither_right_nor_wrong"] == known["neither_right_nor_wrong"]
    assert set(known["neither_right_nor_wrong"]) <= {"unparsable_gold"}


def test_at_most_one_in_thirty_pairs_was_judged_wrongly_at_first_sight(verdicts: ModuleType) -> None:
    pairs, misjudged = 0, 0
    for name in verdicts.FIRST_SIGHT:
        found = recorded(verdicts.first_sight_record(name))["graded"][name]
        pairs += sum(counts["right"] + counts["wrong"] for counts in found["families"].values())
        misjudged += len(found["misjudged"])
    assert pairs >= 2000
    assert misjudged <= pairs / 30


def test_ten_thousand_verdicts_take_at_most_a_hundred_seconds_on_two_cores() -> None:
    found = recorded("verdicts-math-cpu")
    assert found["verdicts"] == 10_000 and found["wrong_verdicts"] == 0
    assert found["verdicts_per_second"] >= 100


def test_the_docs_state_what_was_recorded() -> None:
    found = recorded("verdicts-math-cpu")
    memory_mib = {row["verdicts"]: max(row["workers_rss_mib"]) for row in found["rows"]}
    load = f"{found['load_average_before'][0]:.0f} to {found['load_average_after'][0]:.0f}"
    stated = (
        f"{found['verdicts_per_second']:.0f} verdicts a second on two cores (load average {load}), and "
        f"{memory_mib[500]:.1f} MiB a worker after 500 verdicts, {memory_mib[5000]:.1f} MiB after 5,000 and "
        f"{memory_mib[10000]:.1f} MiB after 10,000."
    )
    assert stated in " ".join((ROOT / "docs" / "math.md").read_text(encoding="utf-8").split())


def test_memory_that_runs_out_is_no_verdict_and_what_sympy_raises_is_no_answer() -> None:
    def fails(error: Exception) -> bool:
        raise error

    assert attempted(lambda: fails(NotImplementedError()), otherwise=True)
    with pytest.raises(MemoryError):
        attempted(lambda: fails(MemoryError()), otherwise=True)
