"""verl on a CPU for the tests of this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "shim")]
os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",
    VERL_USE_EXTERNAL_MODULES="verl_on_cpu",
    VERL_USE_EXTERNAL_PLUGINS="none",
    TOKENIZERS_PARALLELISM="false",
)
