"""`sparroll serve-args`: what `vllm serve` needs to be told for sparse rollouts under a schedule."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from sparroll.cli import common
from sparroll.engines.vllm.worker import EXTENSION
from sparroll.errors import UserError
from sparroll.schedule import Schedule, presets

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def serve_args(
    schedule: Annotated[str, typer.Option("--schedule", help="Preset or file.")],
    model: Annotated[str | None, typer.Option("--model", help="What is served; checked against the schedule.")] = None,
    force_schedule: common.ForceSchedule = False,
    json_output: common.Json = False,
) -> None:
    """Print the arguments for `vllm serve MODEL $(sparroll serve-args --schedule S)`, safe to be split by a shell."""
    found = arguments(schedule, model, force_schedule)
    if json_output:
        common.print_json(found)
    else:
        print(" ".join(found))


def arguments(name: str, model: str | None = None, force: bool = False) -> list[str]:
    """One per word. Quotes would not survive a shell's $(...), so nested settings are written with dots."""
    schedule = Schedule.load(name, model=model, force=force)
    source = name if name in presets() else str(Path(name).resolve())
    if not _SAFE.fullmatch(source):
        raise UserError(
            f"the path {source!r} has characters that a shell would split or expand",
            "copy the schedule to a path of letters, digits and - _ . /",
        )
    block_tokens = _block_tokens(schedule.selector.unit_tokens)
    setting = "--additional-config.sparroll"
    where = [f"{setting}.schedule={source}", f"{setting}.force_schedule=true"] if force else [f"{setting}={source}"]
    return [
        "--attention-backend=CUSTOM",
        *where,
        f"--block-size={block_tokens}",
        # Log-probabilities of the distribution that was sampled from, as every correction needs them.
        "--logprobs-mode=processed_logprobs",
        # What ran, for whoever asks (docs/vllm.md).
        f"--worker-extension-cls={EXTENSION}",
    ]


def _block_tokens(unit_tokens: int) -> int:
    """vLLM's blocks are multiples of 16 and hold whole units."""
    return math.lcm(16, unit_tokens)
