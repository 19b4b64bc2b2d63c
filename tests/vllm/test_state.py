"""The schedule on the device, the counters, and the rows of a step. Needs no vLLM."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparroll import Schedule
from sparroll.attention.selectors import PageMean
from sparroll.engines.report import LayerReport
from sparroll.engines.vllm.arguments import widest
from sparroll.engines.vllm.attention.batch import Rows
from sparroll.engines.vllm.attention.state import (
    FEW_ROWS,
    STEPS_AT_ONCE,
    UNLIMITED,
    State,
    most_and_total,
)
from sparroll.errors import UserError
from sparroll.schedule import Step

RISING = Schedule(steps=(Step(0, 64), Step(100, 96), Step(250, 128)), name="rising")
GROUPED = Schedule(steps=(Step(0, (96, 64)), Step(100, (160, 80))), layer_groups=((2, 5), (3, 4)), name="grouped")


@dataclass
class Common:
    """The part of vLLM's CommonAttentionMetadata that is looked at."""

    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    is_prefilling: torch.Tensor | None
    num_reqs: int
    max_query_len: int

    @staticmethod
    def of(new_tokens: list[int], contexts: list[int], prefilling: list[bool]) -> Common:
        starts = torch.tensor([0, *np.cumsum(new_tokens)], dtype=torch.int32)
        return Common(starts, torch.tensor(contexts), torch.tensor(prefilling), len(new_tokens), max(new_tokens))


def budgets(state: State, contexts: Any, reads_all: list[bool] | None = None) -> list[list[int]]:
    """[L, R] of a step of these contexts."""
    contexts_R = torch.as_tensor(contexts, dtype=torch.int32)
    state.begin_budgets(None if reads_all is None else np.array(reads_all), most_rows=max(8, len(contexts_R)))
    # More rows than the step has, as in an engine.
    kept_LR = torch.full((6, len(contexts_R) + 1), -9, dtype=torch.int32)
    out_LR = kept_LR[:, :-1]
    assert state.budgets(contexts_R, out_LR) is out_LR and (kept_LR[:, -1] == -9).all()
    return out_LR.tolist()


def started(schedule: Schedule | None = RISING) -> State:
    state = State()
    state.configure(schedule, 6, "cpu")
    return state


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
    counted = state.decode_rows(contexts.numpy())
    assert counted.context_tokens == int(contexts.sum())
    assert counted.unread_tokens_L.tolist() == [0] * 2 + [int((contexts - reads).sum())] * 4
    assert (state.unread_tokens(contexts.numpy()) == 4 * (contexts - reads).numpy()).all()


def test_what_rows_read_is_looked_up_however_long_their_contexts_grow() -> None:
    grouped = Schedule((Step(0, (64, 256)), Step(1000, (512, 256))), dense_layers=(0, 1), layer_groups=((2, 3), (4, 5)))
    state = started(grouped)
    dense_R = np.array([False, True])
    for context in (5, 63, 64, 65, 999, 1000, 70_000, 5):
        contexts_R = np.array([context, context + 1])
        reads = [int(grouped.of_layer(layer).read_tokens(context)) for layer in (2, 3, 4, 5)]
        rows = state.decode_rows(contexts_R, dense_R)
        sparse_L, unread_L = np.broadcast_to(rows.left_out_2L, (2, 6)).tolist()
        assert unread_L == [0] * 2 + [context - read for read in reads]
        assert sparse_L == [0, 0] + [int(read < context) for read in reads]
        assert (rows.context_tokens, rows.dense_rows, rows.dense_context_tokens) == (2 * context + 1, 1, context + 1)
        both = np.array([[context], [7]])
        assert (state.unread_tokens(both) == grouped.unread_tokens(both, 6)).all()
    none = state.decode_rows(np.zeros(0, dtype=np.int64))
    assert none.rows == none.context_tokens == 0 and not none.sparse_L.any()


@pytest.mark.parametrize("count", [1, 5, FEW_ROWS, FEW_ROWS + 1])
def test_few_numbers_and_many_have_the_same_largest_and_sums(count: int) -> None:
    numbers = np.random.default_rng(count).integers(1, 99, count)
    assert most_and_total(numbers) == (numbers.max(), numbers.sum())
    assert most_and_total(numbers[:0]) == (0, 0)


