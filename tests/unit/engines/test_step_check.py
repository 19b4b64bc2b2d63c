"""What vLLM's workers must have counted for rollouts of both kinds. Needs no vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparroll.engines.report import EngineReport, LayerReport
from sparroll.engines.vllm.step_check import check_ran
from sparroll.schedule import Schedule
from sparroll.types import Checks, Rollout

SCHEDULE = Schedule.fixed(64, dense_layers=(0,))


def rollout(prompt_tokens: int, tokens: int, checks: Checks | None = None) -> Rollout:
    return Rollout([5] * prompt_tokens, [7] * tokens, torch.zeros(tokens), "length", checks=checks)


def counted(dense_steps: list[int], sparse_steps: list[int], **counts: int) -> EngineReport:
    layers = [LayerReport(dense, sparse) for dense, sparse in zip(dense_steps, sparse_steps, strict=True)]
    return EngineReport("vllm", "m", "s", 0, layers=layers, **counts)


def check(ran: EngineReport, rollouts: list[Rollout], dense: list[bool], schedule: Schedule | None) -> None:
    """All that are not dense have the same schedule."""
    check_ran(ran, rollouts, dense, [None if flag else schedule for flag in dense])


# Contexts of 101 to 109 and of 60 to 67, of which those above 64 are sparse in layer 1.
ROLLOUTS = [rollout(100, 10), rollout(59, 9)]


def test_rows_of_sparse_and_of_dense_requests_must_add_up() -> None:
    check(counted([17, 5], [0, 12]), ROLLOUTS, [False, False], SCHEDULE)
    check(counted([17, 14], [0, 3], dense_request_steps=9), ROLLOUTS, [True, False], SCHEDULE)
    check(counted([17, 17], [0, 0], dense_request_steps=17), ROLLOUTS, [True, True], SCHEDULE)
    for steps, dense in (([17, 6], [0, 11]), ([17, 15], [0, 2])):
        with pytest.raises(RuntimeError, match="layer 1 ran 17 decode steps through sparroll's backend"):
            check(counted(steps, dense, dense_request_steps=9), ROLLOUTS, [steps[1] == 15, False], SCHEDULE)


def test_rollouts_with_schedules_of_their_own_need_the_rows_of_each() -> None:
    # Of the first, contexts above 96 are sparse: 9; of the second, those above 64: 3. The other way round they are 9 and 0.
    wide = Schedule.fixed(96, dense_layers=(0,))
    for schedules, needed in (([wide, SCHEDULE], 12), ([SCHEDULE, wide], 9), ([wide, wide], 9)):
        check_ran(counted([17, 17 - needed], [0, needed]), ROLLOUTS, [False, False], schedules)
        with pytest.raises(RuntimeError, match=f"needed 17, {needed} of them sparse under schedule .*fixed-96"):
            check_ran(counted([17, 18 - needed], [0, needed - 1]), ROLLOUTS, [False, False], schedules)


def test_a_worker_must_have_known_whose_schedules_are_whose() -> None:
    wide = Schedule.fixed(96, dense_layers=(0,))
    # Read by the engine's narrower schedule, both have more sparse rows than they need.
    ran, schedules = counted([17, 5], [0, 12]), [SCHEDULE, wide]
    check_ran(ran, ROLLOUTS, [False, False], schedules, [(wide, 8)])
    for known in (0, 7):
        with pytest.raises(RuntimeError, match=f"read {known} decode rows by the schedule fixed-96 .* 8 were needed"):
            check_ran(ran, ROLLOUTS, [False, False], schedules, [(wide, known)])
    ran.preemptions = ran.resumed_tokens = 1
    check_ran(ran, ROLLOUTS, [False, False], schedules, [(wide, 7)])


def test_a_worker_must_have_known_the_dense_requests() -> None:
    for known in (0, 8):
        with pytest.raises(RuntimeError, match=f"decoded {known} rows of dense requests, and 9 were needed"):
            check(counted([17, 5], [0, 12], dense_request_steps=known), ROLLOUTS, [True, False], SCHEDULE)


def test_tokens_that_no_decode_row_gave_are_not_missed() -> None:
    preempted = counted([16, 14], [0, 2], dense_request_steps=8, preemptions=1, resumed_tokens=1)
    preempted.layers[1].resumed_sparse_tokens = 1
    check(preempted, ROLLOUTS, [True, False], SCHEDULE)
    checked = [rollout(100, 10, Checks(windows=2, drafted_tokens=8, extra_tokens=1)), rollout(59, 9)]
    drafted = counted([16, 13], [0, 3], dense_request_steps=8)
    drafted.checks = Checks(windows=2, drafted_tokens=8, extra_tokens=1)
    check(drafted, checked, [True, False], SCHEDULE)
    drafted.dense_request_steps = 7
    with pytest.raises(RuntimeError, match="decoded 7 rows of dense requests, and 8 were needed"):
        check(drafted, checked, [True, False], SCHEDULE)


def test_steps_that_were_dense_because_they_were_short_are_not_missed() -> None:
    short = counted([17, 6], [0, 11])
    short.layers[1].short_dense_steps = 1
    check(short, ROLLOUTS, [False, False], SCHEDULE)
    short.layers[1].sparse_steps, short.layers[1].dense_steps = 10, 7
    with pytest.raises(RuntimeError, match="10 of them sparse; the rollouts needed 17, 11 of them sparse"):
        check(short, ROLLOUTS, [False, False], SCHEDULE)


def test_without_a_schedule_every_step_is_dense() -> None:
    check(counted([17, 17], [0, 0]), ROLLOUTS, np.array([False, False]).tolist(), None)
    with pytest.raises(RuntimeError, match="needed 17, 0 of them sparse under schedule dense"):
        check(counted([17, 16], [0, 0]), ROLLOUTS, [False, False], None)
