"""The guard's decisions, step by step."""

from __future__ import annotations

import pytest

from sparroll.control.guard import Guard, Verdict
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.train import load_config
from sparroll.train.schedules import make_guard

LOOSE, TIGHT = Schedule.fixed(64), Schedule.fixed(512)


def test_a_tail_that_stays_low_for_the_window_triggers_and_a_single_dip_does_not() -> None:
    guard = Guard("stop", 0.86, 3, [])
    tails = [0.8, 0.8, 0.9, 0.8, 0.8, 0.85]
    verdicts = [guard.watch(tail, LOOSE) for tail in tails]
    assert [verdict.action for verdict in verdicts] == ["none"] * 5 + ["stop"]
    assert "0.850, under 0.860 for 3 steps" in verdicts[-1].reason


def test_the_target_itself_is_met() -> None:
    guard = Guard("stop", 0.86, 1, [])
    assert guard.watch(0.86, LOOSE) == Verdict()


def test_a_guard_without_a_target_says_so_at_the_start_of_a_sparse_run() -> None:
    (notice,) = Guard("warn", None, 5, []).notice(dense=False)
    assert "watches nothing" in notice
    assert "guard.at_least, for example 0.86" in notice
    assert Guard("warn", None, 5, []).notice(dense=True) == []
    assert Guard("off", None, 5, []).notice(dense=False) == []
    assert Guard("warn", 0.86, 5, []).notice(dense=False) == []


def test_stricter_goes_down_its_list_and_dense_ends_the_watch() -> None:
    guard = Guard("stricter", 0.86, 2, [TIGHT, None])
    schedule: Schedule | None = LOOSE
    taken = []
    for _ in range(6):
        verdict = guard.watch(0.7, schedule)
        if verdict.action == "switch":
            schedule = verdict.schedule
        taken.append((verdict.action, schedule.name if schedule else "dense"))
    assert taken == [
        ("none", "fixed-64"),
        ("switch", "fixed-512"),
        ("none", "fixed-512"),
        ("switch", "dense"),
        ("none", "dense"),
        ("none", "dense"),
    ]


def test_at_the_end_of_the_list_it_warns() -> None:
    guard = Guard("stricter", 0.86, 1, [TIGHT])
    assert guard.watch(0.7, LOOSE).action == "switch"
    verdict = guard.watch(0.7, TIGHT)
    assert verdict.action == "warn"
    assert "no stricter schedule is left after fixed-512" in verdict.reason


def test_steps_without_a_measurable_bin_neither_clear_nor_count() -> None:
    guard = Guard("warn", 0.86, 2, [])
    assert [guard.watch(tail, LOOSE).action for tail in (0.7, None, None, 0.7)] == ["none", "none", "none", "warn"]


def test_off_no_target_and_dense_rollouts_say_nothing() -> None:
    assert Guard("off", 0.86, 1, []).watch(0.1, LOOSE) == Verdict()
    assert Guard("warn", None, 1, []).watch(0.1, LOOSE) == Verdict()
    assert Guard("warn", 0.86, 1, []).watch(0.1, None) == Verdict()


def test_a_restored_guard_goes_on_where_the_other_stood() -> None:
    one = Guard("stricter", 0.86, 3, [TIGHT, None])
    for tail in (0.7, 0.7, 0.7, 0.7):
        one.watch(tail, LOOSE)
    other = Guard("stricter", 0.86, 3, [TIGHT, None])
    other.restore(one.state())
    for tail in (0.7, 0.7):
        assert one.watch(tail, TIGHT) == other.watch(tail, TIGHT)


def schedule_with(target: dict[str, object] | None) -> Schedule:
    return Schedule(steps=(Step(0, 64),), target=target, name="own")


OWN = {"statistic": "acceptance", "estimator": "top_k_lower", "top_k": 20, "quantile": 0.05, "at_least": 0.86}


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
    with pytest.raises(UserError, match="is to act at an alarm, but the schedule 'own' names no target"):
        make_guard(load_config(None, ["guard.action=stop"]), schedule_with(None))
