"""What the control group shows, step by step: the window, the share, the alarm, and a state that comes back to the bit."""

from __future__ import annotations

import json
import random

import pytest

from sparroll.control.control_group import ControlGroupSettings, dense_flags
from sparroll.control.paired_prompts import PairedPrompt, paired_prompts
from sparroll.control.reward_gap import RewardGap

PROMPTS, SAMPLES = 16, 8


def pairs_of(
    step: int, share: float, *, solved: tuple[float, float], seed: int = 0, figures: bool = False
) -> list[PairedPrompt]:
    """A step of 128 rollouts. solved: with which probability a dense and a sparse rollout is right."""
    draw, flags = random.Random(f"{seed}/{step}"), dense_flags(seed, step, PROMPTS, SAMPLES, share)
    names = {number: str((step * PROMPTS + number) % 200) for number in range(PROMPTS)}
    values = {"reward": [float(draw.random() < solved[0 if dense else 1]) for dense in flags]}
    if figures:
        values |= {
            "length": [200.0 if dense else 260.0 for dense in flags],
            "truncated": [0.0 if dense else 0.5 for dense in flags],
            "entropy": [0.3 for _ in flags],
        }
    return paired_prompts(step, names, flags, values)


def run(gap: RewardGap, steps: range, solved: tuple[float, float], schedule: str = "sparse") -> list[tuple[int, str]]:
    """-> (step, reason) of each alarm"""
    found = []
    for step in steps:
        _, reason = gap.observe(step, schedule, pairs_of(step, gap.share(step), solved=solved))
        if reason:
            found.append((step, reason))
    return found


def test_a_gap_raises_an_alarm_and_says_what_it_rests_on() -> None:
    ((step, reason), *_) = run(RewardGap(ControlGroupSettings()), range(1, 31), (0.6, 0.3))
    assert step < 10
    assert reason.startswith("sparse rollouts get less reward than dense ones of the same prompts: by 0.")
    assert reason.endswith(f"comparisons within a prompt in steps 1 to {step})")
    assert "surely and by more than the tolerated 0.05" in reason


@pytest.mark.parametrize("solved", [(0.5, 0.5), (0.3, 0.6), (0.0, 0.0), (1.0, 1.0)])
def test_no_gap_and_a_gap_in_favour_of_sparse_rollouts_are_no_alarm(solved: tuple[float, float]) -> None:
    assert run(RewardGap(ControlGroupSettings()), range(1, 151), solved) == []


