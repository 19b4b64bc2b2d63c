"""AdamW over the policy's weights, its learning rate by step, and its state as plain tensors (no pickle)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparroll.errors import UserError
from sparroll.train.config.training import TrainSection

_STATE = ("exp_avg", "exp_avg_sq", "step")


def make_optimizer(model: nn.Module, settings: TrainSection) -> torch.optim.AdamW:
    """AdamW over the trainable weights. Weight decay acts only on matrices, not on norms and biases."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(settings.beta1, settings.beta2))


def learning_rate(settings: TrainSection, step: int) -> float:
    """The learning rate of the updates of a step, which counts from 1: a linear warm-up, then constant. It depends on
    the step alone, so there is no scheduler state to keep."""
    return settings.lr * min(1.0, step / settings.warmup_steps) if settings.warmup_steps else settings.lr


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: "model.norm.weight/exp_avg" and so on. Empty before the first update."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert key in _STATE, f"the optimizer keeps {key!r}, which checkpoints do not know"
            tensors[f"{name}/{key}"] = value.detach().contiguous()
    return tensors


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` took out."""
    left = dict(tensors)
    for name, parameter in model.named_parameters():
        found = {key: left.pop(f"{name}/{key}") for key in _STATE if f"{name}/{key}" in left}
        if found:
            # AdamW keeps its step count on the CPU.
            device = {"step": torch.device("cpu")}
            optimizer.state[parameter] = {
                key: value.to(device.get(key, parameter.device), copy=True) for key, value in found.items()
            }
    if left:
        raise UserError(f"the checkpoint has optimizer state for {next(iter(left))}, which the model does not have")
