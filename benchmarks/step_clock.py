"""Seconds and memory of the parts of a step, for a benchmark that watches somebody else's trainer. Nothing is run here."""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch


def used_gib() -> dict[str, float]:
    """Peaks of torch's allocator since the last call, and what all processes hold on the GPU now."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {"peak_gib": peak / 2**30, "held_gib": (total - free) / 2**30}


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class Clock:
    """Seconds by part, summed since `start`. The GPU's work counts where it was asked for."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._began = self.now()

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def since_start(self) -> float:
        return self.now() - self._began

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self.now()
        yield
        self.seconds[name] += self.now() - began

    def watch(self, owner: Any, method: str, name: str, *, in_updates: bool = True) -> None:
        """Time a method of this one object.  in_updates: also where it is called for a gradient."""
        theirs: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(theirs)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part(name) if in_updates or not torch.is_grad_enabled() else nullcontext():
                return theirs(*arguments, **named)

        setattr(owner, method, timed)
