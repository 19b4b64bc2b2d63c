"""`sparroll report`: the files of a finished (or running) profile, calibration, training or quickstart as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparroll.cli import common


def report(
    run: Annotated[Path, typer.Option("--run", help="The folder that --out named.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; default: RUN/report.html.")] = None,
    json_output: common.Json = False,
) -> None:
    """Write report.html: tails by length, the schedule, planned savings, training curves; no links, no scripts."""
    from sparroll.report import collect, write_report

    path = write_report(run, out)
    if json_output:
        common.print_json({"report": str(path), "parts": [entry.file for entry in collect(run).provenance]})
    common.wrote(path, quiet=json_output)
