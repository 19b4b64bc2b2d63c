"""`python -m sparroll.verl`: verl's own entry point with our trainers. It reads and checks the settings here, where paths
mean what the user typed, and gives them on as plain data."""

from __future__ import annotations

import sys
from typing import Any

import hydra
import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from sparroll.errors import UserError
from sparroll.integrations.verl import refusals
from sparroll.integrations.verl.settings import RunFacts, SparseSettings


class SparrollTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's task runner, in a process that knows our trainers."""

    def run(self, config: DictConfig) -> None:
        from sparroll.integrations.verl import trainers

        assert trainers.SparrollSync.base_mode, "importing them registers them"
        super().run(config)


def prepare(config: DictConfig) -> None:
    """Check the configuration and put the settings into the form that means the same on every node."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    refusals.check(plain)
    settings = SparseSettings.read(refusals.settings_of(plain), RunFacts.of(plain))
    with open_dict(config):
        config.actor_rollout_ref.rollout.custom.sparroll = settings.inline()


def user_error(error: BaseException) -> UserError | None:
    """The UserError that ended the run, here or in one of Ray's processes."""
    if isinstance(error, UserError):
        return error
    cause = getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else error.__cause__
    return None if cause is None else user_error(cause)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    try:
        auto_set_device(config)
        prepare(config)
        validate_config(
            config=config,
            use_reference_policy=need_reference_policy(config),
            use_critic=need_critic(config),
        )
        run_ppo(config, task_runner_class=ray.remote(SparrollTaskRunner))
    except Exception as error:
        known = user_error(error)
        if known is None:
            raise
        print(f"error: {known.message}", file=sys.stderr)
        if known.hint:
            print(f"hint: {known.hint}", file=sys.stderr)
        sys.exit(2)
