"""verl's weights for a separate rollout engine, through files: a checkpoint engine for a machine without GPUs
(`checkpoint_engine.backend=by_file`, `custom_backend_module=weights_by_file`). verl's own ones need NCCL or RDMA."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

Named = tuple[str, torch.Tensor]


@CheckpointEngineRegistry.register("by_file")
class FileCheckpointEngine(CheckpointEngine):
    """The first process of the trainer writes, and every process of an engine reads, what `prepare` has named."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any):
        self.is_master = is_master
        self._path = Path()

    def prepare(self) -> str | None:
        return tempfile.mkdtemp(prefix="weights-") if self.is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        folder = next(each for each in metadata if each)
        writes = [True] + [False] * (actor_wg_world_size - 1)
        return (
            {"folder": [folder] * actor_wg_world_size, "writes": writes},
            {"folder": [folder] * rollout_world_size, "writes": [False] * rollout_world_size},
        )

    def init_process_group(self, folder: str, writes: bool) -> None:
        self._path, self._writes = Path(folder) / "weights.pt", writes

    def finalize(self) -> None:
        if self.is_master:
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    async def send_weights(self, weights: Generator[Named, None, None], global_steps: int | None = None) -> None:
        # Every process of the trainer must ask for all of them: each is gathered.
        found = {name: weight.detach().cpu().clone() for name, weight in weights}
        if self._writes:
            beside = self._path.with_suffix(".part")
            torch.save(found, beside)
            os.replace(beside, self._path)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Named, None]:
        while not self._path.is_file():
            await asyncio.sleep(0.05)
        for name, weight in torch.load(self._path).items():
            yield name, weight
