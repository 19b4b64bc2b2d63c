"""Importance weights with a free choice of level and action. Published combinations have their own names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sparroll.corrections.base import LEVELS, CorrectionResult, LogRatio, as_is, drop_outside, truncate
from sparroll.errors import UserError

_TAKES = {"truncate": ("weight_max",), "mask": ("weight_min", "weight_max"), "weight": ()}


@dataclass(frozen=True)
class Importance:
    """Combines any level with any action. Level "sequence" with action "weight" is the exact dense policy gradient.

    With level "geometric" and action "mask", kept responses are multiplied by the geometric mean. The correction
    `geometric` keeps the same responses at weight 1.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    """What a weight is: the token's p_dense / p_sparse, their product over the response, or their geometric mean over
    the response."""
    action: Literal["truncate", "mask", "weight"] = "weight"
    """truncate: min(weight, weight_max). mask: a token or response whose weight is outside of [weight_min, weight_max]
    is dropped; the ends are inside. weight: the weight as it is."""
    weight_min: float | None = None
    """Smallest weight that is kept. Needed for mask, and an error for the other actions."""
    weight_max: float | None = None
    """Largest weight for truncate, and largest weight that is kept for mask. An error for weight."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("weight_min", "weight_max"):
            given, takes = getattr(self, name) is not None, name in _TAKES[self.action]
            if given != takes:
                needed = " and ".join(_TAKES[self.action]) or "neither weight_min nor weight_max"
                what = f"was given {name}" if given else f"was given no {name}"
                raise UserError(f"correction 'importance' with action {self.action!r} {what}", f"it takes {needed}")

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio, level = LogRatio.of(dense_logp, sparse_logp, mask), LEVELS[self.level]
        if self.action == "weight":
            return as_is(ratio, level)
        assert self.weight_max is not None, "checked at the start"
        if self.action == "truncate":
            return truncate(ratio, level, self.weight_max)
        assert self.weight_min is not None, "checked at the start"
        return drop_outside(ratio, level, self.weight_min, self.weight_max)
