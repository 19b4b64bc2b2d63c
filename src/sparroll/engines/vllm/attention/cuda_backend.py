"""vLLM's FlashAttention backend with sparse decoding, on CUDA. The parent class handles prefill, dense layers and
everything else.

A step that only decodes can run inside a full CUDA graph. The sparse layers then do the same in every such step: they
read lengths, blocks and their own budgets from tensors at fixed addresses, and where a budget exceeds its context the
result is dense attention. Steps in which all rows read everything have graphs of their own, without what chooses
(whole_graphs.py). Steps that also prefill run outside full graphs, decode rows first.
"""

# R rows that decode (padding included), H kv heads, G query heads per kv head, U units, N chosen units, D head dim,
# P blocks, B tokens per block, L layers of the model; of log_weights, N groups of a remainder

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from sparroll.attention.decode import paged
from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.workspace import peaks_to_choose_by
from sparroll.attention.selectors.base import Selector
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.batch import Rows, StepPlan
from sparroll.engines.vllm.attention.cuda_workspace import LayersApart, Workspace, keys_and_index
from sparroll.engines.vllm.attention.layer import SparseLayer
from sparroll.engines.vllm.attention.pages import PAGE_TOKENS, HeadPages
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE, VLLMSettings
from sparroll.errors import UserError

_workspace: Workspace | None = None


def drop_workspace() -> None:
    """Free the workspace after the engine is gone."""
    global _workspace
    _workspace = None


def _rows_at_most(vllm_config: Any) -> int:
    graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return max(vllm_config.scheduler_config.max_num_seqs, graphs)


class SparseBackend(FlashAttentionBackend):
    """`attention_backend="CUSTOM"`."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return SparseMetadataBuilder


class SparseBackendOverFlash(SparseBackend):
    """The same in FLASH_ATTN's place, for frameworks that forward no engine arguments (SPARROLL_VLLM_SCHEDULE)."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


