"""The guard's decisions, step by step."""

from __future__ import annotations

from sparroll.schedule import Schedule
from sparroll.train.guard import Guard, Verdict

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
