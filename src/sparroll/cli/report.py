"""`sparroll report`: draw the files of a finished or running command as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparroll.cli.shared import common, options


def report(
    run: Annotated[Path, typer.Option("--run", help="Folder that another command wrote to with --out.")],
    out: Annotated[Path | None, typer.Option("--out", help="File of the page; default: RUN/report.html.")] = None,
    json_output: options.Json = False,
) -> None:
    """Write one HTML page with tails by length, the schedule, planned savings, and training and evaluation results."""
    from sparroll.report import collect, write_report

    path = write_report(run, out)
    if json_output:
        common.print_json({"report": str(path), "parts": [entry.file for entry in collect(run).provenance]})
    common.wrote(path, quiet=json_output)
