"""Recipes through `sparroll train` on a tiny model, as they are but for a short list of sizes and places. What ran is the
recipe's correction, schedule, clip and compression, on sparse tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from byte_model import END, follow
from recipe_runs import CHANGED, RECIPES, answer, need_sandbox_for_programs, overrides, recipe
from sparroll.cli import main
from sparroll.compression import make_compression
from sparroll.corrections.sparse_rl_released import SparseRLReleased
from sparroll.corrections.tis import TIS
from sparroll.resume import flat
from sparroll.schedule import Schedule
from sparroll.train import TrainConfig, load_config
from sparroll.train.config.rollout import CompressionAttention, ScheduleAttention
from sparroll.train.runtime.sinks import read_lines

pytest.importorskip("math_verify")
pytest.importorskip("pyarrow")

recipes = pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)


def test_there_is_a_recipe_for_each_published_setting() -> None:
    assert [folder.name for folder in RECIPES] == [
        "polaris-grpo-qwen3-1.7b", "polaris-grpo-qwen3-4b", "polaris-grpo-qwen3-8b", "sparse-rl-math-qwen2.5-3b",
        "taco-grpo-qwen3-1.7b",
    ]  # fmt: skip


@recipes
def test_a_recipe_trains_as_it_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_sandbox_for_programs(folder)
    prompts: set[str] = set()
    follow(lambda *asked: prompts.add(asked[0]) or answer(*asked), monkeypatch)
    out, config = tmp_path / "run", folder / "train.toml"
    assert main(["train", "--config", str(config), *overrides(folder, tmp_path), "--out", str(out)]) == 0
    written, ran = recipe(folder), json.loads((out / "config.json").read_text())
    asked = load_config(config).model_dump(mode="json")
    assert ran.pop("engine") == {"kind": CHANGED["engine"]}
    differ = {key for key, value in flat(ran).items() if flat(asked)[key] != value}
    assert differ <= CHANGED.keys(), "a dry run changes nothing else"
    lines = [line for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]
    assert len(lines) == CHANGED["train.steps"]
    count = CHANGED["train.prompts_per_step"] * written["rollout"]["samples_per_prompt"]
    # With a schedule there is a control group, which is a quarter of the first steps' rollouts.
    dense = ran["rollout"]["control_share_first"] if ran["rollout"]["control_share"] else 0.0
    assert (dense > 0) == (written["attention"]["kind"] == "schedule")
    for line in lines:
        assert (line["rollout/count"], line["reward/mean"], line["reward/groups_all_equal_share"]) == (count, 0.5, 0.0)
        # The published schedule, or the eviction, left something out of every other response.
        assert line["rollout/sparse_share"] == 1 - dense and line["rollout/kv_read_share"] < 0.95 + 0.05 * dense
        assert line["policy/learning_rate"] == written["train"]["lr"] and line["policy/kept_tokens"] > 0
        assert line["policy/gradient_norm"] > 0 and line["mismatch/dense_ceiling_q05"] > 0
    _assert_what_ran(TrainConfig.model_validate(ran), out, lines[-1])
    chat = written["task"]["chat_template"]
    assert all(prompt.endswith("assistant: ") == chat and END not in prompt for prompt in prompts)
    assert all("<none>" not in prompt for prompt in prompts), "thinking is on"


def _assert_what_ran(config: TrainConfig, out: Path, line: dict[str, Any]) -> None:
    correction, schedule = config.correction.make(), out / "checkpoints" / "step-000002" / "schedule.toml"
    attention = config.attention
    if isinstance(attention, ScheduleAttention):
        preset = Schedule.load(attention.name)
        assert Schedule.load(schedule).steps == preset.steps
        assert preset.target is not None and preset.target["at_least"] == 0.86
        assert isinstance(correction, TIS) and correction.weight_max == 3.0
        assert line["correction/truncated_share"] >= 0.0
        clip = (0.2, 0.28)
    else:
        assert isinstance(attention, CompressionAttention)
        assert attention.make() == make_compression("r_kv", budget_tokens=512, every_tokens=128)
        assert not schedule.exists() and "compression/kv_saved_share" in line
        assert correction == SparseRLReleased(weight_max=1.5, keep_min=0.5, keep_max=1.5, veto_below=1e-4)
        assert line["correction/vetoed_sequence_share"] >= 0.0
        clip = (0.2, 0.2)
    assert (config.train.clip_low, config.train.clip_high) == clip
