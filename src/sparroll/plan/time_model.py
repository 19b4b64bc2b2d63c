"""Seconds per decode step, fitted to steps that were measured on one machine. The fit holds only for this model on this
machine; for others there is the roofline in speedup.py."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import nnls

from sparroll.errors import UserError
from sparroll.plan.model_shape import ModelShape, model_shape
from sparroll.schedule import Schedule

if TYPE_CHECKING:
    from sparroll.engines.base import Engine


@dataclass(frozen=True)
class MeasuredStep:
    """One timed decode step of a batch.

    >>> MeasuredStep(seconds=0.0151, batch=32, cache_bytes_read=55.0e9)
    """

    seconds: float
    batch: int
    cache_bytes_read: float
    """Bytes of K, V and index that the step read, over all requests and layers."""
    sparse_layers: int = 0
    """Layers that selected what to read."""
    element_bytes: int = 2
    """Bytes of a cached number."""


@dataclass(frozen=True)
class TimeModel:
    """seconds = fixed + per request * batch + cache bytes / bandwidth + per sparse layer * sparse layers."""

    fixed_seconds: float
    """Time to read the weights, and the overhead of all layers."""
    request_seconds: float
    cache_bytes_per_second: float
    """Infinite if the measured times did not depend on the bytes read."""
    sparse_layer_seconds: float
    """What selection adds per layer; 0 if no measured step was sparse."""
    worst_relative_error: float
    """Largest |predicted - measured| / measured over the steps it was fitted to."""
    steps: int
    notes: tuple[str, ...] = ()
    element_bytes: int = 2
    """Bytes of a cached number in these steps; it holds for no other."""

    def seconds(self, batch: int, cache_bytes_read: float, sparse_layers: int = 0) -> float:
        """Predicted seconds of one decode step."""
        fixed = self.fixed_seconds + self.request_seconds * batch + self.sparse_layer_seconds * sparse_layers
        return fixed + cache_bytes_read / self.cache_bytes_per_second

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record. An infinite bandwidth becomes None."""
        table = dataclasses.asdict(self)
        if np.isinf(self.cache_bytes_per_second):
            table["cache_bytes_per_second"] = None
        return table


def fit_time_model(steps: Sequence[MeasuredStep]) -> TimeModel:
    """Fit by non-negative least squares on relative errors, so that short steps count as much as long ones.

    Terms that the steps cannot tell apart stay at 0 and are named in `notes`. Raises UserError for fewer than three
    steps, for caches of different types, or if all steps read the same number of bytes.
    """
    if len(steps) < 3:
        raise UserError(f"a time model needs at least 3 measured steps, got {len(steps)}")
    seconds = np.array([step.seconds for step in steps], dtype=np.float64)
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise UserError(f"measured seconds must be positive, got {seconds.min()}")
    if len(types := {step.element_bytes for step in steps}) > 1:
        raise UserError(f"the measured steps are of caches with {sorted(types)} bytes a number", "measure one model")
    if len({step.cache_bytes_read for step in steps}) < 2:
        raise UserError("all measured steps read the same number of bytes", "measure at two context lengths or more")
    columns = {
        "fixed": np.ones(len(steps)),
        "bytes": np.array([step.cache_bytes_read for step in steps], dtype=np.float64),
        "sparse layers": np.array([step.sparse_layers for step in steps], dtype=np.float64),
        "requests": np.array([step.batch for step in steps], dtype=np.float64),
    }
    kept, notes = _independent(columns, seconds)
    found = dict.fromkeys(columns, 0.0) | kept
    predicted = sum(found[name] * column for name, column in columns.items())
    return TimeModel(
        fixed_seconds=found["fixed"],
        request_seconds=found["requests"],
        cache_bytes_per_second=1 / found["bytes"] if found["bytes"] > 0 else float("inf"),
        sparse_layer_seconds=found["sparse layers"],
        worst_relative_error=float(np.abs(predicted / seconds - 1).max()),
        steps=len(steps),
        notes=tuple(notes),
        element_bytes=steps[0].element_bytes,
    )


