"""The operations of a sparse decode step on a paged cache: keep the index up to date, score units, choose them, attend
to them.

This file checks the arguments; the implementation that the caller names does the work: "reference" (plain PyTorch) or
"triton". An implementation that cannot run is an error, and no other one takes its place. Under "triton" everything is
safe inside CUDA graphs: no value is read on the host, grids follow from shapes, and lengths and budgets of the requests
are in device tensors. The tensors are views of the engine's cache: they may have any strides, but the last axis must be
contiguous, and rows of `quantized_mean` and of groups must be aligned. No engine is imported here.
"""

# R requests, T new tokens, P blocks, B tokens per block, M blocks per request, S units per block, H kv heads,
# K peaks of scores, G query heads per kv head, U units, N chosen units (of log_weights: groups), D head dim,
# W index row width, V group row width in bytes, L layers with budgets of their own

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.workspace import (
    PEAK_UNITS,
    LayerPlans,
    StepWorkspace,
    check_fits,
    check_groups_cut_evenly,
    check_unread_parts,
    has_peaks,
)
from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError, nearest

_MODULES = {
    "reference": dict.fromkeys(
        ("update_index", "update_groups", "score_units", "choose_units", "paged_decode"), "paged_reference"
    ),
    "triton": {
        "update_index": "triton_index",
        "update_groups": "triton_groups",
        "score_units": "scores.triton_score",
        "choose_units": "choice.triton_top_k",
        "plan_step": "triton_work_split",
        "plan_layers": "triton_work_split",
        "paged_decode": "triton_attend",
    },
}
_SCORED_BY_TRITON = ["page_mean", "quantized_mean"]


def update_index(
    keys_PBHD: Tensor,
    index_PSHW: Tensor,
    slots_T: Tensor,
    selector: Selector,
    impl: str = "reference",
    apart_2L: Tensor | None = None,
    beside: bool = False,
) -> None:
    """Write the index rows of the units that the new tokens completed, from the keys that already lie in the cache.

    slots_T int: block * B + offset of each new token, negative for padding. A unit's row is written when the token that
    completes it (slot % unit == unit - 1) is among them.  apart_2L: how far the caches of L layers lie from those that are
    given (layers_apart.py); one launch then writes the rows of all of them. Only "triton" can.  beside: on a stream where no
    kernel of the step was launched before, so that it cannot begin while one of them ends.
    """
    blocks, block_tokens, heads, dim = keys_PBHD.shape
    units_per_block = _units_per_block(block_tokens, selector)
    _shapes(
        index_PSHW=(index_PSHW, (blocks, units_per_block, heads, selector.index_width(dim))),
        slots_T=(slots_T, (slots_T.numel(),)),
    )
    _index_dtype(index_PSHW, selector)
    _contiguous_rows(keys_PBHD=keys_PBHD, index_PSHW=index_PSHW, slots_T=slots_T)
    check_scored(selector, impl)
    if apart_2L is not None:
        if impl != "triton":
            raise UserError(
                f'impl="{impl}" updates the index of one layer at a time', 'leave out apart_2L, or use "triton"'
            )
        _shapes(apart_2L=(apart_2L, (2, apart_2L.shape[-1])))
        _dtype("apart_2L", apart_2L, torch.int64)
        _contiguous_rows(apart_2L=apart_2L)
    _operation(impl, "update_index", keys_PBHD)(keys_PBHD, index_PSHW, slots_T, selector, apart_2L, beside)


