"""How likely rejection sampling is to keep a token, estimated from both policies' most likely tokens. The functions
depend on these lists alone, not on which token was sampled or whether it was kept."""

# *T any leading dimensions, one entry a token; Ks and Kd entries of the sparse and the dense list

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch.acceptance import check_list, check_logp
from sparroll.types import TopK


@dataclass(frozen=True)
class TopKLists:
    """The most likely tokens of both policies at each position, each list also with the other policy's
    log-probabilities.

    >>> TopKLists(sparse=rollout.top_k, dense=score.top_k, dense_at_sparse=score.logp_at_ids)
    """

    sparse: TopK
    """[*T, Ks] the sparse policy's list."""
    dense: TopK
    """[*T, Kd] the dense policy's list."""
    dense_at_sparse: Tensor
    """[*T, Ks] the dense policy's log-probabilities of the sparse list."""
    sparse_at_dense: Tensor | None = None
    """[*T, Kd] the sparse policy's log-probabilities of the dense list. An engine returns only its own list, so this is
    None in a training run."""

    def __post_init__(self) -> None:
        """Raises UserError for shapes that do not fit each other. Values are checked where they are used."""
        own, other = self.sparse.ids.shape, self.dense.ids.shape
        values = (("dense_at_sparse", self.dense_at_sparse, own), ("sparse_at_dense", self.sparse_at_dense, other))
        for name, value, shape in values:
            if value is not None and value.shape != shape:
                raise UserError(f"{name} must have the shape of its list, {list(shape)}, got {list(value.shape)}")
        if own[:-1] != other[:-1]:
            raise UserError(f"both lists need an entry for each token, got {list(own)} and {list(other)}")

    def at(self, mask: Tensor) -> TopKLists:
        """The lists of the tokens where `mask` [*T] is true, as rows [N, K]."""
        sparse_at_dense = None if self.sparse_at_dense is None else self.sparse_at_dense[mask]
        return TopKLists(self.sparse[mask], self.dense[mask], self.dense_at_sparse[mask], sparse_at_dense)


@dataclass(frozen=True)
class AcceptedMass:
    """sum_v min(q_v, p_v / scale) at each position: the probability that a token sampled from q is kept there."""

    values: Tensor
    """[*T] float64, in [0, 1]: the sum over the tokens for which both values are known, so it is a lower bound."""
    whole: Tensor
    """[*T] bool: whether the sum covers the union of both lists."""


@torch.no_grad()
def accepted_mass(lists: TopKLists, scale: float) -> AcceptedMass:
    """The sum over the union of both lists. Where the sparse policy's values on the dense list are missing, the sum is
    over the sparse list only, which is a lower bound.

    The sampled token is not added, although both of its values are known: if the mass depended on what was sampled, the
    weight of a token would depend on its own draw.
    """
    sparse, dense = lists.sparse, lists.dense
    if sparse.ids.shape[:-1].numel() == 0:
        empty = sparse.ids.new_zeros(sparse.ids.shape[:-1])
        return AcceptedMass(empty.double(), empty.bool())
    _check(lists)
    sparse_q, sparse_p = sparse.logp.double().exp(), lists.dense_at_sparse.double().exp()
    values = torch.minimum(sparse_q, sparse_p / scale).sum(-1)
    same = (dense.ids[..., :, None] == sparse.ids[..., None, :]) & (sparse_q > 0)[..., None, :]
    dense_p = dense.logp.double().exp()
    missing = ~same.any(-1) & (dense_p > 0)
    if lists.sparse_at_dense is None:
        return AcceptedMass(values, ~missing.any(-1))
    more = torch.minimum(lists.sparse_at_dense.double().exp(), dense_p / scale)
    return AcceptedMass(values + more.masked_fill(~missing, 0.0).sum(-1), torch.ones_like(missing[..., 0]))


def _check(lists: TopKLists) -> None:
    check_list(lists.sparse.ids, lists.sparse.logp, "sparse.ids", "sparse.logp")
    check_list(lists.dense.ids, lists.dense.logp, "dense.ids", "dense.logp")
    check_logp(lists.dense_at_sparse, "dense_at_sparse")
    if lists.sparse_at_dense is not None:
        check_logp(lists.sparse_at_dense, "sparse_at_dense")
