"""The guard's decisions, step by step, on tails whose 5th percentile is known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from sparroll.control.control_group import ControlGroupSettings, dense_flags
from sparroll.control.guard import Guard, confidence_of
from sparroll.control.paired_prompts import paired_prompts
from sparroll.control.reward_gap import RewardGap
from sparroll.control.watcher import Decision, StepEvidence
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics
from sparroll.schedule import Schedule, Step
from sparroll.train import load_config
from sparroll.train.schedules import make_guard
from tail_worlds import BIN, evidence, measured

LOOSE, TIGHT = Schedule.fixed(64), Schedule.fixed(512)


def shown(
    step: int, tail: float, schedule: Schedule | None = LOOSE, *, dense: bool = False, rollouts: int = 20
) -> StepEvidence:
    """By 2000 tokens of one step the bound lies .004 above the percentile, by those of three steps .002."""
    return evidence(step, measured(step, {0: tail}, rollouts=rollouts), schedule, dense=dense)


def alike(step: int, acceptance: float, *, bins: int = 1, rollouts: int, tokens: int) -> StepEvidence:
    """A step whose tokens all have the same acceptance; so many of each rollout in each bin."""
    statistics = TailStatistics(bin_tokens=BIN, replicates=20)
    context = torch.arange(bins).repeat_interleave(tokens) * BIN
    for rollout in range(rollouts):
        statistics.add(torch.full((bins * tokens,), acceptance), context, f"{step}/{rollout}")
    return evidence(step, statistics, LOOSE)


def actions(guard: Guard, tails: list[float], schedule: Schedule | None = LOOSE) -> list[str]:
    return [guard.watch(shown(step, tail, schedule)).action for step, tail in enumerate(tails, start=1)]


def test_a_tail_that_is_surely_low_raises_an_alarm_at_once_and_says_what_it_rests_on() -> None:
    decision = Guard("stop", 0.86).watch(shown(1, 0.7))
    assert decision.action == "stop"
    (event,) = decision.events
    assert event.startswith(
        "the tail (5th percentile of the acceptance) at 0-2k is 0.700, surely under 0.860: upper bound 0.7"
    )
    assert event.endswith("by 2000 tokens of 20 rollouts (steps 1 to 1): stopped")


def test_an_alarm_that_no_schedule_could_avoid_says_so() -> None:
    """The dense ceiling is under the target, too. It is rounded down, so that .8599 is not read as .860."""
    low = shown(1, 0.7)
    for ceiling, said in ((0.8599, True), (0.86, False)):
        step = replace(low, report={"mismatch/dense_ceiling_q05": ceiling})
        (event,) = Guard("warn", 0.86).watch(step).events
        assert event.endswith("dense rollouts have 0.859 and miss it, too: no schedule can hold this target") is said


def test_a_tail_that_may_be_chance_waits_for_more_evidence() -> None:
    """The bound comes nearer as steps are pooled."""
    found = actions(Guard("stop", 0.86), [0.857] * 10)
    assert found[0] == "none" and "stop" in found
    assert actions(Guard("stop", 0.86), [0.862] * 40) == ["none"] * 40


def test_a_low_step_between_good_ones_is_no_alarm() -> None:
    assert actions(Guard("stop", 0.86, window_steps=3), [0.9, 0.9, 0.85, 0.9, 0.9] * 4) == ["none"] * 20


def test_the_window_forgets_what_is_older() -> None:
    """Ten good steps and then bad ones: a window of two sees the fall sooner than one of ten."""
    tails = [0.9] * 10 + [0.83] * 10
    short, long = (actions(Guard("stop", 0.86, window_steps=steps), tails).index("stop") for steps in (2, 10))
    assert 10 <= short < long


def test_seven_rollouts_raise_no_alarm_however_many_tokens_they_have() -> None:
    for rollouts, action in ((7, "warn"), (8, "stop")):
        tail = measured(1, {0: 0.3}, rollouts=rollouts, tokens=1000)
        assert Guard("stop", 0.86).watch(evidence(1, tail, LOOSE)).action == action
    few = measured(1, {0: 0.3}, rollouts=20, tokens=10)
    assert "cannot test" in Guard("stop", 0.86, least_tokens=201).watch(evidence(1, few, LOOSE)).events[0]


def test_bins_with_too_few_tokens_alone_are_tested_together() -> None:
    """100 tokens in each bin: two of them are enough for a test, and the third joins them."""
    decision = Guard("stop", 0.86).watch(alike(1, 0.01, bins=3, rollouts=10, tokens=10))
    assert decision.action == "stop"
    assert "at 0-6k (3 bins together, which alone have too few tokens) is 0.0" in decision.events[0]
    assert "by 300 tokens of 10 rollouts" in decision.events[0]
    assert Guard("stop", 0.86).watch(alike(1, 0.9, bins=3, rollouts=10, tokens=10)) == Decision()


def test_what_cannot_be_tested_is_said_at_the_first_step_and_tested_as_soon_as_it_can_be() -> None:
    guard = Guard("stop", 0.86)
    said = [guard.watch(alike(step, 0.01, rollouts=4, tokens=12)) for step in range(1, 6)]
    assert [decision.action for decision in said] == ["warn", "none", "none", "none", "stop"]
    assert said[0].events[0] == (
        "the guard cannot test the tail yet: all lengths together have 48 tokens of 4 rollouts so far, and a test needs "
        "200 tokens of 8 rollouts; the first test comes after about 5 such steps"
    )
    assert "by 240 tokens of 20 rollouts (steps 1 to 5)" in said[4].events[0]


def test_a_guard_that_never_has_enough_says_so_once_a_window() -> None:
    guard = Guard("stop", 0.86, window_steps=3)
    said = [guard.watch(alike(step, 0.01, rollouts=4, tokens=10)) for step in range(1, 8)]
    assert [decision.action for decision in said] == ["warn", "none", "none", "warn", "none", "none", "warn"]
    (event,) = said[0].events
    assert "at this rate no test ever comes, because guard.window_steps = 3; --set guard.window_steps=5" in event


def test_the_more_bins_are_tested_the_surer_each_must_be() -> None:
    assert confidence_of(1) == 1 - 1e-2
    assert confidence_of(20) == 1 - 5e-4
    alone, among_many = measured(1, {0: 0.855}), measured(1, {0: 0.855} | dict.fromkeys(range(1, 200), 0.95))
    bounds = [Guard("stop", 0.86).watch(evidence(1, each, LOOSE)).action for each in (alone, among_many)]
    assert bounds == ["stop", "none"]


def test_the_worst_bin_is_named() -> None:
    tail = measured(1, {0: 0.8, 1: 0.6, 2: 0.9})
    assert "at 2k-4k is 0.6" in Guard("warn", 0.86).watch(evidence(1, tail, LOOSE)).events[0]


def test_a_guard_without_a_target_says_so_at_the_start_of_a_sparse_run() -> None:
    (notice,) = Guard("warn", None).notice(dense=False)
    assert "watches nothing" in notice
    assert "guard.at_least, for example 0.86" in notice
    assert Guard("warn", None).notice(dense=True) == []
    assert Guard("off", None).notice(dense=False) == []
    assert Guard("warn", 0.86).notice(dense=False) == []


def test_a_guard_with_a_control_group_alone_says_that_it_watches_the_reward_alone() -> None:
    guard = Guard("warn", None, reward_gap=RewardGap(ControlGroupSettings()))
    (notice,) = guard.notice(dense=False)
    assert notice.startswith("the guard watches the reward alone: there is no target for the tail")
    assert notice.endswith("guard.impossible_at_most, for example 1e-4")
    assert guard.notice(dense=True) == []
    blind = Guard("warn", None, reward_gap=RewardGap(ControlGroupSettings(reward_gap=None)))
    assert "watches nothing" in blind.notice(dense=False)[0]


def test_stricter_goes_down_its_list_and_dense_ends_the_watch() -> None:
    guard = Guard("warn", 0.86, stricter=(TIGHT, None))
    schedule: Schedule | None = LOOSE
    taken = []
    for step in range(1, 5):
        decision = guard.watch(shown(step, 0.7, schedule, dense=schedule is None))
        if decision.action == "switch":
            schedule = decision.schedule
        taken.append((decision.action, schedule.name if schedule else "dense"))
    assert taken == [("switch", "fixed-512"), ("switch", "dense"), ("none", "dense"), ("none", "dense")]


def test_evidence_of_two_groupings_is_not_pooled_and_equal_budgets_are_one_schedule() -> None:
    guard = Guard("stop", 0.86)
    grouped = Schedule((Step(0, (64, 128)),), layer_groups=((2,), (3,)))
    for seen, schedule in enumerate((grouped, Schedule.from_table(grouped.table()))):
        guard.watch(shown(1 + seen, 0.87, schedule))
        assert len(guard.window.evidence) == 1 + seen
    other = Guard("stop", 0.86)
    state = {name: json.loads(json.dumps(each)) for name, each in guard.state().items() if name in ("budgets",)}
    other.restore(guard.state() | state)
    other.watch(shown(3, 0.87, grouped))
    assert len(other.window.evidence) == 3
    other.watch(shown(4, 0.87, Schedule((Step(0, (64, 128)),), layer_groups=((3,), (2,)))))
    assert len(other.window.evidence) == 1


def test_evidence_of_two_schedules_is_not_pooled() -> None:
    guard = Guard("stop", 0.86)
    tails = [0.857] * 10
    under = actions(Guard("stop", 0.86), tails).index("stop")
    for step in range(under):
        assert guard.watch(shown(step + 1, 0.857)).action == "none"
    assert guard.watch(shown(under + 1, 0.857, TIGHT)).action == "none"
    assert len(guard.window.evidence) == 1


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_at_the_end_of_the_list_it_does_what_its_action_says(action: Literal["warn", "stop"]) -> None:
    guard = Guard(action, 0.86, stricter=(TIGHT,))
    assert guard.watch(shown(1, 0.7)).action == "switch"
    decision = guard.watch(shown(2, 0.7, TIGHT))
    assert decision.action == action
    assert "and no stricter schedule is left after fixed-512" in decision.events[0]


def test_a_warning_comes_again_only_after_a_whole_window() -> None:
    assert actions(Guard("warn", 0.86, window_steps=3), [0.7] * 7) == ["warn", "none", "none"] * 2 + ["warn"]


def test_steps_without_a_token_change_nothing() -> None:
    guard = Guard("warn", 0.86)
    assert guard.watch(evidence(1, TailStatistics(bin_tokens=BIN, replicates=20), LOOSE)) == Decision()
    assert guard.watch(shown(2, 0.7)).action == "warn"


def test_off_no_target_and_dense_rollouts_say_nothing() -> None:
    assert Guard("off", 0.86).watch(shown(1, 0.1)) == Decision()
    assert Guard("warn", None).watch(shown(1, 0.1)) == Decision()
    assert Guard("warn", 0.86).watch(shown(1, 0.1, None, dense=True)) == Decision()


def test_a_restored_guard_goes_on_where_the_other_stood() -> None:
    def made() -> Guard:
        return Guard("warn", 0.86, stricter=(TIGHT, None))

    one = made()
    one.watch(shown(1, 0.7))
    assert one.watch(shown(2, 0.857, TIGHT)).action == "none"
    state = one.state()
    plain = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    other = made()
    other.restore(state | json.loads(json.dumps(plain)))
    decisions = [(one.watch(each), other.watch(each)) for step in range(3, 12) if (each := shown(step, 0.857, TIGHT))]
    assert all(mine == theirs for mine, theirs in decisions)
    assert [mine.action for mine, _ in decisions].count("switch") == 1


# -- where the target comes from -------------------------------------------------------------------------------------------


def schedule_with(target: dict[str, object] | None) -> Schedule:
    return Schedule(steps=(Step(0, 64),), target=target, name="own")


OWN: dict[str, Any] = {
    "statistic": "acceptance", "estimator": "top_k_lower", "top_k": 20, "quantile": 0.05, "at_least": 0.86,
}  # fmt: skip


def test_without_a_target_of_its_own_the_guard_takes_the_schedules() -> None:
    assert make_guard(load_config(), schedule_with(OWN)).at_least == 0.86
    assert make_guard(load_config(None, ["guard.at_least=0.8"]), schedule_with(OWN)).at_least == 0.8
    assert make_guard(load_config(), schedule_with(None)).at_least is None
    assert make_guard(load_config(), None).at_least is None


@pytest.mark.parametrize("change", [{"estimator": "exact"}, {"quantile": 0.01}, {"top_k": 50}])
def test_a_target_of_another_statistic_is_refused_and_not_compared(change: dict[str, object]) -> None:
    schedule = schedule_with(OWN | change)
    with pytest.raises(UserError, match=r"(?s)this run measures .*top_k_lower.*guard\.at_least"):
        make_guard(load_config(), schedule)
    assert make_guard(load_config(None, ["guard.at_least=0.8"]), schedule).at_least == 0.8
    assert make_guard(load_config(None, ["guard.action=off"]), schedule).action == "off"


def test_a_guard_that_is_to_act_needs_a_target() -> None:
    with pytest.raises(UserError, match="needs a target to act on, but the schedule 'own' names no target"):
        make_guard(load_config(None, ["guard.action=stop"]), schedule_with(None))
    without = {key: value for key, value in OWN.items() if key != "at_least"}
    assert make_guard(load_config(), schedule_with(without)).at_least is None
    with pytest.raises(UserError, match="needs a target to act on, but the schedule 'own' names no target"):
        make_guard(load_config(None, ["guard.action=stop"]), schedule_with(without))


def test_a_window_with_too_few_rollouts_to_judge_any_bin_is_refused() -> None:
    few = ["train.prompts_per_step=1", "rollout.samples_per_prompt=2", "guard.at_least=0.8"]
    assert make_guard(load_config(None, few), None).window.steps == 10
    message = (
        r"(?s)needs at least 8 rollouts to judge a bin.*window_steps = 3 .* have 6 sparse.*--set guard.window_steps=4"
    )
    with pytest.raises(UserError, match=message):
        make_guard(load_config(None, [*few, "guard.window_steps=3"]), None)


def test_rollouts_of_the_control_group_do_not_count_for_a_window() -> None:
    few = ["train.prompts_per_step=1", "rollout.samples_per_prompt=2", "guard.at_least=0.8", "guard.window_steps=4"]
    sparse = [*few, "attention.kind=budget", "attention.kv_budget_tokens=64"]
    assert make_guard(load_config(None, [*sparse, "rollout.control_share=0"]), None).window.steps == 4
    message = r"(?s)window_steps = 4 .* have 6 sparse ones.*--set guard.window_steps=5"
    with pytest.raises(UserError, match=message):
        make_guard(load_config(None, [*sparse, "rollout.control_share=0.25"]), None)


# -- the control group ---------------------------------------------------------------------------------------------------


def paired(step: int, tail: float = 0.9, *, sparse_solves: bool = False, schedule: Schedule = LOOSE) -> StepEvidence:
    """A step in which every dense rollout is right, and every sparse one or none; one of four is dense."""
    flags = dense_flags(0, step, 16, 4, 1 / 4)
    names = {number: f"{step}/{number}" for number in range(16)}
    rewards = [float(dense or sparse_solves) for dense in flags]
    return replace(shown(step, tail, schedule), pairs=tuple(paired_prompts(step, names, flags, {"reward": rewards})))


def guard_of_gap(action: Literal["off", "warn", "stop"], stricter: tuple[Schedule | None, ...] = ()) -> Guard:
    return Guard(action, 0.86, stricter=stricter, reward_gap=RewardGap(ControlGroupSettings()))


def test_a_reward_gap_is_an_alarm_although_the_tail_holds() -> None:
    decision = guard_of_gap("stop").watch(paired(1))
    assert decision.action == "stop"
    (event,) = decision.events
    assert event.startswith("sparse rollouts get less reward than dense ones of the same prompts: by 1.000 (95 % ")
    assert event.endswith(": stopped")
    assert decision.report["control/reward_gap"] == 1


def test_a_reward_gap_moves_the_run_to_a_stricter_schedule_like_a_low_tail_does() -> None:
    guard = guard_of_gap("stop", (TIGHT, None))
    first = guard.watch(paired(1))
    assert (first.action, first.schedule) == ("switch", TIGHT)
    second = guard.watch(paired(2, 0.5, schedule=TIGHT))
    assert (second.action, second.schedule, guard.switches) == ("switch", None, 2), "two reasons, and one switch"
    assert [event.split()[0] for event in second.events] == ["the", "sparse"]


def test_after_a_switch_by_the_reward_gap_the_tail_is_judged_anew() -> None:
    """The next schedule has the same budgets and checks its drafts; what was sampled without a check says nothing of it."""
    checked = LOOSE.checked(64, 0.01)
    guard, unswitched = guard_of_gap("stop", (checked,)), Guard("stop", 0.86)
    first, second = paired(1, 0.857), shown(2, 0.857, checked)
    assert (guard.watch(first).schedule, unswitched.watch(shown(1, 0.857)).action) == (checked, "none")
    assert [step for step, _ in guard.window.evidence] == []
    guard.watch(second)
    assert [step for step, _ in guard.window.evidence] == [2]


def test_a_low_tail_and_a_reward_gap_in_one_step_are_one_response_that_names_both() -> None:
    decision = guard_of_gap("stop").watch(paired(1, 0.5))
    assert decision.action == "stop"
    assert [event.split()[0] for event in decision.events] == ["the", "sparse"]


def test_what_two_schedules_of_one_name_showed_is_not_pooled() -> None:
    """Files are named by their stem, and a calibration writes schedule.toml."""
    same_name = replace(TIGHT, name=LOOSE.name)
    gap = RewardGap(ControlGroupSettings())
    guard = Guard("stop", 0.86, window_steps=1, stricter=(same_name,), reward_gap=gap)
    for step in (1, 2):
        assert guard.watch(paired(step, sparse_solves=True)).action == "none"
    assert guard.watch(paired(3, 0.5, sparse_solves=True)).action == "switch"
    assert gap.since_step == 3
    after = guard.watch(paired(4, sparse_solves=True, schedule=same_name)).report
    assert after["control/pairs"] == 16, "those of one step"


def test_a_guard_that_is_off_pools_the_whole_window_however_sure_a_gap_is() -> None:
    guard = guard_of_gap("off")
    pairs = [guard.watch(paired(step)).report["control/pairs"] for step in range(1, 6)]
    assert pairs == [16 * step for step in range(1, 6)]


def test_where_the_prompts_are_too_few_for_an_alarm_the_log_says_so_once_in_a_window() -> None:
    settings = ControlGroupSettings()
    events: dict[int, str] = {}
    guard = Guard("stop", None, reward_gap=RewardGap(settings))
    for step in range(1, 2 * settings.window_steps + 1):
        flags = dense_flags(0, step, 4, 4, 1 / 4)
        names = {number: str(number) for number in range(4)}
        pairs = paired_prompts(step, names, flags, {"reward": [float(dense) for dense in flags]})
        decision = guard.watch(replace(shown(step, 0.9), pairs=tuple(pairs)))
        assert decision.action == ("warn" if decision.events else "none")
        events |= dict.fromkeys((step,) * len(decision.events), "".join(decision.events))
    assert list(events) == [settings.window_steps, 2 * settings.window_steps]
    assert "worth those of 4.0 different prompts, and 8 are needed" in events[settings.window_steps]


def test_a_guard_that_is_off_and_one_without_a_target_report_the_control_group() -> None:
    off = guard_of_gap("off").watch(paired(1))
    assert (off.action, off.events, off.report["control/reward_gap"]) == ("none", (), 1)
    targetless = Guard("warn", None, reward_gap=RewardGap(ControlGroupSettings()))
    assert targetless.watch(paired(1)).action == "warn"


def test_a_warning_about_the_reward_gap_does_not_silence_the_tail() -> None:
    guard = Guard("warn", 0.86, window_steps=1, reward_gap=RewardGap(ControlGroupSettings()))
    assert guard.watch(paired(1)).action == "warn"
    (event,) = guard.watch(paired(2, 0.5, sparse_solves=True)).events
    assert event.startswith("the tail")


def test_the_control_group_is_part_of_the_guards_state() -> None:
    one, other = guard_of_gap("warn"), guard_of_gap("warn")
    for step in range(1, 4):
        one.watch(paired(step, sparse_solves=True))
    other.restore(one.state())
    assert one.watch(paired(4)) == other.watch(paired(4))
    assert "reward_gap" not in Guard("warn", 0.86).state()


def test_few_rollouts_must_miss_at_the_stricter_confidence() -> None:
    """Eight rollouts at .84: their 95 % interval ends at .848, below .86, and the stricter one does not."""
    decision = Guard("stop", 0.86).watch(evidence(1, measured(1, {0: 0.84}, rollouts=8), LOOSE))
    assert decision.action == "none"
