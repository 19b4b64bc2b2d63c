"""`sparroll quickstart`: the whole idea on the packaged model, on a CPU, in minutes. Puts the other parts in a row."""

from __future__ import annotations

from sparroll.quickstart.run import quickstart
from sparroll.quickstart.settings import QuickstartSettings, load_settings

__all__ = ["QuickstartSettings", "load_settings", "quickstart"]
