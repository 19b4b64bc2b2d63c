"""The optimizer: state that survives a round trip to the bit, and the learning rate as a function of the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparroll.errors import UserError
from sparroll.train.config.training import TrainSection
from sparroll.train.update.optimizer import learning_rate, make_optimizer, optimizer_tensors, restore_optimizer

SETTINGS = TrainSection(lr=0.01, weight_decay=0.1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_restored_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    straight, resumed = network(), network()
    one = make_optimizer(straight, SETTINGS)
    for seed in range(3):
        update(straight, one, seed)
    save_file(optimizer_tensors(straight, one), tmp_path / "optimizer.safetensors")
    resumed.load_state_dict(straight.state_dict())
    other = make_optimizer(resumed, SETTINGS)
    restore_optimizer(resumed, other, load_file(tmp_path / "optimizer.safetensors"))
    for seed in range(3, 6):
        update(straight, one, seed)
        update(resumed, other, seed)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_before_the_first_update_there_is_no_state() -> None:
    model = network()
    assert optimizer_tensors(model, make_optimizer(model, SETTINGS)) == {}


def test_state_of_an_unknown_parameter_is_refused() -> None:
    model = network()
    with pytest.raises(UserError, match="optimizer state for other/step"):
        restore_optimizer(model, make_optimizer(model, SETTINGS), {"other/step": torch.zeros(())})


def test_only_matrices_decay() -> None:
    model = network()
    decay = {
        id(p): group["weight_decay"] for group in make_optimizer(model, SETTINGS).param_groups for p in group["params"]
    }
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.1,
        "2.bias": 0.0,
    }


def test_the_warm_up_is_linear_and_then_constant() -> None:
    settings = TrainSection(lr=1.0, warmup_steps=4)
    assert [learning_rate(settings, step) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(TrainSection(lr=1.0), 1) == 1.0
