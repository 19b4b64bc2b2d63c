"""`sparroll schedule list | show | check`: what a schedule file says, as a table and a small plot, and a copy of it whose
drafts are checked."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from sparroll import files
from sparroll.cli.shared.common import print_json, say_caveats, wrote
from sparroll.cli.shared.options import OUTPUT, Json, Verb, option
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.draft_check import LEAST_WINDOW_TOKENS, MOST_WINDOW_TOKENS, DraftCheck
from sparroll.errors import UserError
from sparroll.layer_groups import budgets_in_words
from sparroll.presets import presets
from sparroll.rounding import percent_up, rounded_down, rounded_up, with_interval
from sparroll.schedule import Schedule, Step

app = typer.Typer(help="Look at schedules: context length -> KV budget.", no_args_is_help=True)

_LONGEST_TOKENS = 32_768
_COLUMNS, _LINES = 60, 9
_CAPTION = "context tokens. bars: tokens read by a sparse layer; dots: the whole context"


@app.command("list", cls=Verb)
def list_(json: Json = False) -> None:
    """List the schedules that ship with the package."""
    loaded = [Schedule.load(name) for name in presets()]
    if json:
        print_json([schedule.inline() for schedule in loaded])
        return
    table = Table(
        Column("name", overflow="fold"),
        Column("model", overflow="fold"),
        "target",
        "steps",
        "budget tokens",
        box=None,
    )
    for schedule in loaded:
        budgets = [budget for step in schedule.steps for budget in step.budgets]
        held = schedule.target or {}
        target = held.get("at_least")
        said = "-" if target is None else f"{target:.2f}"
        if "at_most" in held:
            said = f"{held['at_most']:g} over {held['nats']} nats"
        span = f"{min(budgets)} to {max(budgets)}"
        table.add_row(
            f"{schedule.name} ({schedule.caveat})" if schedule.caveat else schedule.name,
            schedule.model,
            said,
            str(len(schedule.steps)),
            span,
        )
    Console().print(table)


@app.command(cls=Verb)
def show(
    name: Annotated[str, typer.Argument(help="Name of a preset, or path of a schedule file.")],
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Longest context in the plot and in the shares, in tokens.")
    ] = None,
    json: Json = False,
) -> None:
    """Print one schedule: its settings, its steps, and a plot of budget against context."""
    schedule = Schedule.load(name)
    if json:
        print_json(schedule.inline())
        return
    last = schedule.steps[-1].from_context_tokens
    measured = any(step.measured for step in schedule.steps) and last > 0
    longest = context or (2 * last if measured else max(_LONGEST_TOKENS, 2 * last))
    console = Console(highlight=False)
    for line in _header(schedule):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_steps(schedule, longest))
    console.print()
    for line in plot(schedule, longest):
        if line.endswith(_CAPTION):
            line = textwrap.fill(line, max(40, console.width), subsequent_indent=" " * 10)
        console.print(line, markup=False, no_wrap=True, overflow="crop")


@app.command(cls=Verb)
def check(
    name: Annotated[str, typer.Argument(help="Name of a preset, or path of a schedule file.")],
    out: Annotated[Path, option(OUTPUT, "--out", help="The file to write; it must end with .toml.")],
    window: Annotated[
        int, typer.Option("--window", min=LEAST_WINDOW_TOKENS, max=MOST_WINDOW_TOKENS, help="Tokens of a window.")
    ] = DraftCheck.window_tokens,
    floor: Annotated[
        float,
        typer.Option(
            "--floor",
            help="No token is more than log(1 / floor) nats less likely under the dense policy; 1: exactly the dense "
            "policy.",
        ),
    ] = DraftCheck.floor,
    json: Json = False,
) -> None:
    """Write a copy of a schedule whose drafts the dense policy checks. The copy replaces a check that it had."""
    if out.suffix != ".toml":
        raise UserError(f"a schedule file ends with .toml, got {out}", f"write {out}.toml")
    files.output_file(out, "schedule.toml")
    loaded = Schedule.load(name)
    say_caveats(loaded)
    schedule = dataclasses.replace(loaded, check=DraftCheck(window, floor), name=out.stem)
    path = schedule.save(out)
    if json:
        print_json(schedule.inline())
    wrote(path, quiet=json)


def _setting(key: str, value: object) -> str:
    """A setting of a selector, which may be a table of its own."""
    if isinstance(value, dict):
        return f"{key} ({', '.join(_setting(*inner) for inner in value.items())})"
    return f"{key} {value}"


def _header(schedule: Schedule) -> list[str]:
    selector = schedule.selector.table()
    settings = ", ".join(_setting(key, value) for key, value in selector.items() if key != "kind")
    lines = [
        f"schedule  {schedule.name}",
        f"model     {schedule.model or 'any'}",
        f"selector  {selector['kind']} ({settings})",
        f"dense     layers {', '.join(map(str, schedule.dense_layers)) or 'none'}",
    ]
    for place, group in enumerate(schedule.layer_groups, 1):
        lines.append(f"group {place:<4}layers {', '.join(map(str, group))}")
    if schedule.check:
        lines.append(
            f"check     windows of {schedule.check.window_tokens} tokens, floor {schedule.check.floor:g}: no token more "
            f"than {rounded_up(schedule.check.most_nats, 2)} nats off"
        )
    if schedule.target:
        lines.append("target    " + ", ".join(f"{key} {value}" for key, value in schedule.target.items()))
    if schedule.made_by:
        lines.append("made by   " + ", ".join(str(value) for value in schedule.made_by.values()))
    return [*lines, ""]


def _steps(schedule: Schedule, longest: int) -> Table:
    table = Table(box=None)
    limit = ImpossibleLimit.of_target(schedule.target)
    statistic = "measured tail" if limit is None else f"share over {limit.nats} nats off"
    for title in ("from context", "to", "KV budget", "share read", statistic, "tokens"):
        table.add_column(title, justify="right")
    ends = [step.from_context_tokens for step in schedule.steps[1:]]
    for step, end in zip(schedule.steps, [*ends, None], strict=True):
        beyond = step.from_context_tokens > longest
        measured = step.measured or {}
        table.add_row(
            f"{step.from_context_tokens:,}",
            "" if end is None else f"{end if beyond else min(end, longest):,}",
            budgets_in_words(step.kv_budget_tokens),
            "-" if beyond else _shares_read(schedule, step, longest if end is None else min(end, longest)),
            _figure(measured, limit),
            f"{measured['tokens']:,}" if "tokens" in measured else "-",
        )
    return table


def _figure(measured: dict[str, Any], limit: ImpossibleLimit | None) -> str:
    """What was measured with a step, and its interval where there is one."""
    known = [measured[name] for name in ("value", "low", "high") if name in measured]
    if limit is not None:
        value, *ends = [f"{each:.2g}" for each in known] or ["-"]
        return f"{value} [{', '.join(ends)}]" if ends else value
    return with_interval(*known) if len(known) == 3 else rounded_down(measured.get("value"))


def _shares_read(schedule: Schedule, step: Step, end: int) -> str:
    """The shares that are read where the step begins and at the context length `end`."""
    first, last = (_share_read(schedule, step, max(1, at)) for at in (step.from_context_tokens, end))
    return f"{percent_up(first)} to {percent_up(last)}"


def _share_read(schedule: Schedule, step: Step, context: int) -> float:
    """The share of a context that a sparse layer reads; of groups with budgets of their own, the mean over layers."""
    sizes = [len(group) for group in schedule.layer_groups] or [1]
    read = [schedule.selector.read_tokens(context, step.of_group(place).budgets[0]) for place in range(len(sizes))]
    return sum(size * tokens for size, tokens in zip(sizes, read, strict=True)) / (sum(sizes) * context)


def plot(schedule: Schedule, longest: int) -> list[str]:
    """A plot in characters of tokens read against context. Dots mark the whole context, which dense attention reads.
    Groups of layers with budgets of their own have a plot each."""
    lines = []
    for place, group in enumerate(schedule.groups, 1):
        lines += [f"group {place}"] if len(schedule.groups) > 1 else []
        lines += _plot(group, longest)
    return lines


def _plot(schedule: Schedule, longest: int) -> list[str]:
    unit = schedule.selector.unit_tokens
    # Contexts whose last unit is complete, because incomplete ones would give the bars a sawtooth edge.
    contexts = [-(-longest * (column + 1) // _COLUMNS // unit) * unit for column in range(_COLUMNS)]
    top = max(schedule.kv_budget_tokens(at) for at in contexts)
    lines = []
    for line in range(_LINES, 0, -1):
        low, high = top * (line - 1) / _LINES, top * line / _LINES
        cells = [_cell(schedule.read_tokens(at), at, low, high) for at in contexts]
        label = f"{top * line // _LINES:>8,}" if line in (_LINES, (_LINES + 1) // 2, 1) else " " * 8
        lines.append(f"{label} ┤{''.join(cells)}")
    lines.append(f"{0:>8} └{'─' * _COLUMNS}")
    middle = f"{longest // 2:,}"
    lines.append(" " * 10 + "0" + middle.center(_COLUMNS - 1 - len(f"{longest:,}")) + f"{longest:,}")
    lines.append(" " * 10 + _CAPTION)
    return lines


def _cell(read: int, context: int, low: float, high: float) -> str:
    eighths = round(8 * (min(read, high) - low) / (high - low))
    if eighths > 0:
        return " ▁▂▃▄▅▆▇█"[eighths]
    return "·" if low < context <= high else " "
