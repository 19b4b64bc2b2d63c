"""The CUDA backend's own code where no GPU is: kernels interpreted on CPU tensors, FlashAttention's paged call imitated.
What vLLM does around it is not run here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparroll import Schedule
from sparroll.attention.decode import paged, paged_reference
from sparroll.attention.decode.workspace import PEAK_UNITS
from sparroll.attention.selectors import PageMean, QuantizedMean, Quest, Selector
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.device_budgets import UNLIMITED
from sparroll.engines.vllm.attention.pages import HeadPages
from sparroll.engines.vllm.attention.state import STATE
from sparroll.schedule import Step
from vllm_layers import (
    GROUPED,
    PAIRS,
    SCHEDULE,
    SUMMING,
    SUMMING_FINE,
    D,
    G,
    H,
    M,
    P,
    R,
    attend_pages,
    cache,
    layer_of,
    rows_of,
    workspace,
)
from vllm_runs import needs_vllm

CONTEXTS = [1, 60, 171, 0]
LONG_UNITS = 8200
"""Of an engine for contexts so long that it keeps peaks of scores, if its units are of few bits."""
CASES = [
    *(
        (attention, *case)
        for attention in ("triton", "fa3_pages")
        for case in ((16, SCHEDULE), (64, SCHEDULE), (64, GROUPED))
    ),
    ("triton", 64, SUMMING),
    ("triton", 64, SUMMING_FINE),
    ("triton", 64, PAIRS),
]


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_head_pages_lie_where_the_units_do(layout: str, block: int) -> None:
    keys_PHBD = cache(layout, block)[..., :D]
    keys_PBHD = keys_PHBD.transpose(1, 2)
    pages = HeadPages.of(keys_PBHD)
    view = pages.view(keys_PBHD)
    units_per_block = block // 16
    units = torch.tensor([[[0, 5, P * units_per_block - 1, -1]] * H], dtype=torch.int32)
    numbers = torch.empty_like(units)
    pages.number(units, units_per_block, numbers)
    for head in range(H):
        for place, unit in enumerate(units[0, head, :3].tolist()):
            held = keys_PHBD[unit // units_per_block, head].unflatten(0, (-1, 16))[unit % units_per_block]
            assert torch.equal(view[numbers[0, head, place], :, 0], held)


@needs_vllm
@pytest.mark.parametrize(
    "selector", [PageMean(), QuantizedMean(4, 16, 32, bits=4), Quest(8, 16, 32)], ids=lambda s: s.kind
)
def test_vllm_allocates_the_index_bytes_that_scoring_reads(selector: Selector) -> None:
    spec = compat.rows_spec(64, H, selector.index_width(128), selector.unit_tokens, selector.index_dtype)
    assert spec.page_size_bytes == 64 * H * selector.index_bytes_per_token(128)


@needs_vllm
@pytest.mark.parametrize("by_tokens", [False, True])
def test_index_rows_of_a_head_stand_together_however_vllm_orders_a_block(by_tokens: bool) -> None:
    from sparroll.engines.vllm.attention.landmarks import RowsLayer

    selector = QuantizedMean(4, 16, 32, bits=4)
    layer = RowsLayer.of_units(H, 64, selector)
    assert layer.rows_PSHW is None
    shape = (P, H, 4, selector.index_width(64))
    held = torch.zeros(P, 4, H, shape[3], dtype=torch.uint8).transpose(1, 2) if by_tokens else torch.zeros(shape)
    layer.kv_cache = held.to(torch.uint8)
    index_PSHW = layer.rows_PSHW
    assert index_PSHW is not None and index_PSHW.shape == (P, 4, H, shape[3])
    assert index_PSHW.stride() == (4 * H * shape[3], shape[3], 4 * shape[3], 1)
    assert index_PSHW.data_ptr() == layer.kv_cache.data_ptr()
    index_PSHW.fill_(1)
    assert layer.kv_cache.all()


@pytest.fixture(autouse=True)
def without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are told of no plan before they store: there is no step of vLLM's."""
    monkeypatch.setattr(compat, "plan_of_step", lambda layer: None)


