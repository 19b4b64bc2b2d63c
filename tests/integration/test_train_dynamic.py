"""Dynamic sampling in whole runs: full steps of groups that differ, and a run that was cut off goes on to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from integration.deaths import run_script
from integration.killed_runs import DYNAMIC_MOMENTS
from integration.train_runs import DYNAMIC, SHORT, assert_same_run, short_config, steps
from sparroll.train import train
from sparroll.types import Prompt, Rollout


async def rarely(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
    return 0.0


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    train(short_config(model, **DYNAMIC), out)
    return out


def test_dynamic_sampling_trains_on_full_steps_of_groups_that_differ(straight: Path) -> None:
    drawn = 0
    for line in steps(straight):
        assert line["groups/kept"] == 4
        assert line["policy/trained_rollouts"] == 16
        assert line["groups/sampled"] == 4 + line["groups/all_right"] + line["groups/all_wrong"] + line["groups/spare"]
        assert line["rollout/count"] == 4 * line["groups/sampled"]
        assert 1 <= line["groups/rounds"] <= 10
        assert line["reward/mean"] < line["reward/kept_mean"]
        # The tail is of what is trained on.
        assert sum(line[name] for name in line if name.startswith("mismatch/tokens/")) <= line["policy/kept_tokens"]
        drawn += int(line["groups/sampled"])
    assert sum(line["groups/all_wrong"] for line in steps(straight)) > 0
    assert json.loads((straight / "checkpoints/step-000004/state.json").read_text())["prompts_drawn"] == drawn


@pytest.fixture(scope="module")
def killed(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    run_script("killed_runs.py", model, str(folder), "dynamic", *DYNAMIC_MOMENTS)
    return folder


@pytest.mark.parametrize("moment", DYNAMIC_MOMENTS)
def test_a_run_with_dynamic_sampling_killed_at_any_moment_resumes_to_the_bit(
    moment: str, model: str, killed: Path, straight: Path
) -> None:
    train(short_config(model, **DYNAMIC, checkpoint={"every_steps": 1, "keep": 1}), killed / moment, resume=True)
    assert_same_run(killed / moment, straight)


def test_controller_and_adapter_go_on_with_it_after_a_resume(model: str, tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = DYNAMIC | {
        "control": {"by": "controller", "target": 0.85},
        "distill": {"lr": 1e-4, "rank": 4},
    }
    train(short_config(model, **changes), tmp_path / "long")
    train(short_config(model, **changes, train={"steps": 2}), tmp_path / "short")
    train(short_config(model, **changes), tmp_path / "short", resume=True)
    assert_same_run(tmp_path / "short", tmp_path / "long")
    assert (tmp_path / "short/schedule.toml").is_file()


def test_a_task_without_a_solvable_prompt_stops_the_run(model: str, tmp_path: Path) -> None:
    rollout = {"dynamic_sampling": True, "dynamic_sampling_rounds": 2, "max_new_tokens": 30}
    never = {"terms": [{"use": "integration.test_train_dynamic:rarely"}]}
    config = short_config(model, **SHORT | {"reward": never, "rollout": rollout, "guard": {"empty_steps": 2}})
    result = train(config, tmp_path / "run")
    assert result.steps == 2
    assert "no prompt whose rollouts differ in reward (8 in 2 rounds) for 2 steps: stopped" in result.stopped
    assert [line["groups/kept"] for line in steps(tmp_path / "run")] == [0, 0]
    assert all(line["mismatch/acceptance_q05"] > 0 for line in steps(tmp_path / "run"))
    before = load_file(Path(model) / "model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/step-000002/model/model.safetensors")
    assert all(before[name].equal(after[name]) for name in before)
    assert train(config, tmp_path / "run", resume=True) == result
