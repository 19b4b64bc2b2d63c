"""docs/claims.md: verdicts follow from figures by the rules that the page shows, and each row has all that it needs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparroll import files, records

ROOT = Path(__file__).parents[2]
EXPERIMENTS = {"predicts-training", "threshold", "over-iterations", "page-size", "distil-loss", "sparse-rl"}
EXPERIMENTS |= {"jackpot-union", "staleness", "quantised-sampler"}
"""Of recipes/claims."""


class Benchmarks:
    """Modules of the folder benchmarks, which is no package."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def of() -> Benchmarks:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        importlib.import_module("render_claims")
        return Benchmarks()


@pytest.fixture(scope="module")
def claims(of: Benchmarks) -> list[Any]:
    return of.render_claims.every_claim()


def test_rules_have_known_answers(of: Benchmarks) -> None:
    rules = of.published_rules
    low, across, high = (rules.Estimate(value, value - 0.02, value + 0.02) for value in (-0.05, 0.0, 0.05))
    for rule, expected in (
        (rules.above(0), ("refuted", "undecided", "reproduced")),
        (rules.below(0), ("reproduced", "undecided", "refuted")),
        (rules.inside(-0.01, 0.01), ("refuted", "undecided", "refuted")),
        (rules.inside(-0.02, 0.02), ("refuted", "reproduced", "refuted")),
        (rules.as_good(), ("refuted", "reproduced", "reproduced")),
        (rules.at_least(0.01), ("refuted", "undecided", "reproduced")),
        (rules.uncorrelated(), ("reproduced", "reproduced", "reproduced")),
    ):
        assert tuple(rule.judge(each) for each in (low, across, high)) == expected, rule.text
    assert rules.as_good().judge(rules.Estimate(-0.01, -0.04, 0.02)) == "undecided"
    assert rules.uncorrelated().judge(rules.Estimate(0.5, 0.1, 0.8)) == "refuted"
    assert rules.uncorrelated().judge(rules.Estimate(0.3, -0.1, 0.6)) == "undecided"


def test_a_speed_up_is_reproduced_near_the_published_one_and_refuted_without_any(of: Benchmarks) -> None:
    rules, single = of.published_rules, of.published_rules.Estimate.single
    verdicts = [rules.as_fast(2.0).judge(single(value)) for value in (2.1, 1.8, 1.79, 1.0)]
    assert verdicts == ["reproduced", "reproduced", "partly", "refuted"]
    assert rules.as_fast(2.0).judge(rules.Estimate(1.8, 1.7, 1.9)) == "undecided"
    assert [rules.as_cheap(0.45).judge(single(value)) for value in (0.5, 0.51)] == ["reproduced", "refuted"]


def test_a_claim_is_as_good_as_its_parts(of: Benchmarks) -> None:
    combined = of.published_rules.combined
    for parts, expected in (
        (["reproduced", "reproduced"], "reproduced"),
        (["reproduced", "undecided"], "partly"),
        (["partly", "refuted"], "partly"),
        (["refuted", "undecided"], "refuted"),
        (["undecided", "undecided"], "undecided"),
    ):
        assert combined(parts) == combined(parts[::-1]) == expected
    with pytest.raises(ValueError, match="at least one part"):
        combined([])


def run(row: str, seed: int, gained: float, **series: list[float]) -> dict[str, Any]:
    points = [[0, 0.5, 0.0, 1.0], [4, 0.5 + gained, 0.0, 1.0]]
    about = {"row": row, "seed": seed, "state": "finished", "stopped": "", "dense_accuracy": points}
    return about | {"series": series}


