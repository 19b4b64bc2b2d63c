"""The index (landmarks) as extra layers of vLLM's KV cache, one beside each sparse attention layer, and the rows of a
remainder's groups as another one, where the selector has a remainder. They have the same block ids, so a row is shared by
prefix caching, counted by memory profiling, and put to sleep together with its keys.
"""

# P blocks, S units per block, H kv heads, W index row width

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)

from sparroll.attention.selectors.base import Selector
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.capacity import BLOCK_TOKENS
from sparroll.errors import UserError

SUFFIX, GROUPS_SUFFIX = ".sparroll_index", ".sparroll_groups"


class RowsLayer(AttentionLayerBase):
    """Holds rows of one layer, one for so many tokens and KV head; computes nothing. vLLM sets `kv_cache` once memory is
    allocated."""

    supports_dcp = False
    kv_sharing_target_layer_name = None

    def __init__(self, heads: int, width: int, tokens: int, dtype: torch.dtype, backend: type[AttentionBackend]):
        """width: numbers in a row.  tokens: those that share a row, a unit or a group."""
        self.heads, self.width, self.tokens, self.dtype, self.backend = heads, width, tokens, dtype, backend
        self.kv_cache = torch.empty(0, device="cpu")

    @staticmethod
    def of_units(heads: int, head_dim: int, selector: Selector) -> RowsLayer:
        """The index."""
        width = selector.index_width(head_dim)
        return RowsLayer(heads, width, selector.unit_tokens, selector.index_dtype, IndexBackend)

    @staticmethod
    def of_groups(heads: int, head_dim: int, selector: Selector) -> RowsLayer:
        """The rows of a remainder's groups."""
        assert selector.remainder is not None, "a selector without a remainder"
        width = selector.group_width(head_dim)
        return RowsLayer(heads, width, selector.remainder.group_tokens, torch.uint8, GroupsBackend)

    @property
    def rows_PSHW(self) -> Tensor | None:
        """The rows, or None before memory is allocated. In a block, those of one head stand together."""
        held = self.kv_cache
        if not held.numel():
            return None
        _, heads, units, width = held.shape
        if units > 1 and held.stride()[1:] == (width, heads * width, 1):
            # vLLM may order a block's memory by tokens. Nobody else reads these bytes, so they are taken by heads.
            held = held.as_strided(held.shape, (held.stride(0), units * width, width, 1))
        return held.transpose(1, 2)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        block_tokens = vllm_config.cache_config.block_size
        if block_tokens % self.tokens:
            raise UserError(
                f"a block of {block_tokens} tokens does not hold whole units or groups of {self.tokens}",
                f"block_size={math.lcm(BLOCK_TOKENS, self.tokens)}",
            )
        return compat.rows_spec(block_tokens, self.heads, self.width, self.tokens, self.dtype)


class IndexMetadataBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """Builds empty metadata, until `spare_metadata`: these layers are written and read by the attention layer beside
    them."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttentionMetadata:
        return AttentionMetadata()


class IndexBackend(AttentionBackend):
    """How vLLM shapes the memory of an index layer."""

    @staticmethod
    def get_name() -> str:
        return "SPARROLL_INDEX"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("layers of rows compute nothing")

    @staticmethod
    def get_builder_cls() -> type[IndexMetadataBuilder]:
        return IndexMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return compat.rows_shape(num_blocks, block_size, num_kv_heads, head_size, STATE.unit_tokens)


class GroupsBackend(IndexBackend):
    """The same for the rows of groups."""

    @staticmethod
    def get_name() -> str:
        return "SPARROLL_GROUPS"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return compat.rows_shape(num_blocks, block_size, num_kv_heads, head_size, STATE.group_tokens)


def add_index_layers(vllm_config: Any, impl_class: type, selector: Selector | None) -> None:
    """Give each layer of this worker its number, and each sparse layer its index and groups. A second call, after a weight
    reload, changes nothing."""
    layers = vllm_config.compilation_config.static_forward_context
    for name, layer in list(layers.items()):
        impl: Any = getattr(layer, "impl", None)
        if impl is None or not issubclass(type(impl), impl_class):
            continue
        impl.number = extract_layer_index(name)
        if selector is None or impl.number not in STATE.sparse_layers:
            continue
        kv_bytes = 2 * impl.head_size * layer.kv_cache_torch_dtype.itemsize
        STATE.index_read_share[impl.number] = selector.index_read_bytes_per_token(impl.head_size) / kv_bytes
        if impl.index is None:
            impl.index = RowsLayer.of_units(impl.num_kv_heads, impl.head_size, selector)
        if impl.index.width:
            layers[name + SUFFIX] = impl.index
        if selector.remainder is not None:
            if impl.groups is None:
                impl.groups = RowsLayer.of_groups(impl.num_kv_heads, impl.head_size, selector)
            layers[name + GROUPS_SUFFIX] = impl.groups


def spare_metadata(runner: Any) -> None:
    """Have vLLM's model runner build no metadata for layers of rows, which nobody reads: it would do so in each step, and a
    step of a small model waits for the host. Called once the runner has its KV cache."""
    for groups in runner.attn_groups:
        groups[:] = [group for group in groups if not issubclass(group.backend, IndexBackend)]