def test_each_layer_has_the_budgets_of_its_group_whatever_the_grouping() -> None:
    contexts = torch.tensor([0, 60, 100, 300], dtype=torch.int32)
    state = started()
    budgets(state, contexts)
    where = state._steps_XS.data_ptr()
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
    assert state._steps_XS.data_ptr() == where


def test_an_engine_that_starts_with_groups_takes_all_others_and_none() -> None:
    start = widest(GROUPED, 1000, 6)
    assert start.layer_groups == () and start.kv_budget_tokens(1000) >= 1000
    for state in (started(start), started(GROUPED)):
        for schedule in (GROUPED, replace(GROUPED, layer_groups=((2, 3, 4), (5,))), RISING, None):
            state.set_schedule(schedule)
        with pytest.raises(UserError, match="layer_groups leaves out the layers"):
            state.set_schedule(replace(GROUPED, layer_groups=((2,), (3, 4))))
        assert state.schedule is None


def test_what_layers_of_other_groups_read_is_counted_apart() -> None:
    state = started(GROUPED)
    # 150 tokens: group 0 reads all of them, group 1 (layers 3 and 4) 80 but for what the last unit of 16 lacks.
    for ran in ({0: "dense", 2: "triton", 3: "triton"}, {0: "dense", 2: "triton", 3: "triton", 4: "dense"}):
        run_step(state, [150], ran)
    layers = state.report().layers
    assert [layers[n].sparse_steps for n in range(5)] == [0, 0, 0, 2, 0]
    assert [layers[n].read_tokens for n in (0, 2, 3, 4)] == [300, 300, 2 * (80 - 10), 150]
    # Layer 2 had nothing to leave out; layer 4 had, and ran dense.
    assert state.ran == {0: "dense", 2: "dense", 3: "triton", 4: "dense"}
    run_step(state, [300], {2: "triton"})
    assert state.report().layers[2].read_tokens == 300 + 160 - 4 and state.ran[2] == "triton"


def test_padding_rows_have_no_budget() -> None:
    assert budgets(started(), [0, 5, 0]) == [[0, UNLIMITED, 0]] * 2 + [[0, 64, 0]] * 4


def test_rows_that_read_everything_have_no_limit_in_the_steps_that_say_so() -> None:
    state, contexts = started(), [300, 40, 300, 300]
    plain = [[UNLIMITED] * 4] * 2 + [[128, 64, 128, 128]] * 4
    some = [[UNLIMITED] * 4] * 2 + [[128, 64, UNLIMITED, 128]] * 4
    assert budgets(state, contexts) == plain
    assert state._reads_all_R is not None
    where = state._reads_all_R.data_ptr()
    for _ in range(2):
        assert budgets(state, contexts, [False, False, True, False]) == some
    # A row that is only there in a later step was not said to.
    assert budgets(state, contexts[:1], [True]) == [[UNLIMITED]] * 6
    assert budgets(state, contexts, [False, False, True, False]) == some
    assert budgets(state, contexts) == plain
    assert state._reads_all_R.data_ptr() == where


def test_a_new_schedule_fills_the_same_tensor() -> None:
    state = started()
    budgets(state, [300])
    where = state._steps_XS.data_ptr()
    for schedule, budget, read in ((Schedule.fixed(256), 256, 256 - 4), (None, UNLIMITED, 300), (RISING, 128, 128 - 4)):
        state.set_schedule(schedule)
        assert budgets(state, [300])[2] == [budget]
        unread_L = np.broadcast_to(state.decode_rows(np.array([300])).unread_tokens_L, 6)
        assert unread_L.tolist() == [0] * 2 + [300 - read] * 4
    assert state._steps_XS.data_ptr() == where


