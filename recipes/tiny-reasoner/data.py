"""Training batches made on the fly by worker processes: token ids, loss on responses only, rows of like length."""

from __future__ import annotations

import queue
from array import array
from random import Random

import numpy as np
import torch
import torch.multiprocessing as mp
from folder import WORD_ID

from sparroll.tasks.synthetic.kinds import KINDS
from sparroll.tasks.synthetic.task import LEVELS, RESPONSE_TOKENS, example

BUCKETS = (192, 320, 448, 640, 960, 1408, 1920, 2432)
"""Row lengths; each batch holds problems that fit one of them."""


def level_weights(progress: float) -> list[float]:
    """How often each level is drawn: short ones first, all from 30 % of the training on; long ones less often."""
    highest = 1.5 + progress / 0.3 * (len(LEVELS) - 1)
    present = [max(0.0, min(1.0, highest - level)) for level in LEVELS]
    return [share / (low + high) ** 0.5 for share, (low, high) in zip(present, RESPONSE_TOKENS, strict=True)]


def _work(worker: int, seed: int, batch_tokens: int, progress, batches) -> None:
    torch.set_num_threads(1)
    rng = Random(f"worker|{seed}|{worker}")
    waiting: dict[int, list[tuple[array, int]]] = {size: [] for size in BUCKETS}
    index = 0
    while progress.value < 1.0:
        level = rng.choices(LEVELS, level_weights(progress.value))[0]
        prompt, response = example("train", KINDS[index % len(KINDS)], level, seed * 1000 + worker, index)
        index += 1
        ids = array("h", [WORD_ID[word] for word in prompt + response])
        size = next(size for size in BUCKETS if len(ids) <= size)
        waiting[size].append((ids, len(prompt)))
        if len(waiting[size]) * size >= batch_tokens:
            _put(batches, progress, _pack(waiting[size], size))
            waiting[size] = []


def _pack(rows: list[tuple[array, int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, size] right-padded with 0, and labels: the next token where it belongs to a response, else -100."""
    ids = np.zeros((len(rows), size), dtype=np.int16)
    labels = np.full((len(rows), size), -100, dtype=np.int16)
    for row, (tokens, prompt_tokens) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        labels[row, prompt_tokens - 1 : len(tokens) - 1] = tokens[prompt_tokens:]
    return ids, labels


def _put(batches, progress, batch) -> None:
    while progress.value < 1.0:
        try:
            batches.put(batch, timeout=1.0)
            return
        except queue.Full:
            continue


class Batches:
    """An endless iterator of (ids, labels) on the CPU. Set `progress` from 0 to 1; 1 ends the workers."""

    def __init__(self, workers: int, seed: int, batch_tokens: int) -> None:
        context = mp.get_context("spawn")
        self._progress = context.Value("d", 0.0, lock=False)
        self._queue = context.Queue(maxsize=64)
        arguments = [(worker, seed, batch_tokens, self._progress, self._queue) for worker in range(workers)]
        self._workers = [context.Process(target=_work, args=a, daemon=True) for a in arguments]
        for process in self._workers:
            process.start()

    def set_progress(self, progress: float) -> None:
        self._progress.value = progress

    def waiting(self) -> int:
        return self._queue.qsize()

    def __iter__(self):
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = self._queue.get(timeout=120)
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def close(self) -> None:
        self._progress.value = 1.0
        for process in self._workers:
            process.terminate()
