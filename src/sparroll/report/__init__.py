"""From the files of a run to one self-contained HTML page. Reads results and draws them; computes none."""

from __future__ import annotations

from pathlib import Path

from sparroll import files
from sparroll.report.collect import collect
from sparroll.report.page import render

__all__ = ["collect", "render", "write_report"]


def write_report(folder: Path, path: Path | None = None) -> Path:
    """The page of everything that the folder holds, as FOLDER/report.html or at `path`; returns where it is."""
    return files.write_text(path or folder / "report.html", render(collect(folder)))
