"""This process among its peers: which share of the work it takes, and how shares are put together again. Accelerate
finds the peers; with a single process all functions return what they were given."""

# R processes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from sparroll.engines.devices import take_device
from sparroll.errors import UserError

Item = TypeVar("Item")


class Ranks:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone. device: "auto", "cpu", "cuda", or
    for one process a certain GPU as in "cuda:1"."""

    def __init__(self, device: str = "auto"):
        self._state = PartialState(cpu=True) if device == "cpu" else PartialState()
        self.device = self._own_device(device)
        self.rank: int = self._state.process_index
        self.count: int = self._state.num_processes

    def _own_device(self, device: str) -> torch.device:
        # Accelerate's own choice is made once per Python process, so it does not fit a second run in it.
        if device in ("auto", "cuda") and torch.cuda.is_available():
            return take_device(torch.device("cuda", self._state.local_process_index))
        if ":" in device and self._state.num_processes > 1:
            raise UserError(
                f"model.device is {device!r}, but this run has {self._state.num_processes} processes",
                "--set model.device=cuda: each process takes its own GPU; CUDA_VISIBLE_DEVICES chooses among them",
            )
        return take_device("cpu" if device == "auto" else device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Every R-th item, starting with this process's rank. The shares differ by at most one item."""
        return list(items[self.rank :: self.count])

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all processes, in the order of ranks, on every process."""
        return list(gather_object(items)) if self.count > 1 else items

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over processes in place, as one flat tensor. A missing gradient becomes zero, with one
        process too, so that the optimizer does the same for any number of processes."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count == 1:
            return
        gradients: list[Tensor] = [parameter.grad for parameter in trained if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch.distributed.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            torch.distributed.barrier()
