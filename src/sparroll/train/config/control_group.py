"""Whether a run has a control group: its share where the configuration does not name one, and why it can have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparroll.control.control_group import ControlGroupSettings
from sparroll.errors import UserError
from sparroll.train.config.base import inline

if TYPE_CHECKING:
    from sparroll.train.config.run import TrainConfig

_WITHOUT = "leave the control group out, --set rollout.control_share=0"
_ONLY_WITH_A_GROUP = (
    ("rollout", "control_share_first"),
    ("rollout", "control_first_steps"),
    ("guard", "reward_gap"),
)
"""Settings that have an effect only where there is a control group, as (section, name)."""


def default_share(config: TrainConfig) -> float:
    """The share of a run that names none: 1/32 wherever a control group is possible, else 0."""
    return 0.0 if why_none(config) else ControlGroupSettings.share


def why_none(config: TrainConfig) -> str:
    """Why the run can have no control group; empty where it can have one."""
    train = config.train
    for given, why in (
        (
            config.all_dense,
            'attention.kind = "dense" has no sparse rollouts to compare with',
        ),
        (config.distill is not None, "the engine holds the adapter of [distill], which is there for sparse rollouts"),
        (train.whole_union, "train.whole_union scores all rollouts under the schedule"),
        (
            train.rollouts_behind_steps > 0,
            f"train.rollouts_behind_steps = {train.rollouts_behind_steps} samples with older weights, and the ceiling of a "
            "control group is that of the newest",
        ),
    ):
        if given:
            return why
    return ""


def in_words(config: TrainConfig) -> str:
    """What the share of the configuration means; empty where there is no control group although there could be one."""
    if config.control_share > 0:
        return "the control group of dense rollouts, which shows what sparsity costs in reward; 0 leaves it out"
    why = why_none(config)
    return f"no control group: {why}" if why else ""


def notices(config: TrainConfig) -> list[str]:
    """An event for the start of a run with sparse rollouts that was not told whether to have a control group."""
    if config.names_control_share or config.all_dense:
        return []
    if why := why_none(config):
        return [f"no control group, so what sparsity costs in reward is not measured: {why}"]
    return [
        f"control group: {config.control_share:g} of the rollouts are dense, {config.rollout.control_share_first:g} in the "
        f"first {config.rollout.control_first_steps} steps under a schedule; rollout.control_share = 0 leaves it out"
    ]


def check_control_group(config: TrainConfig) -> None:
    """Raise UserError where a share is named that the run cannot have, or a setting of a control group that is not
    there."""
    rollout = config.rollout
    if config.control_share == 0:
        _refuse_settings_of_none(config)
        return
    asked = f"rollout.control_share = {config.control_share:g}"
    if config.all_dense:
        raise UserError(
            f'{asked} asks for a control group of dense rollouts, and attention.kind = "dense" has no sparse ones to '
            "compare with",
            f"set attention.kind to schedule, budget or compression, or {_WITHOUT}",
        )
    if config.distill is not None:
        raise UserError(
            f"{asked} and [distill] exclude each other: the engine holds the adapter, which is there for sparse "
            "rollouts, so a control group would not be sampled from the dense policy",
            f"--set distill=none, or {_WITHOUT}",
        )
    if rollout.control_share_first < config.control_share:
        raise UserError(
            f"rollout.control_share_first = {rollout.control_share_first:g} must be at least {asked}",
            "the same share in all steps: give both the same value",
        )


def _refuse_settings_of_none(config: TrainConfig) -> None:
    for section, name in _ONLY_WITH_A_GROUP:
        given = getattr(config, section)
        if getattr(given, name) != type(given).model_fields[name].default:
            none = "" if config.names_control_share else f" by default: {why_none(config)}"
            raise UserError(
                f"{section}.{name} = {inline(getattr(given, name))} does nothing without a control group, and "
                f"rollout.control_share is 0{none}",
                f"--set rollout.control_share=0.03125 for one, or leave {section}.{name} out"
                if config.names_control_share
                else f"leave {section}.{name} out",
            )
