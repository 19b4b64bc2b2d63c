"""How far the sparse policy is from the dense one, token by token. Pure functions: nothing here runs a model,
summarises over tokens (see tail.py) or picks a budget.

Both policies must be distributions of the same kind: apply the temperature first, and never truncate (top-p, top-k)
only one of them.
"""

# *T any leading dimensions, one entry a token; V vocabulary, Kd and Ks entries of the dense and the sparse top-k list

# ruff: noqa: F722 (jaxtyping)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.types import check_tensors

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ESTIMATORS = ("exact", "top_k_lower", "top_k_upper", "sampled")
"""Names of the estimators. Figures of two estimators cannot be compared, so each figure is reported with its
estimator."""

LOGP_ABOVE_ZERO = 1e-3
"""Largest log-probability that is still taken for a rounded 0."""

_CHUNK_ELEMENTS = 2**24
"""Elements of a temporary tensor: 64 MiB in float32. Longer inputs are processed in slices of rows."""


@torch.no_grad()
def acceptance(dense_logits: Float[Tensor, "*T V"], sparse_logits: Float[Tensor, "*T V"]) -> Float[Tensor, "*T"]:
    """Probability mass that the two policies share at each position: sum_v min(p_v, q_v), in [0, 1] (Sparrow, eq. 2).

    This is the estimator "exact". It is exactly 1 if the logits are equal, and exactly 0 if no token is possible under
    both policies. A token that a policy excludes has logit -inf. Computed in float64 if one side is float64, otherwise
    in float32.
    """
    _check_pair(dense_logits, sparse_logits, "dense_logits", "sparse_logits")
    if dense_logits.shape != sparse_logits.shape:
        raise UserError(
            f"dense_logits and sparse_logits must have one shape, got {_shape(dense_logits)} and {_shape(sparse_logits)}",
            "score the same tokens with the same vocabulary on both sides",
        )
    if dense_logits.ndim == 0 or dense_logits.shape[-1] == 0:
        raise UserError(
            f"logits must be [.., V] with V of 1 or more, got {_shape(dense_logits)}",
            "the last dimension is the vocabulary",
        )
    double = torch.float64 in (dense_logits.dtype, sparse_logits.dtype)
    dtype = torch.float64 if double else torch.float32
    vocabulary = dense_logits.shape[-1]
    dense_NV, sparse_NV = dense_logits.reshape(-1, vocabulary), sparse_logits.reshape(-1, vocabulary)
    shared_N = torch.empty(len(dense_NV), dtype=dtype, device=dense_logits.device)
    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    named = (dense_NV, "dense_logits"), (sparse_NV, "sparse_logits")
    for start in range(0, len(dense_NV), rows):
        part = slice(start, start + rows)
        shared_N[part] = _shared_mass(
            *(_softmax(every_NV[part], dtype, name, start, len(every_NV)) for every_NV, name in named)
        )
    return shared_N.reshape(dense_logits.shape[:-1])


