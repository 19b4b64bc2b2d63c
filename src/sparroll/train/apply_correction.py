"""One step's rollouts through the correction: the whole step at once on every process, of which each keeps its own rows. The
rules are in corrections/; the update reads what comes out."""

# B our rollouts, T response tokens (right-padded)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from sparroll.corrections import AcceptedMass, Correction, CorrectionResult, TopKLists
from sparroll.corrections.base import NowWeights
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.runtime.randomness import correction_uniforms
from sparroll.train.update.micro_batches import padded
from sparroll.types import Rollout, StepReport, TokenScores

Columns = dict[str, Tensor]
"""What a correction reads of one rollout, [T] each; small enough to gather from all processes."""


class ReadsLists(Protocol):
    """A correction that needs "top_k": what it makes of one rollout's lists, a number a token."""

    def condense(self, lists: TopKLists) -> AcceptedMass: ...


@dataclass
class Corrected:
    """Our rows of the correction of the whole step."""

    weights_BT: Tensor
    """As the first update of the step has them."""
    kept_BT: Tensor
    kept_tokens: int
    """Kept tokens of the step, over all processes: the loss's denominator."""
    report: StepReport
    now_weights: NowWeights | None = None

    def weights(self, members: list[int], now_logp_BT: Tensor) -> Tensor:
        """Weights of these rows at the policy as it is now, on its device."""
        tokens_T, device = now_logp_BT.shape[1], now_logp_BT.device
        if self.now_weights is None:
            return self.weights_BT[members, :tokens_T].to(device)
        return self.now_weights.rows(members, tokens_T).to(device)(now_logp_BT)


def correct(
    correction: Correction,
    rollouts: list[Rollout],
    scores: list[TokenScores],
    ranks: Ranks,
    seed: int,
    step: int,
    left_out: Sequence[bool] | None = None,
) -> Corrected:
    """Every process corrects the whole step's batch, so that a correction may normalise over it, and takes its own rows.

    left_out: of each rollout, whether it is none of the correction's business: nothing of it is kept, counted or reported.
    """
    outside = [False] * len(rollouts) if left_out is None else list(left_out)
    mine = [
        (rollout.prompt_index, rollout.sample_index, _columns(correction, rollout, score, seed, step), out)
        for rollout, score, out in zip(rollouts, scores, outside, strict=True)
    ]
    gathered = sorted(ranks.gather(mine), key=lambda row: row[:2])
    rows: list[Columns] = [row[2] for row in gathered]
    mask_BT = padded([torch.full((len(row[2]["dense_logp"]),), not row[3]) for row in gathered])
    call: Callable[..., CorrectionResult] = correction
    result = call(mask=mask_BT, **_arguments(rows))
    kept_BT = result.kept(mask_BT)
    place = {row[:2]: number for number, row in enumerate(gathered)}
    own = torch.tensor([place[row[:2]] for row in mine], dtype=torch.int64)
    own_T = max((len(row[2]["dense_logp"]) for row in mine), default=0)
    difference = torch.cat([row["sparse_logp"] - row["dense_logp"] for row in rows])
    finite = difference[torch.isfinite(difference)]
    report = result.metrics | ({"mismatch/kl_sparse_to_dense": float(finite.mean())} if len(finite) else {})
    if left_out is not None:
        report["policy/left_out_rollouts"] = float(sum(row[3] for row in gathered))
    return Corrected(
        result.weights[own, :own_T],
        kept_BT[own, :own_T],
        int(kept_BT.sum()),
        report,
        None if result.now_weights is None else result.now_weights.rows(own, own_T),
    )


def _columns(correction: Correction, rollout: Rollout, score: TokenScores, seed: int, step: int) -> Columns:
    """Lists of the most likely tokens are condensed before they are gathered: at 20 entries a side they would be by far the
    largest thing that processes send each other."""
    columns = {"dense_logp": score.logp, "sparse_logp": rollout.sparse_logp}
    if "uniforms" in correction.needs:
        columns["uniforms"] = correction_uniforms(seed, step, rollout)
    if "top_k" in correction.needs:
        mass = cast("ReadsLists", correction).condense(_lists(rollout, score))
        columns |= {"mass": mass.values, "whole": mass.whole}
    return columns


def engine_lists(rollouts: list[Rollout]) -> list[Tensor]:
    """[T, K] ids of each rollout: what the dense policy is asked about where both lists are compared."""
    ids = [rollout.top_k.ids for rollout in rollouts if rollout.top_k is not None]
    assert len(ids) == len(rollouts), "rollouts need top-k lists"
    return ids


def _lists(rollout: Rollout, score: TokenScores) -> TopKLists:
    assert rollout.top_k is not None, "rollouts need top-k lists"
    assert score.top_k is not None, "scores need top-k lists"
    assert score.logp_at_ids is not None, "scores need the engine's list"
    return TopKLists(sparse=rollout.top_k, dense=score.top_k, dense_at_sparse=score.logp_at_ids)


def _arguments(rows: list[Columns]) -> dict[str, Tensor | AcceptedMass]:
    """[B, T] of all rollouts, by the names that corrections use."""
    batch = {name: padded([row[name] for row in rows]) for name in rows[0]}
    if "mass" in batch:
        return batch | {"top_k": AcceptedMass(batch.pop("mass"), batch.pop("whole"))}
    return dict(batch)
