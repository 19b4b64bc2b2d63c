"""The stages of a quickstart, each resumable by itself: what is finished lies in a file and is not done again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sparroll import records, tasks
from sparroll.calibrate.measure import MeasureSettings, Study
from sparroll.calibrate.run import calibrate
from sparroll.calibrate.sweep import sweep
from sparroll.engines.make import make_engine
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.plan.speedup import plan
from sparroll.progress import OnProgress
from sparroll.quickstart.settings import CALIBRATED, QuickstartSettings, RunSettings
from sparroll.schedule import Schedule
from sparroll.train import TrainConfig, train
from sparroll.train.config.file import config_from

CALIBRATION = "calibration"
"""Folder of the sweep, the schedule and their record."""


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


def measure(settings: QuickstartSettings, out: Path, budgets: list[int], *, on_progress: OnProgress) -> None:
    """A part of the budget grid; the dense ceiling too where it is not there yet."""
    about = settings.calibrate
    sweep(
        study(settings),
        out=out / CALIBRATION,
        budgets=budgets,
        selector=about.make_selector(),
        dense_layers=about.dense_layers,
        on_progress=on_progress,
    )


def fit_and_verify(settings: QuickstartSettings, out: Path, *, on_progress: OnProgress) -> None:
    """From the measured grid to schedule.toml and its record."""
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
        made_by=records.made_by("sparroll quickstart"),
        on_progress=on_progress,
    )
    config = {"model": settings.model, **about.model_dump(mode="json")}
    seconds = time.perf_counter() - started
    path = out / CALIBRATION / "calibration.json"
    records.write(path, "calibration", found.table(), config=config, seed=settings.seed, wall_seconds=seconds)


def schedule_path(out: Path) -> Path:
    return out / CALIBRATION / "schedule.toml"


def make_plans(settings: QuickstartSettings, out: Path) -> None:
    """One plan-N.json each."""
    for number, about in enumerate(settings.plans, 1):
        schedule = str(schedule_path(out)) if about.schedule == CALIBRATED else about.schedule
        result = plan(about.model, schedule, hardware=about.gpu, lengths=about.lengths)
        config = about.model_dump(mode="json")
        records.write(out / "plans" / f"plan-{number}.json", "plan", result.table(), config=config)


def train_config(settings: QuickstartSettings, out: Path, name: str) -> TrainConfig:
    """What the runs share, and how this one samples."""
    run = settings.runs[name]
    sections: dict[str, dict[str, Any]] = {section: dict(table) for section, table in settings.train.items()}
    sections.setdefault("model", {}).setdefault("name", settings.model)
    sections["model"].setdefault("device", "cpu")
    sections.setdefault("train", {}).setdefault("seed", settings.seed)
    sections.setdefault("rollout", {})["schedule"] = _run_schedule(settings, out, name, run)
    return config_from(sections)


def _run_schedule(settings: QuickstartSettings, out: Path, name: str, run: RunSettings) -> str:
    if run.schedule == CALIBRATED:
        return str(schedule_path(out))
    if run.schedule is not None:
        return run.schedule
    path = out / f"{name}.toml"
    schedule: Schedule = settings.aggressive_schedule(run)
    return str(path if path.exists() else schedule.save(path))


def train_run(settings: QuickstartSettings, out: Path, name: str, *, on_progress: OnProgress) -> None:
    """One RL run, from its newest checkpoint if it was begun."""
    begun = (out / name / "config.json").is_file()
    train(train_config(settings, out, name), out / name, resume=begun, on_progress=on_progress)
