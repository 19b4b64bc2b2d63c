"""New keys and values in vLLM's CUDA backend: which steps let the kernel that scores store them. Kernels are interpreted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparroll import Schedule
from sparroll.attention.decode import paged
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.batch import StepPlan
from sparroll.engines.vllm.attention.state import STATE
from vllm_layers import (
    GROUPED,
    PAIRS,
    SCHEDULE,
    SUMMING,
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

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels on CPU tensors")


class DecodeStep:
    """Two sparse layers of a worker, and a step of requests that each decode one token. The caches hold these tokens; their
    index rows are not written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, schedule: Schedule, block: int = 16, attention: str = "triton"):
        torch.manual_seed(0)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        from vllm.v1.attention.backends import fa_utils, flash_attn

        from sparroll.engines.vllm.attention import cuda_backend as backend

        self.stored_apart: list[Any] = []
        self.attend = paged.paged_decode
        # The interpreter of Triton 3.9 fails in the gather's masked store.
        monkeypatch.setattr(paged, "paged_decode", lambda *a, impl, **k: self.attend(*a, impl="reference", **k))
        monkeypatch.setattr(compat, "captures_piecewise", lambda device: False)
        monkeypatch.setattr(compat, "plan_of_step", lambda layer: layer.plan)
        monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", attend_pages, raising=False)
        store = flash_attn.FlashAttentionImpl
        monkeypatch.setattr(store, "do_kv_cache_update", lambda *given: self.stored_apart.append(given))
        STATE.configure(schedule, 3, "cpu", attention=attention)
        self.selector, self.block = schedule.selector, block
        self.units_per_block = block // schedule.selector.unit_tokens
        self.work = workspace(monkeypatch, backend, self.selector, M * self.units_per_block)
        self.work.only_decodes = True
        STATE.budgets.begin_step(None, R)
        self.table_RM = torch.randperm(P)[: R * M].view(R, M).int()
        self.contexts_R = torch.tensor([1, 64, 172, 0], dtype=torch.int32)
        at = (self.contexts_R - 1).clamp_min(0)
        slots = self.table_RM[torch.arange(R), at // block] * block + at % block
        self.slots_R = torch.where(self.contexts_R > 0, slots, -1).long()
        layout = "HND" if attention == "triton" else "NHD"
        self.layers = [self._layer(backend, number, cache(layout, block) * number) for number in (1, 2)]
        held = {str(layer.impl.number): layer for layer in self.layers}
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=held))
        for layer in self.layers:
            layer.impl._vllm_config = lambda: config

    def plan(self) -> StepPlan:
        return StepPlan(R, None, self.contexts_R, self.work.kv_budget_tokens_LR[:, :R], self.table_RM)

    def index(self, kv_cache: Tensor, slots_T: Tensor) -> SimpleNamespace:
        """The index with the rows that these tokens complete."""
        index = rows_of(self.units_per_block, self.selector.index_width(D), self.selector.index_dtype)
        keys_PBHD = compat.keys_and_values(kv_cache, D)[0]
        paged.update_index(keys_PBHD, index.rows_PSHW, slots_T, self.selector, impl="triton")
        return index

    def _layer(self, backend: Any, number: int, kv_cache: Tensor) -> SimpleNamespace:
        every = torch.arange(P * self.block)
        index = self.index(kv_cache, every[~torch.isin(every, self.slots_R)])
        layer = layer_of(backend, {"number": number, "index": index, "groups": None}, kv_cache)
        layer.whole, layer.whole_rows = kv_cache.clone(), self.index(kv_cache, every).rows_PSHW
        return layer

    def expected(self, layer: SimpleNamespace, query: Tensor, plan: StepPlan) -> Tensor:
        """What a layer attends to, by the reference."""
        query_RHGD, out = query.unflatten(1, (H, G)), torch.empty(R, H, G, D)
        scores = torch.empty(R, H, M * self.units_per_block)
        ids, budgets_R = scores.int(), plan.kv_budget_tokens_LR[layer.impl.number]
        paged.score_units(query_RHGD, layer.whole_rows, self.table_RM, self.contexts_R, self.selector, scores)
        paged.choose_units(scores, self.contexts_R, budgets_R, self.selector, ids)
        self.attend(
            query_RHGD, *compat.keys_and_values(layer.whole, D), self.table_RM, ids, self.contexts_R, budgets_R,
            self.selector, D**-0.5, out,
        )  # fmt: skip
        return out


