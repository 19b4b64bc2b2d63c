"""Tests that need a sandbox which holds: skipped where there is none, and failed where CI says that there must be one."""

from __future__ import annotations

import os

import pytest

from sparroll.tasks.code import sandbox

NEEDED = "SPARROLL_TESTS_NEED_SANDBOX"
"""Set to 1 by .ci/run."""


def need_sandbox() -> None:
    """Go on only where a sandbox holds."""
    if any(probe.holds for probe in sandbox.probes().values()):
        return
    reason = "; ".join(f"{name}: {probe.detail}" for name, probe in sandbox.probes().items())
    if os.environ.get(NEEDED) == "1":
        pytest.fail(f"no sandbox holds here ({reason}), and {NEEDED}=1 says that one must")
    pytest.skip(f"needs a sandbox that holds ({reason})")
