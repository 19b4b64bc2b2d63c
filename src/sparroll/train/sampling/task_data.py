"""The run's task. A run on real rows also leaves out prompts that are too long, records its rows, and cannot be resumed
on other rows."""

from __future__ import annotations

from pathlib import Path

from sparroll import files, tasks
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.errors import UserError, nearest
from sparroll.resume import refuse_changes
from sparroll.tasks import Task
from sparroll.tasks.data.select import refuse_window_without_dates
from sparroll.tasks.data.task import DataTask, data_task
from sparroll.train.config.run import TrainConfig
from sparroll.train.sampling.prompts import GivenPrompts, PromptStream

ENDLESS_TASK_PROMPTS = 1024
RECORD = "data.json"


def make_task(config: TrainConfig) -> Task:
    """The task that the configuration names. Raises UserError where it has rows to train on, but no eval rows."""
    name = config.task.name
    if not tasks.is_data(name):
        if name not in tasks.names():
            raise UserError(f"unknown task {name!r}", nearest(name, tasks.names()))
        return tasks.get(name)
    task = data_task(name, config.data)
    refuse_window_without_dates(config.data, task.dated)
    # Both are needed before the first step: the dense ceiling is measured on eval rows.
    task.prompts("train", config.task.level, config.train.seed, 1)
    task.prompts("eval", config.task.level, config.train.seed, 1)
    return task


def training_prompts(task: Task, config: TrainConfig, encoder: PromptEncoder) -> PromptStream:
    """The walk over the training prompts, none of which is too long. Raises UserError where there are fewer than
    `task.train_prompts`."""
    asked = config.task.train_prompts
    if not isinstance(task, DataTask):
        endless = not isinstance(task, GivenPrompts)
        count = ENDLESS_TASK_PROMPTS if asked is None and endless else asked
        stream = PromptStream(task, config.task.level, config.train.seed, count)
        encoder.check(stream.prompts)
    else:
        task.limit_prompt_tokens(lambda prompts: [len(ids) for ids in encoder.ids(prompts)])
        stream = PromptStream(task, config.task.level, config.train.seed, asked)
    if asked is not None and len(stream.prompts) < asked:
        raise UserError(
            f"task.train_prompts is {asked:,}, but {task.name} has {len(stream.prompts):,} training prompts",
            "leave it out to train on all of them",
        )
    return stream


def refuse_prompts_without_room(
    task: Task, config: TrainConfig, prompts: PromptStream, encoder: PromptEncoder, context_limit: int | None
) -> None:
    """Raise UserError where the longest prompt of training or evaluation and a whole response do not fit into the model's
    context: its turn may come after many steps, and no resumed run could go on there. A level that the task does not have
    is refused, too."""
    asked_of = {"a training": list(prompts.prompts)}
    if config.evaluate.prompts:
        asked_of["an eval"] = task.prompts("eval", config.eval_level, config.train.seed, config.evaluate.prompts)
    if context_limit is None:
        return
    response = config.rollout.max_new_tokens
    for split, asked in asked_of.items():
        longest = max(map(len, encoder.ids(asked)), default=0)
        if longest + response > context_limit:
            leave_out = "leave long rows out (data.max_prompt_tokens for training rows)"
            shorter = f"--set rollout.max_new_tokens={context_limit - longest} or less, or "
            raise UserError(
                f"{split} prompt has {longest:,} tokens, and with rollout.max_new_tokens = {response:,} that is more than "
                f"the model's context of {context_limit:,}",
                (shorter if longest < context_limit else "") + leave_out,
            )


def write_record(task: Task, out: Path) -> None:
    """Write data.json, which says which rows were read, skipped and left out."""
    if isinstance(task, DataTask):
        files.write_json(out / RECORD, task.report())


def notices(task: Task) -> list[str]:
    """An event for the start of a run that leaves rows out."""
    said = task.left_out() if isinstance(task, DataTask) else ""
    return [said] if said else []


def refuse_other_rows(task: Task, out: Path) -> None:
    """Raise UserError where a run is resumed on other rows than it began with: the order of its prompts would not be
    the same."""
    if isinstance(task, DataTask) and (out / RECORD).is_file():
        began = files.read_table(out / RECORD, "choose another folder with --out").get("fingerprint")
        refuse_changes(out, {"data.fingerprint": began}, {"data.fingerprint": task.fingerprint()})
