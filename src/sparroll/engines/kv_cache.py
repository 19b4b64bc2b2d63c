"""K, V and index rows of the running requests, contiguous per request. Storage only: no attention, no sampling."""

# R rows (requests), H kv heads, C capacity in tokens, D head dimension, U units, W index row width

from __future__ import annotations

import torch
from torch import Tensor

from sparroll.attention.selectors.base import Selector


class KVCache:
    """Per layer keys and values [R, H, C, D] and, in sparse layers, the index [R, H, U, W] of complete units.

    The index is kept as tokens arrive: a unit's row is written when its last token is, and never read before. Memory:
    2 * layers * R * H * C * D elements plus the index; C starts near the first prompts and grows by half until
    `most_tokens`.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        most_tokens: int,
        selector: Selector | None,
        sparse_layers: frozenset[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.selector = selector
        self.unit_tokens = selector.unit_tokens if selector else 1
        self.most_tokens = self._whole_units(most_tokens)
        self.capacity = 0
        empty = torch.empty(rows, heads, 0, head_dim, dtype=dtype, device=device)
        self.keys = [empty] * layers
        self.values = [empty] * layers
        self.index: dict[int, Tensor] = {}
        if selector is not None:
            width = selector.index_width(head_dim)
            for layer in sparse_layers:
                self.index[layer] = torch.empty(rows, heads, 0, width, dtype=selector.index_dtype, device=device)

    def reserve(self, tokens: int) -> None:
        """Make room for contexts of `tokens` tokens, keeping what is there."""
        if tokens <= self.capacity:
            return
        self.capacity = self._whole_units(min(self.most_tokens, max(tokens, self.capacity * 3 // 2)))
        self.keys = [_grown(keys, self.capacity) for keys in self.keys]
        self.values = [_grown(values, self.capacity) for values in self.values]
        self.index = {layer: _grown(index, self.capacity // self.unit_tokens) for layer, index in self.index.items()}

    def write_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """keys, values [H, L, D] become the row's first L tokens; index rows of their complete units follow."""
        tokens = keys.shape[1]
        self.keys[layer][row, :, :tokens] = keys
        self.values[layer][row, :, :tokens] = values
        units = tokens // self.unit_tokens
        if layer in self.index and self.selector is not None and units:
            complete = keys[:, : units * self.unit_tokens].unflatten(1, (units, self.unit_tokens))
            self.index[layer][row, :, :units] = self.selector.build_index(complete)

    def append(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, completed: Tensor | None) -> None:
        """keys, values [A, H, D] go to positions [A] of rows 0..A-1; `completed` [M] are the rows whose unit is now full."""
        rows = torch.arange(len(positions), device=positions.device)
        self.keys[layer][rows, :, positions] = keys
        self.values[layer][rows, :, positions] = values
        if completed is None or layer not in self.index or self.selector is None:
            return
        units = positions[completed] // self.unit_tokens
        full = self.keys[layer].unflatten(2, (-1, self.unit_tokens))[completed, :, units]
        self.index[layer][completed, :, units] = self.selector.build_index(full)

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` tokens of one row, with the index rows of their complete units, into another row."""
        for held in (*self.keys, *self.values):
            held[target, :, :tokens] = held[source, :, :tokens]
        for index in self.index.values():
            index[target, :, : tokens // self.unit_tokens] = index[source, :, : tokens // self.unit_tokens]

    def index_bytes_share(self, layer: int) -> float:
        """Bytes of a layer's index over the bytes of its K and V, per token; 0 where there is no index."""
        if layer not in self.index:
            return 0.0
        row = self.index[layer].shape[-1] * self.index[layer].element_size() / self.unit_tokens
        return row / (2 * self.keys[layer].shape[-1] * self.keys[layer].element_size())

    def _whole_units(self, tokens: int) -> int:
        return -(-tokens // self.unit_tokens) * self.unit_tokens


def _grown(held: Tensor, length: int) -> Tensor:
    # Zeros, not garbage: dense attention masks what lies past a row's context, and 0 * NaN would be NaN.
    larger = held.new_zeros(*held.shape[:2], length, held.shape[3])
    larger[:, :, : held.shape[2]] = held
    return larger
