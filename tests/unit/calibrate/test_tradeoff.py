"""From sweeps to the least KL in a given time: what is chosen, what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparroll.attention.selectors import PageMean, QuantizedMean, Quest, Remainder
from sparroll.calibrate.allocation.tradeoff import _Tried, trade_off, with_verification
from sparroll.calibrate.allocation.wanted import Tradeoff, Wanted, selector_label
from sparroll.calibrate.bounds import BlindSpots
from sparroll.calibrate.choice import Machine
from sparroll.calibrate.run import Calibration, calibrate
from sparroll.calibrate.sweep import Sweep, sweep, sweep_groups
from sparroll.calibrate.verify import verify
from sparroll.cli.calibration.printed import text
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.plan.hardware import find_hardware
from sparroll.plan.kernel_times import kernel_times_of
from sparroll.plan.length_mix import LengthMix
from sparroll.plan.model_shape import ModelShape
from sparroll.plan.time_model import TimeModel
from sparroll.schedule import Schedule

from .fakes import study

GRID = [64, 96, 128, 192, 256, 320]
SHAPE = ModelShape("toy", parameters=1_000_000, layers=4, query_heads=4, kv_heads=2, head_dim=64, vocabulary=100)
MACHINE = Machine(SHAPE, find_hardware("H200"), LengthMix.parse("20-420"))
LEAST = {"min_tokens": 100, "min_rollouts": 4}
FINE = QuantizedMean(page_tokens=4, first_tokens=16, recent_tokens=32, bits=4)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(study(), out=tmp_path_factory.mktemp("swept"), budgets=GRID, dense_layers=(0,))


def traded(sweeps: list[Sweep], share: float | None, objective: str = "kl", target: float = 0.6, **more) -> Tradeoff:
    machine = more.pop("machine", MACHINE)
    dense = machine.plan(Schedule.fixed(64, dense_layers=(0,))).dense.seconds
    wanted = Wanted(objective, target, **{**LEAST, **more})
    return trade_off(sweeps, machine, wanted, None if share is None else share * dense, name="mine", model="m")


def test_more_time_buys_less_kl_and_never_takes_more_than_it_was_given(swept) -> None:
    found = [traded([swept], share) for share in (0.6, 0.7, 0.8, 0.95)]
    losses = [each.point.kl for each in found]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    for each, share in zip(found, (0.6, 0.7, 0.8, 0.95), strict=True):
        planned = MACHINE.plan(each.fitted.schedule)
        assert each.point.step_seconds == planned.sparse.seconds <= share * planned.dense.seconds * (1 + 1e-9)
        assert each.point.tail_low >= 0.6


def test_no_single_budget_is_as_good_in_the_same_time(swept) -> None:
    # No step is in the bin from 400 on, which has too little data and so takes the share that the one before it reads.
    shorter = replace(MACHINE, lengths=LengthMix.parse("20-399"))
    found = traded([swept], 0.8, machine=shorter)
    uniform = [each for each in found.points if each.how == "one budget" and each.tail_low >= 0.6]
    assert uniform
    for each in uniform:
        again = traded([swept], each.step_time_share + 1e-9, machine=shorter)
        assert again.point.kl <= each.kl + 1e-12


def test_the_file_says_what_it_is_and_loads(swept, tmp_path: Path) -> None:
    found = traded([swept], 0.8, bounds=BlindSpots(kl_at_most=9.0))
    schedule = Schedule.load(found.fitted.schedule.save(tmp_path / "mine.toml"))
    assert (schedule.name, schedule.model, schedule.dense_layers) == ("mine", "m", (0,))
    assert schedule.target["at_least"] == 0.6 and schedule.target["kl_at_most"] == 9.0
    said = schedule.made_by["chosen"]
    assert said.startswith("the least KL in ") and "predicted on H200" in said and f"{found.point.kl:.3f}"[:4] in said
    assert all(step.measured for step in schedule.steps if step.from_context_tokens < 400)
    budgets = [budget for _, budget in found.point.budgets]
    assert [each.kv_budget_tokens for each in found.fitted.bins] == budgets[: len(found.fitted.bins)]
    table = found.table()
    assert table["chosen"]["how"] == "chosen" and len(table["points"]) > len(GRID)
    assert table["points"][0]["over_20_nats_share"] <= table["points"][0]["over_2_nats_share"]


def test_the_step_times_of_the_parts_add_up_to_those_of_the_plan(swept) -> None:
    for machine in (MACHINE, replace(MACHINE, time_model=TimeModel(1e-3, 0.0, 1e12, 0.0, 0.0, 8))):
        found = traded([swept], 0.97, machine=machine)
        for each in found.points:
            if each.how == "allocated":
                planned = machine.plan(Schedule.fixed(64, dense_layers=(0,)))
                assert each.step_seconds < planned.dense.seconds
        # The frontier's own sums, against a plan of each schedule on it.
        shown = [each for each in found.points if each.how == "allocated"]
        assert len(shown) > 3
        assert [each.step_seconds for each in shown] == sorted(each.step_seconds for each in shown)
        assert [each.kl for each in shown] == sorted((each.kl for each in shown), reverse=True)


def test_what_budgets_add_to_a_step_adds_up_to_the_plan_with_every_kind_of_time(swept, grouped, tmp_path) -> None:
    selector = QuantizedMean(4, 16, 64, bits=2, remainder=Remainder(64, "fp8"))
    summing = sweep(study(), out=tmp_path, budgets=GRID[1:], selector=selector, dense_layers=(0,))
    fitted = TimeModel(1e-3, 0.0, 1e12, 0.0, 0.0, 8)
    for machine in (MACHINE, replace(MACHINE, time_model=fitted), replace(MACHINE, kernels=kernel_times_of("H200"))):
        for found in (swept, grouped, summing):
            tried = _Tried(found, machine, Wanted("kl", 0.6, **LEAST))
            front = tried.front()
            for place in range(0, len(front), 7):
                planned = machine.plan(tried._schedule(front[place])).sparse.seconds
                assert front.seconds_N[place] + tried._fixed_seconds == pytest.approx(planned, rel=1e-9)


def test_times_rest_on_the_kernels_of_the_gpu_and_a_selector_without_any_is_named(swept, tmp_path) -> None:
    quest = sweep(study(), out=tmp_path / "quest", budgets=GRID, selector=Quest(), dense_layers=(0,))
    fine = sweep(study(), out=tmp_path / "fine", budgets=GRID, selector=FINE, dense_layers=(0,))
    machine = replace(MACHINE, kernels=kernel_times_of("H200"))
    found = traded([fine, quest, swept], None, "time", 0.86, machine=machine)
    # By the fake's law all selectors lose the same, so by bytes alone the index decides; a choice among 4 times as many
    # pages takes longer, and quest has no time for one.
    assert found.point.selector == "quest 16"
    assert traded([fine, swept], None, "time", 0.86, machine=machine).point.selector == "page_mean 16"
    said = [line for line in found.notes if line.startswith("times: ")]
    assert len(said) == 3 and "kernels of page_mean 16 as they were timed on H200" in said[2]
    assert "no kernels of quest 16 were timed on H200: its sparse layers count by their bytes alone" in said[1]
    assert found.table()["times"] == said
    bare = traded([swept], None, "time", 0.86)
    assert bare.notes == bare.refused + bare.times and "by their bytes alone, at peak rates" in bare.times[0]


def test_the_target_holds_in_every_bin_and_what_it_needs_is_said_where_the_time_is_too_short(swept) -> None:
    with pytest.raises(UserError, match=r"50.0% of a dense step's time is too little: .* takes (\d+\.\d)%") as refused:
        traded([swept], 0.5, target=0.86)
    needed = float(refused.value.hint.partition("allow that share, ")[2].partition(",")[0])
    held = traded([swept], needed, target=0.86)
    assert held.point.tail_low >= 0.86
    assert all(each.measured["low"] >= 0.86 for each in held.fitted.bins if each.measured)
    with pytest.raises(UserError, match=r"no budget that was measured holds the bounds at 200-300: 1 - the tail's"):
        traded([replace(swept, measurements=swept.measurements[:2])], 0.9, target=0.86)


def test_where_no_schedule_is_faster_than_dense_decoding_no_share_is_offered(swept, monkeypatch) -> None:
    monkeypatch.setattr(_Tried, "_dense_seconds", lambda tried: 1e-9)
    with pytest.raises(UserError, match="no schedule that holds the target .* is faster than a dense step") as refused:
        traded([swept], 0.5, target=0.86)
    assert "measure longer contexts" in refused.value.hint


def test_every_objective_minimises_its_own(swept) -> None:
    found = {name: traded([swept], 0.75, name).point.figures for name in ("kl", "far_mass", "tail")}
    for name, column in (("kl", 0), ("far_mass", 4), ("tail", 5)):
        if name != "tail":
            assert found[name][column] == min(each[column] for each in found.values())
    bounded = traded([swept], 0.95, "tail", bounds=BlindSpots(far_mass_at_most=0.15, far_mass_nats=10)).point
    assert bounded.figures[3] <= 0.15
    with pytest.raises(UserError, match="unknown objective 'kll'"):
        Wanted("kll")


def test_selectors_are_compared_and_the_best_one_is_taken(swept, tmp_path) -> None:
    bad = sweep(study(), out=tmp_path, budgets=[64, 96], selector=FINE, dense_layers=(0,))
    lossy = replace(
        bad, measurements=tuple(replace(each, divergence=swept.measurements[0].divergence) for each in bad.measurements)
    )
    for sweeps in ([lossy, swept], [swept, lossy]):
        found = traded(sweeps, 0.85, target=0.3)
        assert found.sweep is swept and isinstance(found.fitted.schedule.selector, PageMean)
        assert {each.selector for each in found.points} == {"page_mean 16", "quantized_mean 4, bits 4"}
        assert "of 2 selectors" in found.said()
    half = traded([swept, lossy], 0.9, target=0.86)
    assert half.refused[0].startswith("quantized_mean 4, bits 4: no budget that was measured holds")
    assert selector_label(FINE) == "quantized_mean 4, bits 4"


def test_the_objective_time_is_the_fit_of_the_quickest_selector(swept, tmp_path) -> None:
    found = traded([swept], None, "time", target=0.86)
    assert [s.kv_budget_tokens for s in found.fitted.schedule.steps] == [
        s.kv_budget_tokens for s in swept.fit(0.86, **LEAST).schedule.steps
    ]
    fine = sweep(study(), out=tmp_path, budgets=GRID, selector=FINE, dense_layers=(0,))
    both = traded([swept, fine], None, "time", target=0.86)
    # By the fake's law both lose the same, and whole pages leave out a part of the budget.
    assert both.point.step_seconds == min(
        traded([each], None, "time", 0.86).point.step_seconds for each in (swept, fine)
    )
    assert both.fitted.schedule.made_by["chosen"].startswith("the least time of 2 selectors at the target")


def test_a_bin_without_data_takes_that_of_the_next_longer_one_and_pays_for_it(swept) -> None:
    # A step at each length; the bin from 0 on has 80 tokens of each rollout, the one from 400 on has few.
    found = traded([swept], 0.9, min_tokens=2000)
    thin = [each for each in found.fitted.bins if each.measured is None]
    assert thin and any("fewer than 2000 tokens" in note for note in found.fitted.notes)
    whole = traded([swept], 0.9)
    assert len(found.fitted.bins) == len(whole.fitted.bins)


def test_without_lists_nothing_is_minimised(tmp_path) -> None:
    exact = sweep(study(estimator="exact", mode="replay"), out=tmp_path, budgets=[64], dense_layers=(0,))
    with pytest.raises(UserError, match="the estimator exact has none"):
        traded([exact], 0.9)


def test_contexts_that_nobody_measured_take_the_largest_budget_of_any(swept) -> None:
    # The longest measured bin is made an easy one.
    easy = []
    for each in swept.measurements:
        sums = {start: [row[0], *(0.0 if start >= 300 else value for value in row[1:])]
                for start, row in each.divergence.sums.items()}  # fmt: skip
        easy.append(replace(each, divergence=replace(each.divergence, sums=sums)))
    fitted = traded([replace(swept, measurements=tuple(easy))], 0.75, target=0.3).fitted
    schedule = fitted.schedule
    budgets = [schedule.kv_budget_tokens(context) for context in (150, 250, 350, 5000)]
    assert budgets[2] < budgets[1] == budgets[3]
    longest = fitted.bins[-1].to_context_tokens
    assert fitted.notes[-1] == f"contexts from {longest} on were not measured; they take the largest budget of any bin"


GROUPS = ((1,), (2, 3))


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    out = tmp_path_factory.mktemp("grouped")
    bench = study()
    found = sweep_groups(bench, out=out, budgets=GRID, layer_groups=GROUPS, dense_layers=(0,))
    # The dense rollouts, the largest budget once, and the others in each group.
    assert len(bench.engine.generated) == 2 + 2 * (len(GRID) - 1)
    again = study()
    assert sweep_groups(again, out=out, budgets=GRID, layer_groups=GROUPS, dense_layers=(0,)).table() == found.table()
    assert again.engine.generated == []
    return found


def test_groups_that_are_sampled_together_are_measured_as_each_would_be_alone(grouped, tmp_path) -> None:
    bench = study()
    requests = len(bench.prompts) * bench.settings.samples
    bench.engine.most_schedules, bench.engine.max_batch = 31, 3 * requests
    found = sweep_groups(bench, out=tmp_path, budgets=GRID, layer_groups=GROUPS, dense_layers=(0,))
    sizes = [len(names) for names, _ in bench.engine.generated if isinstance(names, tuple)]
    assert sizes and max(sizes) == 3 and len(bench.engine.generated) < 2 + 2 * (len(GRID) - 1)
    for ours, theirs in zip(found.alone, grouped.alone, strict=True):
        assert [each.tail() for each in ours] == [each.tail() for each in theirs]
        assert [each.schedule for each in ours] == [each.schedule for each in theirs]


def test_the_group_that_loses_more_gets_the_larger_budget(grouped, swept) -> None:
    found = traded([grouped], 0.7)
    schedule = found.fitted.schedule
    assert schedule.layer_groups == GROUPS
    longest = schedule.step_at(350).budgets
    assert longest[0] > longest[1]
    assert found.point.step_seconds <= 0.7 * found.dense_step_seconds * (1 + 1e-9)
    # Better than the best common budgets in the same time, as the sum of what the groups lose alone has it.
    assert found.point.kl < 0.8 * traded([swept], 0.7).point.kl
    assert found.point.tail_low >= 0.6 and Schedule.from_table(schedule.table()).layer_groups == GROUPS
    largest = tuple(max(column) for column in zip(*(step.budgets for step in schedule.steps), strict=True))
    assert schedule.step_at(100_000).budgets == largest
    assert found.fitted.notes[-1].endswith("they take the largest budget of any bin in each group of layers")


def test_one_budget_everywhere_has_a_point_for_each_budget_of_the_groups_too(grouped, swept) -> None:
    """By the fake's law, what two groups lose alone adds up to what all layers lose with that budget."""
    points = {
        name: {point.budgets: point for point in traded([found], 0.7).points if point.how == "one budget"}
        for name, found in (("grouped", grouped), ("alike", swept))
    }
    assert list(points["grouped"]) == list(points["alike"]) == [((0, budget),) for budget in GRID]
    for budgets, alike in points["alike"].items():
        assert points["grouped"][budgets].step_seconds == alike.step_seconds
        assert points["grouped"][budgets].worst_tail == pytest.approx(alike.worst_tail, abs=0.03)
        assert points["grouped"][budgets].kl == pytest.approx(alike.kl, rel=0.1, abs=0.1)


