"""Checks whether given weights fit a model: their names and shapes must be those of its transformers config. No tensor
is moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from sparroll.errors import UserError
from sparroll.types import is_whole

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def expected_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a checkpoint of such a model. Allocates no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def checked(
    weights: nn.Module | Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], tied: bool
) -> list[tuple[str, Tensor]]:
    """Names and tensors as an engine loads them. tied: whether the output head is the embedding; the weights may
    then contain it once or twice.

    Raises UserError where a name is missing or unknown, a shape is wrong, or tied weights differ.
    """
    if not isinstance(weights, (nn.Module, Mapping)):
        raise _unfit(f"they must be a model or a table of tensors, got {type(weights).__name__}")
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise _unfit(f"{name} must be a tensor, got {type(tensor).__name__}")
    found = {name: tensor.detach() for name, tensor in state.items()}
    if tied and _HEAD in found and _EMBEDDING in found:
        head = found.pop(_HEAD)
        if head.shape == found[_EMBEDDING].shape and not _equal(head, found[_EMBEDDING]):
            if head.isnan().any():
                # NaN equals nothing, itself included.
                raise _unfit(f"{_HEAD} holds NaN")
            raise _unfit(f"{_HEAD} differs from {_EMBEDDING}, which this model shares")
    needed = {name: shape for name, shape in expected.items() if not (tied and name == _HEAD)}
    missing, unknown = sorted(needed.keys() - found.keys()), sorted(found.keys() - needed.keys())
    if missing:
        raise _unfit(f"{len(missing)} tensors are missing, {missing[0]} among them")
    if unknown:
        raise _unfit(f"{len(unknown)} tensors are not the model's, {unknown[0]} among them")
    for name, shape in needed.items():
        if tuple(found[name].shape) != shape:
            raise _unfit(f"{name} must have shape {list(shape)}, got {list(found[name].shape)}")
    return [(name, found[name]) for name in needed]


def check_version(version: int, present: int) -> None:
    """Raise UserError unless the version of new weights is a whole number above the present one."""
    if not is_whole(version) or version <= present:
        raise UserError(f"weight version must rise above {present}, got {version!r}", "give a whole number")


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _unfit(reason: str) -> UserError:
    return UserError(f"the weights do not fit the engine's model: {reason}")
