"""Devices by name: what is not here is an error that says what is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparroll.engines.devices import take_device
from sparroll.errors import UserError
from sparroll.train.runtime.distributed import Ranks


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """This machine as one with so many GPUs. Returns the devices that become the current one."""
    current: list[torch.device] = []
    here = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: here)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize("name", ["foo", "", "cuda:x", "cuda:-1", "cuda:99999999999999999999"])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="unknown device .*\nhint: cpu, cuda, or a number"):
        take_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1", "mps"])
def test_a_device_that_is_not_here_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(UserError, match=f"there is no device '{name}' here, only the CPU\nhint: .*use cpu"):
        take_device(name)
    assert take_device(None) == take_device("cpu") == torch.device("cpu")


def test_a_gpu_with_a_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = gpus(monkeypatch, 2)
    assert take_device(None) == torch.device("cuda")
    assert current == []
    assert take_device("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    with pytest.raises(UserError, match="no device 'cuda:2' here, the last one is cuda:1"):
        take_device("cuda:2")


def test_a_run_takes_the_gpu_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    current = gpus(monkeypatch, 2)
    ranks = Ranks("cpu")
    assert ranks.device == torch.device("cpu")
    state = SimpleNamespace(process_index=0, local_process_index=0, num_processes=1)
    ranks._state = state  # type: ignore[assignment]
    assert ranks._own_device("cuda:1") == torch.device("cuda", 1) == current[-1]
    assert ranks._own_device("auto") == ranks._own_device("cuda") == torch.device("cuda", 0)
    state.num_processes = 2
    with pytest.raises(UserError, match="model.device is 'cuda:1', but this run has 2 processes"):
        ranks._own_device("cuda:1")
    gpus(monkeypatch, 0)
    assert ranks._own_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="there is no device 'cuda' here"):
        ranks._own_device("cuda")
