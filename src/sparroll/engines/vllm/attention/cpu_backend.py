"""vLLM's CPU backend with sparse decoding by the reference operations. It has the logic of the CUDA backend where it
can be tested without a GPU, and is not meant to be fast."""

# R rows that decode, H kv heads, G query heads per kv head, P blocks, B tokens per block, D head dim

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from sparroll.attention.decode import paged
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.batch import Rows, StepPlan
from sparroll.engines.vllm.attention.decode_rows import most_and_total
from sparroll.engines.vllm.attention.layer import SparseLayer
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.settings import VLLMSettings


class SparseCPUBackend(CPUAttentionBackend):
    """Registered in place of CPU_ATTN. It behaves like vLLM's own backend unless the engine's settings ask for
    sparroll."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        if _asked():
            return [MultipleOf(16)]
        return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return SparseCPUImpl if _asked() else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        # The builder is given the configuration, unlike the other classes, so it can decide for itself where none is
        # current.
        unasked = get_current_vllm_config_or_none() is not None and not _asked()
        return CPUAttentionMetadataBuilder if unasked else SparseCPUMetadataBuilder


def _asked() -> bool:
    return VLLMSettings.find(get_current_vllm_config_or_none()) is not None


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata, with a plan for the sparse layers beside it."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.ours = VLLMSettings.find(vllm_config) is not None
        if self.ours:
            self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        whole.sparroll = None
        if not self.ours:
            return whole
        rows = Rows.of(common, STATE.which_rows, STATE.row_names).checked(STATE)
        rows.count(STATE)
        if STATE.step_is_whole:
            return whole
        count, longest = rows.decodes, most_and_total(rows.contexts_R)[0]
        context_tokens_R = common.seq_lens[:count].to(torch.int32)
        STATE.budgets.begin_step(rows.read_by_R, self.vllm_config.scheduler_config.max_num_seqs)
        budgets_LR = STATE.budgets.of_step(context_tokens_R, torch.empty(STATE.layers, count, dtype=torch.int32))
        behind = super().build(0, compat.rows_from(common, count), fast_build) if rows.prefills else None
        whole.sparroll = StepPlan(
            decodes=count,
            prefills=behind,
            context_tokens_R=context_tokens_R,
            kv_budget_tokens_LR=budgets_LR,
            block_table_RM=common.block_table_tensor[:count, : -(-longest // self.block_size)],
        )
        return whole


class SparseCPUImpl(SparseLayer, CPUAttentionBackendImpl):
    """One attention layer. The parent class handles dense layers, and steps in which every row reads everything."""

    def __init__(self, *arguments: Any, **named: Any):
        CPUAttentionBackendImpl.__init__(self, *arguments, **named)
        self.start_layer(CPUAttentionBackendImpl, get_current_vllm_config(), arguments, named)

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        index_PSHW = self._index(kv_cache)
        if index_PSHW is None or STATE.selector is None:
            return
        # The operations need rows of D adjacent numbers, which vLLM's keys do not have, so they get a copy of what they
        # need.
        slots_T, block = slot_mapping.long(), kv_cache.shape[2]
        slots_T = slots_T[slots_T >= 0]
        blocks_X, places_T = torch.unique(slots_T // block, return_inverse=True)
        rows_XSHW = index_PSHW[blocks_X]
        keys_XBHD, values_XBHD = (held[blocks_X].contiguous() for held in _views(kv_cache))
        places_T = places_T * block + slots_T % block
        paged.update_index(keys_XBHD, rows_XSHW, places_T, STATE.selector, impl="reference")
        index_PSHW[blocks_X] = rows_XSHW
        groups_PSHV = None if self.groups is None else self.groups.rows_PSHW
        if groups_PSHV is not None:
            rows_XSHV = groups_PSHV[blocks_X]
            paged.update_groups(keys_XBHD, values_XBHD, rows_XSHV, places_T, STATE.selector)
            groups_PSHV[blocks_X] = rows_XSHV

    def attends_with(self) -> str:
        return "reference"

    def _decode(self, query: Tensor, kv_cache: Tensor, plan: StepPlan, output: Tensor) -> None:
        selector, index_PSHW = STATE.selector, self._index(kv_cache)
        assert selector is not None and index_PSHW is not None, "sparse decoding without an index"
        heads, context_tokens_R = self.num_kv_heads, plan.context_tokens_R
        budgets_R = plan.kv_budget_tokens_LR[self.number]
        query_RHGD = query.unflatten(1, (heads, -1))
        blocks_X, table_RM = torch.unique(plan.block_table_RM, return_inverse=True)
        keys_XBHD, values_XBHD = (held[blocks_X].contiguous() for held in _views(kv_cache))
        index_XSHW = index_PSHW[blocks_X].contiguous()
        most_units = -(-int(context_tokens_R.max()) // STATE.unit_tokens)
        scores_RHU = torch.empty(plan.decodes, heads, most_units, dtype=torch.float32)
        unit_ids_RHN = torch.empty(plan.decodes, heads, most_units, dtype=torch.int32)
        paged.score_units(
            query_RHGD,
            index_XSHW,
            table_RM,
            context_tokens_R,
            selector,
            scores_RHU,
            impl="reference",
            scale=self.scale,
        )
        paged.choose_units(scores_RHU, context_tokens_R, budgets_R, selector, unit_ids_RHN, impl="reference")
        out_RHGD = output.view(query.shape).unflatten(1, (heads, -1))
        groups_PSHV = None if self.groups is None else self.groups.rows_PSHW
        paged.paged_decode(
            query_RHGD,
            keys_XBHD,
            values_XBHD,
            table_RM,
            unit_ids_RHN,
            context_tokens_R,
            budgets_R,
            selector,
            self.scale,
            out_RHGD,
            impl="reference",
            index_PSHW=index_XSHW,
            groups_PSHV=None if groups_PSHV is None else groups_PSHV[blocks_X],
        )

    def _index(self, kv_cache: Tensor) -> Tensor | None:
        if self.index is None:
            return None
        if self.index.width:
            return self.index.rows_PSHW
        blocks, heads, block = kv_cache.shape[:3]
        return torch.empty(blocks, block // STATE.unit_tokens, heads, 0, dtype=self.index.dtype)


def _views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [P, B, H, D]. vLLM's CPU kernels keep a block's keys as [D, B] and its values behind, as [B,
    D]."""
    blocks, heads, block, both = kv_cache.shape
    keys, values = kv_cache.view(blocks, heads, 2 * block, both // 2).chunk(2, dim=2)
    return keys.view(blocks, heads, both // 2, block).permute(0, 3, 1, 2), values.permute(0, 2, 1, 3)