def store_keys(layers: list[SimpleNamespace], slots: Tensor) -> None:
    """What vLLM does in a step, layer by layer: a layer's keys are not there before its turn."""
    held = {"0": object(), **{str(layer.impl.number): layer for layer in layers}}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=held))
    coming = [layer.kv_cache.clone() for layer in layers]
    for layer in layers:
        layer.kv_cache.zero_()
    for layer, stored in zip(layers, coming, strict=True):
        layer.impl._vllm_config = lambda: config
        layer.impl.do_kv_cache_update(None, stored, None, layer.kv_cache, slots)


def store(impl: Any, layer: Any, key: Tensor, value: Any, kv_cache: Tensor, slots: Tensor) -> None:
    """In the place of vLLM's own update. `key` is the whole cache as it is to be."""
    kv_cache.copy_(key)


def assert_indexed(layer: SimpleNamespace, slots: Tensor) -> None:
    found, selector = layer.impl.index.rows_PSHW, STATE.selector
    assert selector is not None
    expected = torch.zeros_like(found)
    paged.update_index(compat.keys_and_values(layer.kv_cache, D)[0], expected, slots, selector)
    # The interpreter cuts bf16 off where the device rounds.
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=2**-7)


def assert_peaks(found_RHK: Tensor, scores_RHU: Tensor, context: int, selector: Selector) -> None:
    past_U = torch.arange(scores_RHU.shape[2]) * selector.unit_tokens >= context
    expected_RHK = paged_reference.peaks_of(scores_RHU.masked_fill(past_U, -torch.inf))
    there = -(-context // (selector.unit_tokens * PEAK_UNITS))
    assert torch.equal(found_RHK[..., :there], expected_RHK[..., :there])


def builder_of(backend: Any) -> Any:
    """A metadata builder of a sparse engine with full graphs."""
    builder = object.__new__(backend.SparseMetadataBuilder)
    builder.sparse, builder.use_full_cuda_graph, builder.device = True, True, torch.device("cpu")
    return builder


@needs_vllm
def test_an_engine_that_checks_drafts_has_programs_for_short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparroll.engines.vllm.attention import cuda_backend as backend

    impl = layer_of(backend, {"number": 1, "num_queries_per_kv": G}, cache("NHD", 16)).impl
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_seqs=R),
        model_config=SimpleNamespace(max_model_len=M * 16, dtype=torch.float32),
    )
    for schedule, short in ((SCHEDULE, False), (SCHEDULE.checked(8, 0.01), True), (SCHEDULE, False)):
        STATE.configure(schedule, 3, "cpu")
        monkeypatch.setattr(backend, "_workspace", None)
        impl._allocate(config, schedule.selector)
        assert {each.short_lists for each in backend._workspace.plans.workspaces} == {short}


