"""Keys and values of a step's tokens on their way into the cache. The kernel that scores units can store them, too, so that
no kernel is launched for them alone: scoring reads neither keys nor values, and attention runs after it."""

# T new tokens, P blocks, B tokens per block, H kv heads, D head dim

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.errors import UserError


@dataclass(frozen=True)
class NewTokens:
    """What is to be stored, and where."""

    keys_THD: Tensor
    values_THD: Tensor
    slots_T: Tensor
    """int: block * B + offset of each; negative for padding, which is not stored."""
    keys_PBHD: Tensor
    values_PBHD: Tensor

    @staticmethod
    def none(keys_PBHD: Tensor, values_PBHD: Tensor) -> NewTokens:
        """Of a step whose tokens lie in the cache by now. A kernel that can store is not compiled anew for it."""
        slots = torch.empty(0, dtype=torch.int64, device=keys_PBHD.device)
        return NewTokens(keys_PBHD[:0, 0], values_PBHD[:0, 0], slots, keys_PBHD, values_PBHD)

    @staticmethod
    def held_at(slots_T: Tensor, keys_PBHD: Tensor, values_PBHD: Tensor) -> NewTokens:
        """What a cache holds at these slots, to be stored there again. For checks and measurements."""
        held_T = slots_T.clamp_min(0)
        place = held_T // keys_PBHD.shape[1], held_T % keys_PBHD.shape[1]
        return NewTokens(keys_PBHD[place], values_PBHD[place], slots_T, keys_PBHD, values_PBHD)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Block and offset of each token that is no padding."""
        slots_X, block_tokens = self.slots_T[self.slots_T >= 0].long(), self.keys_PBHD.shape[1]
        return slots_X // block_tokens, slots_X % block_tokens

    def check(self, heads: int, dim: int) -> None:
        """Raises UserError where shapes or types differ, also from what scores, and where heads are not contiguous."""
        if tuple(self.keys_PBHD.shape[2:]) != (heads, dim):
            raise UserError(f"keys_PBHD must have {heads} heads of {dim}, got {tuple(self.keys_PBHD.shape[2:])}")
        if self.slots_T.dim() != 1 or self.slots_T.is_floating_point():
            raise UserError(
                f"slots_T must be a row of whole numbers, got {self.slots_T.dtype} in {self.slots_T.dim()} axes"
            )
        expected = (len(self.slots_T), heads, dim)
        for name in ("keys_THD", "values_THD"):
            found = getattr(self, name)
            if tuple(found.shape) != expected:
                raise UserError(f"{name} must have shape {expected}, got {tuple(found.shape)}")
        if self.values_PBHD.shape != self.keys_PBHD.shape:
            raise UserError(
                f"values_PBHD must have shape {tuple(self.keys_PBHD.shape)}, got {tuple(self.values_PBHD.shape)}"
            )
        held = self.keys_THD, self.values_THD, self.keys_PBHD, self.values_PBHD
        if any(each.dtype != self.keys_PBHD.dtype for each in held):
            raise UserError(
                f"new tokens must have the cache's type, {self.keys_PBHD.dtype}; got {self.keys_THD.dtype} and "
                f"{self.values_THD.dtype} for a cache of {self.keys_PBHD.dtype} and {self.values_PBHD.dtype}",
                "convert them",
            )
        if any(each.stride(-1) != 1 for each in held):
            raise UserError("keys and values of new tokens must be contiguous in their last axis", "call .contiguous()")
