"""The schedule as tensors on the device. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sparroll import Schedule
from sparroll.attention.selectors import PageMean
from sparroll.engines.vllm.attention.decode_rows import DENSE, ENGINES
from sparroll.engines.vllm.attention.device_budgets import UNLIMITED
from sparroll.engines.vllm.attention.state import State
from sparroll.errors import UserError
from sparroll.schedule import Step
from worker_steps import GROUPED, RISING, started


def budgets(state: State, contexts: Any, which: list[int] | None = None) -> list[list[int]]:
    """[L, R] of a step of these contexts. which: the number of each row's schedule."""
    contexts_R = torch.as_tensor(contexts, dtype=torch.int32)
    which_R = None if which is None else np.array(which, dtype=np.int32)
    state.budgets.begin_step(which_R, most_rows=max(8, len(contexts_R)))
    # More rows than the step has, as in an engine.
    kept_LR = torch.full((6, len(contexts_R) + 1), -9, dtype=torch.int32)
    out_LR = kept_LR[:, :-1]
    assert state.budgets.of_step(contexts_R, out_LR) is out_LR and (kept_LR[:, -1] == -9).all()
    return out_LR.tolist()


@pytest.mark.parametrize("name", ["qwen3-1.7b-0.86", "qwen3-14b-0.86"])
def test_budgets_on_the_device_and_on_the_host_are_the_schedules(name: str) -> None:
    schedule = Schedule.load(name)
    state = started(schedule)
    contexts = torch.cat(
        [torch.arange(1, 40_000, 7), torch.tensor([s.from_context_tokens for s in schedule.steps[1:]])]
    )
    expected = schedule.kv_budget_tokens(contexts)
    reads = schedule.read_tokens(contexts)
    out = torch.tensor(budgets(state, contexts))
    assert (out[:2] == UNLIMITED).all() and (out[2:] == expected).all()
    # What the kernels read by the budgets on the device, and what is counted from the lengths on the host.
    assert torch.equal(schedule.selector.read_tokens(contexts.int(), out[5]), reads.int())
    counted = state.reads.decode_rows(contexts.numpy())
    assert counted.context_tokens == int(contexts.sum())
    assert counted.unread_tokens_L.tolist() == [0] * 2 + [int((contexts - reads).sum())] * 4
    assert (state.reads.unread_tokens(contexts.numpy()) == 4 * (contexts - reads).numpy()).all()


def test_each_layer_has_the_budgets_of_its_group_whatever_the_grouping() -> None:
    contexts = torch.tensor([0, 60, 100, 300], dtype=torch.int32)
    state = started()
    budgets(state, contexts)
    where = state.budgets._steps_VXS.data_ptr()
    of_each = Schedule((Step(0, (64, 80, 96, 128)),), layer_groups=((2,), (3,), (4,), (5,)))
    everything, rising = [0] + [UNLIMITED] * 3, [0, 64, 96, 128]
    for schedule, expected in (
        (GROUPED, [[0, 96, 160, 160], [0, 64, 80, 80], [0, 64, 80, 80], [0, 96, 160, 160]]),
        (of_each, [[0, n, n, n] for n in (64, 80, 96, 128)]),
        (None, [everything] * 4),
        (RISING, [rising] * 4),
    ):  # fmt: skip
        state.set_schedule(schedule)
        assert budgets(state, contexts) == [everything, everything, *expected]
    assert state.budgets._steps_VXS.data_ptr() == where


def test_padding_rows_have_no_budget() -> None:
    assert budgets(started(), [0, 5, 0]) == [[0, UNLIMITED, 0]] * 2 + [[0, 64, 0]] * 4


