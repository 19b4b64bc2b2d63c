"""What an evaluation was asked for, checked, and as plain data that a resumed one must share. Loads no model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sparroll.compression import Compression
from sparroll.engines.adapter import check_base, weights_digest
from sparroll.errors import UserError
from sparroll.evaluate.settings import DENSE, EvalTask, EvaluationSettings, Policy, problem_digest
from sparroll.evaluate.weights import fingerprint
from sparroll.schedule import Schedule
from sparroll.tasks.data.task import DataTask
from sparroll.tasks.reward_function import FunctionJudge


@dataclass(frozen=True)
class EvaluationRequest:
    """Everything that the samples depend on, and where and how they are drawn."""

    model: str
    tasks: list[EvalTask]
    policies: list[Policy]
    settings: EvaluationSettings
    judge: FunctionJudge | None = None
    """That of each task, where the tasks' own verdicts are not asked for."""
    problem_seed: int = 0
    contest_window: tuple[date | None, date | None] = (None, None)
    """First contest day, and the one after the last."""
    chat: bool = False
    thinking: bool | None = None
    adapter: Path | None = None
    engine: str = "hf"
    device: str | None = None
    dtype: str | None = None
    """Precision of the weights by name; None: as they are stored."""
    max_batch: int = 64

    def table(self) -> dict[str, Any]:
        """Everything that the samples depend on, as plain data."""
        # A problem's digest is of text and answer; what a program must pass is in neither.
        rows = {each.label: each.task.fingerprint() for each in self.tasks if isinstance(each.task, DataTask)}
        window = [day and day.isoformat() for day in self.contest_window]
        return {
            "model": self.model,
            "weights": fingerprint(self.model),
            "tasks": {task.label: task.level for task in self.tasks},
            "problems": {task.label: [problem_digest(prompt) for prompt in task.problems] for task in self.tasks},
            "rows": rows or None,
            "policies": {policy.name: policy.table() for policy in self.policies},
            **dataclasses.asdict(self.settings),
            "chat": self.chat,
            "thinking": self.thinking,
            "engine": self.engine,
            "dtype": self.dtype,
            "problem_seed": self.problem_seed,
            "contest_window": window if any(window) else None,
            "reward": self.judge.function.table() if self.judge else None,
        }


def check_adapter(adapter: Path | None, schedule: Schedule | None, model: str) -> None:
    """Raise UserError before anything is loaded where it could not be used."""
    if adapter is None:
        return
    if schedule is None:
        raise UserError("--adapter is for sparse responses", "add --schedule or --budget")
    check_base(adapter, model)


def policies(
    schedule: Schedule | None, compression: Compression | None, adapter: Path | None, also_dense: bool
) -> list[Policy]:
    """Dense alone; or the schedule or the compression, with dense before it where that is asked for too."""
    if schedule is None and compression is None:
        return [DENSE]
    digest = None if adapter is None else weights_digest(adapter)
    chosen = Policy("sparse" if schedule is not None else "evicted", schedule, compression, digest)
    return [DENSE, chosen] if also_dense else [chosen]
