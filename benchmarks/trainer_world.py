"""What the checks of other trainers' code share: made-up log-probabilities, the gradient that our corrections give on them,
and names that are read in a file without importing it. Knows no trainer."""

# B responses, T tokens

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparroll.corrections import correction

B, T = 96, 24


@dataclass(frozen=True)
class World:
    """Responses under two policies, from nearly equal ones to such on which every correction does something."""

    dense_BT: Tensor
    sparse_BT: Tensor
    advantage_B: Tensor
    mask_BT: Tensor
    """bool; responses have different lengths."""

    @staticmethod
    def made(seed: int = 0) -> World:
        random = torch.Generator().manual_seed(seed)
        sparse = -0.05 - 3 * torch.rand(B, T, generator=random)
        noise = torch.linspace(0.002, 1.2, B)[:, None] * torch.randn(B, T, generator=random)
        dense = (sparse + noise).clamp(max=-1e-3)
        # On every seventh response there is a token that the dense policy would practically never say.
        dense[::7, 1] = sparse[::7, 1] - 11.0
        mask = torch.arange(T) < torch.randint(4, T + 1, (B, 1), generator=random)
        return World(dense * mask, sparse * mask, torch.randn(B, generator=random), mask)


def our_gradient(name: str, world: World, **settings: float) -> tuple[Tensor, float]:
    """([B, T] gradient of the summed token losses by the log-probabilities under a correction, share of kept tokens)"""
    result = correction(name, **settings)(dense_logp=world.dense_BT, sparse_logp=world.sparse_BT, mask=world.mask_BT)
    kept = result.kept(world.mask_BT)
    gradient = -(result.weights * world.advantage_B[:, None]).masked_fill(~kept, 0.0)
    return gradient, float(kept.sum() / world.mask_BT.sum())


def compared(
    name: str, settings: dict[str, Any], theirs: Callable[[Tensor, World], Tensor], **ours: float
) -> dict[str, Any]:
    """A row: our correction beside a trainer's own loss under `settings`. theirs: log-probabilities [B, T] that require a
    gradient, and the world -> the loss, summed over tokens. The difference is the largest of any token, in units of the
    gradient."""
    world = World.made()
    expected, kept_share = our_gradient(name, world, **ours)
    now = world.dense_BT.clone().requires_grad_()
    theirs(now, world).backward()
    assert now.grad is not None
    difference = float((now.grad - expected).abs().max())
    return {"ours": name, "settings": settings, "difference": difference, "kept_share": kept_share}


def methods_of(path: Path, names: Sequence[str]) -> list[str]:
    """Methods of the classes of these names in a file, which is not imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names]
    found = {
        item.name for each in classes for item in each.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return sorted(name for name in found if not name.startswith("__"))