def test_rows_that_read_everything_have_no_limit_in_the_steps_that_say_so() -> None:
    state, contexts = started(), [300, 40, 300, 300]
    plain = [[UNLIMITED] * 4] * 2 + [[128, 64, 128, 128]] * 4
    some = [[UNLIMITED] * 4] * 2 + [[128, 64, UNLIMITED, 128]] * 4
    assert budgets(state, contexts) == plain
    assert state.budgets._which_R is not None
    where = state.budgets._which_R.data_ptr()
    for _ in range(2):
        assert budgets(state, contexts, [ENGINES, ENGINES, DENSE, ENGINES]) == some
    # A row that is only there in a later step was not said to.
    assert budgets(state, contexts[:1], [DENSE]) == [[UNLIMITED]] * 6
    assert budgets(state, contexts, [ENGINES, ENGINES, DENSE, ENGINES]) == some
    assert budgets(state, contexts) == plain
    assert state.budgets._which_R.data_ptr() == where


def test_rows_of_requests_with_a_schedule_of_their_own_have_its_budgets() -> None:
    state, contexts = started(), [300, 60, 300, 300, 0]
    budgets(state, contexts)
    where = state.budgets._steps_VXS.data_ptr()
    state.set_request_schedules([Schedule.fixed(256), GROUPED], {"a": 1, "b": 2})
    which = [ENGINES, 2, 2, 1, 1]
    assert budgets(state, contexts, which)[:4] == [
        *[[UNLIMITED] * 4 + [0]] * 2, [128, 96, 160, 256, 0], [128, 64, 80, 256, 0]
    ]  # fmt: skip
    # What the host counts is the same.
    assert state.reads.decode_rows(np.array([300, 300]), np.array([2, 1])).unread_tokens_L.tolist() == [
        0, 0, *[600 - (read - 4) - (256 - 4) for read in (160, 80, 80, 160)]
    ]  # fmt: skip
    state.set_schedule(Schedule.fixed(256))
    assert not state.request_numbers and budgets(state, contexts[:1], [ENGINES])[2] == [256]
    assert state.budgets._steps_VXS.data_ptr() == where


def test_schedules_of_requests_that_the_engine_cannot_have_are_refused() -> None:
    state = started()
    for schedules, match in (
        ([Schedule.fixed(64, dense_layers=(0,))], "has the dense layers"),
        ([Schedule.fixed(64, PageMean(page_tokens=4))], "keeps the index of"),
        ([Schedule.fixed(64)] * 32, "at most 31 schedules, got 32"),
        ([replace(GROUPED, layer_groups=((2,), (3, 4)))], "layer"),
    ):
        with pytest.raises(UserError, match=match):
            state.set_request_schedules(schedules, {})
    state.set_schedule(None)
    with pytest.raises(UserError, match="beside one of the engine"):
        state.set_request_schedules([RISING], {})
    assert budgets(state, [300])[2] == [UNLIMITED]


def test_a_new_schedule_fills_the_same_tensor() -> None:
    state = started()
    budgets(state, [300])
    where = state.budgets._steps_VXS.data_ptr()
    for schedule, budget, read in ((Schedule.fixed(256), 256, 256 - 4), (None, UNLIMITED, 300), (RISING, 128, 128 - 4)):
        state.set_schedule(schedule)
        assert budgets(state, [300])[2] == [budget]
        unread_L = np.broadcast_to(state.reads.decode_rows(np.array([300])).unread_tokens_L, 6)
        assert unread_L.tolist() == [0] * 2 + [300 - read] * 4
    assert state.budgets._steps_VXS.data_ptr() == where


def test_the_hosts_copy_stays_there_under_another_default_device() -> None:
    with torch.device("meta"):
        state = started()
    assert budgets(state, [300])[2] == [128]


def test_a_new_engine_is_told_again_which_rows_read_everything() -> None:
    state = started()
    assert budgets(state, [300, 300], [ENGINES, DENSE])[2] == [128, UNLIMITED]
    state.configure(RISING, 6, "cpu")
    assert budgets(state, [300, 300], [ENGINES, DENSE])[2] == [128, UNLIMITED]
