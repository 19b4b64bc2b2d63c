"""`sparroll evaluate` with the engine vllm: both policies in one process, scored by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparroll.cli import main
from sparroll.engines.vllm.launch import installed_version

if installed_version() is None:
    pytest.skip("needs vllm; `make test-vllm` installs it", allow_module_level=True)
pytest.importorskip("pyarrow")

DTYPE = "bf16" if torch.cuda.is_available() else "fp32"


def test_dense_and_sparse_are_sampled_by_vllm_and_scored_by_transformers(tmp_path: Path) -> None:
    command = ["evaluate", "--model", "tiny-reasoner", "--tasks", "synthetic:0", "--count", "4", "--samples", "2"]
    command += ["--budget", "64", "--also-dense", "--max-new-tokens", "60", "--engine", "vllm", "--dtype", DTYPE]
    assert main([*command, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert record["config"]["engine"] == "vllm"
    found = record["results"]["tasks"]["synthetic:0"]["policies"]
    assert found["dense"]["kv_read_share"] == 1.0 > found["sparse"]["kv_read_share"]
    assert found["dense"]["tail"]["overall"]["q05"] > (0.9 if DTYPE == "bf16" else 0.99)
    assert found["sparse"]["tail"]["overall"]["q05"] < found["dense"]["tail"]["overall"]["q05"]
    assert found["sparse"]["sparse_share"] > 0
