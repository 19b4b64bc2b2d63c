"""Calibration with checks of drafts: what is measured, which window, floor and budgets are chosen, and what is kept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.calibrate.bounds import BlindSpots
from sparroll.calibrate.check_figures import CheckFigures
from sparroll.calibrate.choice import Machine, choose, predicted_drafts
from sparroll.calibrate.defaults import CHECKED_KL_AT_MOST
from sparroll.calibrate.measure import check_measurable
from sparroll.calibrate.run import Calibration, calibrate
from sparroll.calibrate.sweep import Sweep, sweep
from sparroll.calibrate.verify import verify
from sparroll.cli.calibration.asked import Candidates
from sparroll.cli.calibration.printed import text
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.plan.hardware import find_hardware
from sparroll.plan.kernel_times import kernel_times_of
from sparroll.plan.length_mix import LengthMix
from sparroll.plan.model_shape import ModelShape
from sparroll.schedule import Schedule, Step
from sparroll.train.config.file import config_from
from sparroll.train.schedules import make_guard
from sparroll.types import Checks, Rollout, TokenScores

from .fakes import study

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results"
GRID = [64, 96, 128, 192, 256]
SHAPE = ModelShape("toy", parameters=1_000_000, layers=4, query_heads=4, kv_heads=2, head_dim=64, vocabulary=100)
MACHINE = Machine(SHAPE, find_hardware("H200"), LengthMix.parse("20-420"))
CHECKS = [DraftCheck(16, 0.01), DraftCheck(64, 0.01)]
LEAST = {"min_tokens": 100, "min_rollouts": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swept")


@pytest.fixture(scope="module")
def swept(folder: Path) -> Sweep:
    return sweep(study(), out=folder, budgets=GRID, dense_layers=(0,), check=CHECKS[0])


def run(bench, out: Path, **more) -> Calibration:
    settings = {"budgets": GRID, "dense_layers": (0,), "checks": CHECKS, "shape": SHAPE, "target": 0.86, **LEAST}
    return calibrate(bench, out=out, **settings | more)


def test_a_checked_schedule_is_measured_from_its_own_checks_without_a_scoring_pass() -> None:
    bench = study()
    plain = bench.measure(Schedule.fixed(64, dense_layers=(0,)))
    assert bench.scorer.calls == ["dense"] and plain.checked is None
    found = bench.measure(Schedule.fixed(64, dense_layers=(0,)).checked(16, 0.1))
    assert bench.scorer.calls == ["dense"]
    assert found.tail().overall.quantile_value > plain.tail().overall.quantile_value
    assert found.checked is not None and found.checked.checks.windows > 0


def test_the_figures_of_a_check_by_hand() -> None:
    rollout = Rollout(
        [1] * 8,
        [2, 3, 4, 5],
        sparse_logp=torch.tensor([-0.1, -0.2, -0.3, -0.4]),
        finish_reason="stop",
        dense=TokenScores(torch.tensor([-0.1, -2.3, -0.4, -3.4])),
        checks=Checks(windows=2, cut_windows=1, drafted_tokens=6, taken_back_tokens=3),
    )
    # Contexts of 8 to 11 tokens, in bins of 10: one token of each bin is more than two nats off.
    found = CheckFigures.of([rollout, rollout], bin_tokens=10)
    assert found.checks == Checks(4, 2, 12, 6)
    assert found.tokens == {0: 4, 10: 4} and found.far_tokens == {0: 2, 10: 2}
    assert found.far_share == found.far_share_at(10) == 0.5 and found.far_share_at(20) == 0
    assert found.largest_nats == pytest.approx(3.0)
    assert CheckFigures.from_table(found.table()) == found
    assert "4 windows, 50.0% cut, 1.500 drafted per kept" in str(found)


def test_drafts_behind_a_stop_id_cost_a_step_and_older_records_do_not_count_them() -> None:
    """A window of 64 whose 10th draft is a stop id: 63 steps for the 10 tokens that stand."""
    checks = Checks(windows=1, drafted_tokens=10, behind_stop_tokens=53)
    assert checks.drafted_per_kept == 6.3 and Checks.from_table(checks.table()) == checks
    older = checks.table()
    del older["behind_stop_tokens"]
    assert Checks.from_table(older) == Checks(windows=1, drafted_tokens=10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "replay"}, "a replay drafts nothing"),
        ({"estimator": "exact"}, "the estimator exact compares"),
        ({"temperature": 0.0}, "at temperature 0"),
    ],
)
def test_settings_that_cannot_measure_a_check_are_refused_before_anything_runs(settings, message, tmp_path) -> None:
    bench = study(**settings)
    with pytest.raises(UserError, match=message):
        run(bench, tmp_path)
    assert bench.engine.generated == []
    check_measurable(Schedule.fixed(64), bench.settings)


def test_checks_have_files_of_their_own_and_may_be_added(swept, folder) -> None:
    assert (folder / "budget-000064-check-16-0.01.json").exists()
    bench = study()
    again = sweep(bench, out=folder, budgets=GRID, dense_layers=(0,), check=CHECKS[0])
    assert bench.engine.generated == []
    assert [each.checked for each in again.measurements] == [each.checked for each in swept.measurements]
    other = sweep(bench, out=folder, budgets=[64], dense_layers=(0,), check=CHECKS[1])
    assert [name for name, _ in bench.engine.generated] == ["fixed-64-checked-64-0.01"]
    assert other.measurements[0].schedule.check == CHECKS[1]
    unchecked = study()
    sweep(unchecked, out=folder, budgets=[64], dense_layers=(0,))
    assert [name for name, _ in unchecked.engine.generated] == ["fixed-64"]


def test_checks_that_were_counted_without_the_token_behind_a_window_are_refused(tmp_path) -> None:
    sweep(study(), out=tmp_path, budgets=[64], dense_layers=(0,), check=CHECKS[0])
    path = tmp_path / "budget-000064-check-16-0.01.json"
    table = json.loads(path.read_text())
    del table["checked"]["extra_tokens"]
    path.write_text(json.dumps(table))
    bench = study()
    with pytest.raises(UserError, match=r"cannot read .*check-16-0.01.json: it lacks 'extra_tokens'") as found:
        sweep(bench, out=tmp_path, budgets=[64], dense_layers=(0,), check=CHECKS[0])
    assert found.value.hint == f"delete {path} to measure it again"
    assert bench.engine.generated == []


def test_drafts_beyond_one_a_token_are_put_down_to_bins_that_read_a_part(swept) -> None:
    rows = {row.from_context_tokens: row.tokens for row in swept.ceiling.tail().rows}
    whole, longer = sum(rows.values()), sum(count for start, count in rows.items() if start >= 100)
    at_128 = swept.measurements[2].checked.checks.drafted_per_kept
    # 128 tokens hold every context of the first bin, so each token of the others has this many drafts beyond those of
    # windows that stand whole.
    least = swept.check.drafts / swept.check.window_tokens
    excess = (at_128 / least - 1) * whole / longer
    assert predicted_drafts(swept, Schedule.fixed(128)) == pytest.approx(at_128)
    last = sum(count for start, count in rows.items() if start >= 300)
    half = Schedule((Step(0, 512), Step(300, 128)))
    assert predicted_drafts(swept, half) == pytest.approx(least * (1 + excess * last / whole))
    assert predicted_drafts(swept, Schedule.fixed(512)) == least


def test_drafts_behind_a_stop_id_are_predicted_alike_for_every_schedule(swept) -> None:
    """100 tokens stand at each budget, and 25 drafts ran behind a stop id."""
    checks = [Checks(4, 0, 100, behind_stop_tokens=25) for _ in GRID]
    stopped = [
        replace(each, checked=replace(each.checked, checks=one))
        for each, one in zip(swept.measurements, checks, strict=True)
    ]
    plain = [
        replace(each, checked=replace(each.checked, checks=replace(one, behind_stop_tokens=0)))
        for each, one in zip(swept.measurements, checks, strict=True)
    ]
    for schedule in (Schedule.fixed(128), Schedule((Step(0, 64), Step(200, 128), Step(300, 192))), Schedule.fixed(512)):
        found, without = (
            predicted_drafts(replace(swept, measurements=tuple(each)), schedule) for each in (stopped, plain)
        )
        assert found - without == pytest.approx(0.25)


def test_the_fastest_schedule_at_the_target_is_chosen_and_not_the_one_that_reads_the_least(swept) -> None:
    cheap = choose([swept], MACHINE, target=0.6, **LEAST).candidates
    assert [each.token_seconds for each in cheap] == sorted(each.token_seconds for each in cheap)
    assert {each.least_budget_tokens for each in cheap} == set(GRID)
    dear = []
    for budget, each in zip(GRID, swept.measurements, strict=True):
        # Small budgets are cut so often that every token is drafted five times.
        drafted = 5_000 if budget < 192 else 1_010
        dear.append(replace(each, checked=replace(each.checked, checks=Checks(100, 10, drafted, drafted - 990))))
    best = choose([replace(swept, measurements=tuple(dear))], MACHINE, target=0.6, **LEAST).best
    assert cheap[0].least_budget_tokens < 192 <= best.least_budget_tokens
    assert best.fitted.schedule.check == CHECKS[0] and best.drafted_per_kept < 1.1


def test_a_bound_on_tokens_far_off_raises_the_budgets_that_break_it(swept) -> None:
    free = choose([swept], MACHINE, target=0.6, **LEAST)
    held = choose([swept], MACHINE, target=0.6, bounds=BlindSpots(0.0), **LEAST)
    contexts = (150, 250, 350)
    least = [
        [min(each.fitted.schedule.kv_budget_tokens(at) for each in found.candidates) for at in contexts]
        for found in (free, held)
    ]
    # By the fake's law a token is far off where the context is 2.6 to 2.8 budgets long.
    assert least == [[64, 64, 64], [96, 128, 192]]


def test_a_bound_on_the_kl_of_what_is_kept_raises_the_budgets_whatever_the_tail(swept) -> None:
    def least(bounds: BlindSpots) -> int:
        found = choose([swept], MACHINE, target=0.01, bounds=bounds, **LEAST).candidates
        return min(each.fitted.schedule.kv_budget_tokens(350) for each in found)

    assert least(BlindSpots()) == 64
    assert least(BlindSpots(kl_at_most=8.0)) > 64
    assert least(BlindSpots(far_mass_at_most=0.1, far_mass_nats=10)) > 64


def test_without_a_target_the_kl_of_what_is_kept_decides_and_the_tail_is_only_reported(tmp_path) -> None:
    """By the fake's law the longest contexts have a tail of .82 and a KL of 17 with 96 tokens. The tail needs 128 there."""
    held = run(study(), tmp_path / "tail", target=0.86, verify_rounds=0)
    found = run(study(), tmp_path / "kl", target=None, bounds=BlindSpots(kl_at_most=21.0))
    least = [min(each.fitted.schedule.kv_budget_tokens(350) for each in of.choice.candidates) for of in (held, found)]
    assert least[0] > 112 and least[1] == found.schedule.kv_budget_tokens(350) == 96
    assert found.schedule.target == {"kl_at_most": 21.0} and Schedule.load(found.path).target == found.schedule.target
    assert min(row["q05"] for row in found.rows() if row["q05"] is not None) < 0.83
    assert found.verification.met
    assert max(each.kl for each in found.verification.measurement.divergence.bins().values()) <= 21.0
    lines = "\n".join(text(found))
    assert "schedules hold what is asked for" in lines and "KL of what is kept, in the last round" in lines
    # A run under it has no target for its guard, and its drafts are checked.
    run_of = config_from({"attention": {"kind": "schedule", "name": str(found.path)}, "check": {"window_tokens": 16}})
    assert make_guard(run_of, found.schedule).at_least is None


