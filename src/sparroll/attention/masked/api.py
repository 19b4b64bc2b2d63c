"""Causal attention of whole sequences in which every position reads its own units: differentiable, without a T x T
matrix.

This file checks the arguments; the implementation that the caller names does the work: "reference" (plain PyTorch, any
device) or "triton" (CUDA). An implementation that cannot run is an error. The units are given as a bit map
(unit_bitmap.py).
"""

# B sequences, S positions, A query heads, H kv heads, U units, P blocks of 32 positions, D head dimension

from __future__ import annotations

import os

import torch
from torch import Tensor

from sparroll.attention.masked import reference as masked_reference
from sparroll.attention.masked.unit_bitmap import WORD_POSITIONS
from sparroll.errors import UserError, nearest

IMPLEMENTATIONS = ("reference", "triton")


def implementation(asked: str, device: torch.device | str) -> str:
    """The implementation that runs where `asked` is given: "auto" is triton on CUDA, and the reference elsewhere.

    Raises UserError for an unknown name, and where triton cannot run: "auto" on CUDA never falls back to the reference.
    """
    device = torch.device(device)
    if asked not in (*IMPLEMENTATIONS, "auto"):
        raise UserError(f"no masked attention implementation {asked!r}", nearest(asked, [*IMPLEMENTATIONS, "auto"]))
    if asked == "auto":
        asked = "triton" if device.type == "cuda" else "reference"
    if asked == "triton":
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError(f'impl="triton" needs CUDA tensors, got {device}', 'impl="reference" runs anywhere')
        try:
            import triton  # noqa: F401
        except ModuleNotFoundError:
            raise UserError(
                'impl="triton" needs triton, which is not installed', "pip install triton (Linux)"
            ) from None
    return asked


def check_offsets(*given_BXSD: Tensor) -> None:
    """Raise UserError where the kernels could not address a tensor: they count the elements from a sequence's first
    position to its last one in 32 bits."""
    for given in given_BXSD:
        _, heads, tokens, dim = given.shape
        # What they write has a position's heads side by side, whatever the input has.
        if tokens * max(given.stride(2), heads * dim) >= 2**31:
            raise UserError(
                f"a sequence of {tokens:,} tokens with {heads} heads of {dim} is too long for the kernels of a pass",
                "shorten the sequences of training and scoring (max_new_tokens)",
            )


def masked_attention(
    query_BASD: Tensor,
    keys_BHSD: Tensor,
    values_BHSD: Tensor,
    words_BHPU: Tensor,
    unit_tokens: int,
    scale: float,
    impl: str = "reference",
) -> Tensor:
    """Softmax attention [B, A, S, D] of each position over the tokens at or before it that lie in the units it reads.

    Query head a belongs to KV head a // (A / H), whose words say what is read; `scale` multiplies q.k. A position that
    reads nothing gives zeros. Gradients reach query, keys and values. Apart from these and the output, memory is O(S)
    for each head, plus lists with 4 bytes for each word.
    """
    batch, heads, tokens, dim = keys_BHSD.shape
    blocks, units = -(-tokens // WORD_POSITIONS), -(-tokens // unit_tokens)
    for name, given, shape in (
        ("query_BASD", query_BASD, (batch, query_BASD.shape[1], tokens, dim)),
        ("values_BHSD", values_BHSD, (batch, heads, tokens, dim)),
        ("words_BHPU", words_BHPU, (batch, heads, blocks, units)),
    ):
        if tuple(given.shape) != shape:
            raise UserError(f"{name} must have shape {shape}, got {tuple(given.shape)}")
    if query_BASD.shape[1] % heads:
        raise UserError(f"{query_BASD.shape[1]} query heads cannot share {heads} kv heads evenly")
    if words_BHPU.dtype != torch.int32:
        raise UserError(f"words_BHPU must be {torch.int32}, got {words_BHPU.dtype}")
    for name, given in (("keys_BHSD", keys_BHSD), ("values_BHSD", values_BHSD)):
        if given.dtype != query_BASD.dtype:
            raise UserError(f"{name} must be {query_BASD.dtype} like the query, got {given.dtype}")
    if implementation(impl, query_BASD.device) == "reference":
        return masked_reference.masked_attention(query_BASD, keys_BHSD, values_BHSD, words_BHPU, unit_tokens, scale)
    from sparroll.attention.masked import triton_forward

    check_offsets(query_BASD, keys_BHSD, values_BHSD)
    return triton_forward.masked_attention(query_BASD, keys_BHSD, values_BHSD, words_BHPU, unit_tokens, scale)
