"""Engines that take turns on one GPU, block by block. Each has a process of its own and waits while another decodes, so what
makes the host or the GPU slower for a while is the same for all of them, which it is not where one engine is measured after
the other.

A block of steps is timed as in vllm_engines.py. Two things keep turns apart. Before a process hands over it waits for the
GPU, because vLLM has launched a step ahead. And its next turn begins with steps that are not timed, until one is ahead
again.

What launches the steps runs on the same processor core in all processes: short steps wait for it, and one core may be a
fifth slower than another whose neighbour is idle.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import vllm_engines
from vllm_engines import WARM_STEPS, Engine

LEAD_STEPS = 2
"""Steps at the begin of a turn that are not timed."""
GPU_SHARE = 0.92
"""Of the GPU's memory, for all engines together."""


class EngineApart:
    """A vllm_engines.Engine in a process of its own, which does nothing between calls."""

    def __init__(self, name: str, root: Path, sparroll: dict[str, Any] | None, **settings: Any) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            self.about: dict[str, Any] = self._call(_start, name, root, sparroll, settings)
        except BaseException:
            self._pool.shutdown()
            raise

    def _call(self, what: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(what, *arguments).result()

    @contextmanager
    def decoding(self, context_tokens_B: Sequence[int], most_steps: int) -> Iterator[Callable[[int], float]]:
        """Exactly these requests decoding. Yields what takes a turn of so many timed steps and returns their seconds."""
        self._call(_begin, context_tokens_B, most_steps)
        try:
            yield lambda steps: self._call(_turn, steps)
        finally:
            self._call(_end)

    def __enter__(self) -> EngineApart:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.about |= self._call(_close)
        finally:
            self._pool.shutdown()


def step_seconds(
    engines: dict[str, EngineApart], context_tokens_B: Sequence[int], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of a decode step of exactly these requests, in each engine: the mean over `steps` in a row, `repeats` times.
    Raises DoesNotFit where the cache of an engine does not hold them.

    The engines' order turns round after each repeat, so that a steady drift is the same for all."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    with ExitStack() as stack:
        most = WARM_STEPS + (LEAD_STEPS + steps) * repeats
        turns = {name: stack.enter_context(each.decoding(context_tokens_B, most)) for name, each in engines.items()}
        for turn in turns.values():
            turn(WARM_STEPS - LEAD_STEPS)
        for repeat in range(repeats):
            for name in reversed(turns) if repeat % 2 else turns:
                found[name].append(turns[name](steps) / steps)
    return found


_engine: Engine | None = None
"""The engine of this process."""
_decoding = ExitStack()
_run: Callable[[int], float] | None = None


def _start(name: str, root: Path, sparroll: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    global _engine
    _engine = Engine(name, root, sparroll, **settings)
    # Not before: a start compiles on all cores. Only the thread that launches steps is bound, which is this one.
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return _engine.settings() | {"capacity_tokens": _engine.capacity_tokens, "core": core}


def _begin(context_tokens_B: Sequence[int], most_steps: int) -> None:
    global _run
    assert _engine is not None, "no engine was started"
    _run = _decoding.enter_context(_engine.decoding(context_tokens_B, most_steps))
    _wait_for_gpu()


def _turn(steps: int) -> float:
    assert _run is not None, "nothing decodes"
    _run(LEAD_STEPS)
    seconds = _run(steps)
    _wait_for_gpu()
    return seconds


def _end() -> None:
    global _run
    _run = None
    _decoding.close()
    _wait_for_gpu()


def _close() -> dict[str, Any]:
    assert _engine is not None, "no engine was started"
    _engine.close()
    return {"left_over_gib": _engine.left_over_bytes / 2**30}


def _wait_for_gpu() -> None:
    if vllm_engines.on_gpu():
        import torch

        torch.cuda.synchronize()
