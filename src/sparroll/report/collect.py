"""Collects what a report shows from a folder that other commands wrote. Reads files, and knows only their formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparroll import files
from sparroll.errors import UserError
from sparroll.mismatch.table import TailRow
from sparroll.report.data import AccuracyPoint, Provenance, ReportData, TailCurve, TrainingRun, thin
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule

_WHAT = {
    "profile": "tails",
    "calibration": "tails and schedule",
    "plan": "plan",
    "train": "training run",
    "evaluation": "evaluation",
}


def collect(folder: Path | str) -> ReportData:
    """Everything in the folder, up to two folders deep. Raises UserError if there is nothing to report."""
    folder = files.existing_folder(folder, "give the folder that --out named")
    found = list(_records(folder))
    if not found:
        raise UserError(
            f"there is nothing to report in {folder}",
            "it holds no profile.json, calibration.json, plan.json, evaluation.json or training run",
        )
    calibrations = [record for _, record in found if record["kind"] == "calibration"]
    profiles = [record for _, record in found if record["kind"] == "profile"]
    runs = [_run(path.parent, record) for path, record in found if record["kind"] == "train"]
    summary = next((record for _, record in found if record["kind"] == "quickstart"), None)
    # A calibration has more measurements than a profile in the same folder, so its curves are shown.
    tails = calibrations or profiles
    parts: dict[str, Any] = {}
    if tails:
        parts |= _tails(tails[-1])
    if calibrations:
        parts |= _calibrated(calibrations[-1]["results"])
    return ReportData(
        title=f"sparroll {'quickstart' if summary else folder.name}",
        plans=tuple(record["results"] for _, record in found if record["kind"] == "plan"),
        runs=tuple(sorted(runs, key=_order)),
        evaluations=tuple(record["results"] for _, record in found if record["kind"] == "evaluation"),
        facts=_facts(parts, runs, found, summary),
        provenance=tuple(
            Provenance(_WHAT[record["kind"]], str(path.relative_to(folder)), record)
            for path, record in found
            if record["kind"] in _WHAT
        ),
        **({"model": _model(found)} | parts),
    )


def _records(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Records of sparroll in the folder and up to two folders down, in the order of their paths."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json"), *folder.glob("*/*/*.json")]):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Other programs may keep their own JSON files here.
            continue
        if isinstance(record, dict) and {"kind", "results", "versions"} <= record.keys():
            yield path, record


def _model(found: list[tuple[Path, dict[str, Any]]]) -> str:
    for _, record in found:
        config = record.get("config") or {}
        name = config.get("model")
        name = name.get("name") if isinstance(name, dict) else name
        if name:
            return str(name)
    return ""


def _tails(record: dict[str, Any]) -> dict[str, Any]:
    results = record["results"]
    sweep = results.get("sweep", results)
    measured = sweep.get("budgets") or sweep.get("schedules") or []
    ceiling = sweep["dense_ceiling"]
    curves = [_curve(each) for each in measured if each["mode"] != "dense"]
    verification = results.get("verification")
    if verification:
        last = verification["rounds"][-1]
        curves.append(_curve(last, name="calibrated schedule", kind="schedule"))
    curves.append(_curve(ceiling, name="dense ceiling", kind="ceiling"))
    tail = ceiling["tail"]
    return {"curves": tuple(curves), "estimator": tail["estimator"], "quantile": tail["quantile"]}


def _curve(measured: dict[str, Any], name: str | None = None, kind: Any = "budget") -> TailCurve:
    steps = (measured["schedule"] or {}).get("steps", [])
    budget = steps[0]["kv_budget_tokens"] if kind == "budget" and len(steps) == 1 else None
    points = tuple(TailRow(**row) for row in measured["tail"]["rows"])
    return TailCurve(name or (f"budget {budget}" if budget is not None else measured["name"]), kind, points, budget)


def _calibrated(results: dict[str, Any]) -> dict[str, Any]:
    schedule = results["schedule"]
    target = (schedule.get("target") or {}).get("at_least")
    return {"schedule": schedule, "schedule_name": "calibrated", "notes": tuple(results["notes"]), "target": target}


def _run(folder: Path, record: dict[str, Any]) -> TrainingRun:
    path = folder / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", f"{folder / 'result.json'} is there, so this file should be, too"
        ) from None
    steps = [line for line in lines if "reward/mean" in line]
    name = "evaluate/dense_accuracy"
    accuracy = [
        AccuracyPoint(line["step"], line[name], line[f"{name}_low"], line[f"{name}_high"])
        for line in lines
        if name in line
    ]
    return TrainingRun(
        name=folder.name,
        steps=tuple(line["step"] for line in steps),
        reward=tuple(line["reward/mean"] for line in steps),
        tail_q05=tuple(line.get("mismatch/acceptance_q05") for line in steps),
        kv_read_share=tuple(line["rollout/kv_read_share"] for line in steps),
        accuracy=tuple(accuracy),
        rollouts=_how(folder, record["config"]["attention"]),
        events=tuple(f"step {line['step']}: {event}" for line in lines for event in line.get("events", ())),
    )


def _how(folder: Path, attention: dict[str, Any]) -> str:
    """What the rollouts read, in words."""
    kind = attention["kind"]
    # The last checkpoint holds the schedule that ran, even if its file is gone or a watcher has changed it.
    saved = sorted(folder.glob("checkpoints/step-*/schedule.toml"))
    if saved:
        budgets = sorted({step.kv_budget_tokens for step in Schedule.load(saved[-1]).steps})
        return f"budget {budgets[0]}" if len(budgets) == 1 else f"budgets {budgets[0]} to {budgets[-1]}"
    if kind == "compression":
        return f"{attention['policy']}, {attention['budget_tokens']} tokens"
    if kind == "budget":
        return f"budget {attention['kv_budget_tokens']}"
    return "whole context" if kind == "dense" else f"schedule {Path(attention['name']).stem}"


def _order(run: TrainingRun) -> tuple[int, str]:
    known = ("dense", "calibrated", "aggressive")
    return (known.index(run.name) if run.name in known else len(known), run.name)


def _facts(
    parts: dict[str, Any],
    runs: list[TrainingRun],
    found: list[tuple[Path, dict[str, Any]]],
    summary: dict[str, Any] | None,
) -> dict[str, str]:
    facts: dict[str, str] = {}
    held = [curve for curve in parts.get("curves", ()) if curve.kind == "schedule"]
    solid = [point.value for point in held[0].points if not thin(point)] if held else []
    if solid and parts.get("target") is not None:
        facts[f"lowest tail of the schedule (target {parts['target']:g})"] = rounded_down(min(solid))
    plans = [record["results"] for _, record in found if record["kind"] == "plan"]
    for plan in plans[:2]:
        facts[f"{plan['model']['name']} on {plan['hardware']['name']}, planned"] = f"{plan['speedup']:.2f}x"
    if summary is not None:
        results = summary["results"]
        facts["of the KV cache read by calibrated rollouts"] = f"{results['kv_read_share']:.0%}"
        minutes, seconds = divmod(round(results["wall_seconds"]), 60)
        facts["for all of it"] = f"{minutes} min {seconds:02d} s"
    elif len(runs) == 1 and runs[0].accuracy:
        facts["dense accuracy, before"] = f"{runs[0].accuracy[0].value:.3f}"
        facts["dense accuracy, after"] = f"{runs[0].accuracy[-1].value:.3f}"
    return facts