def test_a_bin_that_breaks_the_bound_in_the_verification_is_raised(tmp_path) -> None:
    schedule = Schedule.fixed(64, dense_layers=(0,)).checked(16, 0.01)
    found = verify(
        study(), schedule, target=None, notches=GRID, out=tmp_path, bounds=BlindSpots(kl_at_most=8.0), **LEAST
    )
    assert found.met and len(found.rounds) > 1
    assert re.match(
        r"round 1: 100-200 has a KL of 9\.\d at 64 tokens, which breaks a bound; raised to 96", found.notes[0]
    )


def test_the_default_bound_lies_between_what_trained_and_what_solved_fewer_problems_in_the_study(tmp_path) -> None:
    with pytest.raises(UserError, match=r"at the largest budget, 256; asked for: a KL of at most 0\.03"):
        run(study(), tmp_path, target=None)
    trained = []
    for name in ("verified-rollouts", "check-grid", "check-budgets"):
        record = json.loads((RECORDS / f"mismatch-study-{name}-60-steps-h200.json").read_text())
        rows = [row for row in record["results"]["table"] if "verified" in row["row"]]
        assert all(row["accuracy_change"]["low"] > 0 for row in rows)
        trained += [row["kl"]["mean"] for row in rows]
    assert len(trained) == 8 and 0.02 < max(trained) < CHECKED_KL_AT_MOST
    rows = json.loads((RECORDS / "mismatch-study-checks-h200.json").read_text())["results"]["rows"]
    rewards = {row["sampler"]: (row["kl"], row["reward"]) for row in rows}
    kl, reward = rewards["verified-64-64-0.01"]
    assert kl > 2 * CHECKED_KL_AT_MOST and reward < rewards["dense"][1] - 0.07


