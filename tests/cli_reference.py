"""docs/cli.md from the command line itself: `python tests/cli_reference.py` writes it, a test compares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from sparroll.cli.app import app
from sparroll.cli.shared.options import grouped

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_HEAD = """# Command line

Every verb has `--help`, or `-h`; `sparroll --version` says what is installed. A mistake gives one line with a hint on
standard error, and exit code 2; an empty path is one, such as `--out ""`. Ctrl-C ends a verb with exit
code 130 and a line that says what is kept; the same command continues a long verb (`train`: with `--resume`). With
`--json`, standard output holds the result as JSON and nothing else. Long verbs write under `--out` and end by naming
the files they wrote. A terminal shows bars while they work, and a log file gets a line every 30 seconds. While one of
them works in a folder, a second one is refused there, with the name of the first; a killed one holds nothing. A full
disk, and memory that has run out, are errors that say what is kept.

An option that has no effect beside the others is refused, with the reason: `--check-floor` without a schedule,
`--selector` without a `--budget` that it is for, `--gpu` for a calibration that compares no times. A few do no harm where
they have none: `--seed` with `--prompts` at temperature 0, where nothing is drawn; `--count` beyond what a file or a set
holds; `--level`, `--problem-seed`, `--mirror` and the settings of data sets beside `--tasks` that they are not for;
`--bin-tokens` with `--no-tail`; and with `--print-config` everything about running.

On a CPU, threads that wait for each other sleep, because beside other work threads that spin are many times slower
(`OMP_WAIT_POLICY=PASSIVE`). On a machine of its own a small model is a little faster with `OMP_WAIT_POLICY=ACTIVE` in
the environment, which a verb leaves as it is.
"""


def verbs() -> Iterator[tuple[str, Any]]:
    """("schedule show", command) for every command, in the order of the help."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", found) for inner, found in command.commands.items())
        else:
            yield name, command


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_verb(name, command) for name, command in verbs())])


def _verb(name: str, command: Any) -> str:
    lines = [f"## sparroll {name}", "", command.help.strip(), "", "| option | default | |", "|---|---|---|"]
    headings = grouped(command.params)
    for heading, parameters in headings.items():
        if len(headings) > 2:
            lines.append(f"| **{heading}** | | |")
        lines += [
            f"| {_names(each)} | {_default(each)} | {_cell(getattr(each, 'help', '') or '')} |" for each in parameters
        ]
    return "\n".join([*lines, ""])


def _names(parameter: Any) -> str:
    if not parameter.opts[0].startswith("--"):
        return f"`{parameter.name.upper()}`"
    return f"`{parameter.opts[0]}`" + (" (repeatable)" if parameter.multiple else "")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if callable(default) or default is None or default is False or default in ([], ()):
        return ""
    return f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").removesuffix("; repeatable.")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
