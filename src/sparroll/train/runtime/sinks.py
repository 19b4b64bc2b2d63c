"""Where a run's metrics go. metrics.jsonl is always written; the summary and a resumed run read it. The other sinks are
chosen by name, and a chosen sink whose package is missing is an error at the start."""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from sparroll import files
from sparroll.errors import UserError
from sparroll.progress import say
from sparroll.rounding import percent_up, rounded_down
from sparroll.train.config.distill import DistillConfig
from sparroll.train.config.run import TrainConfig
from sparroll.train.sampling.control_group import gap_in_words
from sparroll.types import StepReport


class Sink(Protocol):
    """Takes one report after each step (and after each evaluation)."""

    def write(self, step: int, report: StepReport, events: list[str]) -> object: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object per line: {"step": 3, "reward/mean": 0.41, ..., "events": [...]}; events only where there are
    some.

    Each line is written in one piece. Opening the file at a position cuts off everything behind it, so a resumed run
    never has a step twice.
    """

    def __init__(self, path: Path, position: int = 0):
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        size = os.fstat(self._handle).st_size
        if size < position:
            os.close(self._handle)
            raise UserError(
                f"{path} has {size} bytes, but the checkpoint was made at {position}",
                "the file was shortened since; restore it",
            )
        os.ftruncate(self._handle, position)
        os.lseek(self._handle, position, os.SEEK_SET)
        self.position = position

    def write(self, step: int, report: StepReport, events: list[str]) -> int:
        """Append a line; -> length of the file."""
        line: dict[str, Any] = {"step": step, **report}
        bad = [name for name, value in report.items() if not math.isfinite(value)]
        assert not bad, f"metrics must be finite, {bad[0]} is {report[bad[0]]}"
        if events:
            line["events"] = events
        data = (json.dumps(line) + "\n").encode()
        rest = memoryview(data)
        while rest:
            # On a disk that gets full, the first call may write half a line, and the second one raises OSError.
            rest = rest[os.write(self._handle, rest) :]
        self.position += len(data)
        return self.position

    def flush(self) -> None:
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class ConsoleLine:
    """Prints one line per step with the main figures. All figures are in metrics.jsonl."""

    SHOWN = (
        ("reward", "reward/mean", rounded_down),
        ("tail q05", "mismatch/acceptance_q05", rounded_down),
        ("dense ceiling", "mismatch/dense_ceiling_q05", rounded_down),
        ("distill kl", "distill/kl", "{:.4f}".format),
        ("held-out tail q05", "distill/held_out_q05", rounded_down),
        ("KV read", "rollout/kv_read_share", percent_up),
        ("tokens", "rollout/response_tokens_mean", "{:.0f}".format),
        ("dense accuracy", "evaluate/dense_accuracy", rounded_down),
        ("s", "time/step_seconds", "{:.1f}".format),
    )

    def __init__(self, steps: int):
        self.steps = steps

    def write(self, step: int, report: StepReport, events: list[str]) -> None:
        shown = [f"{label} {form(report[name])}" for label, name, form in self.SHOWN if name in report]
        if gap := gap_in_words(report):
            shown.append(f"reward gap {gap}")
        say(f"step {step}/{self.steps}  " + "  ".join(shown))
        for event in events:
            say(f"  {event}", alarm=True)

    def close(self) -> None:
        return


class TensorBoard:
    def __init__(self, out: Path, completed: int | None):
        module = _package("tensorboard")
        # This hides what a killed run wrote after its last checkpoint, or all of it where it has none.
        self._writer = module.SummaryWriter(
            str(out / "tensorboard"), purge_step=0 if completed is None else completed + 1
        )

    def write(self, step: int, report: StepReport, events: list[str]) -> None:
        for name, value in report.items():
            self._writer.add_scalar(name, value, step)
        for event in events:
            self._writer.add_text("events", event, step)

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """W&B, or trackio, which has the same interface. The run's id is kept in the output folder, so a resumed run
    continues the same page."""

    def __init__(self, package: str, out: Path, config: TrainConfig | DistillConfig):
        module = _package(package)
        name = config.log.run_name or out.name
        about: dict[str, Any] = {
            "project": config.log.project,
            "config": config.model_dump(mode="json"),
            "resume": "allow",
        }
        if package == "wandb":
            about |= {"id": _run_id(out), "name": name, "dir": str(out)}
        else:
            # trackio tells runs apart only by their names.
            about |= {"name": f"{name}-{_run_id(out)}"}
        self._run = module.init(**about)

    def write(self, step: int, report: StepReport, events: list[str]) -> None:
        self._run.log({**report, **({"events": "; ".join(events)} if events else {})}, step=step)

    def close(self) -> None:
        self._run.finish()


_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_packages(config: TrainConfig) -> None:
    """Raise UserError where a chosen sink's package is missing."""
    for name in config.log.sinks:
        if name in _PACKAGES:
            _package(name)


def open_sinks(config: TrainConfig | DistillConfig, out: Path, completed: int | None = None) -> list[Sink]:
    """The chosen sinks; metrics.jsonl is not among them. completed: steps of the checkpoint that a run goes on from; None
    where it begins anew."""
    made: list[Sink] = []
    for name in config.log.sinks:
        if name == "console":
            made.append(ConsoleLine(config.train.steps))
        elif name == "tensorboard":
            made.append(TensorBoard(out, completed))
        else:
            made.append(Tracker(name, out, config))
    return made


def _run_id(out: Path) -> str:
    path = out / "run_id"
    if not path.exists():
        files.write_text(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError:
        raise UserError(
            f"log.sinks names {name!r}, but the package {name} is not installed", f"pip install {name}"
        ) from None