def test_a_bound_that_no_budget_holds_is_refused(tmp_path) -> None:
    found = sweep(study(), out=tmp_path, budgets=[64, 96], dense_layers=(0,), check=CHECKS[0])
    with pytest.raises(UserError, match="200-300 has a share of .* more than 2 nats off at the largest budget, 96"):
        choose([found], MACHINE, target=0.6, bounds=BlindSpots(0.0), **LEAST)


def test_the_file_names_the_check_and_what_was_held_and_a_second_call_writes_the_same_bytes(tmp_path) -> None:
    first = run(study(), tmp_path, bounds=BlindSpots(0.01), made_by={"command": "me"})
    written = first.path.read_bytes()
    loaded = Schedule.load(first.path)
    assert loaded.check in CHECKS and loaded.check == first.choice.best.check
    assert loaded.target["over_2_nats_at_most"] == 0.01 and loaded.target["at_least"] == 0.86
    assert loaded.made_by["command"] == "me" and "least predicted time" in loaded.made_by["chosen"]
    assert loaded.made_by["left_out"].startswith("the tails compare two policies of the engine")
    assert "may be lower by about 0.0" in loaded.made_by["left_out"] and loaded.made_by["left_out"] in first.notes
    assert all(step.measured["verified"] for step in loaded.steps if step.measured)
    assert first.verification.met and first.verification.measurement.checked.far_share <= 0.01
    assert first.table()["choice"]["candidates"][0]["window_tokens"] == loaded.check.window_tokens
    bench = study()
    assert run(bench, tmp_path, bounds=BlindSpots(0.01), made_by={"command": "me"}).path.read_bytes() == written
    assert bench.engine.generated == []


