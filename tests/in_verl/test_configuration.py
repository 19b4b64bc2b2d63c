"""verl's own configuration composes with our settings, and what contradicts them ends the command with two lines."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import runs
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from sparroll.errors import UserError
from sparroll.integrations.verl import main, refusals
from sparroll.integrations.verl.refusals import MODES
from sparroll.integrations.verl.settings import PREFIX, RunFacts
from sparroll.schedule import Schedule

SIZES = ["1.7b", "4b", "8b", "14b"]
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


def told(folder: Path, size: str, *more: str) -> list[str]:
    """The words that run.sh gives to Python for a size, with overrides of the user's behind it."""
    shown = folder / "show"
    shown.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    shown.chmod(0o755)
    command, environment = ["bash", str(RECIPE), size, *more], os.environ | {"PYTHON": str(shown)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def checked(overrides: list[str]) -> Any:
    """The configuration as a run would have it, once our checks and verl's own have accepted it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    main.prepare(config)
    main.validate_config(
        config=config,
        use_reference_policy=main.need_reference_policy(config),
        use_critic=main.need_critic(config),
    )
    return config


@pytest.mark.parametrize("size", SIZES)
def test_the_recipe_of_each_size_composes_and_asks_for_what_was_published(size: str, tmp_path: Path) -> None:
    words = told(tmp_path, size)
    assert words[:2] == ["-m", "sparroll.verl"]
    config = checked(words[2:])
    assert not main.need_reference_policy(config) and not main.need_critic(config)
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    own: Any = OmegaConf.to_container(rollout.custom.sparroll)
    # Published with the paper.
    assert Schedule.load(own["schedule"]) == Schedule.load(f"qwen3-{size}-0.86")
    assert own["correction"] == {"name": "tis", "weight_max": 3.0}
    assert config.algorithm.adv_estimator == "grpo" and actor.loss_agg_mode == "token-mean"
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert (actor.use_kl_loss, config.algorithm.use_kl_in_reward) == (False, False)
    assert data.max_response_length == 37 * 1024
    # Of the released scripts, or of Polaris's.
    assert data.max_prompt_length == 3000
    assert (actor.optim.lr, actor.optim.weight_decay) == (1e-6, 0.01)
    assert (data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs, rollout.n) == (128, 128, 1, 8)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    validation = rollout.val_kwargs
    assert (validation.n, validation.do_sample, validation.temperature, validation.top_p) == (16, True, 1.0, 0.7)
    assert (config.trainer.test_freq, config.trainer.save_freq) == (100, 10)
    # Ours: an alarm ends the savings, and the longest response fits everywhere.
    assert own["control"] == {"by": "guard", "stricter": ["dense"], "force": False}
    assert own["guard"]["at_least"] == 0.84
    longest = data.max_prompt_length + data.max_response_length
    assert longest == 40_888
    limits = (rollout.max_model_len, actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu)
    assert actor.use_dynamic_bsz and rollout.log_prob_use_dynamic_bsz and all(limit >= longest for limit in limits)


@pytest.mark.parametrize("size", [size for size in SIZES if size != "14b"])
def test_the_commands_for_verl_say_what_our_own_loops_recipe_says(size: str, tmp_path: Path) -> None:
    config = checked(told(tmp_path, size)[2:])
    ours = tomllib.loads((RECIPE.parents[1] / f"polaris-grpo-qwen3-{size}" / "train.toml").read_text())
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    own: Any = OmegaConf.to_container(rollout.custom.sparroll)
    validation = rollout.val_kwargs
    same = {
        "model.name": config.actor_rollout_ref.model.path,
        "data.max_prompt_tokens": config.data.max_prompt_length,
        "rollout.samples_per_prompt": rollout.n,
        "rollout.temperature": rollout.temperature,
        "rollout.max_new_tokens": config.data.max_response_length,
        "train.prompts_per_step": config.data.train_batch_size,
        "train.lr": actor.optim.lr,
        "train.weight_decay": actor.optim.weight_decay,
        "train.clip_low": actor.clip_ratio_low,
        "train.clip_high": actor.clip_ratio_high,
        "train.epochs_per_batch": actor.ppo_epochs,
        "correction.name": own["correction"]["name"],
        "correction.weight_max": own["correction"]["weight_max"],
        "evaluate.samples_per_prompt": validation.n,
        "evaluate.every_steps": config.trainer.test_freq,
        "evaluate.temperature": validation.temperature,
        "evaluate.top_p": validation.top_p,
        "checkpoint.every_steps": config.trainer.save_freq,
    }
    written = {name: ours[name.partition(".")[0]][name.partition(".")[2]] for name in same}
    assert same == written
    assert Schedule.load(own["schedule"]).name == ours["attention"]["name"]


def test_every_override_of_the_recipe_is_accepted_with_a_model_that_is_here(tmp_path: Path) -> None:
    runs.write_world(tmp_path)
    here = {
        "actor_rollout_ref.model.path": tmp_path / "model",
        "data.train_files": tmp_path / "train.parquet",
        "data.val_files": tmp_path / "val.parquet",
        f"+{PREFIX}.force_schedule": "true",
    }
    words = told(tmp_path, "4b", *(f"{name}={value}" for name, value in here.items()))[2:]
    config = checked(words)
    facts = RunFacts.of(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    assert facts.vocabulary is not None and facts.vocabulary < 200
    # Each override is in the configuration as it was given, and the last one of a name wins.
    given = dict(word.lstrip("+").split("=", 1) for word in words)
    assert len(given) > 45 and given["actor_rollout_ref.model.path"] == str(tmp_path / "model")
    for name, value in given.items():
        found, expected = OmegaConf.select(config, name), OmegaConf.create(f"value: {value}").value
        # The schedule travels as JSON.
        same = found == expected or (name == f"{PREFIX}.schedule" and Schedule.load(found) == Schedule.load(expected))
        assert same, f"{name}: {found!r}, not {expected!r}"
    # Without force_schedule, the schedule of another model is refused where the model's files say so.
    with pytest.raises(UserError, match="qwen3-4b-0.86"):
        checked([word for word in words if "force_schedule" not in word])


def test_an_error_for_the_user_is_found_under_rays() -> None:
    import ray

    wrong = UserError("wrong", "right")
    assert main.user_error(ray.exceptions.RayTaskError("f", "traceback", wrong)) is wrong
    assert main.user_error(ValueError("a bug")) is None
