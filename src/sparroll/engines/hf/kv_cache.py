"""K, V, index rows and recent queries of the running requests, contiguous per request. This is storage only: attention,
sampling and the choice of tokens that stay are elsewhere."""

# R rows (requests), H kv heads, G query heads per kv head, C capacity in tokens, D head dimension, U units,
# W row width of the index or of groups; of the recent queries, how many there are

from __future__ import annotations

import torch
from torch import Tensor

from sparroll.attention.selectors.base import Selector


class KVCache:
    """Per layer keys and values [R, H, C, D] and, in sparse layers, the index [R, H, U, W] of complete units.

    The index grows with the tokens: a unit's row is written together with its last token, and not read before. The same
    holds for `groups` [R, H, C / group, W], the rows of a remainder. Memory: 2 * layers * R * H * C * D elements plus
    the index and the groups. C starts near the length of the first prompts and grows by half
    each time, up to `most_tokens`. With `recent_queries`, a ring also holds the last W queries of each row, [R, H, G,
    W, D].
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
        recent_queries: int = 0,
        group: int = 1,
    ):
        self.selector = selector
        self.unit_tokens = selector.unit_tokens if selector else 1
        self.group_tokens = selector.remainder.group_tokens if selector and selector.remainder else 0
        """Tokens of a group; 0 where the selector has no remainder."""
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
        self.groups: dict[int, Tensor] = {}
        if selector is not None and self.group_tokens:
            width = selector.group_width(head_dim)
            for layer in sparse_layers:
                self.groups[layer] = torch.empty(rows, heads, 0, width, dtype=torch.uint8, device=device)
        self.queries: list[Tensor] = []
        if recent_queries:
            shape = (rows, heads, group, recent_queries, head_dim)
            self.queries = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.peak_bytes = self.allocated_bytes
        """Largest number of bytes that the tensors of this cache had at any time."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the cache's present tensors."""
        held = (*self.keys, *self.values, *self.index.values(), *self.groups.values(), *self.queries)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def reserve(self, tokens: int) -> None:
        """Make room for contexts of `tokens` tokens, keeping what is there."""
        if tokens <= self.capacity:
            return
        self.capacity = self._whole_units(next_capacity(tokens, self.capacity, self.most_tokens))
        # Tensors grow one at a time, so that old and new ones are never all held together.
        for layer in range(len(self.keys)):
            self.keys[layer] = self._grown(self.keys[layer], self.capacity)
            self.values[layer] = self._grown(self.values[layer], self.capacity)
        for layer, index in self.index.items():
            self.index[layer] = self._grown(index, self.capacity // self.unit_tokens)
        for layer, groups in self.groups.items():
            self.groups[layer] = self._grown(groups, self.capacity // self.group_tokens)

    def _grown(self, held: Tensor, length: int) -> Tensor:
        # Zeros, not garbage: dense attention masks what lies past a row's context, and 0 * NaN would be NaN.
        larger = held.new_zeros(*held.shape[:2], length, held.shape[3])
        larger[:, :, : held.shape[2]] = held
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes + larger.numel() * larger.element_size())
        return larger

    def write_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """keys, values [H, L, D] become the row's first L tokens. The rows of their complete units and groups are
        written, too."""
        self.rewrite(layer, row, 0, keys, values)

    def append(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, completed: Tensor | None) -> None:
        """keys, values [A, H, D] go to positions [A] of rows 0..A-1; `completed` [M] are the rows whose unit is now
        full."""
        rows = torch.arange(len(positions), device=positions.device)
        self.keys[layer][rows, :, positions] = keys
        self.values[layer][rows, :, positions] = values
        if completed is None or layer not in self.index or self.selector is None:
            return
        units = positions[completed] // self.unit_tokens
        full = self.keys[layer].unflatten(2, (-1, self.unit_tokens))[completed, :, units]
        self.index[layer][completed, :, units] = self.selector.build_index(full)
        if layer not in self.groups:
            return
        completed = completed[(positions[completed] + 1) % self.group_tokens == 0]
        groups = positions[completed] // self.group_tokens
        full, full_values = (
            held.unflatten(2, (-1, self.group_tokens))[completed, :, groups]
            for held in (self.keys[layer], self.values[layer])
        )
        self.groups[layer][completed, :, groups] = self.selector.build_groups(full, full_values)

    def rewrite(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """keys, values [H, L, D] take the place of the row's tokens from `start` on. The rows of the complete units and
        groups that they touch are built again."""
        end = start + keys.shape[1]
        self.keys[layer][row, :, start:end] = keys
        self.values[layer][row, :, start:end] = values
        first, last = start // self.unit_tokens, end // self.unit_tokens
        if layer in self.index and self.selector is not None and first < last:
            touched = self.keys[layer][row, :, first * self.unit_tokens : last * self.unit_tokens]
            self.index[layer][row, :, first:last] = self.selector.build_index(
                touched.unflatten(1, (last - first, self.unit_tokens))
            )
        if layer not in self.groups or self.selector is None:
            return
        first, last = start // self.group_tokens, end // self.group_tokens
        if first < last:
            touched, touched_values = (
                held[row, :, first * self.group_tokens : last * self.group_tokens].unflatten(
                    1, (last - first, self.group_tokens)
                )
                for held in (self.keys[layer], self.values[layer])
            )
            self.groups[layer][row, :, first:last] = self.selector.build_groups(touched, touched_values)

    def remember(self, layer: int, query: Tensor, slots: Tensor) -> None:
        """query [A, H, G, D] of rows 0..A-1 goes to places `slots` [A] of their rings."""
        rows = torch.arange(len(slots), device=slots.device)
        self.queries[layer][rows, :, :, slots] = query

    def remembered(self, layer: int, rows: Tensor, slots: Tensor) -> Tensor:
        """Queries [M, H, G, W, D] of rows [M], in the order of `slots` [M, W]."""
        held = self.queries[layer][rows]
        return held.gather(3, slots[:, None, None, :, None].expand(held.shape))

    def keep(self, layer: int, rows: Tensor, slots: Tensor) -> None:
        """Rows [M] keep their tokens at `slots` [M, H, N], which become their first N tokens. The slots behind them are
        free."""
        for held in (self.keys[layer], self.values[layer]):
            held[rows, :, : slots.shape[2]] = taken(held[rows], slots)

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of one row into another, with the rows of their complete units and groups and
        the recent queries."""
        for held in (*self.keys, *self.values):
            held[target, :, :tokens] = held[source, :, :tokens]
        for index in self.index.values():
            index[target, :, : tokens // self.unit_tokens] = index[source, :, : tokens // self.unit_tokens]
        for groups in self.groups.values():
            groups[target, :, : tokens // self.group_tokens] = groups[source, :, : tokens // self.group_tokens]
        for queries in self.queries:
            queries[target] = queries[source]

    def index_read_share(self, layer: int) -> float:
        """What a step reads of a layer's index and groups / the bytes of its K and V, per token; 0 where there is no
        index."""
        if layer not in self.index or self.selector is None:
            return 0.0
        head_dim, element_bytes = self.keys[layer].shape[-1], self.keys[layer].element_size()
        return self.selector.index_read_bytes_per_token(head_dim) / (2 * head_dim * element_bytes)

    def _whole_units(self, tokens: int) -> int:
        """Rounded up to whole units, and to whole groups where there are any."""
        whole = self.selector.row_tokens if self.selector else 1
        return -(-tokens // whole) * whole


class DenseFootprint:
    """Bytes that a dense `KVCache` would have had at its peak for the same requests. It follows the same growth without
    allocating anything."""

    def __init__(self, bytes_per_token: int, tensors: int, most_tokens: int):
        """bytes_per_token: those of one tensor, over all rows and heads.  tensors: number of tensors, K and V of every
        layer."""
        self.bytes_per_token = bytes_per_token
        self.tensors = tensors
        self.most_tokens = most_tokens
        self.capacity = 0
        self.peak_bytes = 0

    def reserve(self, tokens: int) -> None:
        """Count the growth that a context of `tokens` tokens would have needed."""
        if tokens <= self.capacity:
            return
        before, self.capacity = self.capacity, next_capacity(tokens, self.capacity, self.most_tokens)
        # While the last tensor grows, its old and its new version exist together.
        self.peak_bytes = self.bytes_per_token * (self.tensors * self.capacity + before)


def next_capacity(tokens: int, capacity: int, most_tokens: int) -> int:
    """Number of tokens to make room for: half more than before, at least `tokens`, at most `most_tokens`."""
    return min(most_tokens, max(tokens, capacity * 3 // 2))


def taken(held: Tensor, slots: Tensor) -> Tensor:
    """held [M, H, C, D] at slots [M, H, N] -> [M, H, N, D]"""
    return held.gather(2, slots[..., None].expand(*slots.shape, held.shape[3]))
