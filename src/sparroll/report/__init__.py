"""From the files of a run to one self-contained HTML page. Reads results and draws them; it computes none."""

from __future__ import annotations

from pathlib import Path

from sparroll import files
from sparroll.report.collect import collect
from sparroll.report.page import render

__all__ = ["collect", "render", "write_report"]


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write a page about everything in the folder, to `path` or to FOLDER/report.html. Returns its path. Raises UserError
    before anything is read if that is a folder."""
    out = files.output_file(path or folder / "report.html", "report.html")
    return files.write_text(out, render(collect(folder)))
