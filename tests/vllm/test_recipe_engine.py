"""A recipe's dry run with the engine that it names, vLLM: data, chat, thinking mode and the published schedule reach it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from recipe_runs import CHANGED, RECIPES, overrides
from sparroll.cli import main
from sparroll.tasks.data import task as task_module
from sparroll.tasks.data.rows import Row
from sparroll.tasks.verdicts import Verdict
from sparroll.train.runtime.sinks import read_lines
from vllm_runs import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]


class EveryOther:
    """A stand-in for the math reward, whose package this environment does not have."""

    gives_answers = False

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        return [Verdict(float(place % 2)) for place in range(len(response_texts))]

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [True] * len(rows)


def test_a_recipe_samples_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "reward_for", lambda kind, settings: EveryOther())
    (folder,) = [folder for folder in RECIPES if folder.name == "polaris-grpo-qwen3-1.7b"]
    changes, out = overrides(folder, tmp_path, engine="vllm"), tmp_path / "run"
    assert main(["train", "--config", str(folder / "train.toml"), *changes, "--out", str(out)]) == 0
    lines = [line for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]
    assert len(lines) == CHANGED["train.steps"]
    for line in lines:
        assert (line["rollout/count"], line["reward/mean"]) == (16, 0.5)
        # A quarter of the first steps' rollouts are the control group's.
        assert line["rollout/sparse_share"] == 0.75 and line["rollout/kv_read_share"] < 0.97
        assert line["policy/gradient_norm"] > 0
