"""What verbs do alike: what they print, the folder that they hold, Ctrl-C, options without effect."""

from __future__ import annotations

import json
import shlex
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sparroll import files, locks
from sparroll.errors import UserError, of_machine
from sparroll.progress import say
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule, caveats_of

if TYPE_CHECKING:
    from sparroll.train.config.base import Section


def as_typed(command: typer.Context) -> str:
    """The command line that this process runs, as a shell would take it again."""
    return shlex.join(["sparroll", *(command.obj or [])])


def print_json(value: Any) -> None:
    """Print a result as JSON, for programs; nothing else goes to standard output."""
    from sparroll.records import plain

    print(json.dumps(plain(value), indent=1, allow_nan=False))


def harmless(text: str) -> str:
    """The text with a question mark for each character that a terminal would obey. Line breaks and tabs stay."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs" else "?"
        for letter in text
    )


def output_folder(path: Path) -> Path:
    """The folder, created if it is missing and checked for writing before any work starts."""
    return files.output_folder(path)


def hold_folder(command: typer.Context, path: Path) -> Path:
    """The same, for a command that goes on where it was interrupted: no other process has the folder until it ends."""
    folder: Path = command.with_resource(locks.locked(path, command.command_path))
    return folder


def run_folder(path: Path | None) -> Path:
    """The folder of a training run, where --out may be missing. The run itself holds it, in one of its processes."""
    if path is None:
        raise UserError("--out is missing", "give a folder for the results, e.g. --out runs/mine")
    return output_folder(path)


def print_config(config: Section, as_json: bool) -> None:
    """Print the resolved configuration, as a file that --config reads."""
    from sparroll.train.config.file import as_toml

    if as_json:
        print_json(config)
    else:
        print(as_toml(config), end="")


def wrote(*paths: Path, quiet: bool = False, kept: Collection[Path] = ()) -> None:
    """Name the files that a command wrote; every long command ends with this. kept: those of them that it left as they
    were, because it had nothing to do."""
    for path in paths:
        said = f"{path} stays as it was: nothing was left to do" if path in kept else f"wrote {path}"
        say(said, quiet=quiet)


def interrupted() -> str:
    """What is true of any command that was interrupted."""
    last = files.last_written
    if last is None:
        return "interrupted before anything was written"
    return f"interrupted: the last file that was written is {last}"


@contextmanager
def interruptible(what_is_kept: str, log: Path | None = None) -> Iterator[None]:
    """Turn Ctrl-C into exit code 130 and a line that says what is kept and how to continue. A full disk and memory that
    has run out are errors with the same line.

    log: the file of what is finished; where it is empty, the line says that nothing is."""

    def kept() -> str:
        nothing = log is not None and not (log.is_file() and log.stat().st_size)
        return "nothing was finished yet; run the same command to start again" if nothing else what_is_kept

    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {kept()}")
        raise typer.Exit(130) from None
    except Exception as error:
        known = of_machine(error)
        if known is None:
            raise
        raise UserError(known.message, f"{known.hint}; {kept()}") from error


def refuse_idle(command: typer.Context, idle: bool, why: str, *names: str) -> None:
    """Raise UserError if the command line gives one of these options, by the names of their parameters, although they
    are idle: without effect, for this reason."""
    for each in command.command.params if idle else ():
        if each.name in names and typed(command, each.name, True):
            raise UserError(f"{each.opts[0]} has no effect {why}", "leave it out")


def typed(command: typer.Context, name: str, value: Any) -> Any:
    """The value of an option, by the name of its parameter; None where nobody gave it."""
    return value if getattr(command.get_parameter_source(name), "name", "") == "COMMANDLINE" else None


def refuse_idle_prompt_options(command: typer.Context, prompts_file: Path | None, task: str | None) -> None:
    """Raise UserError for --level where no task has levels."""
    from sparroll.tasks import is_data

    refuse_idle(command, prompts_file is not None, "with --prompts: a file has no levels", "level")
    refuse_idle(command, task is not None and is_data(task), f"with --task {task}, which has no levels", "level")


def say_prompts_left_out(command: typer.Context, prompts_file: Path | None, taken: int) -> None:
    """Say where the default of --count leaves prompts of the file out, and where the file has fewer than was asked for."""
    from sparroll.tasks.prompt_file import holds_more

    by_default = getattr(command.get_parameter_source("count"), "name", "") == "DEFAULT"
    if prompts_file is None:
        return
    if by_default and holds_more(prompts_file, taken):
        say(f"the first {taken:,} prompts of {prompts_file}; --count takes more")
    asked = command.params["count"]
    if not by_default and taken < asked:
        say(f"{prompts_file} has {taken:,} prompts, fewer than --count {asked:,}")


def say_caveats(*schedules: Schedule | None) -> None:
    """Say, before anything runs, what must be known of the schedules that a command takes."""
    for line in caveats_of(schedules):
        say(line, alarm=True)


def print_facts(facts: dict[str, Any]) -> None:
    """Print the plain values of a summary, one per line. Nested tables are only in the record."""
    flat = {
        name: "-" if value in (None, "") else value
        for name, value in facts.items()
        if not isinstance(value, dict | list)
    }
    width = max(len(name) for name in flat)
    for name, value in flat.items():
        shown = value if not isinstance(value, float) else rounded_down(value) if "_q05" in name else f"{value:.4g}"
        print(f"{name:<{width}}  {shown}")
