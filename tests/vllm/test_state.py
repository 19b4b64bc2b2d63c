"""What each layer ran, and how it is counted. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparroll import Schedule
from sparroll.engines.report import LayerReport
from sparroll.engines.vllm.attention.batch import Rows
from sparroll.engines.vllm.attention.decode_rows import DENSE
from sparroll.engines.vllm.attention.state import STEPS_AT_ONCE, State
from worker_steps import GROUPED, RISING, Common, run_step, started


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
    for state in (alone, together):
        state.set_request_schedules([RISING, Schedule.fixed(80)], {})
    captured = {0: "dense", 1: "dense", **dict.fromkeys(range(2, 6), "triton")}
    together.captured = captured
    for step in range(2 * STEPS_AT_ONCE + 1):
        # The last one is no decode row.
        contexts = np.append(drawn.integers(1, 400, size=drawn.integers(1, 6)), 0)
        which = drawn.integers(DENSE, 3, size=len(contexts), dtype=np.int32) if step % 3 == 0 else None
        for state in (alone, together):
            if step % 7 == 0:
                state.take_back(state.reads.decode_rows(contexts[:1], None if which is None else which[:1]))
            state.begin_step(contexts.tolist(), which, may_replay=state is together)
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


def test_rows_that_only_repeat_a_token_count_for_no_layer() -> None:
    state = started()
    state.take_back(state.reads.decode_rows(np.array([300])))
    run_step(state, [300, 310], {2: "triton"})
    assert state.report().layers[2].sparse_steps == state.decoded.rows == 1