@torch.no_grad()
def acceptance_top_k(
    dense_ids: Int[Tensor, "*T Kd"],
    dense_logp: Float[Tensor, "*T Kd"],
    sparse_ids: Int[Tensor, "*T Ks"],
    sparse_logp: Float[Tensor, "*T Ks"],
) -> tuple[Float[Tensor, "*T"], Float[Tensor, "*T"]]:
    """Bounds of the acceptance from the most likely tokens of both sides: `lower <= acceptance <= upper`, in [0, 1].

    These are the estimators "top_k_lower" (the published one, with k = 20) and "top_k_upper". Lists may be in any order
    and of different lengths. Entries with log-probability -inf are padding, whatever their id. A token listed twice is
    refused.

    lower: sum of min(p, q) over the tokens on both lists, the intersection I.
    upper: lower + the most that all other tokens can share, min(1 - p(I), 1 - q(I), (1 - p(list)) + (1 - q(list))).
    It assumes nothing about how the lists were chosen. (Lower + min(1 - p(list), 1 - q(list)) is not a bound: with
    p = (.6, .3, .1), q = (.3, .4, .3) and lists of one token it gives .4, but the acceptance is .7.)
    """
    _check_pair(dense_logp, sparse_logp, "dense_logp", "sparse_logp")
    check_list(dense_ids, dense_logp, "dense_ids", "dense_logp")
    check_list(sparse_ids, sparse_logp, "sparse_ids", "sparse_logp")
    if dense_ids.shape[:-1] != sparse_ids.shape[:-1]:
        raise UserError(
            f"dense_ids and sparse_ids must agree in all dimensions but the last, got {_shape(dense_ids)} and "
            f"{_shape(sparse_ids)}",
            "give one list for each token on both sides",
        )
    tokens, leading = dense_ids.shape[:-1].numel(), dense_ids.shape[:-1]
    flat = [x.reshape(tokens, x.shape[-1]) for x in (dense_ids, dense_logp, sparse_ids, sparse_logp)]
    dtype = torch.promote_types(torch.promote_types(dense_logp.dtype, sparse_logp.dtype), torch.float32)
    bounds_2N = torch.empty(2, tokens, dtype=dtype, device=dense_logp.device)
    rows = max(1, _CHUNK_ELEMENTS // (dense_ids.shape[-1] * sparse_ids.shape[-1]))
    for start in range(0, tokens, rows):
        bounds_2N[:, start : start + rows] = _bounds(*(x[start : start + rows] for x in flat))
    return bounds_2N[0].reshape(leading), bounds_2N[1].reshape(leading)


@torch.no_grad()
def acceptance_sampled(dense_logp: Float[Tensor, "*T"], sparse_logp: Float[Tensor, "*T"]) -> Float[Tensor, "*T"]:
    """min(1, p/q) of the token that the sparse policy sampled, in [0, 1]. This is the estimator "sampled".

    Its expected mean over tokens is that of the acceptance, but **its percentiles are not**: never compare them with a
    target that was set for another estimator. A dense log-probability of -inf gives 0. A sparse one is an error,
    because such a token cannot have been sampled.
    """
    _check_pair(dense_logp, sparse_logp, "dense_logp", "sparse_logp")
    if dense_logp.shape != sparse_logp.shape:
        raise UserError(
            f"dense_logp and sparse_logp must have one shape, got {_shape(dense_logp)} and {_shape(sparse_logp)}",
            "give the log-probability of the same sampled tokens on both sides",
        )
    check_logp(dense_logp, "dense_logp")
    check_logp(sparse_logp, "sparse_logp")
    if bool(torch.isneginf(sparse_logp).any()):
        raise UserError(
            f"sparse_logp is -inf at {_first(torch.isneginf(sparse_logp))}: a token of probability 0 cannot be sampled",
            "pass the log-probabilities that the sampling engine returned with the rollout",
        )
    dtype = torch.promote_types(torch.promote_types(dense_logp.dtype, sparse_logp.dtype), torch.float32)
    return (dense_logp.to(dtype) - sparse_logp.to(dtype)).clamp(max=0).exp()


def _softmax(logits_NV: Tensor, dtype: torch.dtype, name: str, first: int, of: int) -> Tensor:
    """Probabilities of the rows from the first on, of so many. Raises UserError for rows that have none, which their maxima
    show: NaN, +inf, or only -inf."""
    top_N = logits_NV.amax(-1)
    if not bool(torch.isfinite(top_N).all()):
        row = int((~torch.isfinite(top_N)).nonzero()[0, 0])
        what = "NaN" if bool(torch.isnan(top_N[row])) else "+inf" if bool(top_N[row] > 0) else "only -inf"
        raise UserError(
            f"{name} hold {what} in row {first + row} of {of}",
            "find where the forward pass overflows (try bf16 or fp32 instead of fp16); each row needs a possible token",
        )
    return torch.softmax(logits_NV, dim=-1, dtype=dtype).contiguous()


def _shared_mass(dense_NV: Tensor, sparse_NV: Tensor) -> Tensor:
    """[N] mass that both share. It is divided by the rounded sum of a distribution, added up in the same order, so that
    equal distributions give 1 and not 1 - 1e-7."""
    whole_N = torch.maximum(dense_NV.sum(-1), sparse_NV.sum(-1))
    return (torch.minimum(dense_NV, sparse_NV, out=dense_NV).sum(-1) / whole_N).clamp(0, 1)


def _bounds(dense_ids: Tensor, dense_logp: Tensor, sparse_ids: Tensor, sparse_logp: Tensor) -> Tensor:
    """[2, N] lower and upper bound. Computed in float64, because the remaining masses are small differences."""
    dense_ND, sparse_NS = dense_logp.double().exp(), sparse_logp.double().exp()
    ids_ND, (ids_NS, order_NS) = _padding_apart(dense_ids, dense_logp), _padding_apart(sparse_ids, sparse_logp).sort(-1)
    place_ND = torch.searchsorted(ids_NS, ids_ND).clamp_(max=ids_NS.shape[-1] - 1)
    common_ND = ids_NS.gather(-1, place_ND) == ids_ND
    common_dense_ND = dense_ND * common_ND
    common_sparse_ND = sparse_NS.gather(-1, order_NS).gather(-1, place_ND) * common_ND
    lower_N = torch.minimum(common_dense_ND, common_sparse_ND).sum(-1)
    unlisted_N = (1 - dense_ND.sum(-1)).clamp_min(0) + (1 - sparse_NS.sum(-1)).clamp_min(0)
    common_N = torch.maximum(common_dense_ND.sum(-1), common_sparse_ND.sum(-1))
    elsewhere_N = torch.minimum((1 - common_N).clamp_min(0), unlisted_N)
    return torch.stack([lower_N, lower_N + elsewhere_N]).clamp(0, 1)


def _padding_apart(ids: Tensor, logp: Tensor) -> Tensor:
    """Ids whose padding has ids of its own, which differ within a list. Padding of two lists may agree: it has no mass."""
    own_K = torch.iinfo(torch.int64).max - torch.arange(ids.shape[-1], device=ids.device)
    return torch.where(torch.isneginf(logp), own_K, ids.long()).contiguous()


def check_list(ids: Tensor, logp: Tensor, ids_name: str, logp_name: str) -> None:
    """Raise UserError unless these are top-k lists [.., K]: distinct ids, and log-probabilities with a total mass of 1
    at most. Entries of -inf are padding."""
    check_tensors(**{ids_name: ids, logp_name: logp})
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"{ids_name} must be integers, got {ids.dtype}", f"was {logp_name} passed in its place?")
    if ids.shape != logp.shape or ids.ndim == 0 or ids.shape[-1] == 0:
        raise UserError(
            f"{ids_name} and {logp_name} must have one shape [.., K] with K of 1 or more, got {_shape(ids)} and "
            f"{_shape(logp)}",
            "ask the engine for top-k lists (top_k=20) on both sides",
        )
    if ids.device != logp.device:
        raise UserError(f"{ids_name} is on {ids.device} and {logp_name} on {logp.device}", "move both to one device")
    check_logp(logp, logp_name)
    listed = ~torch.isneginf(logp)
    if not bool(listed.any(-1).all()):
        raise UserError(
            f"{logp_name} holds only -inf at {_first(~listed.any(-1))}, so the list there is empty",
            "leave out tokens without a list, on both sides",
        )
    p = logp.double().exp()
    mass = p.sum(-1)
    # Each log-probability may be off by its rounding, which in bf16 is far more than the rest.
    rounding = torch.finfo(logp.dtype).eps * (p * logp.double().abs()).nan_to_num(0).sum(-1)
    too_much = mass > 1 + rounding.clamp_min(LOGP_ABOVE_ZERO)
    if bool(too_much.any()):
        raise UserError(
            f"{logp_name} holds a probability mass of {float(mass.max()):.6g} at {_first(too_much)}",
            "pass log-probabilities over the whole vocabulary, not logits or values renormalised over the list",
        )
    _check_distinct(ids, logp, ids_name)


