"""verl's own configuration composes with our settings, and what contradicts them ends the command with two lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from sparroll.errors import UserError
from sparroll.integrations.verl import main
from sparroll.integrations.verl.refusals import MODES
from sparroll.integrations.verl.settings import PREFIX
from sparroll.schedule import Schedule


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
    assert own["correction"]["name"] == "tis" and own["rescoring"]["probe_rollouts"] == 32


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


def test_an_error_for_the_user_is_found_under_rays() -> None:
    import ray

    wrong = UserError("wrong", "right")
    assert main.user_error(ray.exceptions.RayTaskError("f", "traceback", wrong)) is wrong
    assert main.user_error(ValueError("a bug")) is None
