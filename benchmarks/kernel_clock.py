"""What one call takes on a GPU, for the benchmarks of kernels: replays of a CUDA graph, an L2 flush before each call."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 1 << 28
COPY_BYTES = 1 << 31
MICRO = 1e6


class Clock:
    """Medians of what a GPU takes for one call."""

    def __init__(self, repeats: int, calls: int):
        self.repeats, self.calls = repeats, calls
        self.flushed = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.flush_alone = self._graph(lambda: None)

    def flush(self) -> None:
        # Read, not written: dirty lines would be written back in the middle of what is timed.
        self.flushed.amax()

    def _graph(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        self.flush(), call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.calls):
                self.flush()
                call()
        return graph

    def _seconds(self, call: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def graph_us(self, call: Callable[[], Any]) -> float:
        graph = self._graph(call)
        graph.replay()
        taken = [
            self._seconds(graph.replay) - self._seconds(self.flush_alone.replay) for _ in range(self.repeats)
        ]  # fmt: skip
        return MICRO * statistics.median(taken) / self.calls

    def event_us(self, call: Callable[[], Any]) -> float:
        taken = []
        for _ in range(self.repeats):
            self.flush()
            taken.append(self._seconds(call))
        return MICRO * statistics.median(taken)

    def copy_bytes_per_second(self) -> float:
        source = torch.ones(COPY_BYTES // 4, device="cuda")
        target = torch.empty_like(source)
        target.copy_(source)
        taken = [self._seconds(lambda: target.copy_(source)) for _ in range(self.repeats)]
        return 2 * COPY_BYTES / statistics.median(taken)


class DryClock:
    """Calls once and times nothing."""

    def graph_us(self, call: Callable[[], Any]) -> float:
        call()
        return math.nan

    def copy_bytes_per_second(self) -> float:
        return math.nan


AnyClock = Clock | DryClock
