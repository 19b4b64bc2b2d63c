"""Training batches made on the fly by worker processes, one shape a batch, and the stages that grow from short tables to
full ones. Knows no model."""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from table_sums import MOST_COUNTED, NAMES, Shape, draw


@dataclass(frozen=True)
class Stage:
    """From these ranges shapes are drawn, ends included."""

    rows: tuple[int, int]
    entries: tuple[int, int]
    largest_group: int
    batch_tokens: int
    latest: float = 1.0
    """Share of the training time after which the next stage begins, learned or not."""


STAGES = (
    Stage((2, 4), (1, 3), 2, 32_768, 0.12),
    Stage((4, 10), (2, 6), 4, 32_768, 0.3),
    Stage((12, 40), (6, 16), 6, 32_768, 0.42),
    Stage((48, 112), (12, 32), 8, 65_536, 0.5),
    Stage((128, 288), (24, 64), 8, 131_072, 0.58),
    Stage((480, 680), (24, 80), 8, 131_072),
)
"""The first one is what lookups start from: among two or three rows a guess is often right, and learning takes hold within
a hundred steps; among six it had not after five hundred. The last one is what the study uses."""

EARLIER_SHARE = 0.15
"""So many batches come from an earlier stage, unless asked otherwise."""


def draw_shape(rng: np.random.Generator, stage: Stage) -> Shape:
    """Half of the shapes have groups of one size, as the levels have."""
    entries = int(rng.integers(stage.entries[0], stage.entries[1] + 1))
    equal = int(rng.integers(2, stage.largest_group + 1)) if rng.random() < 0.5 else 0
    sizes: list[int] = []
    while sum(sizes) < entries and len(sizes) < MOST_COUNTED - 1:
        sizes.append(min(equal or int(rng.integers(1, stage.largest_group + 1)), entries - sum(sizes)))
    rows = int(rng.integers(max(stage.rows[0], sum(sizes)), stage.rows[1] + 1))
    return Shape(min(rows, len(NAMES)), tuple(sizes))


def make_batch(
    rng: np.random.Generator, stage: int, batch_tokens: int | None = None, earlier_share: float = EARLIER_SHARE
) -> tuple[Shape, np.ndarray]:
    """A shape and [B, S] int16 ids, about `batch_tokens` of them (default: the stage's own)."""
    if stage and rng.random() < earlier_share:
        stage = int(rng.integers(0, stage))
    shape = draw_shape(rng, STAGES[stage])
    tokens = shape.prompt_tokens + shape.response_tokens
    return shape, draw(rng, shape, max(1, (batch_tokens or STAGES[stage].batch_tokens) // tokens))


def _work(worker: int, seed: int, batch_tokens: int | None, earlier_share: float, stage, batches) -> None:
    rng = np.random.default_rng([seed, worker])
    while stage.value >= 0:
        batch = make_batch(rng, stage.value, batch_tokens, earlier_share)
        while stage.value >= 0:
            try:
                batches.put(batch, timeout=0.5)
                break
            except queue.Full:
                continue
    batches.cancel_join_thread()


class Batches:
    """An endless iterator of (shape, ids [B, S] on the CPU). Start it before anything touches a GPU: workers are forked."""

    def __init__(
        self,
        workers: int,
        seed: int,
        batch_tokens: int | None = None,
        first_stage: int = 0,
        earlier_share: float = EARLIER_SHARE,
    ) -> None:
        context = mp.get_context("fork")
        self._stage = context.Value("i", first_stage, lock=False)
        self._queue = context.Queue(maxsize=12)
        arguments = [(worker, seed, batch_tokens, earlier_share, self._stage, self._queue) for worker in range(workers)]
        self._workers = [context.Process(target=_work, args=a, daemon=True) for a in arguments]
        for process in self._workers:
            process.start()

    def set_stage(self, stage: int) -> None:
        """Batches already made still come first, a dozen at most."""
        self._stage.value = stage

    def __iter__(self) -> Iterator[tuple[Shape, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[Shape, torch.Tensor]:
        shape, ids = self._queue.get(timeout=60)
        return shape, torch.from_numpy(ids)

    def waiting(self) -> int:
        return int(self._queue.qsize())

    def close(self) -> None:
        self._stage.value = -1
        for process in self._workers:
            process.terminate()