def test_a_calibration_that_broke_between_checks_goes_on(tmp_path) -> None:
    bench = study()
    straight = run(bench, tmp_path / "straight")
    broken = study()
    generate, most = broken.engine.generate, len(GRID) + 2

    def until(*prompts, **settings):
        if len(broken.engine.generated) == most:
            raise RuntimeError("killed")
        return generate(*prompts, **settings)

    broken.engine.generate = until
    with pytest.raises(RuntimeError, match="killed"):
        run(broken, tmp_path / "broken")
    rest = study()
    again = run(rest, tmp_path / "broken")
    assert again.path.read_bytes() == straight.path.read_bytes()
    assert broken.engine.generated[:most] + rest.engine.generated == bench.engine.generated


def test_without_checks_nothing_is_written_about_them(tmp_path) -> None:
    found = run(study(), tmp_path, checks=())
    assert found.choice is None and "choice" not in found.table() and "check" not in found.schedule.table()
    assert "check" not in found.sweep.table() and "checked" not in found.table()["sweep"]["budgets"][0]
    assert not {"chosen", "left_out"} & (found.schedule.made_by or {}).keys()
    with pytest.raises(UserError, match="needs checked drafts"):
        run(study(), tmp_path, checks=(), bounds=BlindSpots(0.1))


