"""Which rows of a step decode, and which of them read everything. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparroll.engines.vllm.attention import batch
from sparroll.engines.vllm.attention.batch import Rows
from sparroll.engines.vllm.attention.decode_rows import DENSE, ENGINES
from sparroll.engines.vllm.attention.state import State
from sparroll.schedule import Schedule
from worker_steps import GROUPED, RISING, Common, started


def assert_a_row_of_300_leaves_out(state: State) -> None:
    """300 tokens are 19 units of 16, of which the last holds 12; no other row leaves anything out."""
    assert state.decoded.sparse_L.tolist() == [0, 0, 1, 1, 1, 1]
    assert state.decoded.unread_tokens_L.tolist() == [0] * 2 + [300 - (128 - 4)] * 4


def test_a_mixed_step_is_told_apart_and_counted() -> None:
    # Two decode rows, the one-token end of a chunked prompt, a chunk of 30, a resumed request of 50 tokens.
    rows = Rows.of(Common.of([1, 1, 1, 30, 50], [40, 300, 129, 62, 90], [False, False, True, True, False]))
    assert (rows.decodes, rows.prefills) == (3, 2)
    state = started()
    rows.count(state)
    assert not state.step_is_whole
    counted = state.counters
    assert (counted.tail_tokens, counted.prefill_tokens) == (1, 81)
    assert (state.decoded.rows, state.decoded.context_tokens) == (2, 340)
    assert_a_row_of_300_leaves_out(state)


def test_rows_of_dense_requests_decode_and_read_everything() -> None:
    # Two long decode rows, of which the second is dense; a short one; a dense prompt's end; padding.
    common = Common.of([1, 1, 1, 1, 0], [300, 310, 40, 129, 0], [False, False, False, True, False])
    rows = Rows.of(common, np.array([ENGINES, DENSE, ENGINES, DENSE], dtype=np.int32))
    assert rows.which_R.tolist() == [ENGINES, DENSE, ENGINES, DENSE, ENGINES]
    assert rows.read_by_R.tolist() == [ENGINES, DENSE, ENGINES, DENSE, ENGINES]
    state = started()
    rows.count(state)
    assert not state.step_is_whole
    counted = state.counters
    assert (counted.tail_tokens, counted.prefill_tokens) == (1, 1)
    assert (state.decoded.rows, state.decoded.context_tokens) == (3, 650)
    assert (state.decoded.dense_rows, state.decoded.dense_context_tokens) == (1, 310)
    assert_a_row_of_300_leaves_out(state)
    report = state.report()
    assert (report.dense_request_steps, report.dense_request_context_tokens) == (1, 310)
    Rows.of(common, np.array([DENSE] * 4, dtype=np.int32)).count(state)
    assert state.step_is_whole
    assert Rows.of(common).which_R is None


@pytest.mark.parametrize("few_rows", [0, 4, 128])
@pytest.mark.parametrize("short_step_tokens", [0, 400])
@pytest.mark.parametrize("may_replay", [False, True])
def test_a_step_of_one_token_a_row_is_counted_in_few_operations_as_in_many(
    short_step_tokens: int, may_replay: bool, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "FEW_ROWS", few_rows)
    # vLLM names the longest query; where it names a longer one, the rows are looked at one by one.
    drawn = np.random.default_rng(0)
    states = []
    for longest in (1, 2):
        state = State()
        state.configure(RISING, 6, "cpu", short_step_tokens=short_step_tokens)
        state.set_request_schedules([Schedule.fixed(80), GROUPED], {})
        state.captured = dict.fromkeys(range(6), "triton")
        state.captured_whole = dict.fromkeys(range(6), "dense")
        state.take_short_reads()
        states.append((longest, state))
    for step in range(200):
        # A context of 0 is that of a request that takes no part in a draft step.
        contexts = drawn.integers(step % 4 == 1, (70, 400)[step % 2], size=drawn.integers(1, 9)).tolist()
        prefilling = [bool(step % 5 == 0 and drawn.random() < 0.3) for _ in contexts]
        which = drawn.integers(DENSE, 3, size=len(contexts), dtype=np.int32) if step % 3 == 0 else None
        told = []
        for longest, state in states:
            # Padding of a graph, whose lengths may be those of an earlier step.
            padding = step % 3
            common = Common.of([1] * len(contexts) + [0] * padding, contexts + [9] * padding, prefilling)
            state.row_names = [f"request {row}" for row in range(len(contexts))]
            rows = Rows.of(replace(common, max_query_len=longest), which, state.row_names)
            rows.count(state, may_replay)
            told.append((state.step_is_whole, rows.decodes, rows.prefills))
            read_by = None if rows.read_by_R is None else rows.read_by_R.tolist()
            told[-1] += (list(rows.contexts_R), read_by)
        assert told[0] == told[1]
    few, many = (state for _, state in states)
    assert few.report() == many.report()
    assert few.take_short_reads() == many.take_short_reads()
    assert few.counters.tail_tokens == many.counters.tail_tokens > 0


def test_requests_that_take_no_part_in_a_draft_step_are_no_rows() -> None:
    state = started()
    rows = Rows.of(
        Common.of([1] * 4, [300, 0, 310, 0], [False] * 4), np.array([DENSE, DENSE, ENGINES, ENGINES], dtype=np.int32)
    )
    rows.count(state)
    assert (state.decoded.rows, state.decoded.context_tokens) == (2, 610)
    assert (state.decoded.dense_rows, state.decoded.dense_context_tokens) == (1, 300)


def test_a_step_that_only_prefills_notes_and_counts_no_decode_row() -> None:
    state = started()
    state.captured_whole = dict.fromkeys(range(6), "dense")
    state.take_short_reads()
    state.row_names = ["a", "b"]
    rows = Rows.of(Common.of([30, 50], [30, 90], [True, True]), None, state.row_names)
    assert (rows.decodes, rows.prefills, len(rows.contexts_R)) == (0, 2, 0)
    rows.count(state)
    assert state.step_is_whole and state.take_short_reads() == {}
    assert (state.decoded.rows, state.counters.prefill_tokens) == (0, 80)


def test_padding_is_no_row_although_the_longest_query_has_one_token() -> None:
    state = started()
    common = Common.of([1, 1, 0, 0], [300, 40, 7, 7], [False] * 4)
    for names in (None, ["a", "b"], []):
        rows = Rows.of(common, None, names)
        assert list(rows.contexts_R) == [300, 40, 0, 0]
    rows.count(state)
    assert (state.decoded.rows, state.decoded.context_tokens) == (2, 340)


def test_padding_rows_of_a_graph_count_nothing() -> None:
    rows = Rows.of(Common.of([1, 1, 0, 0], [300, 40, 0, 0], [False] * 4))
    assert (rows.decodes, rows.prefills) == (4, 0)
    state = started()
    rows.count(state)
    assert state.decoded.rows == 2


def test_names_that_a_dummy_step_does_not_have_are_no_rows() -> None:
    # As vLLM's V1 runner leaves the lengths behind the rows of such a step.
    common = Common.of([1, 1], [300, 0], [False] * 2)
    rows = Rows.of(replace(common, seq_lens_cpu_upper_bound=torch.tensor([300, 0, 300, 300])), None, ["a", "b", "c"])
    state = started()
    rows.count(state)
    assert rows.decodes == 2 and state.decoded.rows == 1