def update_groups(
    keys_PBHD: Tensor,
    values_PBHD: Tensor,
    groups_PSHV: Tensor,
    slots_T: Tensor,
    selector: Selector,
    impl: str = "reference",
) -> None:
    """Write the remainder's rows of the groups that the new tokens completed, as `update_index` does those of units.

    groups_PSHV uint8: S groups per block, rows of `selector.group_width(D)` bytes.
    """
    blocks, block_tokens, heads, dim = keys_PBHD.shape
    _units_per_block(block_tokens, selector)
    _groups_shape(groups_PSHV, (blocks, block_tokens, heads, dim), selector)
    if impl == "triton":
        check_groups_cut_evenly(selector)
    _shapes(
        values_PBHD=(values_PBHD, (blocks, block_tokens, heads, dim)),
        slots_T=(slots_T, (slots_T.numel(),)),
    )
    _contiguous_rows(keys_PBHD=keys_PBHD, values_PBHD=values_PBHD, slots_T=slots_T)
    _operation(impl, "update_groups", keys_PBHD)(keys_PBHD, values_PBHD, groups_PSHV, slots_T, selector)


def plan_step(
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    most_units: int,
    workspace: StepWorkspace,
    impl: str = "triton",
) -> None:
    """Plan how `score_units` and `paged_decode` share their work among programs. The plan is written into the
    workspace, once for all layers. Neither it nor contexts, budgets or the block table may change until they have run.

    most_units: N, the columns of the lists of chosen units. The reference has nothing to plan.
    """
    _known(impl)
    _shapes(kv_budget_tokens_R=(kv_budget_tokens_R, tuple(context_tokens_R.shape)))
    _contiguous_rows(context_tokens_R=context_tokens_R, kv_budget_tokens_R=kv_budget_tokens_R)
    if impl == "triton":
        check_fits(workspace, len(context_tokens_R))
        _operation(impl, "plan_step", context_tokens_R)(
            context_tokens_R, kv_budget_tokens_R, selector, most_units, workspace
        )


def plan_layers(
    context_tokens_R: Tensor,
    kv_budget_tokens_LR: Tensor,
    selector: Selector,
    most_units: int,
    plans: LayerPlans,
) -> None:
    """What `plan_step` does, for layers with budgets of their own, all in one kernel: each layer's plan is written into
    its workspace. Only Triton has plans."""
    _shapes(kv_budget_tokens_LR=(kv_budget_tokens_LR, (len(plans.workspaces), len(context_tokens_R))))
    _contiguous_rows(context_tokens_R=context_tokens_R, kv_budget_tokens_LR=kv_budget_tokens_LR)
    if plans.workspaces:
        check_fits(plans.workspaces[0], len(context_tokens_R))
        _operation("triton", "plan_layers", context_tokens_R)(
            context_tokens_R, kv_budget_tokens_LR, selector, most_units, plans
        )