def test_prompts_that_gain_what_others_lose_raise_no_alarm() -> None:
    """It surely makes a difference how rollouts are decoded, and none in the mean."""
    gap = RewardGap(ControlGroupSettings(share=1 / 4, reward_gap=0.0))
    for step in range(1, 101):
        flags = dense_flags(0, step, PROMPTS, SAMPLES, 1 / 4)
        kinds = [dense == (place // SAMPLES % 2 == 0) for place, dense in enumerate(flags)]
        draw = random.Random(step)
        rewards = [float(draw.random() < (0.9 if high else 0.1)) for high in kinds]
        pairs = paired_prompts(step, {n: str(n) for n in range(PROMPTS)}, flags, {"reward": rewards})
        gap.evidence.logs = [20.0] * 4
        gap.closer_since = 0
        assert gap.observe(step, "sparse", pairs)[1] == ""


def test_a_tolerated_gap_is_no_alarm_however_sure() -> None:
    settings = ControlGroupSettings(share=1 / 4, reward_gap=0.5)
    gap = RewardGap(settings)
    assert run(gap, range(1, 61), (0.6, 0.3)) == []
    assert gap.evidence.is_sure
    never = RewardGap(ControlGroupSettings(reward_gap=None))
    assert run(never, range(1, 31), (0.9, 0.1)) == []


def test_the_figures_are_those_of_the_window_and_of_the_step() -> None:
    gap = RewardGap(ControlGroupSettings(window_steps=2, reward_gap=None))
    for step in range(1, 4):
        pairs = pairs_of(step, 1 / 4, solved=(1.0, float(step != 3)), figures=True)
        report, _ = gap.observe(step, "sparse", pairs)
    assert report["control/pairs"] == 2 * PROMPTS
    assert (report["control/reward_gap"], report["control/step_reward_gap"]) == (0.5, 1.0)
    assert report["control/reward_gap_low"] < 0.5 < report["control/reward_gap_high"]
    assert (report["control/length_gap"], report["control/truncated_gap"]) == (-60.0, -0.5)
    assert report["control/entropy_gap"] == report["control/entropy_gap_low"] == 0
    assert report["control/share"] == 0.25


def test_without_pairs_there_are_no_figures_and_no_alarm() -> None:
    gap = RewardGap(ControlGroupSettings())
    report, reason = gap.observe(1, "sparse", [])
    assert set(report) == {"control/share", "control/pairs", "control/reward_gap_evidence"}
    assert (report["control/pairs"], reason) == (0, "")
    run(gap, range(2, 10), (0.7, 0.6))
    for step in range(10, 60):
        report, reason = gap.observe(step, "sparse", [])
    assert "control/reward_gap" not in report and not reason, "the window still holds pairs of 50 steps ago"


def test_the_first_steps_have_the_larger_share_and_so_have_those_of_another_schedule() -> None:
    settings = ControlGroupSettings(share=1 / 32, share_first=1 / 4, first_steps=3)
    gap = RewardGap(settings)
    for step in range(1, 40):
        gap.observe(step, "one", pairs_of(step, 1 / 4, solved=(0.3, 0.6)))
    assert [gap.share(step) for step in (1, 3, 4, 40)] == [1 / 4, 1 / 4, 1 / 32, 1 / 32]
    gap.observe(40, "two", pairs_of(40, 1 / 32, solved=(0.5, 0.5)))
    assert [gap.share(step) for step in (41, 42, 43)] == [1 / 4, 1 / 4, 1 / 32]
    assert {pair.step for pair in gap.pairs} == {40}, "differences under two schedules are not pooled"


def test_the_share_grows_where_the_evidence_is_under_way_to_an_alarm() -> None:
    gap = RewardGap(ControlGroupSettings(first_steps=0))
    assert gap.share(1) == 1 / 4, "nothing is known yet"
    for step in range(1, 60):
        gap.observe(step, "sparse", pairs_of(step, gap.share(step), solved=(0.4, 0.5)))
    assert gap.share(60) == 1 / 32
    grown = []
    for step in range(60, 200):
        grown.append(gap.share(step) == 1 / 4)
        if gap.observe(step, "sparse", pairs_of(step, gap.share(step), solved=(0.6, 0.4)))[1]:
            break
    assert not grown[0] and any(grown)


def test_a_gap_that_began_late_is_judged_by_the_steps_since_it_showed() -> None:
    """The window of 200 steps still says .05 or less when the alarm comes."""
    gap = RewardGap(ControlGroupSettings(share=1 / 4, window_steps=200))
    assert run(gap, range(1, 151), (0.5, 0.5)) == []
    for step in range(151, 200):
        report, reason = gap.observe(step, "sparse", pairs_of(step, 1 / 4, solved=(0.65, 0.35)))
        if reason:
            break
    assert step < 170
    assert report["control/reward_gap_low"] < 0.05
    first = int(reason.split("in steps ")[1].split()[0])
    assert 150 < first <= step


def test_without_a_share_no_step_has_dense_rollouts() -> None:
    gap = RewardGap(ControlGroupSettings(share=0, share_first=0.25))
    assert [gap.share(step) for step in (1, 100)] == [0, 0]


def test_after_an_alarm_the_evidence_starts_anew() -> None:
    gap = RewardGap(ControlGroupSettings(share=1 / 4))
    (first, _), (second, _), *_ = run(gap, range(1, 60), (0.6, 0.3))
    assert second - first >= 3
    gap = RewardGap(ControlGroupSettings(share=1 / 4))
    run(gap, range(1, first + 2), (0.6, 0.3))
    assert {pair.step for pair in gap.pairs} == {first + 1}


def test_an_alarm_under_the_same_schedule_does_not_begin_its_first_steps_again() -> None:
    """Only another schedule does. The gap begins behind the first three steps."""
    gap = RewardGap(ControlGroupSettings(first_steps=3))
    assert run(gap, range(1, 10), (0.5, 0.5), "one") == []
    step, reason = 9, ""
    while not reason:
        step += 1
        _, reason = gap.observe(step, "one", pairs_of(step, gap.share(step), solved=(0.7, 0.3)))
    assert gap.pairs == ()
    assert gap.share(step + 1) == 1 / 32
    gap.observe(step + 1, "two", pairs_of(step + 1, 1 / 32, solved=(0.5, 0.5)))
    assert [gap.share(step + later) for later in (2, 3, 4)] == [1 / 4, 1 / 4, 1 / 32]


def test_a_resumed_run_goes_on_to_the_bit_in_the_middle_of_a_window() -> None:
    one = RewardGap(ControlGroupSettings(window_steps=20))
    run(one, range(1, 28), (0.55, 0.45))
    saved = one.state()
    text = json.dumps(saved, allow_nan=False)
    other = RewardGap(ControlGroupSettings(window_steps=20))
    other.restore(json.loads(text))
    for step in range(28, 60):
        assert one.share(step) == other.share(step)
        pairs = pairs_of(step, one.share(step), solved=(0.55, 0.45), figures=True)
        assert one.observe(step, "sparse", pairs) == other.observe(step, "sparse", pairs)
    assert json.dumps(one.state()) == json.dumps(other.state())
    assert json.dumps(saved) == text, "a state that was handed out has changed"


def test_pairs_of_two_processes_in_any_order_are_those_of_one() -> None:
    one, other = (RewardGap(ControlGroupSettings()) for _ in range(2))
    for step in range(1, 40):
        pairs = pairs_of(step, one.share(step), solved=(0.55, 0.45))
        assert one.observe(step, "sparse", pairs) == other.observe(step, "sparse", [*pairs[1::2], *pairs[0::2]])
    assert json.dumps(one.state()) == json.dumps(other.state())


def alarms(prompts: int, difference: float, tolerated: float | None = None) -> bool:
    """Whether so many prompts, each with this difference, are an alarm beside evidence that is strong enough."""
    settings = ControlGroupSettings() if tolerated is None else ControlGroupSettings(reward_gap=tolerated)
    gap = RewardGap(settings)
    gap.evidence.logs = [20.0] * 4
    pairs = [PairedPrompt(1, n, str(n), {"reward": (1.0, difference)}, (0.0,) * 4) for n in range(prompts)]
    return bool(gap.observe(1, "sparse", pairs)[1])


def test_each_condition_of_the_alarm_keeps_it_quiet_alone() -> None:
    assert alarms(8, 1.0)
    assert not alarms(7, 1.0), "too few prompts for an interval"
    assert not alarms(8, 0.5), "above the tolerated gap at 95 % confidence, and not at that of an alarm"
    assert not alarms(8, 1.0, tolerated=0.9), "the gap is above what is tolerated, and its interval is not"
