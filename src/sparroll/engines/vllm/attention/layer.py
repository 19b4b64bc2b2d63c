"""What the CPU and the CUDA backend share: starting the worker's state, and each layer's number and index."""

from __future__ import annotations

import inspect
import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.batch import StepPlan
from sparroll.engines.vllm.attention.landmarks import RowsLayer, add_index_layers
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.settings import VLLMSettings

# A child of vLLM's logger, so that it is shown wherever vLLM's own lines are.
_logger = logging.getLogger("vllm.sparroll")
_engine: weakref.ref[Any] | None = None


def start(vllm_config: Any, settings: VLLMSettings) -> None:
    """Check the engine's configuration and configure the worker's state for it. The first layer does this for all."""
    global _engine
    if _engine is not None and _engine() is vllm_config:
        return
    device = vllm_config.device_config.device_type
    model = vllm_config.model_config
    compat.check_version(compat.version(), device)
    schedule = settings.load(model.model)
    layers = int(model.hf_text_config.num_hidden_layers)
    if schedule is not None:
        schedule.check_layers(layers)
        compat.check_engine(vllm_config, schedule.selector, device)
    STATE.configure(
        schedule,
        layers,
        compat.device_of(vllm_config),
        str(model.model),
        settings.attention,
        settings.short_step_tokens,
    )
    _logger.info(
        "sparroll: schedule %s, %d of %d layers sparse, attention %s",
        schedule.name if schedule else None,
        len(STATE.sparse_layers),
        layers,
        "reference" if device == "cpu" else settings.attention,
    )
    _engine = weakref.ref(vllm_config)


class SparseLayer:
    """Mixed into vLLM's `Impl` classes, before them."""

    number: int
    index: RowsLayer | None
    groups: RowsLayer | None
    """None where the selector has no remainder."""

    def start_layer(self, parent: type, vllm_config: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called at the end of `__init__`, whose arguments are checked by name."""
        settings = VLLMSettings.find(vllm_config)
        assert settings is not None, "a sparse layer without settings"
        start(vllm_config, settings)
        if STATE.has_index:
            bound = inspect.signature(parent.__init__).bind(self, *arguments, **named)  # type: ignore[misc]
            compat.check_layer(bound.arguments)
        self.number, self.index, self.groups = -1, None, None
        self._vllm_config = weakref.ref(vllm_config)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """The parent class handles dense layers and steps without a plan. In other steps it handles the rows that
        prefill, and `_decode` the rest."""
        plan: StepPlan | None = getattr(attn_metadata, "sparroll", None)
        parent: Any = super()
        if plan is None or self.index is None:
            if plan is not None and self.number in STATE.sparse_layers:
                raise RuntimeError(f"layer {self.number} has to run sparse and has no index; start the engine anew")
            if attn_metadata is not None:
                self._note("dense")
            return parent.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert output_scale is None and output_block_scale is None, "fused output quantization"
        count = plan.decodes
        if plan.prefills is not None:
            parent.forward(layer, query[count:], key[count:], value[count:], kv_cache, plan.prefills, output[count:])
        self._decode(query[:count], kv_cache, plan, output[:count])
        self._note(self.attends_with())
        return output

    def _note(self, attention: str) -> None:
        """Tell the state what this layer just ran, or put into a CUDA graph."""
        if compat.captures(STATE.device):
            STATE.layer_captured(self.number, attention)
        else:
            STATE.layer_ran(self.number, attention)

    def attends_with(self) -> str:
        """What the report calls the attention of a sparse step."""
        return STATE.attention

    def _decode(self, query: Tensor, kv_cache: Tensor, plan: StepPlan, output: Tensor) -> None:
        """Attention of the rows that decode, under the plan."""
        raise NotImplementedError

    # vLLM may fuse the cache update into its own kernels. Our update, which keeps the index, would then not be called.
    supports_kv_cache_update_bypass = False

    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this once the weights are loaded, before it asks what the KV cache holds."""
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        # Layers do not know their names, so the first one to come here numbers all of them.
        add_index_layers(self._vllm_config(), SparseLayer, STATE.selector)
