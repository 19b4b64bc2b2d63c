"""All verbs, and how errors are shown: a UserError is printed as one line and a hint on standard error, with exit code
2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import sparroll
from sparroll import files
from sparroll.cli import (
    calibrate,
    config,
    data,
    distill,
    doctor,
    evaluate,
    plan,
    profile,
    quickstart,
    report,
    rollout,
    schedule,
    serve_args,
    train,
)
from sparroll.cli.shared.options import Verb
from sparroll.errors import UserError, of_machine

app = typer.Typer(
    name="sparroll",
    help="RL for reasoning models with sparse-attention rollouts held close enough to dense ones to train on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("quickstart", cls=Verb)(quickstart.quickstart)
app.command("doctor", cls=Verb)(doctor.doctor)
app.command("rollout", cls=Verb)(rollout.rollout)
app.command("plan", cls=Verb)(plan.plan)
app.command("profile", cls=Verb)(profile.profile)
app.command("calibrate", cls=Verb)(calibrate.calibrate)
app.command("train", cls=Verb)(train.train)
app.command("config", cls=Verb)(config.config)
app.command("distill", cls=Verb)(distill.distill)
app.command("evaluate", cls=Verb)(evaluate.evaluate)
app.command("serve-args", cls=Verb)(serve_args.serve_args)
app.command("report", cls=Verb)(report.report)
app.add_typer(schedule.app, name="schedule")
app.add_typer(data.app, name="data")

# Typer carries its own copy of click, so the base of its usage errors is found through a public one.
_UsageProblem: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"sparroll {sparroll.__version__}")
        raise typer.Exit


@app.callback()
def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """RL for reasoning models with sparse-attention rollouts held close enough to dense ones to train on."""


def run(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code: 0, or 2 after a UserError."""
    files.last_written = None
    try:
        code = app(args=arguments, prog_name="sparroll", standalone_mode=False, obj=arguments)
    except UserError as error:
        return fail(error.message, error.hint)
    except _UsageProblem as problem:
        return _usage(problem, arguments)
    except Exception as error:
        if isinstance(error, ValueError) and hasattr(error, "errors"):
            return fail(*_first_problem(error))
        known = of_machine(error)
        if known is None:
            raise
        return fail(known.message, known.hint)
    return code if isinstance(code, int) else 0


def fail(message: str, hint: str | None) -> int:
    """Print a UserError's message and hint. Returns the exit code."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {' '.join(hint.split())}", file=sys.stderr)
    return 2


def _usage(problem: Exception, arguments: list[str]) -> int:
    context = getattr(problem, "ctx", None)
    if type(problem).__name__ == "NoArgsIsHelpError":
        # This message is the help text itself.
        print(problem.format_message())  # type: ignore[attr-defined]
        return 2
    # An option that lacks its values comes without the verb that it belongs to.
    verb = f" {arguments[0]}" if arguments and not arguments[0].startswith("-") else ""
    where = context.command_path if context is not None else f"sparroll{verb}"
    return fail(problem.format_message(), f"`{where} --help` lists the options")  # type: ignore[attr-defined]


def _first_problem(error: ValueError) -> tuple[str, str | None]:
    """Message and hint for the first entry of a pydantic validation error."""
    problems = error.errors()  # type: ignore[attr-defined]
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"]) or "the configuration"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {first['msg']}, got {first['input']!r}{more}", None