@needs_vllm
@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="interprets kernels on CPU tensors; with CUDA Triton compiles, and test_engine_cuda.py runs what it compiled",
)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("attention", "block", "schedule"), CASES)
def test_a_decode_step_is_the_references(
    monkeypatch: pytest.MonkeyPatch, attention: str, block: int, schedule: Schedule, dense: bool
) -> None:
    # Before the kernels' modules are first imported.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from vllm.v1.attention.backends import fa_utils, flash_attn

    from sparroll.engines.vllm.attention import cuda_backend as backend

    # The interpreter of Triton 3.9 fails in the gather's masked store; the kernel's own tests run it with another.
    attend = paged.paged_decode
    monkeypatch.setattr(paged, "paged_decode", lambda *a, impl, **k: attend(*a, impl="reference", **k))
    monkeypatch.setattr(compat, "captures_piecewise", lambda device: False)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", attend_pages, raising=False)
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "do_kv_cache_update", store)
    monkeypatch.setattr(
        flash_attn.FlashAttentionMetadataBuilder,
        "build",
        lambda self, prefix, common, fast_build=False: SimpleNamespace(),
    )
    STATE.configure(schedule, 3, "cpu", attention=attention)
    selector, units_per_block = schedule.selector, block // schedule.selector.unit_tokens
    kv_cache = cache("NHD", block)
    table = torch.randperm(P)[: R * M].view(R, M).int()
    work = workspace(monkeypatch, backend, selector, LONG_UNITS if schedule is PAIRS else M * units_per_block)
    assert (work.peaks_RHK is not None) == (schedule is PAIRS)
    assert (work.log_weights_RHGN is not None) == (schedule is SUMMING_FINE)

    builder = builder_of(backend)
    common = SimpleNamespace(
        num_reqs=R,
        query_start_loc_cpu=torch.tensor([0, 1, 2, 3, 3]),
        seq_lens=torch.tensor(CONTEXTS, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(CONTEXTS),
        is_prefilling=torch.zeros(R, dtype=torch.bool),
        block_table_tensor=table,
        max_query_len=1,
    )
    if dense:
        monkeypatch.setattr(STATE, "which_rows", np.array([0, 0, -1], dtype=np.int32))
    metadata = builder.build(0, common)
    width = selector.index_width(D)
    index, groups = rows_of(units_per_block, width, selector.index_dtype), None
    if selector.remainder is not None:
        groups = rows_of(block // selector.row_tokens, selector.group_width(D), torch.uint8)
    first = layer_of(backend, {"number": 1, "index": index, "groups": groups}, kv_cache)
    # One launch of the last layer writes the index rows of all; layer 2 has other keys.
    behind_index = rows_of(units_per_block, width, selector.index_dtype)
    behind = layer_of(backend, {"number": 2, "index": behind_index, "groups": None}, -kv_cache)
    slots = torch.arange(P * block)
    assert work.only_decodes
    store_keys([first, behind], slots)
    impl = first.impl
    query, output = torch.randn(R, H * G, D), torch.full((R, H * G, D), float("nan"))
    impl.forward(None, query, None, None, kv_cache, metadata, output)
    # No other row is longer than its budget.
    assert STATE.ran[1] == ("dense" if dense else attention)
    # The first layer has computed the budgets of all.
    long = [UNLIMITED] * 2 if dense else [80, schedule.of_layer(2).kv_budget_tokens(171)]
    assert metadata.sparroll.kv_budget_tokens_LR.tolist() == [
        [UNLIMITED] * 3 + [0],
        [UNLIMITED, 64, long[0], 0],
        [UNLIMITED, schedule.of_layer(2).kv_budget_tokens(60), long[1], 0],
    ]

    keys_PBHD, values_PBHD = kv_cache.transpose(1, 2).split(D, dim=-1)
    for layer in (first, behind):
        assert_indexed(layer, slots)
    contexts, budgets = common.seq_lens, metadata.sparroll.kv_budget_tokens_LR[1]
    scores = torch.empty(R, H, M * units_per_block)
    unit_ids = torch.empty(R, H, M * units_per_block, dtype=torch.int32)
    query_RHGD, expected = query.unflatten(1, (H, G)), torch.empty(R, H, G, D)
    paged.score_units(query_RHGD, index.rows_PSHW, table, contexts, selector, scores)
    paged.choose_units(scores, contexts, budgets, selector, unit_ids)
    if groups is not None and selector.remainder is not None:
        expected_groups = torch.zeros_like(groups.rows_PSHW)
        paged.update_groups(keys_PBHD, values_PBHD, expected_groups, slots, selector)
        means, wanted = (selector.remainder.means(held, D) for held in (groups.rows_PSHW, expected_groups))
        assert torch.equal(means, wanted) and means.any()
    attend(
        query_RHGD, keys_PBHD, values_PBHD, table, unit_ids, contexts, budgets, selector, D**-0.5, expected,
        index_PSHW=index.rows_PSHW, groups_PSHV=None if groups is None else groups.rows_PSHW,
    )  # fmt: skip
    if work.log_weights_RHGN is not None and groups is not None and not dense:
        weights_RHGN = torch.empty_like(work.log_weights_RHGN)
        paged.score_units(
            query_RHGD, index.rows_PSHW, table, contexts, selector, scores, groups_PSHV=groups.rows_PSHW,
            log_weights_RHGN=weights_RHGN,
        )  # fmt: skip
        weighed = work.log_weights_RHGN[2, :, :, : CONTEXTS[2] // selector.row_tokens]
        torch.testing.assert_close(weighed, weights_RHGN[2, :, :, : weighed.shape[2]], atol=1e-4, rtol=0)
    if work.peaks_RHK is not None and not dense:
        assert_peaks(work.peaks_RHK[2:3], scores[2:3], CONTEXTS[2], selector)
    torch.testing.assert_close(output.unflatten(1, (H, G)), expected, atol=1e-5, rtol=1e-5)
    assert (output[3] == 0).all()
    if dense:
        keys, values = (held[table[2].long()].flatten(0, 1)[: CONTEXTS[2]] for held in (keys_PBHD, values_PBHD))
        whole = torch.softmax(torch.einsum("hgd,thd->hgt", query_RHGD[2], keys) * D**-0.5, -1)
        whole = torch.einsum("hgt,thd->hgd", whole, values)
        torch.testing.assert_close(output[2].unflatten(0, (H, G)), whole, atol=1e-5, rtol=1e-5)
    report = STATE.report()
    assert report.dense_request_steps == dense
    assert report.layers[1].sparse_steps == (0 if dense else 1)


@needs_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels on CPU tensors")
def test_the_index_follows_a_cache_that_moves_and_not_within_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from vllm.v1.attention.backends import flash_attn

    from sparroll.engines.vllm.attention import cuda_backend as backend

    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "do_kv_cache_update", store)
    STATE.configure(SCHEDULE, 3, "cpu")
    work = workspace(monkeypatch, backend, SCHEDULE.selector)
    kept, slots = cache("NHD", 16), torch.arange(P * 16)
    layers = [
        layer_of(backend, {"number": number, "index": rows_of(1, D, torch.bfloat16), "groups": None}, kept * number)
        for number in (1, 2)
    ]
    monkeypatch.setattr(compat, "captures_piecewise", lambda device: False)
    work.only_decodes = True
    monkeypatch.setattr(compat, "captures", lambda device: True)
    with pytest.raises(RuntimeError, match="captured before any step ran"):
        store_keys(layers, slots)
    monkeypatch.setattr(compat, "captures", lambda device: False)
    store_keys(layers, slots)
    monkeypatch.setattr(compat, "captures", lambda device: True)
    store_keys(layers, slots)
    # vLLM measures memory with a small cache, and allocates another behind it. One that moved is enough.
    for moves in ("keys", "index"):
        if moves == "keys":
            layers[0].kv_cache = layers[0].kv_cache * 2
        else:
            layers[1].impl.index = rows_of(1, D, torch.bfloat16)
        monkeypatch.setattr(compat, "captures", lambda device: True)
        with pytest.raises(RuntimeError, match="captured before any step ran"):
            store_keys(layers, slots)
        monkeypatch.setattr(compat, "captures", lambda device: False)
        for layer, factor in zip(layers, (2, 1) if moves == "index" else (2, 2), strict=True):
            layer.kv_cache = kept * factor
        store_keys(layers, slots)
        for layer in layers:
            assert_indexed(layer, slots)


@needs_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels on CPU tensors")
@pytest.mark.parametrize("why", ["a row prefills", "a piecewise graph", "one recent unit"])
def test_layers_write_their_own_index_rows_where_they_may_be_read_at_once(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from vllm.v1.attention.backends import flash_attn

    from sparroll.engines.vllm.attention import cuda_backend as backend

    schedule = (
        Schedule((Step(0, 64),), PageMean(16, 16, 16), dense_layers=(0,)) if why == "one recent unit" else SCHEDULE
    )
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "do_kv_cache_update", store)
    monkeypatch.setattr(compat, "captures_piecewise", lambda device: why == "a piecewise graph")
    STATE.configure(schedule, 3, "cpu")
    work = workspace(monkeypatch, backend, schedule.selector)
    work.only_decodes = why != "a row prefills"
    kept, slots = cache("NHD", 16), torch.arange(P * 16)
    for number in (1, 2):
        STATE.index_read_share[number] = 0.0
    # The last layer has not come yet.
    first = layer_of(backend, {"number": 1, "index": rows_of(1, D, torch.bfloat16), "groups": None}, kept)
    store_keys([first], slots)
    assert_indexed(first, slots)


@needs_vllm
@pytest.mark.parametrize(
    ("starts", "only_decodes"), [([0, 1, 2, 3, 3], True), ([0, 1, 2, 9, 9], False), ([0, 5, 9], False)]
)
def test_the_metadata_says_whether_any_row_prefills(
    monkeypatch: pytest.MonkeyPatch, starts: list[int], only_decodes: bool
) -> None:
    from vllm.v1.attention.backends import flash_attn

    from sparroll.engines.vllm.attention import cuda_backend as backend

    monkeypatch.setattr(
        flash_attn.FlashAttentionMetadataBuilder, "build", lambda self, *a, **k: SimpleNamespace(), raising=True
    )
    monkeypatch.setattr(backend.SparseMetadataBuilder, "_prefills", lambda self, common, first: None)
    STATE.configure(SCHEDULE, 3, "cpu")
    work = workspace(monkeypatch, backend, SCHEDULE.selector)
    work.only_decodes = not only_decodes
    builder = builder_of(backend)
    rows = len(starts) - 1
    contexts = torch.tensor(CONTEXTS[:rows], dtype=torch.int32)
    common = SimpleNamespace(
        num_reqs=rows, query_start_loc_cpu=torch.tensor(starts), seq_lens=contexts, seq_lens_cpu_upper_bound=contexts,
        is_prefilling=torch.zeros(rows, dtype=torch.bool), block_table_tensor=torch.zeros(rows, M, dtype=torch.int32),
        max_query_len=int(np.diff(starts).max()),
    )  # fmt: skip
    builder.build(0, common)
    assert work.only_decodes is only_decodes


@needs_vllm
def test_whole_steps_have_no_plan_once_there_are_graphs_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import flash_attn

    from sparroll.engines.vllm.attention import cuda_backend as backend

    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "build", lambda self, *a, **k: SimpleNamespace())
    STATE.configure(SCHEDULE, 3, "cpu")
    workspace(monkeypatch, backend, SCHEDULE.selector)
    builder = builder_of(backend)

    def common(contexts: list[int]) -> SimpleNamespace:
        lengths = torch.tensor(contexts, dtype=torch.int32)
        return SimpleNamespace(
            num_reqs=2, query_start_loc_cpu=torch.arange(3), seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
            is_prefilling=torch.zeros(2, dtype=torch.bool), block_table_tensor=torch.zeros(2, M, dtype=torch.int32),
            max_query_len=1,
        )  # fmt: skip

    # As vLLM captures: the usual graphs, and then those of whole steps.
    assert builder.build_for_cudagraph_capture(common([1, 1])).sparroll is not None
    STATE.layer_captured(1, "triton")
    assert builder.build(0, common([50, 60])).sparroll is not None
    STATE.captures_whole = True
    assert builder.build_for_cudagraph_capture(common([1, 1])).sparroll is None
    STATE.layer_captured(1, "dense")
    STATE.captures_whole = False
    assert builder.build_for_cudagraph_capture(common([1, 1])).sparroll is not None
    for contexts, whole in (([50, 60], True), ([50, 150], False), ([50, 60], True)):
        assert (builder.build(0, common(contexts)).sparroll is None) is STATE.step_is_whole is whole


@needs_vllm
@pytest.mark.parametrize(
    ("mode", "captures"), [("PIECEWISE", True), ("FULL", True), ("NONE", True), ("PIECEWISE", False)]
)
def test_a_piecewise_graph_is_known_by_the_forward_context(
    monkeypatch: pytest.MonkeyPatch, mode: str, captures: bool
) -> None:
    from vllm.config import CUDAGraphMode

    from vllm import forward_context

    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode[mode])
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    monkeypatch.setattr(compat, "captures", lambda device: captures)
    assert compat.captures_piecewise(torch.device("cpu")) is (captures and mode == "PIECEWISE")
