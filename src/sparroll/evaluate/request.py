"""What an evaluation is asked for, checked, and as the plain data that a resumed evaluation must share. Loads no
model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sparroll.compression import Compression
from sparroll.engines.adapter import check_base, refuse_check, weights_digest
from sparroll.engines.make import check_samples_at
from sparroll.errors import UserError
from sparroll.evaluate.settings import DENSE, EvalTask, EvaluationSettings, Policy, problem_digest
from sparroll.evaluate.weights import fingerprint
from sparroll.schedule import Schedule
from sparroll.tasks.data.task import DataTask
from sparroll.tasks.reward_function import FunctionJudge


@dataclass(frozen=True)
class EvaluationRequest:
    """Everything that the samples depend on, and which engine draws them."""

    model: str
    tasks: list[EvalTask]
    policies: list[Policy]
    settings: EvaluationSettings
    judge: FunctionJudge | None = None
    """Your own judge of all tasks, instead of the tasks' own verdicts."""
    problem_seed: int = 0
    contest_window: tuple[date | None, date | None] = (None, None)
    """The first day of contests that count, and the day after the last one."""
    chat: bool = False
    thinking: bool | None = None
    adapter: Path | None = None
    engine: str = "hf"
    device: str | None = None
    dtype: str | None = None
    """Precision of the weights by name; None: as they are stored."""
    max_batch: int = 64

    def __post_init__(self) -> None:
        check_samples_at(self.engine, self.settings.temperature)
        checked = any(policy.schedule is not None and policy.schedule.check is not None for policy in self.policies)
        if checked and self.settings.tail and self.settings.temperature == 0:
            raise UserError(
                "at temperature 0 the policy behind checked drafts has no distribution to compare",
                "add --no-tail, or use a temperature above 0",
            )

    def table(self) -> dict[str, Any]:
        """Everything that the samples depend on, as plain data."""
        # A problem's digest covers its text and answer, but not the tests that a program must pass.
        rows = {each.label: each.task.fingerprint() for each in self.tasks if isinstance(each.task, DataTask)}
        limits = {each.label: each.task.limits_of_tests() for each in self.tasks if isinstance(each.task, DataTask)}
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
            "test_limits": {label: found for label, found in limits.items() if found} or None,
            "reward": self.judge.function.table() if self.judge else None,
        }


def check_adapter(adapter: Path | None, schedule: Schedule | None, model: str) -> None:
    """Raise UserError if the adapter cannot be used. Loads nothing."""
    if adapter is None:
        return
    if schedule is None:
        raise UserError("--adapter is only for sparse responses", "add --schedule or --budget")
    refuse_check(schedule)
    check_base(adapter, model)


def policies(
    schedule: Schedule | None, compression: Compression | None, adapter: Path | None, also_dense: bool
) -> list[Policy]:
    """The policies to evaluate: dense alone, or the schedule or compression, with dense before it if `also_dense` is
    set."""
    if schedule is None and compression is None:
        return [DENSE]
    digest = None if adapter is None else weights_digest(adapter)
    chosen = Policy("sparse" if schedule is not None else "evicted", schedule, compression, digest)
    return [DENSE, chosen] if also_dense else [chosen]
