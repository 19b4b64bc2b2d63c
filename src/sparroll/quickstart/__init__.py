"""`sparroll quickstart`: profile, calibrate, run RL three times, plan and report, with the packaged model on a CPU, in
minutes. It only calls the other parts in order; quickstart.toml holds the sizes."""

from __future__ import annotations

from sparroll.quickstart.run import quickstart
from sparroll.quickstart.settings import QuickstartSettings, load_settings

__all__ = ["QuickstartSettings", "load_settings", "quickstart"]