@needs_vllm
@interpreted
@pytest.mark.parametrize(
    ("attention", "block", "schedule"),
    [("triton", 16, SCHEDULE), ("triton", 64, GROUPED), ("triton", 16, PAIRS), ("fa3_pages", 16, SCHEDULE)],
)
def test_layers_store_new_tokens_while_they_score_and_the_last_one_writes_all_index_rows(
    monkeypatch: pytest.MonkeyPatch, attention: str, block: int, schedule: Schedule
) -> None:
    step = DecodeStep(monkeypatch, schedule, block, attention)
    plan, written = step.plan(), []
    real = step.slots_R >= 0
    place = step.slots_R[real] // block, step.slots_R[real] % block
    for layer in step.layers:
        layer.plan = plan
        # vLLM pads a batch behind its slots.
        key, value = (torch.full((R + 2, H, D), torch.nan) for _ in range(2))
        for new, held_PBHD in zip((key, value), compat.keys_and_values(layer.kv_cache, D), strict=True):
            new[:R][real] = held_PBHD[place]
            held_PBHD[place] = torch.nan
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, step.slots_R)
        query, output = torch.randn(R, H * G, D), torch.full((R, H * G, D), torch.nan)
        layer.impl.forward(layer, query, key, value, layer.kv_cache, SimpleNamespace(sparroll=plan), output)
        assert torch.equal(layer.kv_cache, layer.whole) and not step.stored_apart
        expected = step.expected(layer, query, plan)
        torch.testing.assert_close(output.unflatten(1, (H, G)), expected, atol=1e-5, rtol=1e-5)
        written.append([torch.equal(each.impl.index.rows_PSHW, each.whole_rows) for each in step.layers])
    assert written == [[False, False], [True, True]]


@needs_vllm
@interpreted
def test_what_an_interrupted_step_left_is_not_stored_under_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeStep(monkeypatch, SCHEDULE)
    layer, new = step.layers[0], torch.ones(R, H, D)
    layer.plan = step.plan()
    layer.impl.do_kv_cache_update(layer, new, new, layer.kv_cache, step.slots_R)
    query, output = torch.randn(R, H * G, D), torch.empty(R, H * G, D)
    layer.impl.forward(layer, query, new, new, layer.kv_cache, SimpleNamespace(sparroll=step.plan()), output)
    assert torch.equal(layer.kv_cache, layer.whole) and not step.stored_apart


@needs_vllm
@interpreted
@pytest.mark.parametrize("why", ["a remainder", "no plan", "a row prefills"])
def test_other_steps_store_in_the_way_of_vllm(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    step = DecodeStep(monkeypatch, SUMMING if why == "a remainder" else SCHEDULE)
    layer, new = step.layers[0], torch.ones(R, H, D)
    layer.plan = None if why == "no plan" else step.plan()
    step.work.only_decodes = why != "a row prefills"
    if why == "a remainder":
        layer.impl.groups = rows_of(1, step.selector.group_width(D), torch.uint8)
        monkeypatch.setattr(paged, "update_groups", lambda *given, impl: None)
    layer.impl.do_kv_cache_update(layer, new, new, layer.kv_cache, step.slots_R)
    assert len(step.stored_apart) == 1


@needs_vllm
def test_the_plan_of_a_step_is_found_in_what_vllm_gives_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.forward_context

    layer, plan = SimpleNamespace(layer_name="layers.1"), object()
    planned, other = SimpleNamespace(sparroll=plan), SimpleNamespace()
    for given, expected in (
        ({"layers.0": other, "layers.1": planned}, plan),
        ({"layers.0": planned, "layers.1": other}, None),
        ([{"layers.1": planned}, {"layers.1": other}], plan),
        (planned, plan),
        (None, None),
    ):
        context = SimpleNamespace(attn_metadata=given)
        monkeypatch.setattr(vllm.forward_context, "get_forward_context", lambda context=context: context)
        assert compat.plan_of_step(layer) is expected
