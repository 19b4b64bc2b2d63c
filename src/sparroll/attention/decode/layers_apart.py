"""How far apart the caches of several layers lie, so that one launch can write to all of them."""

# P blocks, B tokens per block, S units per block, H kv heads, D head dim, W index row width, L layers

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparroll.errors import UserError

ALIGNED_BYTES = 16
"""Layers lie apart a multiple of this, so that kernels may load so many bytes at a time."""


def layers_apart(caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """caches: keys [P, B, H, D] and index rows [P, S, H, W] of each layer.

    Returns [2, L] int64 on their device: the bytes from the first layer's keys to those of each layer, and the same of the
    index rows. It holds as long as the caches stay where they are. It is copied to the device, so it must not be made
    inside a CUDA graph. Raises UserError where layers are not laid out alike, or not aligned alike.
    """
    if not caches:
        raise UserError("there is no layer whose index could be kept", "pass the caches of at least one layer")
    keys, index = zip(*caches, strict=True)
    for name, held in (("keys", keys), ("index rows", index)):
        layouts = {(each.device, each.dtype, tuple(each.shape), each.stride()) for each in held}
        if len(layouts) > 1:
            raise UserError(
                f"the {name} of {len(held)} layers are laid out in {len(layouts)} ways",
                "update the index of each layer by itself",
            )
    apart = [[each.data_ptr() - held[0].data_ptr() for each in held] for held in (keys, index)]
    if any(bytes_apart % ALIGNED_BYTES for row in apart for bytes_apart in row):
        raise UserError(
            f"the caches of layers must lie apart a multiple of {ALIGNED_BYTES} bytes",
            "update the index of each layer by itself",
        )
    # The device is named because vLLM builds models under another default device.
    return torch.tensor(apart, dtype=torch.int64, device="cpu").to(keys[0].device)