def test_what_groups_lose_adds_up_to_what_a_verification_of_the_whole_measures(grouped, tmp_path) -> None:
    found = traded([grouped], 0.7)
    checked = verify(study(), found.fitted.schedule, target=0.6, notches=GRID, out=tmp_path, **LEAST)
    assert checked.met and checked.schedule.layer_groups == GROUPS
    assert checked.measurement.divergence.overall().kl == pytest.approx(found.point.kl, rel=0.1)
    raised = verify(study(), found.fitted.schedule, target=0.93, notches=GRID, out=tmp_path / "more", **LEAST)
    for before, after in zip(found.fitted.schedule.steps, raised.schedule.steps, strict=False):
        assert all(high >= low for low, high in zip(before.budgets, after.budgets, strict=True))
    assert any(" / " in note for note in raised.notes)


def test_groups_need_a_grid(tmp_path) -> None:
    with pytest.raises(UserError, match="need a grid of two budgets or more"):
        sweep_groups(study(), out=tmp_path, budgets=[64], layer_groups=GROUPS, dense_layers=(0,))
    with pytest.raises(UserError, match="leaves out the layers"):
        sweep_groups(study(), out=tmp_path, budgets=[64, 96], layer_groups=((1,), (2,)), dense_layers=(0,))


ASKED = {"budgets": GRID, "dense_layers": (0,), "shape": SHAPE, "target": 0.6, "objective": "kl", **LEAST}


