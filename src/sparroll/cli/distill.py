"""`sparroll distill`: train an adapter for the sparse rollouts of a frozen model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparroll.cli.shared import common, options
from sparroll.cli.shared.options import MODEL, PROMPTS, READING, RUN, option
from sparroll.errors import UserError
from sparroll.progress import Progress, quiet_transformers

if TYPE_CHECKING:
    from sparroll.train.sampling.prompts import GivenPrompts


def distill(
    command: typer.Context,
    model: Annotated[
        str | None, option(MODEL, "--model", help="tiny-reasoner (the default), a folder, or a hub name.")
    ] = None,
    out: options.RunOut = None,
    schedule: Annotated[
        str | None, option(READING, "--schedule", help="Preset or schedule file to sample under.")
    ] = None,
    budget: Annotated[
        int | None, option(READING, "--budget", help="A fixed KV budget in tokens, instead of a schedule.")
    ] = None,
    prompts_file: options.Prompts = None,
    task: options.Task = None,
    level: Annotated[int | None, option(PROMPTS, "--level", min=0, help="Difficulty of the task's prompts.")] = None,
    config: Annotated[
        Path | None,
        option(RUN, "--config", help="TOML file like the one that --print-config shows; default: all defaults."),
    ] = None,
    overrides: Annotated[
        list[str] | None, option(RUN, "--set", help="section.key=value, e.g. --set train.steps=500; repeatable.")
    ] = None,
    print_config: options.PrintConfig = False,
    resume: Annotated[bool, option(RUN, "--resume", help="Go on from the newest whole checkpoint in OUT.")] = False,
    json_output: options.Json = False,
) -> None:
    """Train a LoRA adapter that brings a frozen model's sparse rollouts back to its dense policy, into OUT/adapter."""
    from sparroll.train.config.file import load_distill_config
    from sparroll.train.distill.run import distill as run

    common.refuse_idle_prompt_options(command, prompts_file, task)
    given = _given(prompts_file, task)
    if schedule is not None and budget is not None:
        raise UserError("--schedule and --budget exclude each other", "for a first try: --budget 512")
    said: dict[str, Any] = {
        "model.name": model,
        "attention": "schedule" if schedule is not None else "budget" if budget is not None else None,
        "attention.name": schedule,
        "attention.kv_budget_tokens": budget,
        "task.name": given.name if given else task,
        "task.level": level,
    }
    options = [f"{key}={json.dumps(value)}" for key, value in said.items() if value is not None]
    settings = load_distill_config(config, [*options, *(overrides or [])])
    if print_config:
        common.print_config(settings, json_output)
        return
    out = common.run_folder(out)
    quiet_transformers()
    with Progress(json_output) as bars:
        result = run(settings, out, resume=resume, on_progress=bars.bar("distill"), task=given)
    if json_output:
        common.print_json(result.table())
    else:
        common.print_facts(_facts(result.table()))
    common.wrote(result.adapter, out / "result.json", quiet=json_output)


def _given(path: Path | None, task: str | None) -> GivenPrompts | None:
    """The file's prompts; None if a task or the configuration names the prompts."""
    if path is None:
        return None
    from sparroll.tasks.prompt_file import read_prompts
    from sparroll.train.sampling.prompts import GivenPrompts

    return GivenPrompts(read_prompts(path, task, 0, 2**62, 0), path.name)


def _facts(table: dict[str, Any]) -> dict[str, Any]:
    """The plain figures, with those of the held-out prompts before and after training."""
    facts = {name: value for name, value in table.items() if name not in ("before", "after")}
    for when in ("before", "after"):
        if table[when]:
            facts |= {f"held_out_{name}_{when}": table[when][name] for name in ("q05", "q05_low", "q05_high", "kl")}
    return facts