def test_the_hosts_copy_stays_there_under_another_default_device() -> None:
    with torch.device("meta"):
        state = started()
    assert budgets(state, [300])[2] == [128]


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (Schedule.fixed(64, PageMean(page_tokens=8, first_tokens=8)), "keeps the index"),
        (Schedule.fixed(64, dense_layers=(0,)), "has the dense layers"),
    ],
)
def test_a_schedule_that_needs_another_engine_is_refused(schedule: Schedule, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        started().set_schedule(schedule)


def test_an_engine_started_dense_takes_no_schedule() -> None:
    state = started(None)
    assert state.sparse_layers == frozenset()
    with pytest.raises(UserError, match="keeps no index"):
        state.set_schedule(RISING)


def test_a_mixed_step_is_told_apart_and_counted() -> None:
    # Two decode rows, the one-token end of a chunked prompt, a chunk of 30, a resumed request of 50 tokens.
    rows = Rows.of(Common.of([1, 1, 1, 30, 50], [40, 300, 129, 62, 90], [False, False, True, True, False]))
    assert (rows.decodes, rows.prefills) == (3, 2)
    state = started()
    rows.count(state)
    assert not state.step_is_whole
    counted = state.counters
    assert (counted.tail_tokens, counted.prefill_tokens) == (1, 81)
    # 300 tokens are 19 units of 16, of which the last holds 12.
    assert (state.decoded.rows, state.decoded.context_tokens) == (2, 340)
    assert state.decoded.sparse_L.tolist() == [0, 0, 1, 1, 1, 1]
    assert state.decoded.unread_tokens_L.tolist() == [0] * 2 + [300 - (128 - 4)] * 4


def test_rows_of_dense_requests_decode_and_read_everything() -> None:
    # Two long decode rows, of which the second is dense; a short one; a dense prompt's end; padding.
    common = Common.of([1, 1, 1, 1, 0], [300, 310, 40, 129, 0], [False, False, False, True, False])
    rows = Rows.of(common, np.array([False, True, False, True]))
    assert rows.dense_R.tolist() == [False, True, False, True, False]
    assert rows.reads_all_R.tolist() == [False, True, False, True, False]
    state = started()
    rows.count(state)
    assert not state.step_is_whole
    counted = state.counters
    assert (counted.tail_tokens, counted.prefill_tokens) == (1, 1)
    assert (state.decoded.rows, state.decoded.context_tokens) == (3, 650)
    assert (state.decoded.dense_rows, state.decoded.dense_context_tokens) == (1, 310)
    assert state.decoded.sparse_L.tolist() == [0, 0, 1, 1, 1, 1]
    # 300 tokens are 19 units of 16, of which the last holds 12.
    assert state.decoded.unread_tokens_L.tolist() == [0] * 2 + [300 - (128 - 4)] * 4
    report = state.report()
    assert (report.dense_request_steps, report.dense_request_context_tokens) == (1, 310)
    Rows.of(common, np.array([True] * 4)).count(state)
    assert state.step_is_whole
    assert Rows.of(common).dense_R is None


@pytest.mark.parametrize("short_step_tokens", [0, 400])
@pytest.mark.parametrize("may_replay", [False, True])
def test_a_step_of_one_token_a_row_is_counted_in_few_operations_as_in_many(
    short_step_tokens: int, may_replay: bool
) -> None:
    # vLLM names the longest query; where it names a longer one, the rows are looked at one by one.
    drawn = np.random.default_rng(0)
    states = []
    for longest in (1, 2):
        state = State()
        state.configure(RISING, 6, "cpu", short_step_tokens=short_step_tokens)
        state.captured = dict.fromkeys(range(6), "triton")
        state.captured_whole = dict.fromkeys(range(6), "dense")
        state.take_short_reads()
        states.append((longest, state))
    for step in range(200):
        # A context of 0 is that of a request that takes no part in a draft step.
        contexts = drawn.integers(step % 4 == 1, (70, 400)[step % 2], size=drawn.integers(1, 9)).tolist()
        prefilling = [bool(step % 5 == 0 and drawn.random() < 0.3) for _ in contexts]
        dense = drawn.random(len(contexts)) < 0.3 if step % 3 == 0 else None
        told = []
        for longest, state in states:
            # Padding of a graph, whose lengths may be those of an earlier step.
            padding = step % 3
            common = Common.of([1] * len(contexts) + [0] * padding, contexts + [9] * padding, prefilling)
            state.row_names = [f"request {row}" for row in range(len(contexts))]
            rows = Rows.of(replace(common, max_query_len=longest), dense, state.row_names)
            rows.count(state, may_replay)
            told.append((state.step_is_whole, rows.decodes, rows.prefills))
            told[-1] += tuple(None if of is None else of.tolist() for of in (rows.contexts_R, rows.reads_all_R))
        assert told[0] == told[1]
    few, many = (state for _, state in states)
    assert few.report() == many.report()
    assert few.take_short_reads() == many.take_short_reads()
    assert few.counters.tail_tokens == many.counters.tail_tokens > 0


def test_requests_that_take_no_part_in_a_draft_step_are_no_rows() -> None:
    state = started()
    rows = Rows.of(Common.of([1] * 4, [300, 0, 310, 0], [False] * 4), np.array([True, True, False, False]))
    rows.count(state)
    assert (state.decoded.rows, state.decoded.context_tokens) == (2, 610)
    assert (state.decoded.dense_rows, state.decoded.dense_context_tokens) == (1, 300)


def test_padding_is_no_row_although_the_longest_query_has_one_token() -> None:
    state = started()
    common = Common.of([1, 1, 0, 0], [300, 40, 7, 7], [False] * 4)
    for names in (None, ["a", "b"], []):
        rows = Rows.of(common, None, names)
        assert rows.contexts_R.tolist() == [300, 40, 0, 0]
    rows.count(state)
    assert (state.decoded.rows, state.decoded.context_tokens) == (2, 340)


def is_whole(state: State, *step: list[Any], may_replay: bool = False) -> bool:
    """Whether a step of these new tokens, contexts and prefilling rows reads everything."""
    Rows.of(Common.of(*step)).count(state, may_replay)
    return state.step_is_whole


def test_rows_within_their_budget_padding_and_the_ends_of_prompts_are_not_sparse() -> None:
    assert not is_whole(started(), [1, 1], [64, 65], [False, False])
    for new_tokens, contexts, prefilling in (([1], [64], [False]), ([1], [65], [True]), ([0], [0], [False])):
        assert is_whole(started(), new_tokens, contexts, prefilling)
    assert is_whole(started(None), [1], [65], [False])


def test_a_step_that_a_graph_may_run_is_whole_only_where_there_is_a_graph_for_that() -> None:
    state = started()
    assert not is_whole(state, [1], [64], [False], may_replay=True)
    state.captures_whole = True
    state.layer_captured(2, "dense")
    state.captures_whole = False
    assert state.captured == {} and state.captured_whole == {2: "dense"}
    assert is_whole(state, [1], [64], [False], may_replay=True)
    assert not is_whole(state, [1, 1], [64, 65], [False, False], may_replay=True)
    state.set_schedule(None)
    assert is_whole(state, [1, 1], [64, 65], [False, False], may_replay=True)
    state.configure(RISING, 6, "cpu")
    assert not is_whole(state, [1], [64], [False], may_replay=True)


def test_a_short_step_reads_everything_and_is_counted_apart() -> None:
    state = State()
    state.configure(RISING, 6, "cpu", short_step_tokens=400)
    assert is_whole(state, [1, 1], [300, 100], [False, False])
    assert not is_whole(state, [1, 1], [300, 101], [False, False])
    state.reset_report()
    run_step(state, [300, 40], {0: "dense", 2: "dense"})
    run_step(state, [401], {0: "dense", 2: "triton"})
    layers = state.report().layers
    # Of the short step, one row is longer than its budget.
    assert [layers[n].short_dense_steps for n in (0, 2)] == [0, 1]
    assert (layers[2].dense_steps, layers[2].sparse_steps) == (2, 1)
    assert layers[2].read_tokens == 340 + 128 - 15 and layers[2].context_tokens == 741
    # It was meant to be dense, so the layer is none that fell back.
    assert state.ran == {0: "dense", 2: "triton"}


def test_padding_rows_of_a_graph_count_nothing() -> None:
    rows = Rows.of(Common.of([1, 1, 0, 0], [300, 40, 0, 0], [False] * 4))
    assert (rows.decodes, rows.prefills) == (4, 0)
    state = started()
    rows.count(state)
    assert state.decoded.rows == 2


def run_step(state: State, contexts: list[int], ran: dict[int, str], may_replay: bool = False) -> None:
    """A step of decode rows, in which these layers are entered."""
    Rows.of(Common.of([1] * len(contexts), contexts, [False] * len(contexts))).count(state, may_replay)
    for layer, attention in ran.items():
        state.layer_ran(layer, attention)


def test_layers_that_never_ran_report_no_steps() -> None:
    state = started()
    run_step(state, [300], {0: "dense", 2: "triton"})
    layers = state.report().layers
    assert [layer.sparse_steps + layer.dense_steps for layer in layers] == [1, 0, 1, 0, 0, 0]
    assert (layers[0].sparse_steps, layers[2].sparse_steps) == (0, 1)


def test_a_sparse_layer_that_ran_dense_is_not_reported_sparse() -> None:
    state = started()
    run_step(state, [300, 310], {2: "dense", 3: "triton"})
    layers = state.report().layers
    assert (layers[2].dense_steps, layers[2].sparse_steps) == (2, 0)
    assert layers[2].read_tokens == layers[2].context_tokens == 610
    assert layers[3].sparse_steps == 2


def test_one_dense_step_of_a_layer_shows_among_sparse_ones_until_the_report_is_reset() -> None:
    state = started()
    for attention in ("triton", "dense", "triton"):
        run_step(state, [300], {2: attention, 3: "triton"})
    layers = state.report().layers
    assert (layers[2].dense_steps, layers[2].sparse_steps) == (1, 2)
    assert layers[2].read_tokens == 300 + 2 * 124 and layers[3].read_tokens == 3 * 124
    assert state.ran == {2: "dense", 3: "triton"}
    state.reset_report()
    assert state.ran == {} and state.report().layers == [LayerReport()] * 6
    run_step(state, [300], {2: "triton"})
    assert state.ran == {2: "triton"}


def test_steps_within_every_budget_do_not_make_a_sparse_layer_dense() -> None:
    state = started()
    run_step(state, [40], {2: "dense"})
    run_step(state, [300], {2: "triton"})
    assert state.ran == {2: "triton"}
    assert (state.report().layers[2].dense_steps, state.report().layers[2].sparse_steps) == (1, 1)


def test_a_replayed_graph_runs_what_was_captured() -> None:
    state = started()
    # Two graphs were captured. In one of them layer 4 fell back to dense attention.
    for number, attention in ((0, "dense"), (3, "triton"), (4, "dense"), (3, "triton"), (4, "triton")):
        state.layer_captured(number, attention)
    run_step(state, [300], {}, may_replay=True)
    run_step(state, [301], {}, may_replay=True)
    layers = state.report().layers
    assert [layer.sparse_steps for layer in layers] == [0, 0, 0, 2, 0, 0]
    assert [layer.dense_steps for layer in layers] == [2, 0, 0, 0, 2, 0]
    assert state.ran == {0: "dense", 3: "triton", 4: "dense"}
    state.reset_report()
    run_step(state, [302], {}, may_replay=True)
    assert state.ran == {0: "dense", 3: "triton", 4: "dense"}


def test_a_whole_step_replays_what_was_captured_for_whole_steps() -> None:
    state = State()
    state.configure(RISING, 6, "cpu", short_step_tokens=250)
    for whole, attention in ((False, "triton"), (True, "dense")):
        state.captures_whole = whole
        state.layer_captured(2, attention)
    state.captures_whole = False
    for context in (40, 249, 300):
        run_step(state, [context], {}, may_replay=True)
    layer = state.report().layers[2]
    assert (layer.dense_steps, layer.short_dense_steps, layer.sparse_steps) == (2, 1, 1)
    assert layer.read_tokens == 40 + 249 + 124
    assert state.ran == {2: "triton"}


def test_a_captured_layer_that_is_not_entered_in_a_step_without_graphs_ran_something_else() -> None:
    state = started()
    for number in (2, 3):
        state.layer_captured(number, "triton")
    run_step(state, [300], {2: "triton"}, may_replay=True)
    run_step(state, [301], {}, may_replay=False)
    layers = state.report().layers
    assert (layers[2].sparse_steps, layers[3].sparse_steps, layers[3].dense_steps) == (1, 0, 0)


def test_steps_that_graphs_ran_are_counted_as_each_would_be_alone() -> None:
    drawn = np.random.default_rng(0)
    alone, together = started(GROUPED), started(GROUPED)
    captured = {0: "dense", 1: "dense", **dict.fromkeys(range(2, 6), "triton")}
    together.captured = captured
    for step in range(2 * STEPS_AT_ONCE + 1):
        # The last one is no decode row.
        contexts = np.append(drawn.integers(1, 400, size=drawn.integers(1, 6)), 0)
        dense = drawn.random(len(contexts)) < 0.3 if step % 3 == 0 else None
        for state in (alone, together):
            if step % 7 == 0:
                state.take_back(state.decode_rows(contexts[:1], None if dense is None else dense[:1]))
            state.begin_step(contexts, dense, may_replay=state is together)
        for layer, attention in captured.items():
            alone.layer_ran(layer, attention)
        if step == STEPS_AT_ONCE + 5:
            assert together.report() == alone.report()
    found, expected = together.decoded, alone.decoded
    assert (found.rows, found.context_tokens, found.dense_rows) == (
        expected.rows, expected.context_tokens, expected.dense_rows
    )  # fmt: skip
    assert found.rows > 500 and found.dense_rows > 50
    assert together.report() == alone.report()


def test_steps_that_graphs_ran_count_under_the_schedule_that_they_ran_with() -> None:
    state = started()
    state.captured = dict.fromkeys(range(6), "triton")
    run_step(state, [300], {}, may_replay=True)
    state.set_schedule(Schedule.fixed(256))
    run_step(state, [300], {}, may_replay=True)
    assert state.report().layers[2].read_tokens == (128 - 4) + (256 - 4)


def test_a_new_engine_is_told_again_which_rows_read_everything() -> None:
    state = started()
    assert budgets(state, [300, 300], [False, True])[2] == [128, UNLIMITED]
    state.configure(RISING, 6, "cpu")
    assert budgets(state, [300, 300], [False, True])[2] == [128, UNLIMITED]


def test_names_that_a_dummy_step_does_not_have_are_no_rows() -> None:
    # As vLLM's V1 runner leaves the lengths behind the rows of such a step.
    rows = Rows.of(Common.of([1, 1], [300, 0], [False] * 2), None, ["a", "b", "c"])
    state = started()
    rows.count(state)
    assert rows.decodes == 2 and state.decoded.rows == 1


def test_rows_that_only_repeat_a_token_count_for_no_layer() -> None:
    state = started()
    state.take_back(state.decode_rows(np.array([300])))
    run_step(state, [300, 310], {2: "triton"})
    assert state.report().layers[2].sparse_steps == state.decoded.rows == 1


def test_the_prefix_cache_is_emptied_without_assertions_too() -> None:
    """As `python -O` compiles it."""
    from sparroll.engines.vllm import engine as module

    source = textwrap.dedent(inspect.getsource(module.VLLMEngine._empty_cache))
    within = dict(vars(module))
    exec(compile(source, "without assertions", "exec", optimize=1), within)
    called: list[int] = []
    engine = object.__new__(module.VLLMEngine)
    engine._llm = SimpleNamespace(reset_prefix_cache=lambda: called.append(1) or True)
    within["_empty_cache"](engine)
    assert called == [1]


def test_a_worker_takes_no_schedule_whose_drafts_it_cannot_check_or_would_not() -> None:
    plain, checked = started(), started(RISING.checked(window_tokens=32))
    for state, other, reason in (
        (plain, RISING.checked(window_tokens=8), "started without checks of drafts"),
        (checked, RISING, "started with checks of drafts"),
        (checked, RISING.checked(window_tokens=33), "windows of 32 tokens, .* asks for 33"),
    ):
        before = state.schedule
        with pytest.raises(UserError, match=reason) as caught:
            state.set_schedule(other)
        windows = "windows" in reason
        assert ("capacity=" if windows else "--check-window 64") in (caught.value.hint or "")
        assert state.schedule is before
    # The scheduler of a server is in another process.
    with pytest.raises(UserError, match="scheduler gives windows of 32 tokens, the schedule .* asks for 8"):
        checked.set_schedule(RISING.checked(window_tokens=8), window_follows=False)
    checked.set_schedule(RISING.checked(window_tokens=32, floor=0.7), window_follows=False)
    for fits in (RISING.checked(window_tokens=8, floor=0.5), None):
        checked.set_schedule(fits)
        assert checked.schedule is fits