def test_from_a_study_to_a_file_with_two_selectors_and_a_second_call_writes_the_same_bytes(tmp_path: Path) -> None:
    def run(bench) -> Calibration:
        about = {"also_selectors": [FINE], "step_time_share": 0.8, "made_by": {"command": "me"}, "verify_rounds": 1}
        return calibrate(bench, out=tmp_path, **ASKED, **about)

    first = run(study())
    written, loaded = first.path.read_bytes(), Schedule.load(first.path)
    assert loaded.made_by["command"] == "me" and "of 2 selectors in" in loaded.made_by["chosen"]
    assert loaded.made_by["verified"].startswith("KL ") and first.tradeoff.verified.kl > 0
    assert {each.selector for each in first.tradeoff.points} == {"page_mean 16", "quantized_mean 4, bits 4"}
    assert len(list((tmp_path / "selectors").iterdir())) == 1
    measured = first.sweep.ceiling.statistics.tokens + first.verification.measurement.statistics.tokens
    others = sum(each.statistics.tokens for each in first.sweep.measurements)
    # Both selectors were swept, over the same prompts and seeds.
    assert first.generated_tokens == measured + 2 * others == first.table()["generated_tokens"]
    lines = "\n".join(text(first))
    assert f"{first.generated_tokens:,} tokens were generated for this" in lines and ", verified" in lines
    bench = study()
    assert run(bench).path.read_bytes() == written and bench.engine.generated == []


