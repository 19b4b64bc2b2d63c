"""`sparroll doctor`: what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from sparroll.cli.shared.common import print_json
from sparroll.cli.shared.options import RUN, Json, option


def doctor(
    kernels: Annotated[
        bool,
        option(RUN, "--kernels", help="Also compare the kernels of decode steps with their references on this GPU."),
    ] = False,
    schedule: Annotated[
        str | None,
        option(
            RUN,
            "--schedule",
            help="With --kernels: those of this preset or file, with its model's group and head size.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check versions, devices, memory and folders. The exit code is 1 if something that sparroll needs is missing, or if a
    kernel is wrong."""
    from sparroll import doctor as checks
    from sparroll.errors import UserError
    from sparroll.progress import Progress
    from sparroll.schedule import Schedule

    if schedule is not None and not kernels:
        raise UserError("--schedule says whose kernels are compared", "add --kernels")
    cases = checks.kernel_cases(None if schedule is None else Schedule.load(schedule)) if kernels else []
    findings = checks.examine()
    if cases:
        with Progress(json) as bars:
            findings += checks.examine_kernels(cases, bars.bar("kernels"))
    if json:
        print_json({"ok": checks.healthy(findings), "findings": findings})
    else:
        widths = [max(len(getattr(finding, name)) for finding in findings) for name in ("what", "value")]
        for finding in findings:
            line = f"{finding.status:<3} {finding.what:<{widths[0]}}  {finding.value:<{widths[1]}}  {finding.note}"
            print(line.rstrip())
    raise typer.Exit(0 if checks.healthy(findings) else 1)
