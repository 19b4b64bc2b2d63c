"""verl's own configuration composes with our settings, and what contradicts them ends the command with two lines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import runs
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from sparroll.errors import UserError
from sparroll.integrations.verl import main, refusals
from sparroll.integrations.verl.refusals import MODES
from sparroll.integrations.verl.settings import PREFIX
from sparroll.schedule import Schedule

RECIPE = Path(__file__).parents[2] / "recipes" / "verl-polaris" / "run.sh"


def composed(folder: Path, *more: str, mode: str = "sparroll_sync") -> Any:
    settings = [
        f"{name}={value}" for name, value in runs.overrides(folder, mode).items() if not name.startswith("hydra")
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*settings, *more])


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_preset_is_all_that_has_to_be_added(mode: str, tmp_path: Path) -> None:
    config = composed(tmp_path, f"+{PREFIX}.schedule=qwen3-4b-0.86", f"+{PREFIX}.force_schedule=true", mode=mode)
    main.prepare(config)
    own = OmegaConf.to_container(config)["actor_rollout_ref"]["rollout"]["custom"]["sparroll"]  # type: ignore[index, call-overload]
    assert Schedule.load(own["schedule"]) == Schedule.load("qwen3-4b-0.86")
    assert own["correction"]["name"] == "tis" and own["rescoring"]["probe_rollouts"] == "auto"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"+{PREFIX}.schedul=x", "unknown key"),
        ("algorithm.rollout_correction.rollout_is=token", r"rollout_is=token would weight the loss a second time"),
        ("actor_rollout_ref.model.lora_rank=8", "LoRA"),
        ("actor_rollout_ref.rollout.temperature=0.6", r"temperature 0\.6"),
    ],
)
def test_what_contradicts_us_is_refused(override: str, message: str, tmp_path: Path) -> None:
    config = composed(tmp_path, f"+{PREFIX}.schedule=qwen3-4b-0.86", f"+{PREFIX}.force_schedule=true", override)
    with pytest.raises(UserError, match=message):
        main.prepare(config)


def test_every_field_that_is_looked_at_is_one_of_verls(tmp_path: Path) -> None:
    """A field that verl renames would otherwise be refused no more, without a word."""
    config = composed(tmp_path)
    fields = [field for field, *_ in refusals._WRONG] + [
        "actor_rollout_ref.actor.shuffle",
        "actor_rollout_ref.actor.loss_agg_mode",
        "actor_rollout_ref.actor.use_kl_loss",
        "actor_rollout_ref.model.lora_rank",
        "actor_rollout_ref.model.lora.rank",
        "actor_rollout_ref.model.lora.merge",
        "algorithm.filter_groups.enable",
    ]
    # What stands under engine_kwargs.vllm goes on to vLLM, and verl does not know it.
    known = [field for field in fields if ".engine_kwargs.vllm." not in field]
    unknown = object()
    assert [field for field in known if OmegaConf.select(config, field, default=unknown) is unknown] == []


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b", "14b"])
def test_the_recipe_of_each_size_composes_and_asks_for_what_was_published(size: str, tmp_path: Path) -> None:
    shown = tmp_path / "show"
    shown.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    shown.chmod(0o755)
    told = subprocess.run(
        ["bash", str(RECIPE), size], env=os.environ | {"PYTHON": str(shown)}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert told[:2] == ["-m", "sparroll.verl"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=told[2:])
    main.prepare(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    own = OmegaConf.to_container(rollout.custom.sparroll)
    assert Schedule.load(own["schedule"]) == Schedule.load(f"qwen3-{size}-0.86")  # type: ignore[index, call-overload]
    assert own["control"] == {"by": "guard", "stricter": ["dense"], "force": False}  # type: ignore[index, call-overload]
    assert (actor.clip_ratio_low, actor.clip_ratio_high, rollout.n, rollout.temperature) == (0.2, 0.28, 8, 1.0)
    assert rollout.max_model_len >= config.data.max_prompt_length + config.data.max_response_length == 40_888


def test_an_error_for_the_user_is_found_under_rays() -> None:
    import ray

    wrong = UserError("wrong", "right")
    assert main.user_error(ray.exceptions.RayTaskError("f", "traceback", wrong)) is wrong
    assert main.user_error(ValueError("a bug")) is None