def test_the_time_of_another_schedule_is_the_limit(tmp_path: Path) -> None:
    slower = Schedule.fixed(192, dense_layers=(0,))
    found = calibrate(study(), out=tmp_path, **ASKED, at_time_of=slower, verify_rounds=0)
    machine = Machine.decoding(study().dense_rollouts(), SHAPE, find_hardware("H200"))
    assert found.tradeoff.most_step_seconds == pytest.approx(machine.plan(slower).sparse.seconds)
    assert found.tradeoff.point.step_seconds <= found.tradeoff.most_step_seconds * (1 + 1e-9)
    assert found.tradeoff.verified is None
    steps = TimeModel(2e-3, 0.0, 1e12, 0.0, 0.0, 8)
    timed = calibrate(study(), out=tmp_path, **ASKED, at_time_of=slower, time_model=steps, verify_rounds=0).tradeoff
    assert timed.most_step_seconds == pytest.approx(replace(machine, time_model=steps).plan(slower).sparse.seconds)


def test_a_limit_of_an_untimed_selector_is_compared_by_bytes_too(tmp_path: Path) -> None:
    """By its bytes alone beside timed kernels it would be far too short a time."""
    untimed = Schedule.fixed(192, QuantizedMean(16, bits=4), dense_layers=(0,))
    found = calibrate(study(), out=tmp_path, **ASKED, at_time_of=untimed, verify_rounds=0).tradeoff
    machine = Machine.decoding(study().dense_rollouts(), SHAPE, find_hardware("H200"))
    assert found.most_step_seconds == pytest.approx(replace(machine, kernels=None).plan(untimed).sparse.seconds)
    assert any("kernels of quantized_mean 16, bits 4 were not timed on H200" in note for note in found.notes)


