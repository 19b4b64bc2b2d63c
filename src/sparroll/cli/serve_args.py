"""`sparroll serve-args`: the arguments that `vllm serve` needs for sparse decoding under a schedule."""

from __future__ import annotations

from typing import Annotated

import typer

from sparroll.cli.shared import common, options
from sparroll.engines.vllm.serve_args import serve_arguments
from sparroll.schedule import Schedule


def serve_args(
    schedule: Annotated[str, typer.Option("--schedule", help="Preset or file.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="The model to be served, which the schedule must fit: by its name, and by its config if that is here.",
        ),
    ] = None,
    force_schedule: options.ForceSchedule = False,
    short_step_tokens: Annotated[
        int,
        typer.Option(
            "--short-step-tokens",
            help="Decode a step densely if the contexts of its requests add up to at most N tokens.",
        ),
    ] = 0,
    json_output: options.Json = False,
) -> None:
    """Print the arguments for `vllm serve MODEL $(sparroll serve-args --schedule S)`, safe to be split by a shell."""
    found = serve_arguments(schedule, model, force_schedule, short_step_tokens)
    common.say_caveats(Schedule.load(schedule))
    if json_output:
        common.print_json(found)
    else:
        print(" ".join(found))
