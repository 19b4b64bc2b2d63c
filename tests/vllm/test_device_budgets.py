"""The schedule as tensors on the device. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparroll import Schedule
from sparroll.engines.vllm.attention.device_budgets import UNLIMITED
from sparroll.engines.vllm.attention.state import State
from sparroll.schedule import Step
from worker_steps import GROUPED, RISING, started


def budgets(state: State, contexts: Any, reads_all: list[bool] | None = None) -> list[list[int]]:
    """[L, R] of a step of these contexts."""
    contexts_R = torch.as_tensor(contexts, dtype=torch.int32)
    state.budgets.begin_step(None if reads_all is None else np.array(reads_all), most_rows=max(8, len(contexts_R)))
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
    where = state.budgets._steps_XS.data_ptr()
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
    assert state.budgets._steps_XS.data_ptr() == where


def test_padding_rows_have_no_budget() -> None:
    assert budgets(started(), [0, 5, 0]) == [[0, UNLIMITED, 0]] * 2 + [[0, 64, 0]] * 4


def test_rows_that_read_everything_have_no_limit_in_the_steps_that_say_so() -> None:
    state, contexts = started(), [300, 40, 300, 300]
    plain = [[UNLIMITED] * 4] * 2 + [[128, 64, 128, 128]] * 4
    some = [[UNLIMITED] * 4] * 2 + [[128, 64, UNLIMITED, 128]] * 4
    assert budgets(state, contexts) == plain
    assert state.budgets._reads_all_R is not None
    where = state.budgets._reads_all_R.data_ptr()
    for _ in range(2):
        assert budgets(state, contexts, [False, False, True, False]) == some
    # A row that is only there in a later step was not said to.
    assert budgets(state, contexts[:1], [True]) == [[UNLIMITED]] * 6
    assert budgets(state, contexts, [False, False, True, False]) == some
    assert budgets(state, contexts) == plain
    assert state.budgets._reads_all_R.data_ptr() == where


def test_a_new_schedule_fills_the_same_tensor() -> None:
    state = started()
    budgets(state, [300])
    where = state.budgets._steps_XS.data_ptr()
    for schedule, budget, read in ((Schedule.fixed(256), 256, 256 - 4), (None, UNLIMITED, 300), (RISING, 128, 128 - 4)):
        state.set_schedule(schedule)
        assert budgets(state, [300])[2] == [budget]
        unread_L = np.broadcast_to(state.reads.decode_rows(np.array([300])).unread_tokens_L, 6)
        assert unread_L.tolist() == [0] * 2 + [300 - read] * 4
    assert state.budgets._steps_XS.data_ptr() == where


def test_the_hosts_copy_stays_there_under_another_default_device() -> None:
    with torch.device("meta"):
        state = started()
    assert budgets(state, [300])[2] == [128]


def test_a_new_engine_is_told_again_which_rows_read_everything() -> None:
    state = started()
    assert budgets(state, [300, 300], [False, True])[2] == [128, UNLIMITED]
    state.configure(RISING, 6, "cpu")
    assert budgets(state, [300, 300], [False, True])[2] == [128, UNLIMITED]
