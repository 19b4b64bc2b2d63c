"""Which rollouts go through the model together: similar lengths, bounded padding, nothing that cannot move a weight."""

# B rollouts, S tokens of prompt + response, T response tokens

from __future__ import annotations

import torch
from torch import Tensor

from sparroll.engines.scoring import length_buckets
from sparroll.types import TokenBatch


def micro_batches(
    batch: TokenBatch, rows: list[int], most_tokens: int, most_rollouts: int | None = None
) -> list[list[int]]:
    """`rows` grouped so that longest * count <= most_tokens in a group; a rollout longer than that stands alone."""
    lengths = (batch.prompt_tokens_B + batch.response_tokens_B).tolist()
    groups = [[rows[i] for i in group] for group in length_buckets([lengths[row] for row in rows], most_tokens)]
    if most_rollouts is None:
        return groups
    return [group[i : i + most_rollouts] for group in groups for i in range(0, len(group), most_rollouts)]


def take(batch: TokenBatch, rows: list[int], device: torch.device) -> TokenBatch:
    """Those rows on the device, without the padding that only the other rows needed."""
    index = torch.tensor(rows)
    tokens_S = int((batch.prompt_tokens_B + batch.response_tokens_B)[index].max())
    tokens_T = int(batch.response_tokens_B[index].max())

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[index, :tokens_T].to(device)

    return TokenBatch(
        input_ids_BS=batch.input_ids_BS[index, :tokens_S].to(device),
        prompt_tokens_B=batch.prompt_tokens_B[index].to(device),
        response_tokens_B=batch.response_tokens_B[index].to(device),
        sparse_logp_BT=batch.sparse_logp_BT[index, :tokens_T].to(device),
        dense_logp_BT=cut(batch.dense_logp_BT),
        advantage_B=None if batch.advantage_B is None else batch.advantage_B[index].to(device),
    )


def padded(values: list[Tensor]) -> Tensor:
    """[B, T] from B tensors of different length, zeros behind their ends."""
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
