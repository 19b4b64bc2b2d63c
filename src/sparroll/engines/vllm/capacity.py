"""Which schedules an engine can go on with, by the one that it was started with, which its requests can have of their own,
and how large the blocks of its cache are. vLLM is not imported."""

from __future__ import annotations

import math

from sparroll.attention.selectors import Selector
from sparroll.errors import UserError
from sparroll.schedule import Schedule

MOST_STEPS = 64
MOST_REQUEST_SCHEDULES = 31
"""That requests which decode together may have of their own."""
BLOCK_TOKENS = 64
"""Of a block on a GPU, or a multiple. In vLLM's blocks of 16, attention to pages of 16 tokens takes a tenth longer on an
H200 with 89 requests (benchmarks/results/kernels-89-requests-blocks-of-16-h200.json, -64-)."""
_BY_ITSELF = "run the other one by itself: in a command, a run or an engine of its own"


def block_tokens(selector: Selector, on_cpu: bool = False) -> int:
    """Tokens of a block of vLLM's cache: the least multiple of BLOCK_TOKENS, and of 16 on a CPU, that holds whole units and
    groups."""
    return math.lcm(16 if on_cpu else BLOCK_TOKENS, selector.row_tokens)


def check_fits_engine(schedule: Schedule, started: Schedule) -> None:
    """Raise UserError where an engine that was started with one schedule cannot go on with another: index, dense layers
    and the memory for drafts and steps are fixed at the start."""
    if len(schedule.steps) > MOST_STEPS:
        raise UserError(f"vLLM takes schedules of up to {MOST_STEPS} steps, got {len(schedule.steps)}")
    for what, kept, asked in (
        ("keeps the index of", started.selector.table(), schedule.selector.table()),
        ("has the dense layers", list(started.dense_layers), list(schedule.dense_layers)),
    ):
        if kept != asked:
            raise UserError(
                f"the engine {what} {kept}, the schedule {schedule.name!r} asks for {asked}",
                f"all schedules of one vLLM engine have one selector and the same dense layers; {_BY_ITSELF}",
            )
    most, asks = started.check, schedule.check
    if (most is None) != (asks is None):
        raise UserError(
            f"the engine was started {'without' if most is None else 'with'} checks of drafts, and the schedule "
            f"{schedule.name!r} is {'without' if asks is None else 'with'} them",
            "one vLLM engine checks all drafts or none: give every schedule a check (--check-window 64; in training --set "
            f"check.window_tokens=64; in Python schedule.checked()), or {_BY_ITSELF}; dense rollouts fit both",
        )
    if most is not None and asks is not None and asks.window_tokens > most.window_tokens:
        raise UserError(
            f"the engine has memory for windows of {most.window_tokens} tokens, the schedule {schedule.name!r} asks for "
            f"{asks.window_tokens}",
            "start it with the longest window: VLLMEngine(..., capacity=that schedule), or a server with it",
        )


def check_same_window(schedule: Schedule, started: Schedule) -> None:
    """Raise UserError where the schedule asks for other windows than those that the scheduler gives."""
    gives, asks = started.check, schedule.check
    if gives is not None and asks is not None and gives.window_tokens != asks.window_tokens:
        raise UserError(
            f"vLLM's scheduler gives windows of {gives.window_tokens} tokens, the schedule {schedule.name!r} asks for "
            f"{asks.window_tokens}, and a scheduler in another process cannot be told",
            f"give the schedule windows of {gives.window_tokens} tokens (`sparroll schedule check NAME --window "
            f"{gives.window_tokens}`), or start the server with it",
        )
