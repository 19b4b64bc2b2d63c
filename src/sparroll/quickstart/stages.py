"""The stages of a quickstart. Each can be resumed: finished work is in a file and is not done again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from sparroll import files, records, tasks
from sparroll.calibrate.measure import MeasureSettings, Study
from sparroll.calibrate.prospects import check_ceiling
from sparroll.calibrate.run import calibrate
from sparroll.calibrate.store import Store
from sparroll.calibrate.sweep import budget_name, sweep_budget, sweep_fingerprint
from sparroll.engines.make import make_engine
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.plan.speedup import plan
from sparroll.progress import OnProgress, Stages, quiet_transformers
from sparroll.quickstart.settings import CALIBRATED, QuickstartSettings, RunSettings
from sparroll.rounding import rounded_down
from sparroll.train import TrainConfig, train
from sparroll.train.config.file import config_from
from sparroll.train.dense_checks import first_accuracy

CALIBRATION = "calibration"
"""Name of the folder for the sweep, the schedule and their record."""


def study(settings: QuickstartSettings) -> Study:
    """The packaged model and the prompts it is measured on."""
    about = settings.calibrate
    engine = make_engine("hf", settings.model, device="cpu", max_batch=about.prompts * about.samples)
    asked = tasks.get(about.task).prompts("eval", about.level, settings.seed, about.prompts)
    ids = PromptEncoder(engine.tokenizer).ids(asked)
    measuring = MeasureSettings(
        max_new_tokens=about.max_new_tokens,
        samples=about.samples,
        temperature=about.temperature,
        bin_tokens=about.bin_tokens,
        seed=settings.seed,
    )
    return Study(engine, Scorer.beside(engine), ids, measuring)


def measure_ceiling(settings: QuickstartSettings, out: Path, *, on_progress: OnProgress) -> None:
    """Generate the dense rollouts and measure their tail, the dense ceiling. Raises UserError if it is below the
    target."""
    measured = study(settings)
    ceiling = _store(settings, out, measured).ceiling(measured, on_progress)
    check_ceiling(measured, ceiling, settings.calibrate.target)


def measure_budgets(settings: QuickstartSettings, out: Path, budgets: list[int], *, on_progress: OnProgress) -> None:
    """Measure some budgets of the grid. A budget as large as the longest context is dense by construction; the sweep
    takes it."""
    about, measured = settings.calibrate, study(settings)
    longest = max(len(prompt) for prompt in measured.prompts) + about.max_new_tokens - 1
    stages = Stages(on_progress, len(budgets))
    for budget in budgets:
        progress = stages.next(f"budget {budget}")
        if budget < longest:
            sweep_budget(
                measured,
                budget,
                out=out / CALIBRATION,
                selector=about.make_selector(),
                dense_layers=about.dense_layers,
                on_progress=progress,
            )
    stages.end()


def first_tail(settings: QuickstartSettings, out: Path, budget: int) -> list[str]:
    """Write the dense ceiling and the tail of one budget by context length to profile.json. Returns them as lines to
    print, or nothing if the budget was not measured here."""
    folder = out / CALIBRATION
    tables = [folder / "dense.json", folder / f"{budget_name(budget)}.json"]
    if not tables[1].exists():
        return []
    ceiling, measured = (json.loads(path.read_text(encoding="utf-8")) for path in tables)
    results = {"dense_ceiling": ceiling, "schedules": [measured]}
    config = {"model": settings.model, **settings.calibrate.model_dump(mode="json")}
    records.write(out / "profile.json", "profile", results, config=config, seed=settings.seed)
    dense = {row["from_context_tokens"]: row["quantile_value"] for row in ceiling["tail"]["rows"]}
    lines = ["", f"{'from context':>12}{f'tail of {budget} tokens':>20}{'dense ceiling':>15}"]
    for row in measured["tail"]["rows"]:
        start, own = row["from_context_tokens"], row["quantile_value"]
        figures = [rounded_down(value) for value in (own, dense.get(start))]
        lines.append(f"{start:>12,}{figures[0]:>20}{figures[1]:>15}")
    return [*lines, ""]


def is_calibrated(out: Path) -> bool:
    return (out / CALIBRATION / "calibration.json").exists()


def open_calibration(settings: QuickstartSettings, out: Path) -> None:
    """Make the sweep's folder and its settings, before several processes write into it."""
    quiet_transformers()
    _store(settings, out, study(settings), shared=False)


