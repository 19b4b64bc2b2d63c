"""A report with every part, from made-up figures."""

from __future__ import annotations

import math
from typing import Any

from sparroll.mismatch import TailRow
from sparroll.plan.speedup import plan
from sparroll.records import provenance
from sparroll.report.answers import answers
from sparroll.report.data import (
    AccuracyPoint,
    Measured,
    PlannedDecoding,
    Provenance,
    ReportData,
    TailCurve,
    TrainingRun,
)
from sparroll.schedule import Schedule, Step

BINS = tuple((start, start + 250) for start in range(0, 1500, 250))
TARGET = 0.86
MODEL = "tiny-reasoner"


def row(start: int, value: float, low: float, high: float, rollouts: int = 32) -> TailRow:
    """The tail of one bin."""
    return TailRow(start, start + 250, 4000, rollouts, 0.98, value, value, value, value, low, high, 0.7)


def _curve(name: str, kind: str, budget: int | None, level: float) -> TailCurve:
    points = []
    for start, end in BINS:
        value = 1 - (1 - level) * (1 if budget is None else max(0.0, 1 - budget / end) ** 0.6) - 0.01 * start / 1500
        points.append(row(start, value, value - 0.02, value + 0.015))
    return TailCurve(name, kind, tuple(points), budget)  # type: ignore[arg-type]


def schedule(*budgets: int) -> Schedule:
    """Made-up budgets from 0, 500, 1000, ... on."""
    figures = {"value": 0.893, "low": 0.871, "high": 0.902, "tokens": 41_234}
    return Schedule(
        steps=tuple(Step(500 * place, budget, figures) for place, budget in enumerate(budgets)),
        target={"statistic": "acceptance", "estimator": "top_k_lower", "quantile": 0.05, "at_least": TARGET},
        name="calibrated",
    )


def config(attention: str = "schedule", seed: int = 0, model: str = MODEL) -> dict[str, Any]:
    return {"model": {"name": model}, "attention": {"kind": attention}, "train": {"seed": seed, "lr": 1e-4}}


def run(
    name: str,
    rollouts: str,
    drift: float,
    tail: float,
    share: float,
    under: Schedule | None = None,
    **changes: Any,
) -> TrainingRun:
    """20 steps whose dense accuracy rises by `drift` a step."""
    steps = tuple(range(1, 21))
    reward = tuple(0.4 + drift * step + 0.05 * math.sin(3.1 * step + share) for step in steps)
    tails = tuple(tail + 0.02 * math.cos(step) for step in steps)
    accuracy = tuple(
        AccuracyPoint(step, 0.42 + drift * step, 0.34 + drift * step, 0.5 + drift * step, 128) for step in (0, 10, 20)
    )
    about: dict[str, Any] = {
        "reward_first": sum(reward[:5]) / 5,
        "reward_last": sum(reward[-5:]) / 5,
        "reward_window_steps": 5,
        "worst_bin_q05": tuple(value - 0.01 for value in tails),
        "accuracy": accuracy,
        "config": config("dense" if under is None else "schedule"),
        "rollouts": rollouts,
        "schedule": under,
        "target": TARGET,
    }
    return TrainingRun(name, steps, reward, tail_q05=tails, kv_read_share=(share,) * len(steps), **(about | changes))


def measured(**changes: Any) -> Measured:
    curves = [_curve(f"budget {budget}", "budget", budget, 0.35) for budget in (64, 128, 256, 512)]
    verified = TailCurve("calibrated schedule", "schedule", tuple(row(start, 0.9, 0.88, 0.92) for start, _ in BINS))
    about: dict[str, Any] = {
        "folder": "calibration",
        "model": MODEL,
        "curves": (*curves, verified, _curve("dense ceiling", "ceiling", None, 0.985)),
        "estimator": "top_k_lower",
        "target": TARGET,
        "schedule": schedule(64, 128, 192),
        "bound": "value",
        "notes": ("contexts from 1500 on were not measured; they take the 192 tokens of 1250-1500",),
    }
    return Measured(**(about | changes))


def runs() -> tuple[TrainingRun, ...]:
    return (
        run("dense", "whole context", 0.008, 0.975, 1.0),
        run("calibrated", "budgets 64 to 192", 0.0076, 0.9, 0.461, schedule(64, 128, 192)),
        run("aggressive", "budget 64", 0.003, 0.52, 0.22, schedule(64)),
    )


def plans() -> tuple[PlannedDecoding, ...]:
    names = ("Qwen3-1.7B", "Qwen3-8B")
    return tuple(
        PlannedDecoding(f"Qwen/{name}", plan(name, f"{name.lower()}-0.86", hardware="H200").table()) for name in names
    )


def full() -> ReportData:
    record = provenance() | {"seed": 0}
    return ReportData(
        title="sparroll quickstart",
        models=(MODEL,),
        answers=answers([measured()], runs(), plans()),
        measured=(measured(),),
        plans=plans(),
        runs=runs(),
        facts={"of the KV cache read": "47%", "wall time": "7 min 40 s"},
        provenance=(
            Provenance("tail and schedule", "calibration.json", record),
            Provenance("runs", "runs/dense/summary.json", record),
        ),
    )
