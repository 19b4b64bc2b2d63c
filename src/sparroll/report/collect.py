"""Collects what a report shows from a folder that other commands wrote. Reads files, and knows only their formats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparroll import files
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.mismatch.table import TailRow
from sparroll.report.answers import answers
from sparroll.report.data import (
    Evaluated,
    Measured,
    PlannedDecoding,
    Provenance,
    ReportData,
    TailCurve,
    TrainingRun,
    model_key,
    thin,
    told_apart,
)
from sparroll.report.reading import reading, records_in, texts, written
from sparroll.report.training_runs import read_run, unfinished_runs
from sparroll.rounding import percent_up, rounded_down
from sparroll.schedule import Schedule

_WHAT = {
    "profile": "tails",
    "calibration": "tails and schedule",
    "plan": "plan",
    "train": "training run",
    "evaluation": "evaluation",
}

_Found = list[tuple[Path, dict[str, Any]]]
"""Records with their paths."""


def collect(folder: Path | str) -> ReportData:
    """Everything in the folder, up to two folders deep. Raises UserError if there is nothing to report, and for a
    damaged file."""
    folder = files.existing_folder(folder, "give the folder that --out named")
    found = [(path, record) for path, record in records_in(folder) if record["kind"] in (*_WHAT, "quickstart")]
    unfinished = unfinished_runs(folder)
    if not found:
        raise _nothing(folder, unfinished)

    def inside(path: Path) -> str:
        return str(path.parent.relative_to(folder))

    # That of a folder further down is about that folder alone.
    summary = next((record for path, record in found if record["kind"] == "quickstart" and path.parent == folder), None)
    measured = tuple(_measured(path, inside(path), record) for path, record in _measurements(found))
    plans = tuple(
        PlannedDecoding(_model(record), record["results"], inside(path))
        for path, record in found
        if record["kind"] == "plan"
    )
    runs = [
        read_run(path.parent, path.parent.name if inside(path) == "." else inside(path), record)
        for path, record in found
        if record["kind"] == "train"
    ]
    runs.sort(key=_order)
    models = _distinct(_model(record) for _, record in found if record["kind"] not in ("plan", "quickstart"))
    models = models or _distinct(plan.model for plan in plans)
    return ReportData(
        title=f"sparroll {'quickstart' if summary else folder.resolve().name}",
        models=tuple(model for model in models if model),
        answers=answers(measured, runs, plans),
        measured=measured,
        plans=plans,
        runs=tuple(runs),
        evaluations=tuple(
            Evaluated(inside(path), _model(record), record["results"])
            for path, record in found
            if record["kind"] == "evaluation"
        ),
        unfinished=tuple(str(each.relative_to(folder)) for each in unfinished),
        facts=_facts(measured, plans, runs, models, summary),
        provenance=tuple(
            Provenance(_WHAT[record["kind"]], str(path.relative_to(folder)), record)
            for path, record in found
            if record["kind"] in _WHAT
        ),
    )


def _nothing(folder: Path, unfinished: Sequence[Path]) -> UserError:
    """The error for a folder that holds no results."""
    if not unfinished:
        return UserError(
            f"there is nothing to report in {folder}",
            "it holds no profile.json, calibration.json, plan.json, evaluation.json or training run",
        )
    run, *more = map(str, unfinished)
    also = f", nor are {', '.join(more)}" if more else ""
    return UserError(
        f"there is nothing to report in {folder} yet: the run {run} is not finished, it has no result.json{also}",
        "run the command that began it again; `sparroll train` and `distill` take --resume",
    )


def _model(record: dict[str, Any]) -> str:
    config = record.get("config")
    name = config.get("model") if isinstance(config, dict) else None
    return str((name.get("name") if isinstance(name, dict) else name) or "")


def _distinct(models: Iterable[str]) -> tuple[str, ...]:
    """The models, each once and as it is spelled first."""
    found: dict[str, str] = {}
    for model in models:
        found.setdefault(model_key(model), model)
    return tuple(found.values())


def _measurements(found: _Found) -> _Found:
    """The calibrations and profiles, without profiles that a calibration of the same model, in the same folder or in one
    of its folders, has superseded: it has more measurements."""
    calibrations = [(path, record) for path, record in found if record["kind"] == "calibration"]
    superseded = {
        path
        for path, record in found
        for other, its in calibrations
        if path.parent in (other.parent, other.parent.parent) and model_key(_model(record)) == model_key(_model(its))
    }
    profiles = [(path, record) for path, record in found if record["kind"] == "profile" and path not in superseded]
    return sorted([*calibrations, *profiles], key=lambda each: each[0])


def _measured(path: Path, folder: str, record: dict[str, Any]) -> Measured:
    with reading(path):
        return _measurement(folder, _model(record), record["results"])


def _measurement(folder: str, model: str, results: dict[str, Any]) -> Measured:
    sweep = results.get("sweep", results)
    budgets = sweep.get("budgets") or sweep.get("schedules") or []
    ceiling = sweep["dense_ceiling"]
    curves = [_curve(each) for each in budgets if each["mode"] != "dense"]
    for group in sweep.get("layer_groups", ()):
        where = f"in layers {group['layers'][0]} to {group['layers'][-1]}"
        curves += [
            _curve(each, name=f"{each['kv_budget_tokens']} {where}")
            for each in group["budgets"]
            if each["mode"] != "dense"
        ]
    verification = results.get("verification")
    if verification:
        curves.append(_curve(verification["rounds"][-1], name="calibrated schedule", kind="schedule"))
    curves.append(_curve(ceiling, name="dense ceiling", kind="ceiling"))
    schedule = Schedule.from_table(results["schedule"], "calibrated") if "schedule" in results else None
    return Measured(
        folder=folder,
        model=model,
        curves=tuple(curves),
        estimator=written(ceiling["tail"], "estimator"),
        quantile=written(ceiling["tail"], "quantile"),
        target=(schedule.target or {}).get("at_least") if schedule else None,
        schedule=schedule,
        # A record without the field is of a time when the value was all that a verification could ask for.
        bound=verification.get("bound", "value") if verification else None,
        notes=texts(results.get("notes", ())),
        tradeoff=results.get("tradeoff"),
    )


def _curve(measured: dict[str, Any], name: str | None = None, kind: Any = "budget") -> TailCurve:
    steps = (measured["schedule"] or {}).get("steps", [])
    budget = steps[0]["kv_budget_tokens"] if kind == "budget" and len(steps) == 1 else None
    if isinstance(budget, list):
        budget = None
    points = tuple(TailRow.from_table(row) for row in measured["tail"]["rows"])
    table = (measured["schedule"] or {}).get("check")
    check = DraftCheck.from_table(table) if table else None
    said = f", check {check.window_tokens} / {check.floor:g}" if check and budget is not None else ""
    own = measured["name"] if budget is None else f"budget {budget}{said}"
    overall = TailRow.from_table(measured["tail"]["overall"])
    return TailCurve(name or own, kind, points, budget, check, measured.get("checked"), overall)


def _order(run: TrainingRun) -> tuple[int, str]:
    known = ("dense", "calibrated", "aggressive")
    return (known.index(run.name) if run.name in known else len(known), run.name)


def _facts(
    measured: tuple[Measured, ...],
    plans: tuple[PlannedDecoding, ...],
    runs: list[TrainingRun],
    models: tuple[str, ...],
    summary: dict[str, Any] | None,
) -> dict[str, str]:
    """Short figures about the one model of the page; none if there are several."""
    facts: dict[str, str] = {}
    if len(models) != 1:
        return facts
    for each in measured if len(measured) == 1 else ():
        points = [point.value for point in each.verified.points if not thin(point)] if each.verified else []
        if points and each.target is not None:
            facts[f"lowest tail of the schedule in any bin (target {each.target:g})"] = rounded_down(min(points))
    own = [plan for plan in plans if model_key(plan.model) == model_key(models[0])][:2]
    for plan, name in zip(own, told_apart(own), strict=True):
        facts[f"as fast as dense on {name}, predicted"] = f"{rounded_down(plan.speedup, 2)}x"
    if summary is not None:
        results = summary["results"]
        if results["kv_read_share"] is not None:
            facts["of the KV cache is read by the calibrated rollouts"] = percent_up(results["kv_read_share"])
        minutes, seconds = divmod(round(results["wall_seconds"]), 60)
        facts["for all of it"] = f"{minutes} min {seconds:02d} s"
    elif len(runs) == 1 and runs[0].accuracy:
        facts["dense accuracy, before"] = rounded_down(runs[0].accuracy[0].value)
        facts["dense accuracy, after"] = rounded_down(runs[0].accuracy[-1].value)
    return facts
