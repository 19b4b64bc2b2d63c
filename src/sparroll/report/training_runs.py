"""Reads a training run from its folder: its metrics, its configuration and the schedule of its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.report.data import AccuracyPoint, GapPoint, TrainingRun
from sparroll.report.reading import FOLDERS, reading, written
from sparroll.schedule import Schedule
from sparroll.train.reward_ends import reward_ends

_RESTORE = (
    "if a kill left half a line, `sparroll train` with --resume cuts it off; else restore the file, or move the run's "
    "folder elsewhere"
)

_WITH_SCHEDULE = ("schedule", "budget")
"""Kinds of attention whose checkpoints have a schedule, unless a watcher has changed to dense rollouts."""


def read_run(folder: Path, name: str, record: dict[str, Any]) -> TrainingRun:
    """The run whose result.json holds `record`. Raises UserError if its metrics.jsonl cannot be read."""
    path, last_checkpoint = folder / "metrics.jsonl", max(folder.glob("checkpoints/step-*"), default=None)
    lines, schedule = _lines(path), _schedule_of(last_checkpoint)
    with reading(folder / "result.json"):
        config = record["config"]
        for key in config.keys() & {"model", "attention"}:
            written(config, key)
        rollouts, target = _what_they_read(config, schedule, last_checkpoint is not None), _target(config, schedule)
        tolerated = _tolerated_gap(config)
        ended_at = record["results"].get("steps")
    with reading(path):
        steps = [line for line in lines if "reward/mean" in line]
        rewards = tuple(float(line["reward/mean"]) for line in steps)
        first, last, window = reward_ends(rewards)
        return TrainingRun(
            name=name,
            steps=tuple(line["step"] for line in steps),
            reward=rewards,
            reward_first=first,
            reward_last=last,
            reward_window_steps=window,
            tail_q05=tuple(line.get("mismatch/acceptance_q05") for line in steps),
            worst_bin_q05=tuple(line.get("mismatch/acceptance_q05_worst_bin") for line in steps),
            kv_read_share=tuple(
                line.get("control/sparse_kv_read_share", line["rollout/kv_read_share"]) for line in steps
            ),
            accuracy=tuple(_accuracy(line) for line in lines if "evaluate/dense_accuracy" in line),
            config=config,
            rollouts=rollouts,
            schedule=schedule,
            target=target,
            reward_gap=tuple(_gap(line) for line in steps if "control/reward_gap_low" in line),
            tolerated_gap=tolerated,
            events=tuple(f"step {line['step']}: {event}" for line in lines for event in line.get("events", ())),
            gone_on=ended_at is not None and ended_at != len(steps),
        )


def unfinished_runs(folder: Path) -> list[Path]:
    """Folders of runs that began and have no result.json yet."""
    logs = sorted(found for place in FOLDERS for found in folder.glob(f"{place}metrics.jsonl"))
    return [
        log.parent
        for log in logs
        if (log.parent / "config.json").is_file() and not (log.parent / "result.json").exists()
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that has at least one step."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}",
            f"{path.with_name('result.json')} is there, so this file should be, too",
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: {error}", _RESTORE) from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            lines.append(dict(json.loads(line)))
        except (TypeError, ValueError):
            raise UserError(f"cannot read {path}: line {number} is no JSON table", _RESTORE) from None
    if not any("reward/mean" in line for line in lines):
        raise UserError(f"cannot read {path}: it has no step of training", _RESTORE)
    return lines


def _accuracy(line: dict[str, Any]) -> AccuracyPoint:
    name = "evaluate/dense_accuracy"
    prompts = int(line["evaluate/prompts"])
    return AccuracyPoint(line["step"], line[name], line[f"{name}_low"], line[f"{name}_high"], prompts)


def _gap(line: dict[str, Any]) -> GapPoint:
    name = "control/reward_gap"
    return GapPoint(line["step"], line[name], line[f"{name}_low"], line[f"{name}_high"])


def _tolerated_gap(config: dict[str, Any]) -> float | None:
    """The gap above which the guard raises an alarm; None where none does."""
    guard = config.get("guard", {})
    if not config.get("rollout", {}).get("control_share") or guard.get("action") == "off":
        return None
    tolerated: float | None = guard.get("reward_gap")
    return tolerated


def _schedule_of(checkpoint: Path | None) -> Schedule | None:
    """The schedule that ran last, even if its file is gone or a watcher has changed it; None without one, and where a
    watcher has changed to dense rollouts."""
    saved = None if checkpoint is None else checkpoint / "schedule.toml"
    return Schedule.load(saved) if saved is not None and saved.is_file() else None


def _what_they_read(config: dict[str, Any], schedule: Schedule | None, saved: bool = False) -> str:
    """What the rollouts read and how their drafts were checked, in words. saved: whether a checkpoint says what ran last."""
    if schedule is not None:
        budgets = sorted({budget for step in schedule.steps for budget in step.budgets})
        said = f"budget {budgets[0]}" if len(budgets) == 1 else f"budgets {budgets[0]} to {budgets[-1]}"
        return said + _checked(schedule.check) + (f" ({schedule.caveat})" if schedule.caveat else "")
    section = config.get("check")
    check = DraftCheck(section["window_tokens"], section["floor"]) if section else None
    began_with = _whole_or_named(config["attention"]) + _checked(check)
    return f"{began_with}, dense at the end" if saved and config["attention"]["kind"] in _WITH_SCHEDULE else began_with


def _checked(check: DraftCheck | None) -> str:
    return f", check {check.window_tokens} / {check.floor:g}" if check else ""


def _whole_or_named(attention: dict[str, Any]) -> str:
    kind = attention["kind"]
    if kind == "compression":
        return f"{attention['policy']}, {attention['budget_tokens']} tokens"
    if kind == "budget":
        return f"budget {attention['kv_budget_tokens']}"
    return "whole context" if kind == "dense" else f"schedule {Path(attention['name']).stem}"


def _target(config: dict[str, Any], schedule: Schedule | None) -> float | None:
    """What the run held the tail to: the target of its guard, in the order in which train/schedules.py looks for it, or
    else that of its controller. None where nobody watched the tail."""
    guard, control = config.get("guard", {}), config.get("control", {})
    controlled = control if control.get("by") == "controller" else {}
    if guard.get("action") == "off":
        return controlled.get("target")
    for limits, target in (
        (guard, "at_least"),
        (controlled, "target"),
        ((schedule and schedule.target) or {}, "at_least"),
    ):
        if limits.get(target) is not None or limits.get("impossible_at_most") is not None:
            return limits.get(target)
    return None