def test_groups_of_layers_are_calibrated_and_verified_as_a_whole(tmp_path: Path) -> None:
    about = {**ASKED, "budgets": [64, 128, 256, 320]}
    found = calibrate(study(), out=tmp_path, **about, layer_groups=GROUPS, step_time_share=0.7, verify_rounds=1)
    loaded = Schedule.load(found.path)
    assert loaded.layer_groups == GROUPS and all(step.measured["verified"] for step in loaded.steps if step.measured)
    assert found.table()["sweep"]["layer_groups"][0]["layers"] == [1] and found.rows()


def test_a_verification_that_makes_steps_too_long_is_noted(swept) -> None:
    made = traded([swept], 0.7)
    slow = Schedule.fixed(320, dense_layers=(0,))
    after, _ = with_verification(made, MACHINE, slow, swept.measurements[-1])
    assert "the verification raised budgets: a step takes" in after.notes[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "kl"}, "the objective kl is as small as a step's time allows, so it needs one limit, and 0 are"),
        ({"objective": "time", "step_time_share": 0.5}, "a limit of a step's time needs something else to be small"),
        ({"step_time_share": 0.5, "at_time_of": Schedule.fixed(64)}, "needs one limit, and 2 are given"),
        ({"step_time_share": 0.0}, "the share of a dense step's time must be above 0, got 0"),
        ({"step_time_share": float("nan")}, "the share of a dense step's time must be above 0, got nan"),
        (
            {"at_time_of": Schedule.fixed(64, dense_layers=(0, 27))},
            "--at-time-of fixed-64: dense_layers names layer 27, but the model has layers 0..3",
        ),
        (
            {"at_time_of": Schedule.fixed(64, dense_layers=(0,)).checked(16)},
            r"(?s)--at-time-of fixed-64-checked-16-0.01 checks drafts, so .*hint: name a schedule without \[check\]",
        ),
        (
            {"step_time_share": 0.5, "checks": [DraftCheck()]},
            "with checks of drafts the objective is the time of a kept",
        ),
        (
            {"objective": "time", "layer_groups": GROUPS},
            "groups of layers get budgets of their own where a step's time",
        ),
        ({"step_time_share": 0.5, "also_selectors": [PageMean()]}, "a selector is named twice"),
        (
            {"step_time_share": 0.5, "also_selectors": [PageMean(128, 128, 128)]},
            "multiple of page_tokens \\(128\\), got 64",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(change, message, tmp_path) -> None:
    bench = study()
    with pytest.raises(UserError, match=message):
        calibrate(bench, out=tmp_path, **{**ASKED, **change})
    assert bench.engine.generated == []


def test_bounds_hold_with_the_cheapest_budgets_too(swept, tmp_path) -> None:
    plain = calibrate(study(), out=tmp_path, **{**ASKED, "objective": "time"}, verify_rounds=0)
    bounds = BlindSpots(kl_at_most=3.5)
    about = {**ASKED, "objective": "time", "bound": "value"}  # with 4 rollouts in a bin, an interval begins at 0
    held = calibrate(study(), out=tmp_path, **about, bounds=bounds, verify_rounds=1)
    assert held.schedule.target["kl_at_most"] == 3.5 and held.tradeoff is None
    assert held.schedule.kv_budget_tokens(350) > plain.schedule.kv_budget_tokens(350)
    of_bins = held.verification.measurement.divergence.bins()
    assert held.verification.met and max(each.kl for start, each in of_bins.items() if start < 400) <= 3.5
    with pytest.raises(UserError, match="has a KL of .* at the largest budget, 320; asked for: a KL of at most 0.1"):
        BlindSpots(kl_at_most=0.1).least_budgets(swept, **LEAST)
    with pytest.raises(UserError, match="far_mass_nats must be one of 2, 5, 10, 20, got 7"):
        BlindSpots(far_mass_nats=7)