def _store(settings: QuickstartSettings, out: Path, measured: Study, shared: bool = True) -> Store:
    about = settings.calibrate
    asked = sweep_fingerprint(measured, about.make_selector(), about.dense_layers)
    return Store(out / CALIBRATION, asked, shared=shared)


def fit_and_verify(settings: QuickstartSettings, out: Path, command: str, *, on_progress: OnProgress) -> None:
    """From the measured grid to schedule.toml and its record. command: the one that made them, for the schedule."""
    about, started = settings.calibrate, time.perf_counter()
    found = calibrate(
        study(settings),
        out=out / CALIBRATION,
        budgets=about.budgets,
        target=about.target,
        selector=about.make_selector(),
        dense_layers=about.dense_layers,
        verify_rounds=about.verify_rounds,
        bound=about.bound,
        model=settings.model,
        made_by=records.made_by(command),
        on_progress=on_progress,
    )
    config = {"model": settings.model, **about.model_dump(mode="json")}
    seconds = time.perf_counter() - started
    path = out / CALIBRATION / "calibration.json"
    records.write(path, "calibration", found.table(), config=config, seed=settings.seed, wall_seconds=seconds)


def schedule_path(out: Path) -> Path:
    return out / CALIBRATION / "schedule.toml"


def make_plans(settings: QuickstartSettings, out: Path) -> None:
    """Make the plans, and write each to plans/plan-N.json."""
    for number, about in enumerate(settings.plans, 1):
        schedule = str(schedule_path(out)) if about.schedule == CALIBRATED else about.schedule
        result = plan(about.model, schedule, hardware=about.gpu, lengths=about.lengths)
        config = about.model_dump(mode="json")
        records.write(out / "plans" / f"plan-{number}.json", "plan", result.table(), config=config)


def train_config(settings: QuickstartSettings, out: Path, name: str) -> TrainConfig:
    """The configuration of a run: the sections that all runs share, and what its rollouts read."""
    run = settings.runs[name]
    sections: dict[str, dict[str, Any]] = {section: dict(table) for section, table in settings.train.items()}
    sections.setdefault("model", {}).setdefault("name", settings.model)
    sections["model"].setdefault("device", "cpu")
    sections.setdefault("train", {}).setdefault("seed", settings.seed)
    # The dense run beside the sparse ones is what they are compared with.
    sections.setdefault("rollout", {}).setdefault("control_share", 0)
    # The guard watches all sparse runs, also those whose schedule has no target of its own.
    sections.setdefault("guard", {}).setdefault("at_least", settings.calibrate.target)
    sections["attention"] = _attention(settings, out, name, run)
    return config_from(sections)


def _attention(settings: QuickstartSettings, out: Path, name: str, run: RunSettings) -> dict[str, Any]:
    """The section [attention] of a run."""
    if run.schedule == "dense":
        return {"kind": "dense"}
    path = schedule_path(out) if run.schedule == CALIBRATED else out / f"{name}.toml"
    if run.schedule is None and not path.exists():
        settings.aggressive_schedule(run).save(path)
    return {"kind": "schedule", "name": str(path) if run.schedule in (CALIBRATED, None) else run.schedule}


def first_accuracy_path(out: Path) -> Path:
    return out / "first_accuracy.json"


def measure_first_accuracy(settings: QuickstartSettings, out: Path, name: str, *, on_progress: OnProgress) -> None:
    """Measure the dense accuracy that all runs begin with, by the configuration of the run `name`."""
    files.write_json(first_accuracy_path(out), first_accuracy(train_config(settings, out, name)))
    on_progress(1, 1)


def train_run(settings: QuickstartSettings, out: Path, name: str, *, on_progress: OnProgress) -> None:
    """Train one run, from its newest checkpoint if it was begun before."""
    begun, measured = (out / name / "config.json").is_file(), first_accuracy_path(out)
    first = json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else None
    config = train_config(settings, out, name)
    train(config, out / name, resume=begun, on_progress=on_progress, first_accuracy=first)
