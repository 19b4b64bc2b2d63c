"""The data and the reward of recipes/verl-polaris, on small files. Its commands are composed in tests/in_verl."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "verl-polaris"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"verl_polaris_{name}", RECIPE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_in_verls_columns_and_what_no_grader_reads_is_left_out(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("math_verify")
    train = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    train.append({"problem": "Which is it?", "answer": "\\frac{"})
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in train))
    (tmp_path / "held.jsonl").write_text(json.dumps({"problem": "Compute 3 * 7.", "answer": "21"}))
    counts = loaded("prepare").prepare(tmp_path / "out", str(tmp_path / "own.jsonl"), (str(tmp_path / "held.jsonl"),))
    assert counts == {"train.parquet": 4, "eval.parquet": 1}
    (row,) = parquet.read_table(tmp_path / "out" / "eval.parquet").to_pylist()
    assert row["data_source"] == "held.jsonl" and row["reward_model"] == {"style": "rule", "ground_truth": "21"}
    (turn,) = row["prompt"]
    assert turn["role"] == "user" and turn["content"].startswith("Compute 3 * 7.") and "\\boxed" in turn["content"]
    golds = parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert sorted(each["reward_model"]["ground_truth"] for each in golds) == ["1", "2", "3", "4"]


def test_the_reward_is_the_verdict_on_the_boxed_answer() -> None:
    pytest.importorskip("math_verify")
    from sparroll.errors import UserError

    score = loaded("reward").compute_score
    assert score("aime24", "so \\boxed{\\frac{1}{2}}", "0.5", {"index": "aime24:train/3"}) == 1.0
    assert score("aime24", "so \\boxed{2}", "0.5", None, reward_router_address=None) == 0.0
    with pytest.raises(UserError, match="cannot be read"):
        score("polaris", "so \\boxed{2}", "")
