"""All kernels compile for Hopper, on any machine that has NVIDIA's assembler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton runs on Linux only")

ROOT = Path(__file__).parents[2]


def launched() -> set[str]:
    """File and function of every kernel that is launched in the package: `_kernel[grid](...)`."""
    return {
        f"{path.stem}.{name}"
        for path in (ROOT / "src").rglob("*.py")
        if "import triton" in (text := path.read_text())
        for name in re.findall(r"^ +(_\w+)\[.+\]\($", text, re.MULTILINE)
    }


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    from triton import knobs

    for tool in ("ptxas", "cuobjdump"):
        try:
            _ = getattr(knobs.nvidia, tool).path
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"this triton has no {tool}: {error}")
    script = Path(__file__).with_name("sm90.py")
    fresh = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | fresh
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    compiled = {line.partition(":")[0] for line in lines}
    assert len(launched()) > 15 and not launched() - compiled, f"not compiled: {sorted(launched() - compiled)}"
    assert sum("triton_top_k" in line for line in lines) == 4, "the choice of units in every layout"
    assert all("REG:" in line for line in lines), run.stdout
    assert all("STACK:0 " in line for line in lines), f"registers spill: {run.stdout}"
