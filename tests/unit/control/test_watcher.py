"""What holds for every watcher: one table of states, one hand on the schedule."""

from __future__ import annotations

import pytest

from sparroll.attention.selectors import PageMean
from sparroll.control.cheaper_schedules import CheaperSchedules
from sparroll.control.controller import Controller, Rules
from sparroll.control.empty_steps import EmptySteps
from sparroll.control.guard import Guard
from sparroll.control.length_bins import LengthBins
from sparroll.control.watcher import StepEvidence, Watcher, refuse_two_hands, restore_all, states_of
from sparroll.schedule import Schedule
from tail_worlds import BIN, measured

LEARNED = {"policy/kept_tokens": 9.0, "policy/trained_rollouts": 8.0, "policy/trained_tokens": 9.0}


def controller() -> Controller:
    return Controller(Rules(0.86), LengthBins(BIN, 4000, PageMean()), [512, 512])


def cheaper() -> CheaperSchedules:
    return CheaperSchedules([Schedule.fixed(64)], 0.8, every_steps=1, patience=3, least_tokens=20)


def test_one_table_of_states_takes_all_watchers_to_where_they_stood() -> None:
    def made() -> list[Watcher]:
        return [Guard("warn", 0.86), cheaper(), EmptySteps(2)]

    one, other = made(), made()
    for step in range(1, 4):
        tail = measured(step, {0: 0.857})
        shown = StepEvidence(step, Schedule.fixed(512), False, tail, LEARNED, tail.table("top_k_lower"))
        if step == 3:
            restore_all(other, states_of(one))
            assert list(states_of(other)) == ["guard", "cheaper_schedules", "empty_steps"]
            assert [watcher.watch(shown) for watcher in other] == [watcher.watch(shown) for watcher in one]
        else:
            for watcher in one:
                watcher.watch(shown)


def test_only_one_watcher_may_move_the_schedule() -> None:
    refuse_two_hands([Guard("warn", 0.86), EmptySteps(3), controller()])
    refuse_two_hands([Guard("stop", 0.8), cheaper()])
    with pytest.raises(AssertionError, match="guard and controller would both move the schedule"):
        refuse_two_hands([Guard("stricter", 0.86, stricter=(None,)), EmptySteps(3), controller()])
