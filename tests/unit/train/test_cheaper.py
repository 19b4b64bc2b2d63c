"""When DistillSparse goes on to a cheaper schedule: patience, the worst bin's lower bound, bins with too few tokens or
rollouts to count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparroll.control.cheaper_schedules import CheaperSchedules
from sparroll.control.watcher import Decision, StepEvidence
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics, TailTable
from sparroll.schedule import Schedule, Step
from sparroll.train.config.file import load_config
from sparroll.train.schedules import _refuse_dearer, make_cheaper_schedules, starting_schedule

OPTIONS = [
    "model.name=Qwen/Qwen3-1.7B", "attention.kind=schedule", "attention.name=qwen3-1.7b-0.86", "distill.rank=16",
    "control.by=cheaper",
]  # fmt: skip
START, FIRST, SECOND = Schedule.fixed(512), Schedule.fixed(256), Schedule.fixed(128)


def tail(value: float, tokens: int = 400, last_bin: float | None = None) -> TailTable:
    """20 rollouts whose acceptance is `value` everywhere, or `last_bin` in the second bin of lengths."""
    statistics = TailStatistics(bin_tokens=1000)
    for rollout in range(20):
        statistics.add(torch.full((tokens // 20,), value), torch.full((tokens // 20,), 10), f"{rollout}")
        if last_bin is not None:
            statistics.add(torch.full((5,), last_bin), torch.full((5,), 1010), f"{rollout}")
    return statistics.table("top_k_lower")


def measurement(rng: np.random.Generator, q05: float, long_q05: float) -> TailTable:
    """16 rollouts of unlike length, some 4,000 tokens each: tokens up to 4,000 are of one law, those behind of another, each
    with that 5th percentile. Few rollouts reach the last bins."""
    statistics = TailStatistics(bin_tokens=2000)
    for length in np.exp(rng.normal(np.log(4000), 0.7, size=16)).clip(300, 20_000).astype(int):
        context = np.arange(200, 200 + length)
        power = np.log(0.05) / np.log(np.where(context < 4000, q05, long_q05))
        missing = 1 - rng.random(length) ** (1 / power)
        statistics.add(torch.from_numpy(1 - missing), torch.from_numpy(context), int(rng.integers(2**60)))
    return statistics.table("top_k_lower")


def cheaper(patience: int = 2, every: int = 10, least_tokens: int = 200) -> CheaperSchedules:
    return CheaperSchedules([FIRST, SECOND], 0.86, every_steps=every, patience=patience, least_tokens=least_tokens)


def shown(replay: TailTable, schedule: Schedule = START) -> StepEvidence:
    return StepEvidence(10, schedule, False, TailStatistics(), {}, replay)


def test_it_is_due_every_so_many_steps_while_a_schedule_is_left() -> None:
    one = cheaper(patience=1, every=5)
    assert [step for step in range(1, 16) if one.due(step)] == [5, 10, 15]
    one.watch(shown(tail(0.9)))
    one.watch(shown(tail(0.9), FIRST))
    assert one.following is None
    assert not one.due(5)


def test_it_switches_after_patience_measurements_in_a_row_and_says_why() -> None:
    one = cheaper()
    decisions = [one.watch(shown(tail(value))) for value in (0.87, 0.85, 0.87, 0.86)]
    assert [decision.action for decision in decisions] == ["none", "none", "none", "switch"]
    assert decisions[3].schedule == FIRST
    assert decisions[3].events == (
        "with the adapter, the tail under fixed-256 (worst bin, lower bound) is 0.860, at least 0.860 in 2 measurements: "
        "fixed-512 -> fixed-256",
    )
    assert (one.following, one.held) == (SECOND, 0)


def test_the_worst_bin_decides_unless_it_has_too_few_tokens() -> None:
    decision = cheaper(patience=1, least_tokens=100).watch(shown(tail(0.9, last_bin=0.5)))
    assert decision.action == "none"
    expected = {"distill/cheaper_q05_low": 0.5, "distill/cheaper_q05": 0.5, "distill/cheaper_held": 0.0}
    assert decision.report == pytest.approx(expected, abs=1e-3)
    assert cheaper(patience=1, least_tokens=101).watch(shown(tail(0.9, last_bin=0.5))).action == "switch"


def test_a_bin_with_too_few_rollouts_neither_holds_the_target_nor_breaks_the_row() -> None:
    """The lower bound of a bin that one rollout reached is 0, whatever was measured."""

    def reached_by(rollouts: int, value: float) -> TailTable:
        statistics = TailStatistics(bin_tokens=1000)
        for rollout in range(20):
            statistics.add(torch.full((100,), 0.9), torch.full((100,), 10), f"{rollout}")
            if rollout < rollouts:
                statistics.add(torch.full((400,), value), torch.full((400,), 1010), f"{rollout}")
        return statistics.table("top_k_lower")

    assert reached_by(1, 0.9).rows[1].low == 0.0
    for rollouts in (1, 7):
        assert cheaper(patience=1).watch(shown(reached_by(rollouts, 0.9))).action == "switch"
    assert cheaper(patience=1).watch(shown(reached_by(8, 0.5))).action == "none"
    none_counts = TailStatistics(bin_tokens=1000)
    for rollout in range(7):
        none_counts.add(torch.full((400,), 0.1), torch.full((400,), 10), f"{rollout}")
    one = cheaper()
    one.watch(shown(tail(0.9)))
    assert one.watch(shown(none_counts.table("top_k_lower"))) == Decision()
    assert one.held == 1


def test_it_switches_where_the_tail_is_above_the_target_at_every_length_and_never_where_it_is_not() -> None:
    """16 rollouts of mixed lengths a measurement, as by default: the last bins have one or two of them."""
    rng = np.random.default_rng(0)
    above, under, under_behind = cheaper(patience=3), cheaper(patience=3), cheaper(patience=3)
    tables = [measurement(rng, 0.9, 0.9) for _ in range(3)]
    assert all(table.rows[-1].rollouts < 8 and table.rows[-1].low < 0.86 for table in tables)
    assert [above.watch(shown(table)).action for table in tables] == ["none", "none", "switch"]
    for _ in range(6):
        assert under.watch(shown(measurement(rng, 0.85, 0.85))).action == "none"
        assert under_behind.watch(shown(measurement(rng, 0.95, 0.85))).action == "none"


def test_a_measurement_without_a_bin_that_counts_changes_nothing() -> None:
    one = cheaper()
    one.watch(shown(tail(0.9)))
    assert one.watch(shown(tail(0.1, tokens=180))) == Decision()
    assert one.watch(StepEvidence(11, START, False, TailStatistics(), {})) == Decision()
    assert one.held == 1


def test_its_place_survives_a_checkpoint() -> None:
    one, other = cheaper(), cheaper()
    for value in (0.9, 0.9, 0.9):
        one.watch(shown(tail(value)))
    other.restore(one.state())
    assert (other.following, other.held) == (SECOND, 1)
    assert other.watch(shown(tail(0.9), FIRST)).schedule == SECOND


def test_a_cheaper_schedule_that_reads_more_is_refused_at_the_start() -> None:
    def made(*names: str) -> CheaperSchedules | None:
        listed = ", ".join(f'"{name}"' for name in names)
        config = load_config(None, [*OPTIONS, f"control.schedules=[{listed}]"])
        return make_cheaper_schedules(config, starting_schedule(config))

    found = made("qwen3-1.7b-0.83", "qwen3-1.7b-0.80")
    assert found is not None and len(found.schedules) == 2
    with pytest.raises(UserError, match="from 'qwen3-1.7b-0.86' to 'qwen3-1.7b-0.92', which reads more"):
        made("qwen3-1.7b-0.92")
    with pytest.raises(UserError, match="from 'qwen3-1.7b-0.80' to 'qwen3-1.7b-0.83', which reads more"):
        made("qwen3-1.7b-0.80", "qwen3-1.7b-0.83")


@pytest.mark.parametrize(
    ("budgets", "dearer"), [((512, 512), False), ((512, 528), True), ((496, 528), False), (512, False), (528, True)]
)
def test_cheaper_schedules_are_compared_layer_by_layer(budgets: int | tuple[int, ...], dearer: bool) -> None:
    groups = ((2, 3), (4,))
    grouped = Schedule((Step(0, budgets),), layer_groups=groups, name="after")
    for before in (Schedule.fixed(512), Schedule((Step(0, (512, 512)),), layer_groups=((2,), (3, 4)))):
        if dearer:
            with pytest.raises(UserError, match="which reads more: 528 tokens instead of 512 from 0 on"):
                _refuse_dearer(before, grouped)
        else:
            _refuse_dearer(before, grouped)


def test_measurements_that_could_never_count_are_refused_at_the_start() -> None:
    def made(*more: str) -> CheaperSchedules | None:
        config = load_config(None, [*OPTIONS, 'control.schedules=["qwen3-1.7b-0.80"]', *more])
        return make_cheaper_schedules(config, starting_schedule(config))

    assert made("rollout.samples_per_prompt=4") is not None
    with pytest.raises(UserError, match=r"(?s)at least 8 rollouts to judge a bin, .* has 4.*control\.prompts=2"):
        made("rollout.samples_per_prompt=4", "control.prompts=1")
    with pytest.raises(UserError, match=r"(?s)a measurement has 4.*train\.prompts_per_step = 2 or more"):
        made("rollout.samples_per_prompt=4", "train.prompts_per_step=1")


def test_a_guard_that_would_stop_what_cheaper_schedules_hold_is_refused_at_the_start() -> None:
    def made(*more: str) -> CheaperSchedules | None:
        more = ("guard.action=stop", *more)
        config = load_config(None, [*OPTIONS, 'control.schedules=["qwen3-1.7b-0.80"]', *more])
        return make_cheaper_schedules(config, starting_schedule(config))

    assert made() is not None
    with pytest.raises(UserError, match="accepts a tail of 0.8, but the guard stops the run below 0.86"):
        made("control.at_least=0.8")
    assert made("control.at_least=0.8", "guard.at_least=0.8") is not None
