"""Chooses the units that one step reads, and attends to them, in contiguous caches. This file checks the arguments; the
implementation that the caller names does the work. An unknown implementation is an error, and no other one takes its
place.
"""

# R requests, Q query positions, H kv heads, G query heads per kv head, C cached tokens, U units, N chosen units,
# D head dim

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from sparroll.attention.decode import reference, remainder_reference
from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError, nearest

_IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference}


def _implementation(name: str) -> ModuleType:
    if name not in _IMPLEMENTATIONS:
        raise UserError(f"no attention implementation {name!r} here", nearest(name, list(_IMPLEMENTATIONS)))
    return _IMPLEMENTATIONS[name]


def _shapes(**named: tuple[Tensor, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in named.items():
        if tuple(tensor.shape) != shape:
            raise UserError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def _held(what: str, context_tokens: Tensor, most: int) -> None:
    """Raise UserError for a context that is longer than what is there. On a GPU it is not looked at, because the host would
    wait for it."""
    if context_tokens.device.type == "cpu" and context_tokens.numel() and int(context_tokens.max()) > most:
        raise UserError(f"a context has {int(context_tokens.max())} tokens, and {what} holds {most}")


def select(
    query: Tensor,
    index: Tensor,
    context_tokens: Tensor,
    kv_budget_tokens: Tensor,
    selector: Selector,
    scale: float,
    impl: str = "reference",
) -> Tensor:
    """Units that each query position reads, per KV head, shared by the query heads of its group.

    query [R, Q, H, G, D] after RoPE; index [R, H, U, W], a row for each unit of the longest context, the incomplete one
    included (only rows of complete units are looked at);
    context_tokens, kv_budget_tokens [R, Q] int, the query's own token counts as context; scale multiplies q.k.
    Returns unit ids [R, Q, H, N] int64, -1 where a position reads fewer than N units. A context within its budget gets
    all its units. First and recent units are always among them, and count against the budget. Of equal scores, the
    lowest units are read.
    """
    requests, positions, heads = query.shape[:3]
    width = selector.index_width(query.shape[-1])
    _shapes(
        index=(index, (requests, heads, index.shape[2], width)),
        context_tokens=(context_tokens, (requests, positions)),
        kv_budget_tokens=(kv_budget_tokens, (requests, positions)),
    )
    _held("the index", context_tokens, index.shape[2] * selector.unit_tokens)
    return _implementation(impl).select(query, index, context_tokens, kv_budget_tokens, selector, scale)


def sparse_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    unit_ids: Tensor,
    context_tokens: Tensor,
    unit_tokens: int,
    scale: float,
    impl: str = "reference",
) -> Tensor:
    """Attention of one new token per request over the chosen units: softmax over exactly their tokens.

    query [R, H, G, D]; keys, values [R, H, C, D] with C a multiple of `unit_tokens`; unit_ids [R, H, N] from `select`;
    context_tokens [R] (tokens at or past it are never read, whatever lies there). Returns [R, H, G, D].
    """
    requests, heads, _, dim = query.shape
    cached = keys.shape[2]
    _shapes(
        keys=(keys, (requests, heads, cached, dim)),
        values=(values, (requests, heads, cached, dim)),
        unit_ids=(unit_ids, (requests, heads, unit_ids.shape[-1])),
        context_tokens=(context_tokens, (requests,)),
    )
    _whole_units(cached, unit_tokens)
    _held("the cache", context_tokens, cached)
    return _implementation(impl).sparse_decode(query, keys, values, unit_ids, context_tokens, unit_tokens, scale)


def sparse_decode_with_remainder(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    groups: Tensor,
    unit_ids: Tensor,
    context_tokens: Tensor,
    selector: Selector,
    scale: float,
) -> Tensor:
    """`sparse_decode` in which the units that were not chosen count, too: one entry of the softmax for each group of
    tokens, as remainder_reference.py says.

    index [R, H, U, W] and groups [R, H, N, V]: the rows of complete units and of complete groups, for all units that
    the contexts have. Others may hold anything. Returns [R, H, G, D].
    """
    requests, heads, _, dim = query.shape
    cached, units = keys.shape[2], index.shape[2]
    if selector.remainder is None:
        raise UserError(f"the selector {selector.kind!r} has no remainder", "use sparse_decode")
    _shapes(
        keys=(keys, (requests, heads, cached, dim)),
        values=(values, (requests, heads, cached, dim)),
        index=(index, (requests, heads, units, selector.index_width(dim))),
        groups=(groups, (requests, heads, -(-units // selector.units_per_group), selector.group_width(dim))),
        unit_ids=(unit_ids, (requests, heads, unit_ids.shape[-1])),
        context_tokens=(context_tokens, (requests,)),
    )
    _whole_units(cached, selector.unit_tokens)
    return remainder_reference.sparse_decode(
        query, keys, values, index, groups, unit_ids, context_tokens, selector, scale
    )


def _whole_units(cached_tokens: int, unit_tokens: int) -> None:
    if cached_tokens % unit_tokens:
        raise UserError(
            f"the cache's length must be a multiple of the unit ({unit_tokens} tokens), got {cached_tokens}",
            f"allocate {-(-cached_tokens // unit_tokens) * unit_tokens}",
        )
