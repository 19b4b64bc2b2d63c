"""What is evaluated and how: tasks, policies, and how each policy samples. Plain data, which is checked; nothing
runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparroll import tasks
from sparroll.compression import Compression
from sparroll.engines.generate_arguments import check_temperature
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.tasks import Task, Verdict
from sparroll.tasks.data.read import FORMATS
from sparroll.tasks.reward_function import FunctionJudge
from sparroll.tasks.thinking import with_opened
from sparroll.types import MOST_SAMPLES, Prompt, Rollout, check_seed

if TYPE_CHECKING:
    from sparroll.tasks.data.settings import DataSettings

PROMPTS = 64
"""How many problems are taken from an endless task."""
ESTIMATOR = "top_k_lower"
"""The estimator of every acceptance in the log and in the summary."""


@dataclass(frozen=True)
class Policy:
    """What a decode step reads: the whole cache, what a schedule chooses, or what a compression left.

    >>> Policy("sparse", Schedule.fixed(512))
    """

    name: str
    schedule: Schedule | None = None
    compression: Compression | None = None
    adapter: str | None = None
    """Digest of the LoRA adapter that it samples with. The acceptance is against the model without the adapter."""

    def table(self) -> dict[str, Any]:
        """Plain data for a record."""
        return {
            "schedule": self.schedule.table() if self.schedule else None,
            "compression": self.compression.table() if self.compression else None,
        } | ({"adapter": self.adapter} if self.adapter else {})


DENSE = Policy("dense")


@dataclass(frozen=True)
class EvaluationSettings:
    """How each policy samples, and how its responses are measured. Dense and sparse samples with the same seed use the
    same random numbers."""

    samples: int = 16
    """Responses per problem."""
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1, each token is drawn from the fewest most likely ones with at least this mass. The acceptance then compares
    both policies as they are cut, and no target was set for that."""
    seed: int = 0
    tail: bool = True
    """Whether every response is scored under the dense policy, for the acceptance and its tail."""
    top_k: int = 20
    """Length of the top-k lists from which the acceptance is computed. The published target of 0.86 is for 20."""
    bin_tokens: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p!r}", "1 cuts nothing")
        for name in ("samples", "max_new_tokens", "top_k", "bin_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a whole number of 1 or more, got {value!r}")
        if self.samples > MOST_SAMPLES:
            raise UserError(f"samples must be at most {MOST_SAMPLES:,}, got {self.samples:,}")
        check_temperature(self.temperature)
        check_seed(self.seed)
        if self.temperature == 0 and self.top_p < 1:
            raise UserError(f"top_p = {self.top_p} does nothing at temperature 0", "leave one of them out")
        if self.temperature == 0 and self.samples > 1:
            raise UserError(f"at temperature 0 all {self.samples} samples of a problem are equal", "use --samples 1")


@dataclass(frozen=True)
class EvalTask:
    """One task at one level, with its problems.

    label: as the user wrote it, such as "synthetic_add:5". Labels are unique in an evaluation.
    """

    label: str
    task: Task
    level: int
    problems: tuple[Prompt, ...]
    judge: FunctionJudge | None = None
    """Judges the responses instead of the task, if it is given."""

    @property
    def has_answers(self) -> bool:
        """Whether responses give answers, so that they can vote."""
        return self.judge is None and tasks.has_answers(self.task)

    def verdicts(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        rollouts: Sequence[Rollout],
        decode: Callable[[list[int]], str],
    ) -> list[Verdict]:
        """A verdict for each response to the prompt at the same place. Answers that mean the same have one string; so
        give it all responses to a prompt at once. decode: turns token ids into text."""
        if self.judge is not None:
            return self.judge.verdicts(prompts, texts, rollouts)
        return tasks.pooled(self.task, prompts, tasks.judge(self.task, prompts, with_opened(texts, rollouts, decode)))


def read_tasks(
    text: str,
    level: int,
    count: int | None,
    problem_seed: int = 0,
    data: DataSettings | None = None,
    judge: FunctionJudge | None = None,
) -> list[EvalTask]:
    """Tasks from "name,name:level,set,set:split,file,...". `level` is for names without one. `count` None means all
    problems of a finite set (the task's `eval_count`), and PROMPTS of an endless task. data: mirror, template, sandbox
    and contest window for sets and files. judge: judges the responses of all tasks instead of the tasks themselves."""
    found: list[EvalTask] = []
    for label in (part.strip() for part in text.split(",")):
        if any(one.label == label for one in found):
            raise UserError(f"the task {label!r} is named twice", "name each task and level once")
        task, own = _task(label, level, data, judged=judge is not None)
        wanted = count or int(getattr(task, "eval_count", PROMPTS))
        problems = task.prompts("eval", own, problem_seed, wanted)
        if not problems:
            raise UserError(f"the task {label!r} has no problems to evaluate on")
        if len({prompt.prompt_id for prompt in problems}) < len(problems):
            raise UserError(f"problems of the task {label!r} share a prompt_id", "give each problem a different one")
        found.append(EvalTask(label, task, own, tuple(problems), judge))
    if data is not None:
        from sparroll.tasks.data.select import refuse_window_without_dates
        from sparroll.tasks.data.task import DataTask

        if data.prompt_template is not None and not any(isinstance(each.task, DataTask) for each in found):
            raise UserError("prompt templates are for sets and files, and --tasks names none", "leave the template out")
        refuse_window_without_dates(data, any(getattr(each.task, "dated", False) for each in found))
    return found


def _task(label: str, level: int, data: DataSettings | None, judged: bool) -> tuple[Task, int]:
    """(the task, its level). All rows of a set or a file are evaluated, even if they are a training split. judged:
    whether a judge of the user's own reads the responses."""
    name, colon, written = label.partition(":")
    if (tasks.is_data(name) and name != "data") or Path(name).suffix.lower() in FORMATS:
        from sparroll.tasks.data.rewards import JudgedElsewhere, RowReward
        from sparroll.tasks.data.rows import KINDS
        from sparroll.tasks.data.settings import DataSettings
        from sparroll.tasks.data.task import DataTask

        settings = data or DataSettings()
        rewards: dict[str, RowReward] = {kind: JudgedElsewhere() for kind in KINDS} if judged else {}
        return DataTask(label, settings.model_copy(update={"eval": (label,)}), rewards), level
    if not name or (colon and not written.isdecimal()):
        raise UserError(f"--tasks takes name or name:level, separated by commas, got {label!r}", _known())
    return tasks.get(name), int(written) if colon else level


def _known() -> str:
    return f"known: {', '.join(tasks.names())}"


def sample_seeds(seed: int, prompts: Sequence[Prompt], samples: int) -> list[int]:
    """The 63-bit seed of each sample, prompt by prompt. It depends on the prompt's id, but not on the other prompts."""
    return [
        int.from_bytes(blake2b(f"{seed}/{prompt.prompt_id}/{sample}".encode(), digest_size=8).digest(), "little") >> 1
        for prompt in prompts
        for sample in range(samples)
    ]


def problem_digest(prompt: Prompt) -> str:
    """A digest of text and answer. Two problems with the same digest are the same problem."""
    return blake2b(f"{prompt.text}\0{prompt.answer}".encode(), digest_size=8).hexdigest()
