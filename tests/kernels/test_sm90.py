"""The kernels of the sparse training pass, of units of few bits and of checks compile for Hopper, on any machine that has
NVIDIA's assembler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton runs on Linux only")


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    from triton import knobs

    for tool in ("ptxas", "cuobjdump"):
        try:
            _ = getattr(knobs.nvidia, tool).path
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"this triton has no {tool}: {error}")
    script = Path(__file__).with_name("sm90.py")
    root = script.parents[2]
    fresh = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root / "src")}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | fresh
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    assert len(lines) == 16 and all("REG:" in line for line in lines), run.stdout
    assert all("STACK:0 " in line for line in lines), f"registers spill: {run.stdout}"