def score_units(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    block_table_RM: Tensor,
    context_tokens_R: Tensor,
    selector: Selector,
    scores_RHU: Tensor,
    impl: str = "reference",
    *,
    kv_budget_tokens_R: Tensor | None = None,
    scale: float | None = None,
    workspace: StepWorkspace | None = None,
    planned: bool = False,
    peaks_RHK: Tensor | None = None,
    groups_PSHV: Tensor | None = None,
    log_weights_RHGN: Tensor | None = None,
    new_tokens: NewTokens | None = None,
) -> None:
    """Score every unit of each (request, head) into scores_RHU (fp32), as `selector.score` does.

    Units that are read anyway (first, recent, the incomplete one) are +inf, units past the context -inf. A padding row
    has context 0. With `kv_budget_tokens_R`, rows whose context lies within their budget are left as they are (all
    their units will be chosen), and units past the context may be: `choose_units` does not look at them. `scale` is
    what the model multiplies q.k with (default D ** -0.5), for selectors that use it. `planned`: `plan_step` was called
    with the same contexts and budgets. `peaks_RHK`, of `peaks_for`, takes the peaks of what is scored.

    `log_weights_RHGN`, of `log_weights_for`, takes what each group of the remainder weighs to each query head if none of
    its units is read, as base-2 logarithms, for `paged_decode`; units that are read anyway weigh nothing. It needs the
    rows of groups. "triton" cannot do without it where the selector is `weighed_with_scores`.

    `new_tokens` are stored into the cache by the same kernel, for kernels behind it.
    """
    requests, heads, group, dim = query_RHGD.shape
    blocks, units_per_block = index_PSHW.shape[:2]
    _shapes(
        index_PSHW=(index_PSHW, (blocks, units_per_block, heads, selector.index_width(dim))),
        block_table_RM=(block_table_RM, (requests, block_table_RM.shape[-1])),
        context_tokens_R=(context_tokens_R, (requests,)),
        scores_RHU=(scores_RHU, (requests, heads, scores_RHU.shape[-1])),
    )
    if kv_budget_tokens_R is not None:
        _shapes(kv_budget_tokens_R=(kv_budget_tokens_R, (requests,)))
        _contiguous_rows(kv_budget_tokens_R=kv_budget_tokens_R)
    _index_dtype(index_PSHW, selector)
    _dtype("scores_RHU", scores_RHU, torch.float32)
    _contiguous_rows(
        query_RHGD=query_RHGD, index_PSHW=index_PSHW, block_table_RM=block_table_RM, context_tokens_R=context_tokens_R,
        scores_RHU=scores_RHU,
    )  # fmt: skip
    check_scored(selector, impl)
    if impl == "triton":
        check_fits(workspace, requests)
    if peaks_RHK is not None:
        _peaks(peaks_RHK, scores_RHU)
        if not has_peaks(selector):
            raise UserError(f"no peaks are kept of the scores of {selector}", "leave out peaks_RHK")
    if new_tokens is not None:
        new_tokens.check(heads, dim)
        if not requests and len(new_tokens.slots_T):
            raise UserError("without requests no kernel is launched that could store new tokens", "store them apart")
    _check_log_weights(log_weights_RHGN, (requests, heads, group), selector, impl)
    if log_weights_RHGN is not None:
        if groups_PSHV is None:
            raise UserError("log_weights_RHGN needs groups_PSHV", "give the rows that update_groups wrote")
        _groups_shape(groups_PSHV, (blocks, units_per_block * selector.unit_tokens, heads, dim), selector)
        needed = -(-scores_RHU.shape[2] // selector.units_per_group)
        _shapes(log_weights_RHGN=(log_weights_RHGN, (requests, heads, group, needed)))
    _operation(impl, "score_units", query_RHGD)(
        query_RHGD, index_PSHW, block_table_RM, context_tokens_R, selector, scores_RHU, kv_budget_tokens_R,
        dim**-0.5 if scale is None else scale, workspace, planned, peaks_RHK, groups_PSHV=groups_PSHV,
        log_weights_RHGN=log_weights_RHGN, new_tokens=new_tokens,
    )  # fmt: skip


def choose_units(
    scores_RHU: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    unit_ids_RHN: Tensor,
    impl: str = "reference",
    *,
    pages_RHN: Tensor | None = None,
    block_table_RM: Tensor | None = None,
    units_per_block: int | None = None,
    fill_rest: bool = True,
    peaks_RHK: Tensor | None = None,
    planned: bool = False,
    workspace: StepWorkspace | None = None,
) -> None:
    """Write the best units of each (request, head) into unit_ids_RHN (int32), in ascending order, with -1 after them.

    These are as many units as the budget holds, or all of them where the context is within the budget, and never more
    than N; the caller must refuse a budget of more than N units. Of equal scores, the lowest units are chosen. With
    `pages_RHN` (int32), the place of each unit is written, too: block_table_RM[r, u // units_per_block] *
    units_per_block + u % units_per_block, with -1 after them. `fill_rest=False` leaves the entries after them as they
    are, for readers that know the budgets. `peaks_RHK`: what `score_units` wrote with these scores. With it the
    kernel reads fewer of them, and chooses the same; a large batch may not look at it (workspace.peaks_to_choose_by).
    `planned`: `plan_step` was called with the same contexts and budgets. `workspace`, where planned: the kernel
    announces each list there that is complete, for `paged_decode(announced=True)`, where that begins early.
    """
    requests, heads, _ = scores_RHU.shape
    _shapes(
        context_tokens_R=(context_tokens_R, (requests,)),
        kv_budget_tokens_R=(kv_budget_tokens_R, (requests,)),
        unit_ids_RHN=(unit_ids_RHN, (requests, heads, unit_ids_RHN.shape[-1])),
    )
    _dtype("scores_RHU", scores_RHU, torch.float32)
    _dtype("unit_ids_RHN", unit_ids_RHN, torch.int32)
    _contiguous_rows(
        scores_RHU=scores_RHU, context_tokens_R=context_tokens_R, kv_budget_tokens_R=kv_budget_tokens_R,
        unit_ids_RHN=unit_ids_RHN,
    )  # fmt: skip
    if workspace is not None and impl == "triton":
        if not planned:
            raise UserError(
                "a choice that is announced needs a plan that was made before", "plan_step(...), planned=True"
            )
        check_fits(workspace, requests)
        if workspace.kv_heads != heads:
            raise UserError(
                f"the workspace is for {workspace.kv_heads} kv heads, got scores of {heads}",
                "allocate it for this model",
            )
    if peaks_RHK is not None:
        _peaks(peaks_RHK, scores_RHU)
    if pages_RHN is not None:
        if block_table_RM is None or units_per_block is None:
            raise UserError("pages_RHN needs block_table_RM and units_per_block", "give both, or leave out pages_RHN")
        _shapes(
            pages_RHN=(pages_RHN, tuple(unit_ids_RHN.shape)),
            block_table_RM=(block_table_RM, (requests, block_table_RM.shape[-1])),
        )
        _dtype("pages_RHN", pages_RHN, torch.int32)
        _contiguous_rows(pages_RHN=pages_RHN, block_table_RM=block_table_RM)
    _operation(impl, "choose_units", scores_RHU)(
        scores_RHU, context_tokens_R, kv_budget_tokens_R, selector, unit_ids_RHN, pages_RHN, block_table_RM,
        units_per_block or 1, fill_rest, peaks_RHK, planned, workspace,
    )  # fmt: skip


def paged_decode(
    query_RHGD: Tensor,
    keys_PBHD: Tensor,
    values_PBHD: Tensor,
    block_table_RM: Tensor,
    unit_ids_RHN: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    scale: float,
    out_RHGD: Tensor,
    workspace: StepWorkspace | None = None,
    impl: str = "reference",
    *,
    pages_RHN: Tensor | None = None,
    planned: bool = False,
    index_PSHW: Tensor | None = None,
    groups_PSHV: Tensor | None = None,
    log_weights_RHGN: Tensor | None = None,
    announced: bool = False,
) -> None:
    """Write the attention of one new token per request into out_RHGD: softmax over exactly the tokens of the chosen
    units, and with a remainder over the groups of the others (remainder_reference.py), whose index and rows are then
    needed.

    Tokens at or past the context are never read, whatever is stored there. Padding rows (context 0) become zeros.
    unit_ids_RHN (int32) and kv_budget_tokens_R are those of `choose_units`: as many units as it chooses, in ascending
    order, which the kernel relies on. Entries past the budget are not looked at, filled or not. With `pages_RHN`, the
    block table is not read. `planned`: `plan_step` was called with the same contexts and budgets. `log_weights_RHGN`: what
    `score_units` wrote with the same budgets; "triton" needs it where that kernel weighs groups, with a place for every
    group of the longest context, and the reference does not look at it. `announced`: `choose_units` was called with this
    workspace right before, so that the kernel may read each list as soon as it is complete, where that is faster
    (StepWorkspace.begins_early). out_RHGD must be allocated before that call: the choice may still use memory that it has
    given back. The reference does not look at it.
    """
    requests, heads, group, dim = query_RHGD.shape
    blocks, block_tokens = keys_PBHD.shape[:2]
    _units_per_block(block_tokens, selector)
    _shapes(
        keys_PBHD=(keys_PBHD, (blocks, block_tokens, heads, dim)),
        values_PBHD=(values_PBHD, (blocks, block_tokens, heads, dim)),
        block_table_RM=(block_table_RM, (requests, block_table_RM.shape[-1])),
        unit_ids_RHN=(unit_ids_RHN, (requests, heads, unit_ids_RHN.shape[-1])),
        context_tokens_R=(context_tokens_R, (requests,)),
        kv_budget_tokens_R=(kv_budget_tokens_R, (requests,)),
        out_RHGD=(out_RHGD, (requests, heads, group, dim)),
    )
    for name, given in (("keys_PBHD", keys_PBHD), ("values_PBHD", values_PBHD)):
        _dtype(name, given, query_RHGD.dtype)
    _dtype("unit_ids_RHN", unit_ids_RHN, torch.int32)
    _contiguous_rows(
        query_RHGD=query_RHGD, keys_PBHD=keys_PBHD, values_PBHD=values_PBHD, block_table_RM=block_table_RM,
        unit_ids_RHN=unit_ids_RHN, context_tokens_R=context_tokens_R, kv_budget_tokens_R=kv_budget_tokens_R,
        out_RHGD=out_RHGD,
    )  # fmt: skip
    if announced and not planned and impl == "triton":
        raise UserError("lists that are announced need a plan that was made before", "plan_step(...), planned=True")
    if pages_RHN is not None:
        _shapes(pages_RHN=(pages_RHN, tuple(unit_ids_RHN.shape)))
        _dtype("pages_RHN", pages_RHN, torch.int32)
        _contiguous_rows(pages_RHN=pages_RHN)
    if selector.remainder is None:
        index_PSHW = groups_PSHV = None
    else:
        _check_remainder(index_PSHW, groups_PSHV, (blocks, block_tokens, heads, dim), selector)
    _check_log_weights(log_weights_RHGN, (requests, heads, group), selector, impl)
    if impl == "triton":
        check_fits(workspace, requests, (heads, group, dim))
        if workspace is not None and selector.remainder is not None:
            check_unread_parts(workspace, requests * heads, selector)
    _operation(impl, "paged_decode", query_RHGD)(
        query_RHGD, keys_PBHD, values_PBHD, block_table_RM, unit_ids_RHN, context_tokens_R, kv_budget_tokens_R, selector,
        scale, out_RHGD, workspace, pages_RHN, planned, index_PSHW, groups_PSHV, log_weights_RHGN, announced,
    )  # fmt: skip


def _known(impl: str) -> None:
    if impl not in _MODULES:
        raise UserError(f"no paged attention implementation {impl!r}", nearest(impl, list(_MODULES)))


@cache
def _load(impl: str, name: str) -> Callable[..., Any]:
    _known(impl)
    try:
        module = importlib.import_module(f"sparroll.attention.decode.{_MODULES[impl][name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise UserError('impl="triton" needs triton, which is not installed', "pip install triton (Linux)") from None
    operation: Callable[..., Any] = getattr(module, name)
    return operation


def _operation(impl: str, name: str, tensor: Tensor) -> Callable[..., Any]:
    if impl == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f'impl="triton" needs CUDA tensors, got {tensor.device}', 'impl="reference" runs anywhere'
        )  # fmt: skip
    return _load(impl, name)


def _shapes(**named: tuple[Tensor, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in named.items():
        if tuple(tensor.shape) != shape:
            raise UserError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def _dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise UserError(f"{name} must be {dtype}, got {tensor.dtype}")


def _peaks(peaks: Tensor, scores: Tensor) -> None:
    _shapes(peaks_RHK=(peaks, (*scores.shape[:2], -(-scores.shape[2] // PEAK_UNITS))))
    _dtype("peaks_RHK", peaks, torch.int32)
    _contiguous_rows(peaks_RHK=peaks)


def _check_log_weights(log_weights: Tensor | None, heads: tuple[int, int, int], selector: Selector, impl: str) -> None:
    """heads: requests, kv heads and query heads per kv head."""
    weighed = selector.remainder is not None and selector.weighed_with_scores
    if log_weights is None:
        if weighed and impl == "triton":
            raise UserError(
                'impl="triton" needs log_weights_RHGN for this remainder',
                "give log_weights_for(...) to both operations",
            )
        return
    if not weighed:
        raise UserError(f"no groups are weighed with the scores of {selector}", "leave out log_weights_RHGN")
    _shapes(log_weights_RHGN=(log_weights, (*heads, log_weights.shape[-1])))
    _dtype("log_weights_RHGN", log_weights, torch.float32)
    _contiguous_rows(log_weights_RHGN=log_weights)


def _check_remainder(
    index: Tensor | None, groups: Tensor | None, cache: tuple[int, int, int, int], selector: Selector
) -> None:
    """What attention with a remainder needs beside a cache [P, B, H, D]: rows of units and of groups."""
    if index is None or groups is None:
        raise UserError(
            "attention with a remainder needs index_PSHW and groups_PSHV",
            "give the rows that update_index and update_groups wrote",
        )
    blocks, block_tokens, heads, dim = cache
    rows = blocks, _units_per_block(block_tokens, selector), heads, selector.index_width(dim)
    _shapes(index_PSHW=(index, rows))
    _index_dtype(index, selector)
    _contiguous_rows(index_PSHW=index)
    _groups_shape(groups, cache, selector)


def _contiguous_rows(**named: Tensor) -> None:
    for name, tensor in named.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise UserError(
                f"the last axis of {name} must be contiguous, got strides {tuple(tensor.stride())}",
                "call .contiguous(), or pass a view whose last axis has stride 1",
            )


def _index_dtype(index: Tensor, selector: Selector) -> None:
    _dtype("index_PSHW", index, selector.index_dtype)


def _groups_shape(groups: Tensor, cache: tuple[int, int, int, int], selector: Selector) -> None:
    """Of the rows of a remainder's groups beside a cache [P, B, H, D]."""
    blocks, block_tokens, heads, dim = cache
    assert selector.remainder is not None, "a selector without a remainder"
    group = selector.remainder.group_tokens
    if block_tokens % group:
        raise UserError(
            f"a cache block must hold whole groups of {group} tokens, got blocks of {block_tokens}",
            f"use blocks of {-(-block_tokens // group) * group}",
        )
    _shapes(groups_PSHV=(groups, (blocks, block_tokens // group, heads, selector.group_width(dim))))
    _dtype("groups_PSHV", groups, torch.uint8)
    _contiguous_rows(groups_PSHV=groups)
    # Parts of a row are read as numbers of 2 and 4 bytes.
    if any(place % 4 for place in (*groups.stride()[:3], groups.storage_offset())):
        raise UserError(
            f"rows of groups must lie at multiples of 4 bytes, got strides {groups.stride()}",
            "allocate rows of selector.group_width(head_dim) bytes one after the other",
        )


def _units_per_block(block_tokens: int, selector: Selector) -> int:
    unit = selector.unit_tokens
    if block_tokens % unit:
        raise UserError(
            f"a cache block must hold whole units of {unit} tokens, got blocks of {block_tokens}",
            f"use blocks of {-(-block_tokens // unit) * unit}",
        )
    if unit & (unit - 1):
        raise UserError(f"units in a paged cache must be powers of two, got {unit} tokens", "page_tokens = 16")
    return block_tokens // unit


def check_scored(selector: Selector, impl: str) -> None:
    """Raise UserError where this implementation cannot score the units of such a selector."""
    if impl == "triton" and selector.kind not in _SCORED_BY_TRITON:
        raise UserError(
            f"no triton kernel scores units for the selector {selector.kind!r}",
            f"with kernels: {', '.join(_SCORED_BY_TRITON)}",
        )