def _independent(columns: dict[str, np.ndarray], seconds: np.ndarray) -> tuple[dict[str, float], list[str]]:
    names: list[str] = []
    scaled: list[np.ndarray] = []
    notes = []
    for name, column in columns.items():
        size = np.abs(column).max()
        candidate = [*scaled, column / size / seconds] if size else scaled
        if size == 0 or np.linalg.matrix_rank(np.stack(candidate, 1)) < len(candidate):
            notes.append(f"the measured steps do not show the cost of {name} apart from other costs; it is taken as 0")
            continue
        names.append(name)
        scaled = candidate
    solution, _ = nnls(np.stack(scaled, 1), np.ones(len(seconds)))
    sizes = [np.abs(columns[name]).max() for name in names]
    return {name: float(value / size) for name, value, size in zip(names, solution, sizes, strict=True)}, notes


def measure_steps(
    engine: Engine,
    shape: ModelShape,
    *,
    contexts: Sequence[int] = (256, 512, 1024),
    batches: Sequence[int] = (1, 4),
    element_bytes: int = 2,
    new_tokens: int = 16,
    repeats: int = 3,
    seed: int = 0,
) -> list[MeasuredStep]:
    """Time the engine's decode steps under its present schedule at each context and batch.

    A step's time is (time for 1 + `new_tokens` tokens - time for 1 token) / `new_tokens`, so that the prefill cancels
    out. Both times are medians of `repeats`. element_bytes: bytes per number in the cache. Resets the engine's report.
    """
    steps = []
    for batch in batches:
        for context in contexts:
            rows = np.random.default_rng(seed).integers(3, 64, size=(batch, context)).tolist()
            several = statistics.median(_seconds(engine, rows, 1 + new_tokens, seed) for _ in range(repeats))
            read, sparse_layers = _reads(engine, shape, element_bytes)
            one = statistics.median(_seconds(engine, rows, 1, seed) for _ in range(repeats))
            if several > one:
                took = (several - one) / new_tokens
                steps.append(MeasuredStep(took, batch, read / new_tokens, sparse_layers, element_bytes))
    return steps


def _seconds(engine: Engine, prompts: list[list[int]], new_tokens: int, seed: int) -> float:
    engine.reset_report()
    start = time.perf_counter()
    engine.generate(prompts, max_new_tokens=new_tokens, stop_ids=(), seed=seed)
    return time.perf_counter() - start


def _reads(engine: Engine, shape: ModelShape, element_bytes: int) -> tuple[float, int]:
    """Cache bytes that the last `generate` read, and how many layers were sparse in it."""
    token_bytes = 2 * shape.kv_heads * shape.head_dim * element_bytes
    read, sparse_layers = 0.0, 0
    for layer in engine.report().layers:
        index = layer.index_read_share * layer.context_tokens if layer.sparse_steps else 0.0
        read += token_bytes * (layer.read_tokens + index)
        sparse_layers += bool(layer.sparse_steps)
    return read, sparse_layers


def time_model_here(model: str, schedule: Schedule, element_bytes: int | None = None) -> TimeModel:
    """Load the model on this machine, time dense and sparse decode steps, and fit a time model to them. Steps of a
    schedule with a check are timed without it. element_bytes: of a cached number, if the caller relies on it; raises
    UserError where the model has another type here."""
    from sparroll.engines.make import make_engine

    with make_engine("hf", model) as engine:
        shared, shape = engine.shared_model(), model_shape(model)
        assert shared is not None, "HFEngine shares its model"
        found = shared.dtype.itemsize
        if element_bytes not in (None, found):
            raise other_type(element_bytes, found)
        dense = measure_steps(engine, shape, element_bytes=found)
        engine.set_schedule(dataclasses.replace(schedule, check=None))
        return fit_time_model([*dense, *measure_steps(engine, shape, element_bytes=found)])


def other_type(asked: int | None, measured: int) -> UserError:
    """Of a prediction for a cache of another type than the steps' that were timed."""
    return UserError(
        f"the steps were timed with {measured} bytes per cached number, not {asked}",
        f"leave the number out, or take --element-bytes {measured}",
    )
