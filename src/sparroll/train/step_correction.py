"""Applies the correction to one step's rollouts. Every process corrects the whole step and keeps its own rows. The
formulas are in corrections/; the weights go into the batch that the update reads."""

# B our rollouts, T response tokens (right-padded)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from sparroll.corrections import AcceptedMass, Correction, CorrectionResult, TopKLists
from sparroll.mismatch.step_metrics import distance_report
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.runtime.randomness import correction_uniforms
from sparroll.types import Rollout, StepReport, TokenBatch, TokenScores, padded

Columns = dict[str, Tensor]
"""What a correction reads of one rollout, [T] each. Columns are small enough to gather from all processes."""


class ReadsLists(Protocol):
    """A correction that needs "top_k". It condenses one rollout's lists to one number per token."""

    def condense(self, lists: TopKLists) -> AcceptedMass: ...


def correct_step(
    correction: Correction,
    batch: TokenBatch,
    rollouts: list[Rollout],
    scores: list[TokenScores],
    ranks: Ranks,
    seed: int,
    step: int,
    control: Sequence[bool] = (),
    sparse_at_dense: Sequence[Tensor] | None = None,
) -> StepReport:
    """Fill in the weights and kept tokens of the batch, whose rows are these rollouts. -> metrics of the whole step

    Every process corrects the whole step's batch, so that a correction may normalise over it. Rollouts that stay out of
    the loss keep no token, and the correction's metrics do not count them. control: which of the rollouts are of the
    control group, empty for none; they are corrected like the others, but the distance to the dense policy is that of
    the sparse ones. sparse_at_dense: [T, K] for each rollout, the sparse policy's log-probabilities of the dense list, for
    a correction that compares lists; None: it knows the engine's list alone.
    """
    at_dense: Sequence[Tensor | None] = sparse_at_dense or [None] * len(rollouts)
    left_out = [False] * len(batch) if batch.left_out_B is None else batch.left_out_B.tolist()
    mine = [
        (
            rollout.prompt_index,
            rollout.sample_index,
            _columns(correction, rollout, score, other, seed, step),
            out,
            dense,
        )
        for rollout, score, other, out, dense in zip(
            rollouts, scores, at_dense, left_out, control or [False] * len(rollouts), strict=True
        )
    ]
    gathered = sorted(ranks.gather(mine), key=lambda row: row[:2])
    rows: list[Columns] = [row[2] for row in gathered]
    mask_BT = padded([torch.full((len(row[2]["dense_logp"]),), not row[3]) for row in gathered])
    call: Callable[..., CorrectionResult] = correction
    result = call(mask=mask_BT, **_arguments(rows))
    kept_BT = result.kept(mask_BT)
    place = {row[:2]: number for number, row in enumerate(gathered)}
    own_B = torch.tensor([place[row[:2]] for row in mine], dtype=torch.int64)
    own_T = batch.sparse_logp_BT.shape[1]
    batch.weight_BT, batch.kept_BT = result.weights[own_B, :own_T], kept_BT[own_B, :own_T]
    batch.kept_tokens = int(kept_BT.sum())
    batch.now_weights = None if result.now_weights is None else result.now_weights.rows(own_B, own_T)
    left_out_report = {"policy/left_out_rollouts": float(sum(row[3] for row in gathered))}
    return (
        result.metrics
        | _distance([row[2] for row in gathered if not row[4]])
        | (left_out_report if batch.left_out_B is not None else {})
    )


def _distance(rows: list[Columns]) -> StepReport:
    dense, sparse = (torch.cat([row[name] for row in rows]) for name in ("dense_logp", "sparse_logp"))
    return distance_report(dense, sparse)


def _columns(
    correction: Correction, rollout: Rollout, score: TokenScores, at_dense: Tensor | None, seed: int, step: int
) -> Columns:
    """Top-k lists are condensed before they are gathered: at 20 entries a side they would be by far the largest thing
    that processes send each other."""
    columns = {"dense_logp": score.logp, "sparse_logp": rollout.sparse_logp}
    if "uniforms" in correction.needs:
        columns["uniforms"] = correction_uniforms(seed, step, rollout)
    if "top_k" in correction.needs:
        mass = cast("ReadsLists", correction).condense(_lists(rollout, score, at_dense))
        columns |= {"mass": mass.values, "whole": mass.whole}
    return columns


def engine_lists(rollouts: list[Rollout]) -> list[Tensor]:
    """[T, K] ids of each rollout's top-k list, for which a correction that compares both lists needs dense
    log-probabilities."""
    ids = [rollout.top_k.ids for rollout in rollouts if rollout.top_k is not None]
    assert len(ids) == len(rollouts), "rollouts need top-k lists"
    return ids


def _lists(rollout: Rollout, score: TokenScores, at_dense: Tensor | None) -> TopKLists:
    assert rollout.top_k is not None, "rollouts need top-k lists"
    assert score.top_k is not None, "scores need top-k lists"
    assert score.logp_at_ids is not None, "scores need the engine's list"
    return TopKLists(rollout.top_k, score.top_k, score.logp_at_ids, at_dense)


def _arguments(rows: list[Columns]) -> dict[str, Tensor | AcceptedMass]:
    """Padded columns [B, T] of all rollouts, by the names of the correction's arguments."""
    batch = {name: padded([row[name] for row in rows]) for name in rows[0]}
    if "mass" in batch:
        return batch | {"top_k": AcceptedMass(batch.pop("mass"), batch.pop("whole"))}
    return dict(batch)
