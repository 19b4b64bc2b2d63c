"""Which rollouts go through the model together: those of similar length, within a bound on padded tokens.
`TokenBatch.take` then cuts them out."""

from __future__ import annotations

from sparroll.engines.scoring import length_buckets
from sparroll.types import TokenBatch


def micro_batches(
    batch: TokenBatch, rows: list[int], most_tokens: int, most_rollouts: int | None = None
) -> list[list[int]]:
    """`rows` in groups with longest * count <= most_tokens. A rollout longer than that has a group to itself."""
    lengths = (batch.prompt_tokens_B + batch.response_tokens_B).tolist()
    groups = [[rows[i] for i in group] for group in length_buckets([lengths[row] for row in rows], most_tokens)]
    if most_rollouts is None:
        return groups
    return [group[i : i + most_rollouts] for group in groups for i in range(0, len(group), most_rollouts)]