def _check_distinct(ids: Tensor, logp: Tensor, name: str) -> None:
    sorted_ids = _padding_apart(ids, logp).sort(-1).values
    twice = sorted_ids[..., 1:] == sorted_ids[..., :-1]
    if bool(twice.any()):
        raise UserError(
            f"{name} lists token {int(sorted_ids[..., 1:][twice][0])} twice at {_first(twice.any(-1))}",
            "list each token once; pad with log-probability -inf",
        )


def check_logp(logp: Tensor, name: str) -> None:
    """Raise UserError if a value is NaN or above 0."""
    # NaN fails this comparison, too.
    wrong = ~(logp <= LOGP_ABOVE_ZERO)
    if bool(wrong.any()):
        raise UserError(
            f"{name} must be log-probabilities (at most 0), got {float(logp[wrong][0]):.6g} at {_first(wrong)}",
            "pass log_softmax over the whole vocabulary, after temperature; for NaN, look for an overflow in the model",
        )


def _check_pair(dense: Tensor, sparse: Tensor, dense_name: str, sparse_name: str) -> None:
    check_tensors(**{dense_name: dense, sparse_name: sparse})
    for value, name in ((dense, dense_name), (sparse, sparse_name)):
        if not value.is_floating_point():
            raise UserError(f"{name} must be floating point, got {value.dtype}", "were token ids passed in its place?")
    if dense.device != sparse.device:
        raise UserError(f"{dense_name} is on {dense.device} and {sparse_name} on {sparse.device}", "move both to one")


def _shape(value: Tensor) -> list[int]:
    return list(value.shape)


def _first(wrong: Tensor) -> str:
    """Position of the first true entry, e.g. "[3, 17]"."""
    return str(wrong.nonzero()[0].tolist())