class SparseMetadataBuilder(FlashAttentionMetadataBuilder):
    """The parent's metadata, with a plan for the sparse layers beside it (`metadata.sparroll`)."""

    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if not _is_sparse(vllm_config):
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.sparse = _is_sparse(vllm_config)
        if self.sparse:
            self._init_reorder_batch_threshold(1)

    def use_cascade_attention(self, *arguments: Any, **named: Any) -> bool:
        return False if self.sparse else super().use_cascade_attention(*arguments, **named)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        rows = Rows.of(common_attn_metadata, STATE.which_rows, STATE.row_names).checked(STATE)
        rows.count(STATE, may_replay=self._may_replay(rows))
        return self._plan(common_prefix_len, common_attn_metadata, fast_build, rows, captures=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashAttentionMetadata:
        rows = Rows.of(common_attn_metadata)
        return self._plan(0, common_attn_metadata, False, rows, captures=True)

    def _may_replay(self, rows: Rows) -> bool:
        """Whether a full CUDA graph may run the step. Those of sparse layers only decode."""
        return bool(self.use_full_cuda_graph) and not (self.sparse and rows.prefills)

    def _plan(
        self, common_prefix_len: int, common: Any, fast_build: bool, rows: Rows, captures: bool
    ) -> FlashAttentionMetadata:
        whole = super().build(common_prefix_len, common, fast_build)
        whole.sparroll = None
        if _workspace is not None:
            _workspace.only_decodes = not rows.prefills
        if not self.sparse or not rows.decodes:
            return whole
        if STATE.captures_whole if captures else STATE.step_is_whole:
            return whole
        assert _workspace is not None, "metadata is built before any layer exists"
        count = rows.decodes
        # The rows of a capture are dummies: none of them has to read everything.
        STATE.budgets.begin_step(None if captures else rows.read_by_R, _workspace.kv_budget_tokens_LR.shape[1])
        whole.sparroll = StepPlan(
            decodes=count,
            prefills=self._prefills(common, count) if rows.prefills else None,
            context_tokens_R=common.seq_lens[:count],
            kv_budget_tokens_LR=_workspace.kv_budget_tokens_LR[:, :count],
            block_table_RM=common.block_table_tensor[:count],
        )
        return whole

    def _prefills(self, common: Any, first: int) -> FlashAttentionMetadata:
        # fast_build computes no tile schedule ahead: the parent keeps it in one buffer, which the whole batch's
        # metadata uses.
        behind = super().build(0, compat.rows_from(common, first), fast_build=True)
        behind.max_num_splits = 0
        return behind


class SparseImpl(SparseLayer, FlashAttentionImpl):
    """One attention layer. The parent class handles dense layers, and steps in which every row reads everything."""

    supports_dcp = False
    _to_store: tuple[StepPlan, NewTokens] | None = None
    """New keys and values that wait for `_decode` of the same step, with that step's plan. What an interrupted step left is
    dropped, because a later step has another plan."""

    def __init__(self, *arguments: Any, **named: Any):
        FlashAttentionImpl.__init__(self, *arguments, **named)
        vllm_config = get_current_vllm_config()
        if VLLMSettings.find(vllm_config) is None:
            raise UserError(
                'attention_backend="CUSTOM" is sparroll\'s, and no schedule is given',
                'additional_config={"sparroll": "schedule.toml"}, or a preset\'s name; or set ' + SCHEDULE_VARIABLE,
            )
        self.start_layer(FlashAttentionImpl, vllm_config, arguments, named)
        if STATE.selector is not None:
            self._allocate(vllm_config, STATE.selector)

    def _allocate(self, vllm_config: Any, selector: Selector) -> None:
        # Memory is allocated here, while the model is built, so that vLLM counts it before it sizes the KV cache.
        global _workspace
        if STATE.attention == "fa3_pages":
            if get_flash_attn_version(head_size=self.head_size) != 3:
                raise UserError('attention "fa3_pages" needs FlashAttention 3 (Hopper)', 'use attention "triton"')
            if selector.remainder is not None:
                raise UserError('attention "fa3_pages" takes no remainder', 'use attention "triton"')
            if STATE.unit_tokens != PAGE_TOKENS:
                raise UserError(
                    f'attention "fa3_pages" reads units of {PAGE_TOKENS} tokens, the schedule has {STATE.unit_tokens}',
                    'use attention "triton"',
                )
        rows, most_units = _rows_at_most(vllm_config), -(-vllm_config.model_config.max_model_len // STATE.unit_tokens)
        shape = (rows, self.num_kv_heads, most_units)
        if _workspace is not None and _workspace.scores_RHU.shape == shape and STATE.has_workspace:
            return
        _workspace = Workspace.allocate(
            rows,
            self.num_kv_heads,
            self.num_queries_per_kv,
            self.head_size,
            most_units,
            vllm_config.model_config.dtype,
            selector,
            STATE.layers,
            STATE.device,
            # Drafts that are checked read a few hundred tokens.
            short_lists=STATE.checks_drafts,
        )
        STATE.has_workspace = True

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        index_PSHW, selector = None if self.index is None else self.index.rows_PSHW, STATE.selector
        if index_PSHW is None or selector is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        keys_PBHD, values_PBHD = compat.keys_and_values(kv_cache, self.head_size)
        plan = self._plan_to_store_under(layer, selector)
        if plan is not None:
            tokens = slot_mapping.numel()
            new_tokens = NewTokens(key[:tokens], value[:tokens], slot_mapping, keys_PBHD, values_PBHD)
            self._to_store = plan, new_tokens
            return
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        groups_PSHV = None if self.groups is None else self.groups.rows_PSHW
        if groups_PSHV is not None:
            paged.update_groups(keys_PBHD, values_PBHD, groups_PSHV, slot_mapping, selector, impl="triton")
        if not self._last_layer_writes_all(selector):
            paged.update_index(keys_PBHD, index_PSHW, slot_mapping, selector, impl="triton")
        elif self.number == STATE.last_indexed_layer:
            self._update_all(slot_mapping, selector)

    def _plan_to_store_under(self, layer: torch.nn.Module, selector: Selector) -> StepPlan | None:
        """The plan of a step in which the kernel that scores is to store this layer's keys and values: all rows are decoded
        by it, and neither the index nor groups are made of them before. None in other steps."""
        if self.groups is not None or not self._last_layer_writes_all(selector):
            return None
        plan: StepPlan | None = compat.plan_of_step(layer)
        assert plan is None or plan.prefills is None, "rows prefill in a step of decode rows alone"
        return plan

    def _last_layer_writes_all(self, selector: Selector) -> bool:
        """Whether the index rows of this step may wait for the last layer, which writes those of all layers in one launch.
        Layers score before that, and the last one before or after. So no row that any of them scores may be one of this
        step's.

        In a step of decode rows alone, a row's new token completes at most the unit that it stands in, the row's last one,
        which is read without being scored. Prefix caching shares whole blocks, as soon as they are scheduled. So another
        row may share that unit in this very step, and its own one new token then begins the next unit: there it is the last
        but one, and is not scored either, if at least two recent units are always read. All other units were written in
        earlier steps. Not so where a row prefills: it completes many units, and a row that shares them may score them. What
        is captured into a piecewise graph is replayed in steps of both kinds.
        """
        assert _workspace is not None, "an index without a workspace"
        decodes = _workspace.only_decodes and not compat.captures_piecewise(STATE.device)
        return decodes and selector.recent_tokens >= 2 * selector.unit_tokens

    def _update_all(self, slot_mapping: Tensor, selector: Selector, beside: bool = False) -> None:
        """The index of all sparse layers of this worker, whose keys are stored by now."""
        assert _workspace is not None, "an index without a workspace"
        layers, apart = _indexed_layers(self._vllm_config()), _workspace.apart
        if apart is None or not apart.holds(layers):
            if compat.captures(STATE.device):
                raise RuntimeError("a CUDA graph is captured before any step ran over this KV cache")
            apart = _workspace.apart = LayersApart.of(layers)
        keys_PBHD, index_PSHW = keys_and_index(layers[0])
        paged.update_index(
            keys_PBHD, index_PSHW, slot_mapping, selector, impl="triton", apart_2L=apart.bytes_2L, beside=beside
        )

    def _decode(self, query: Tensor, kv_cache: Tensor, plan: StepPlan, output: Tensor) -> None:
        selector, work = STATE.selector, _workspace
        index_PSHW = None if self.index is None else self.index.rows_PSHW
        assert selector is not None and work is not None and index_PSHW is not None, "sparse decoding without an index"
        count, heads = plan.decodes, self.num_kv_heads
        if self.number == STATE.first_indexed_layer:
            _plan_layers(plan, selector, work)
        budgets_R, shared = plan.kv_budget_tokens_LR[self.number], work.plans.workspaces[self.number]
        query_RHGD = query.unflatten(1, (heads, -1))
        out_RHGD = output.view(count, heads, -1, self.head_size)
        keys_PBHD, values_PBHD = compat.keys_and_values(kv_cache, self.head_size)
        scores_RHU, unit_ids_RHN, pages_RHN = (
            held[:count] for held in (work.scores_RHU, work.unit_ids_RHN, work.pages_RHN)
        )
        peaks_RHK = peaks_to_choose_by(work.peaks_RHK, count, scores_RHU.shape[2])
        log_weights_RHGN = None if work.log_weights_RHGN is None else work.log_weights_RHGN[:count]
        groups_PSHV = None if self.groups is None else self.groups.rows_PSHW
        new_tokens = self._take_to_store(plan)
        paged.score_units(
            query_RHGD,
            index_PSHW,
            plan.block_table_RM,
            plan.context_tokens_R,
            selector,
            scores_RHU,
            impl="triton",
            kv_budget_tokens_R=budgets_R,
            scale=self.scale,
            workspace=shared,
            planned=True,
            peaks_RHK=peaks_RHK,
            groups_PSHV=groups_PSHV,
            log_weights_RHGN=log_weights_RHGN,
            new_tokens=NewTokens.none(keys_PBHD, values_PBHD) if new_tokens is None else new_tokens,
        )
        is_last = self.number == STATE.last_indexed_layer
        if new_tokens is not None and is_last:
            # All layers' keys are stored by now, and what follows reads no index rows.
            with work.beside.what_follows():
                self._update_all(new_tokens.slots_T, selector, beside=True)
        paged.choose_units(
            scores_RHU,
            plan.context_tokens_R,
            budgets_R,
            selector,
            unit_ids_RHN,
            impl="triton",
            pages_RHN=pages_RHN,
            block_table_RM=plan.block_table_RM,
            units_per_block=index_PSHW.shape[1],
            # Our kernel knows from the budgets where each list ends.
            fill_rest=STATE.attention != "triton",
            peaks_RHK=peaks_RHK,
            planned=True,
            # Where our attention begins early, it does so with lists that are announced.
            workspace=None if STATE.attention == "fa3_pages" else shared,
        )
        self._attend(query_RHGD, keys_PBHD, values_PBHD, plan, work, out_RHGD)
        if new_tokens is not None and is_last:
            work.beside.join()

    def _take_to_store(self, plan: StepPlan) -> NewTokens | None:
        """What waits to be stored under this plan, if anything does. It waits no longer."""
        waiting, self._to_store = self._to_store, None
        return waiting[1] if waiting is not None and waiting[0] is plan else None

    def _attend(
        self,
        query_RHGD: Tensor,
        keys_PBHD: Tensor,
        values_PBHD: Tensor,
        plan: StepPlan,
        work: Workspace,
        out_RHGD: Tensor,
    ) -> None:
        """Attend to the units that the lists in the workspace name."""
        if STATE.attention == "fa3_pages":
            self._attend_pages(query_RHGD, keys_PBHD, values_PBHD, work, out_RHGD)
            return
        selector, count = STATE.selector, plan.decodes
        assert selector is not None and self.index is not None, "sparse decoding without an index"
        paged.paged_decode(
            query_RHGD,
            keys_PBHD,
            values_PBHD,
            plan.block_table_RM,
            work.unit_ids_RHN[:count],
            plan.context_tokens_R,
            plan.kv_budget_tokens_LR[self.number],
            selector,
            self.scale,
            out_RHGD,
            work.plans.workspaces[self.number],
            impl="triton",
            pages_RHN=work.pages_RHN[:count],
            planned=True,
            index_PSHW=self.index.rows_PSHW,
            groups_PSHV=None if self.groups is None else self.groups.rows_PSHW,
            log_weights_RHGN=None if work.log_weights_RHGN is None else work.log_weights_RHGN[:count],
            announced=True,
        )

    def _attend_pages(
        self, query_RHGD: Tensor, keys_PBHD: Tensor, values_PBHD: Tensor, work: Workspace, out_RHGD: Tensor
    ) -> None:
        """Attend with FlashAttention 3. The page numbers overwrite the unit ids, which are no longer needed."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        count, heads = query_RHGD.shape[:2]
        head_pages = HeadPages.of(keys_PBHD)
        numbers_RHN = work.unit_ids_RHN[:count]
        head_pages.number(work.pages_RHN[:count], keys_PBHD.shape[1] // PAGE_TOKENS, numbers_RHN)
        flash_attn_varlen_func(
            q=query_RHGD.reshape(count * heads, -1, self.head_size),
            k=head_pages.view(keys_PBHD),
            v=head_pages.view(values_PBHD),
            out=out_RHGD.view(count * heads, -1, self.head_size),
            cu_seqlens_q=work.starts[: count * heads + 1],
            max_seqlen_q=1,
            seqused_k=work.read_tokens_LRH[self.number, :count].view(-1),
            max_seqlen_k=numbers_RHN.shape[2] * PAGE_TOKENS,
            softmax_scale=self.scale,
            causal=True,
            block_table=numbers_RHN.view(count * heads, -1),
            fa_version=3,
            # The number is fixed, because a graph would keep whatever was best at capture.
            num_splits=1,
        )


def _plan_layers(plan: StepPlan, selector: Selector, work: Workspace) -> None:
    """Compute what the sparse layers of a step need to know of it. The first of them does so, and not what builds the
    metadata: inside a CUDA graph it costs the host nothing."""
    contexts_R, budgets_LR, most_units = plan.context_tokens_R, plan.kv_budget_tokens_LR, work.unit_ids_RHN.shape[2]
    STATE.budgets.of_step(contexts_R, budgets_LR)
    paged.plan_layers(contexts_R, budgets_LR, selector, most_units, work.plans)
    if STATE.attention == "fa3_pages":
        count, heads = plan.decodes, work.read_tokens_LRH.shape[2]
        torch.arange(count * heads + 1, dtype=torch.int32, out=work.starts[: count * heads + 1])
        work.read_tokens_LRH[:, :count] = selector.read_tokens(contexts_R, budgets_LR)[..., None]


def _indexed_layers(vllm_config: Any) -> list[Any]:
    """vLLM's attention layers of this worker that have an index."""
    held = vllm_config.compilation_config.static_forward_context.values()
    ours = [layer for layer in held if isinstance(getattr(layer, "impl", None), SparseImpl)]
    return [layer for layer in ours if layer.impl.index is not None]


def _is_sparse(vllm_config: Any) -> bool:
    settings = VLLMSettings.find(vllm_config)
    return settings is not None and settings.schedule is not None
