"""From the files of a run to one self-contained HTML page. Reads results and draws them; computes none."""

from __future__ import annotations

from sparroll.report.collect import collect
from sparroll.report.page import render

__all__ = ["collect", "render"]
