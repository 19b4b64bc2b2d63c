"""What every test in tests/in_trl runs under: vLLM on a CPU, in this process, in fp32."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Where TRL is not installed, this folder itself looks like a package of that name, but has no file of its own.
_FOUND = importlib.util.find_spec("trl")
HAVE_TRL = _FOUND is not None and _FOUND.origin is not None
collect_ignore_glob = [] if HAVE_TRL else ["test_*.py"]

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> object:
    """One short training run, which many tests look at."""
    from trl_runs import Observed, train

    folder: Path = tmp_path_factory.mktemp("run")
    observed: Observed = train(folder)
    return observed