@pytest.fixture
def study(of: Benchmarks, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three rows whose seeds lie .02 apart, which is a standard deviation of .02 with six degrees of freedom."""
    runs = [
        run(row, seed, mean + apart)
        for row, mean in (("up", 0.1), ("level", 0.0), ("down", -0.1))
        for seed, apart in enumerate((-0.02, 0.0, 0.02))
    ]
    runs.append(run("down", 3, -0.5) | {"state": "cut"})
    runs.append(run("down", 4, -0.5) | {"stopped": "no token kept"})
    found = {"runs": runs}
    monkeypatch.setattr(of.published_figures, "results", lambda name, kind: found)
    return found


def test_intervals_of_changes_take_one_deviation_for_all_rows(of: Benchmarks, study: dict[str, Any]) -> None:
    figures = of.published_figures
    assert figures.pooled_deviation(["made-up"]) == (pytest.approx(0.02), 6)
    half = 2.446912 * 0.02
    change = figures.change("made-up", "up")
    assert (change.value, change.high - change.value) == (pytest.approx(0.1), pytest.approx(half / 3**0.5))
    both = figures.change("made-up", "up", "down")
    assert (both.value, both.high) == (pytest.approx(0, abs=1e-12), pytest.approx(half / 6**0.5))
    than = figures.difference("made-up", "up", "down")
    assert (than.value, than.value - than.low) == (pytest.approx(0.2), pytest.approx(half * (2 / 3) ** 0.5))


def test_shifts_and_worst_bins_are_means_over_runs(of: Benchmarks, study: dict[str, Any]) -> None:
    figures = of.published_figures
    bins = [f"mismatch/acceptance_q05/{name}" for name in ("0-100", "100-200")]
    study["runs"] = [
        run("row", seed, 0.0, **{bins[0]: [0.9] * 6, bins[1]: [0.7, *[0.8] * 4, 0.8 + more]})
        for seed, more in enumerate((0.0, 0.1, 0.2))
    ]
    shifted = figures.shift("made-up", "row", bins[1])
    assert shifted.value == pytest.approx((0.1 + 0.1) / 5)
    assert shifted.high - shifted.value == pytest.approx(4.302653 * 0.02 / 3**0.5)
    assert figures.worst_bin_of("made-up", "row") == pytest.approx([0.7 + 0.5 / 6, 0.7 + 0.6 / 6, 0.7 + 0.7 / 6])
    welch = figures.less([1.0, 1.1, 0.9], [0.5, 0.6, 0.4])
    assert (welch.value, welch.high) == (pytest.approx(0.5), pytest.approx(0.5 + 2.776445 * 0.1 * (2 / 3) ** 0.5))


def claim_on(of: Benchmarks, row: str, **more: Any) -> Any:
    claims, figures, rules = of.published_claims, of.published_figures, of.published_rules
    about: dict[str, Any] = {"title": "it rises", "says": "it rises by .1", "model": "made up", "records": ("made-up",)}
    about |= {"parts": lambda: [claims.Part(row, figures.change("made-up", row), rules.above(0), sign=True)]}
    return claims.PublishedClaim(name="rises", command="python benchmarks/render.py", **about | more)


def test_a_row_is_computed_and_one_without_its_record_says_not_run_yet(
    of: Benchmarks, study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of.published_claims, "RESULTS", tmp_path)
    assert claim_on(of, "up").verdict() == "not run yet"
    waiting = claim_on(of, "up", experiment="threshold", settled=nothing)
    expected = ["`rises`", "**not run yet**", "it rises by .1", "-", "made up", "`claims-threshold-*`: not run yet"]
    assert waiting.row() == expected
    assert waiting.sources()[1] == ["python recipes/claims/run.py --out runs/claims --only threshold"]
    (tmp_path / "made-up.json").write_text("{}")
    verdicts = {row: claim_on(of, row).verdict() for row in ("up", "down", "level")}
    assert verdicts == {"up": "reproduced", "down": "refuted", "level": "undecided"}
    cells = claim_on(of, "up").row()
    assert cells[1:4] == ["**reproduced**", "it rises by .1", "up: +0.100 [+0.071, +0.129]"]
    assert claim_on(of, "up").sources() == ("`made-up`", ["python benchmarks/render.py"])
    assert claim_on(of, "up").rules()[1].endswith("refuted if below (up: reproduced)")


def test_a_claim_with_an_experiment_must_say_what_reads_its_records(of: Benchmarks) -> None:
    with pytest.raises(ValueError, match="the claim rises needs both an experiment and what reads its records"):
        claim_on(of, "up", experiment="threshold")


def nothing(found: Any) -> list[Any]:
    return []


def test_an_end_that_is_not_0_does_not_look_like_0(of: Benchmarks) -> None:
    def interval(low: float, high: float) -> str:
        estimate = of.published_rules.Estimate((low + high) / 2, low, high)
        return of.published_claims.Part("any", estimate, of.published_rules.below(0), sign=True).interval()

    assert interval(-0.0956, -0.00078) == "[-0.096, -0.0007]" and interval(0.00034, 0.068) == "[+0.0003, +0.068]"
    assert interval(-0.0956, 0.0) == "[-0.096, +0.000]"


def moved(budget: int, step: int, mean: float, half: float) -> dict[str, Any]:
    of = {"mean": mean, "low": mean - half, "high": mean + half}
    return {"task": "remarks", "rollouts": "sparse", "step": step, "budget": budget, "q05_moved": of}


def test_experiments_speak_for_the_claims_that_they_were_made_for(of: Benchmarks) -> None:
    made = of.published_experiments

    def target(value: float | None, *gained: float) -> dict[str, Any]:
        return {"task": "remarks", "target": value, "accuracy_change": {"seeds": list(gained)}}

    def tail(value: float) -> dict[str, Any]:
        steps = {"mismatch/acceptance_q05/0-100": [value, None]}
        return {"config": {"task": "remarks", "target": value}, "results": {"steps": steps}}

    rows = [target(None, 0.08, 0.1, 0.12), target(0.75, -0.1), target(0.86, 0.09, 0.11, 0.13)]
    threshold = [{"cells": [tail(0.75), tail(0.86)], "lines": rows}]
    (high,) = made.trains_like_dense(threshold)
    # Two rows of three seeds that lie .02 apart: a standard deviation of .02 with four degrees of freedom.
    half = 2.776445 * 0.02 * (2 / 3) ** 0.5
    assert (high.label, high.estimate.value) == (
        "remarks, target .86 (worst bin .860), beyond dense",
        pytest.approx(0.01),
    )
    assert high.estimate.low == pytest.approx(0.01 - half) and high.verdict == "undecided"
    low, drifts = made.too_low_collapses(threshold)
    assert (low.label, low.verdict) == ("remarks, target .75 (worst bin .750), change", "reproduced")
    assert low.estimate.high == pytest.approx(-0.1 + 2.776445 * 0.02)
    assert (drifts.estimate, drifts.verdict, drifts.missing) == (None, "undecided", "not run yet")
    steps = [{"over_seeds": [moved(96, 30, 0.5, 0), moved(96, 60, 0.01, 0.001), moved(128, 60, -0.04, 0.01)]}]
    (most,) = made.same_at_every_iteration(steps)
    assert (most.label, most.verdict) == (
        "remarks, sparse rollouts, the budget that moved most (128 tokens)",
        "refuted",
    )


def test_pages_are_compared_at_equal_cost(of: Benchmarks) -> None:
    def line(page: int, eflops: float, tail: float) -> dict[str, Any]:
        found = {"task": "remarks", "selector": {"kind": "page_mean", "page_tokens": page}, "eflops": eflops}
        return found | {"statistics": {"q05": [tail, tail - 0.01, tail + 0.01]}}

    lines = [line(16, 1.0, 0.4), line(16, 2.0, 0.6), line(16, 4.0, 0.9), line(8, 2.0, 0.9)]
    # Of pages of 32: one below a usable tail, one above, one that leaves nothing out, one dearer than all of 16.
    lines += [line(32, 1.5, 0.4), line(32, 3.0, 0.77), line(32, 3.5, 0.98), line(32, 9.0, 0.7)]
    ceiling = {"task": "remarks", "selector": None, "statistics": {"q05": [0.98, 0.97, 0.99]}}
    above, below = of.published_experiments.smaller_pages_are_better([{"lines": [*lines, ceiling]}])
    assert above.label == "remarks, pages of 32 beyond 16, tails above .6" and above.verdict == "refuted"
    assert above.estimate.value == pytest.approx(0.02)
    assert above.estimate.high - above.estimate.value == pytest.approx(0.01 * 2**0.5)
    assert below.label == "remarks, pages of 32 beyond 16, tails below .6" and below.verdict == "reproduced"
    assert below.estimate.value == pytest.approx(-0.1)


@pytest.fixture
def sharpened(
    of: Benchmarks, study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A claim with an older record, and an experiment with a part for each of its lines, which refutes it."""
    monkeypatch.setattr(of.published_claims, "RESULTS", tmp_path)
    (tmp_path / "made-up.json").write_text("{}")
    part = of.published_claims.Part("late", of.published_rules.Estimate.single(-1.0), of.published_rules.above(0))
    return partial(claim_on, of, "up", experiment="threshold", settled=lambda found: [part] * len(found[0]["lines"]))


def ran(folder: Path, *lines: Any, toy: bool = False) -> None:
    results = {"lines": lines, "cells": [{}], "missing": []}
    config = {"toy": toy, "tasks": {"remarks": {}}}
    records.write(folder / "claims-threshold-h200.json", "claims-threshold", results, config=config)


def test_an_experiment_stands_beside_older_records_once_it_came_to_the_claim(
    sharpened: Callable[..., Any], tmp_path: Path
) -> None:
    claim = sharpened()
    assert claim.verdict() == "reproduced" and "not run yet" in claim.row()[5]
    ran(tmp_path)
    assert claim.verdict() == "reproduced"
    assert claim.row()[5] == "`made-up`, `claims-threshold-h200`: not in this verdict"
    ran(tmp_path, {})
    assert claim.verdict() == "partly" and claim.row()[5] == "`made-up`, `claims-threshold-h200`"
    assert claim.row()[3].startswith("up: ") and claim.row()[3].endswith("late: -1.000 (single)")
    assert claim.row()[4] == "made up; tiny-reasoner"
    ran(tmp_path, {}, toy=True)
    with pytest.raises(ValueError, match="made with --toy"):
        claim.verdict()


def test_every_claim_has_all_fields(claims: list[Any]) -> None:
    assert 25 <= len(claims) <= 45
    assert len({claim.name for claim in claims}) == len(claims)
    for claim in claims:
        cells = claim.row()
        assert len(cells) == 6 and all(cells), claim.name
        assert claim.title and not any("|" in cell for cell in cells), claim.name
        assert claim.parts or claim.experiment or claim.untestable, f"{claim.name} can never get a verdict"
        assert bool(claim.records) == bool(claim.parts), claim.name
        assert not claim.experiment or claim.experiment in EXPERIMENTS, claim.name
        assert (claim.verdict() == "not run yet") == (cells[3] == "-"), claim.name
    assert {claim.experiment for claim in claims} - {""} == EXPERIMENTS


def test_every_record_that_a_claim_names_exists_or_the_row_says_not_run_yet(claims: list[Any]) -> None:
    for claim in claims:
        missing = [name for name in claim.records if not (ROOT / "benchmarks" / "results" / f"{name}.json").exists()]
        assert not missing or claim.verdict() == "not run yet", (claim.name, missing)


def test_every_command_names_a_file_that_exists(claims: list[Any]) -> None:
    for claim in claims:
        commands = claim.sources()[1]
        assert commands, claim.name
        for words in map(shlex.split, commands):
            (path, *_) = [word for word in words if re.search(r"\.(py|toml)$", word)]
            runner = words[1] == "recipes/claims/run.py" and "not run yet" in claim.row()[5]
            assert (ROOT / path).is_file() or runner, f"{claim.name}: {path}"


def test_commands_of_the_study_name_rows_of_its_records(claims: list[Any]) -> None:
    known = {
        run["row"]
        for path in (ROOT / "benchmarks" / "results").glob("mismatch-study-*.json")
        if (record := records.read(path))["kind"] == "mismatch-study"
        for run in record["results"]["runs"]
    }
    for claim in claims:
        if "study.py" in claim.command:
            rows = claim.command.partition("--rows ")[2].split()
            assert rows and set(rows) <= known, (claim.name, set(rows) - known)


def test_the_page_has_one_row_for_each_claim(claims: list[Any]) -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| \*\*", page, flags=re.M)
    assert sorted(rows) == sorted(claim.name for claim in claims)
    for claim in claims:
        assert page.count(f"(`{claim.name}`)") == 1, f"the list of verdicts has {claim.name} not once"


def logged(row: str, seed: int, gained: float, level: float, metrics: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """A run in which every statistic has the level, in the direction that it should have."""
    series = {metric: [direction * level, direction * level] for metric, direction in metrics.values()}
    return run(row, seed, gained) | {"series": series}


def test_a_statistic_that_orders_runs_has_a_correlation_of_one(of: Benchmarks) -> None:
    predictors = of.predictors
    runs = [logged(f"row {n // 2}", n % 2, n / 100, n, predictors.STATISTICS) for n in range(8)]
    runs[3]["series"] |= {"mismatch/acceptance_mean": [0.0, 0.0]}
    dense = logged("dense", 0, 1.0, -1.0, predictors.STATISTICS)
    cut = logged("row 9", 0, 1.0, -1.0, predictors.STATISTICS) | {"state": "cut"}
    found = predictors.runs_of({"runs": [*runs, dense, cut]})
    assert len(found) == 8
    made = predictors.correlate(found, "run_mean", 200, importlib.import_module("numpy").random.default_rng(0))
    assert made["5th percentile of acceptance"]["value"] == pytest.approx(1)
    assert [made["KL sparse to dense"][name] for name in ("value", "low", "high")] == pytest.approx([-1, -1, -1])
    mean = made["mean acceptance"]
    # Ranks 1.5 3 4 1.5 5 6 7 8 against 1 to 8.
    assert mean["value"] == pytest.approx(37.5 / (41.5 * 42) ** 0.5)
    assert mean["gained"]["value"] == pytest.approx(mean["value"] - 1)
    assert mean["low"] < mean["value"] and mean["gained"]["high"] <= 1e-9


def test_the_record_of_predictors_is_of_the_records_that_are_here(of: Benchmarks) -> None:
    predictors, folder = of.predictors, ROOT / "benchmarks" / "results"
    record = json.loads((folder / "predictors.json").read_text())
    assert [each["selection"] for each in record["results"]] == [each.name for each in predictors.SELECTIONS]
    for each in record["results"]:
        for name, digest in each["records"].items():
            assert files.sha256(folder / f"{name}.json") == digest, (
                f"run benchmarks/predictors.py again: {name} changed"
            )
    again = predictors.analyse(predictors.SELECTIONS[3], draws=20, seed=0)
    for when in predictors.WHEN:
        for name, found in again[when].items():
            assert record["results"][3][when][name]["value"] == pytest.approx(found["value"])