def test_a_round_of_another_check_is_not_taken_over(tmp_path) -> None:
    def verified(check: DraftCheck):
        bench = study()
        schedule = replace(Schedule.fixed(256, dense_layers=(0,)), check=check)
        found = verify(bench, schedule, target=0.5, notches=GRID, out=tmp_path, **LEAST)
        return bench.engine.generated, found

    assert len(verified(CHECKS[0])[0]) == 1
    assert verified(CHECKS[0])[0] == []
    generated, found = verified(CHECKS[1])
    assert len(generated) == 1 and found.measurement.schedule.check == CHECKS[1]


def test_a_bin_with_too_many_tokens_far_off_is_raised_though_its_tail_holds(tmp_path) -> None:
    schedule = Schedule.fixed(96, dense_layers=(0,)).checked(16, 0.01)
    # The longest bin has fewer than 8 rollouts, so the lower end of its interval is 0.
    about = {"target": 0.5, "notches": GRID, "bound": "value", **LEAST}
    assert len(verify(study(), schedule, out=tmp_path / "free", **about).rounds) == 1
    held = verify(study(), schedule, out=tmp_path / "held", bounds=BlindSpots(0.0), **about)
    assert held.met and len(held.rounds) > 1
    assert "of its tokens more than 2 nats off at 96 tokens, which breaks a bound; raised to 128" in held.notes[0]
    assert held.schedule.check == schedule.check


def test_every_selector_is_measured_under_every_check_and_the_fastest_pair_is_taken(tmp_path) -> None:
    """The fake engine draws alike under both selectors, so the one whose steps are predicted to be shorter wins: pages of
    16, since both were timed on an H200."""
    bench, small = study(), QuantizedMean(4, bits=4)
    tried = Candidates([256], small, [PageMean()], (0,), (), [])
    assert [each.selector for each in tried.schedules(bench.settings, tmp_path)] == [small, PageMean()]
    found = run(bench, tmp_path, selector=small, also_selectors=[PageMean()], verify_rounds=1)
    pairs = {(each.selector, each.check) for each in found.choice.candidates}
    assert pairs == {(selector, check) for selector in (PageMean(), small) for check in CHECKS}
    assert found.schedule.selector == found.sweep.selector == PageMean() and found.schedule.check == found.sweep.check
    assert found.schedule.made_by["chosen"].startswith("page_mean 16 with windows of ")
    assert found.table()["choice"]["candidates"][0]["selector"] == PageMean().table()
    assert len(found.choice.times) == 2 and not set(found.choice.times) - set(found.notes)
    lines = text(found)
    (head,) = (number for number, line in enumerate(lines) if line.startswith("selector"))
    assert lines[head + 1].startswith("page_mean 16 ")
    alone = run(study(), tmp_path / "alone", verify_rounds=1)
    assert not any(line.startswith("selector") for line in text(alone))
    # A second call starts where the first one was, finds all of them and samples nothing.
    assert [each.selector for each in tried.schedules(bench.settings, tmp_path)] == [PageMean(), small]
    again = study()
    written = run(again, tmp_path, selector=small, also_selectors=[PageMean()], verify_rounds=1).path.read_bytes()
    assert written == found.path.read_bytes() and again.engine.generated == []


def test_where_one_selector_was_not_timed_all_are_compared_by_their_bytes(tmp_path) -> None:
    """Otherwise it would win by what is left out of its steps."""
    untimed = QuantizedMean(16, bits=4)
    found = run(study(), tmp_path, also_selectors=[untimed], verify_rounds=0)
    (said,) = found.choice.times
    assert "kernels of quantized_mean 16, bits 4 were not timed on H200, so the steps of all" in said
    assert said in found.notes and found.choice.table()["times"] == [said]
    machine = replace(MACHINE, kernels=kernel_times_of("H200"))
    assert machine.comparing([PageMean(), QuantizedMean(4, bits=4)]) is machine.comparing([untimed]) is machine
    assert machine.comparing([PageMean(), untimed]).kernels is None
    assert machine.comparing([untimed, untimed]) is machine
