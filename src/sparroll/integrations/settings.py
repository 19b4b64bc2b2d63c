"""The settings of a run in another trainer, as a configuration of our own loop, whose guard, controller and corrections it
uses. What users type, and in which words a mistake is reported, each integration says itself. Imports no framework."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sparroll.control.watcher import Watcher
from sparroll.corrections import Correction
from sparroll.engines.make import check_samples_at, roomiest
from sparroll.engines.vllm.rescoring import check_sampling
from sparroll.errors import UserError
from sparroll.integrations.corrections import check_usable
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.schedule import Schedule
from sparroll.train.config.base import Section
from sparroll.train.config.control import ByControllerSection
from sparroll.train.config.file import config_from
from sparroll.train.config.run import TrainConfig
from sparroll.train.schedules import caveat_events, check_events, make_controller, make_empty_steps, make_guard
from sparroll.types import LEAST_VLLM_TEMPERATURE

DENSE = "dense"
AUTO: Final = "auto"
"""A probe as large as a step's rollouts ask for (`probe_of`)."""
MOST_PROBED = 32


@dataclass(frozen=True)
class CommonSettings(ABC):
    """The settings, checked."""

    config: TrainConfig
    """The same as a configuration of our own loop."""
    start: Schedule | None
    """What the rollouts start under; None: dense, with a controller that makes them sparse."""
    longest_context_tokens: int

    @abstractmethod
    def in_their_words(self, text: str) -> str:
        """A message or event about our own configuration, with the names that a user of the framework types."""

    @property
    def correction(self) -> Correction:
        return self.config.correction.make()

    def watchers(self) -> tuple[Watcher, ...]:
        """The guard, the watch on empty steps, and the controller where the run has one; in the order in which they are
        shown a step."""
        guard = make_guard(self.config, self.start)
        controller = make_controller(self.config, self.start, self.longest_context_tokens)
        made = (guard, make_empty_steps(self.config), controller)
        return tuple(each for each in made if each is not None)

    def first_schedule(self) -> Schedule | None:
        """The schedule of the first step: the controller's, where the run has one."""
        controller = make_controller(self.config, self.start, self.longest_context_tokens)
        return controller.schedule() if controller else self.start

    def schedules(self) -> list[Schedule]:
        """Every schedule that the run may come to; of a controller's, the widest."""
        later = [each for watcher in self.watchers() for each in watcher.may_switch_to]
        controlled = isinstance(self.config.control, ByControllerSection)
        return [each for each in (later if controlled else [self.first_schedule(), *later]) if each is not None]

    def capacity(self) -> Schedule:
        """A schedule with the index, the dense layers and the longest window of all of these; its budgets say nothing."""
        roomy = roomiest(self.schedules())
        assert roomy is not None, "a run without any schedule"
        return roomy

    def table(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run that wrote the checkpoint, as plain data."""
        config = self.config.model_dump(mode="json")
        table = {name: config[name] for name in ("attention", "check", "control", "guard", "correction", "mismatch")}
        rollout = self.config.rollout
        if rollout.temperature != 1.0:
            table["temperature"] = rollout.temperature
        if rollout.control_share:
            group = (rollout.control_share, rollout.control_share_first, rollout.control_first_steps)
            table["control_group"] = dict(zip(("share", "share_first", "first_steps"), group, strict=True))
        return table

    def events(self) -> list[str]:
        """What the start of a run says: what must be known of its schedules, what the guard cannot watch, and which check
        holds where a file says another."""
        guard = make_guard(self.config, self.start)
        lines = caveat_events(self.config, self.start)
        lines += [*guard.notice(self.first_schedule() is None), *check_events(self.config, self.start)]
        return [self.in_their_words(line) for line in lines]


def outside_commands(text: str, in_their_words: Callable[[str], str]) -> str:
    """The text with each part in their words, except for the commands of sparroll that it quotes, which know our names
    alone.

    >>> outside_commands("`sparroll config guard` explains guard", str.upper)
    '`sparroll config guard` EXPLAINS GUARD'
    """
    parts = re.split(r"(`sparroll [^`]*`)", text)
    return "".join(part if part.startswith("`sparroll ") else in_their_words(part) for part in parts)


def checked_config(ours: dict[str, Any], trainer: str) -> TrainConfig:
    """The configuration of our own loop, without what only our own loop can do. trainer: who trains instead."""
    control = ours.get("control")
    if isinstance(control, Mapping) and control.get("by") == "cheaper":
        raise UserError(
            f'control.by = "cheaper" waits for an adapter of DistillSparse, which {trainer} does not train',
            "choose nobody, guard or controller; `sparroll train` runs DistillSparse",
        )
    config = config_from({**ours, "rollout": {"control_share": 0, **ours.get("rollout", {})}})
    check_usable(config.correction.make())
    _check_sampled(config.rollout.temperature)
    return config


def _check_sampled(temperature: float) -> None:
    """Raise UserError for a temperature that vLLM, which samples inside other trainers, would silently raise."""
    try:
        check_samples_at("vllm", temperature, "rollout.temperature")
    except UserError as error:
        raise UserError(error.message, f"rollout.temperature={LEAST_VLLM_TEMPERATURE:g} or more") from None


def stays_dense(config: TrainConfig, start: Schedule | None) -> bool:
    """Whether a run that starts under this schedule would never be sparse."""
    return start is None and not isinstance(config.control, ByControllerSection)


def check_rescoring(temperature: float, top_k: int, vocabulary: int, hint: str) -> None:
    """Raise UserError, with this hint, where re-scoring could not say how far the rollouts are from dense."""
    try:
        check_sampling(temperature, 1.0, top_k, vocabulary)
    except UserError as error:
        raise UserError(error.message, hint) from None


def probe_of(asked: int | str | None, rollouts: int) -> int | None:
    """How many of a step's `rollouts` are re-scored; None: all. AUTO is a quarter of them, since re-scoring a response
    takes about a twentieth of the time that sampling it does; but 8 at least, which a length bin needs, and 32 at most.

    >>> [probe_of(AUTO, rollouts) for rollouts in (16, 64, 1024)]
    [8, 16, 32]
    """
    if asked != AUTO:
        assert asked is None or isinstance(asked, int), "the settings were checked"
        return asked
    return min(max(rollouts // 4, LEAST_ROLLOUTS), MOST_PROBED)


def inlined(section: Any) -> Any:
    """A section as plain data, with the schedules that it names given themselves, since a path leads nowhere on another
    machine. What is no section is returned as it is, for the configuration to refuse."""
    if isinstance(section, Section):
        section = section.model_dump(mode="json")
    if not isinstance(section, Mapping):
        return section
    section = dict(section)
    if isinstance(section.get("stricter"), list | tuple):
        section["stricter"] = [each if each == DENSE else as_text(each) for each in section["stricter"]]
    return section


def as_text(source: Any) -> str:
    """The schedule itself as JSON, which Schedule.load takes wherever it takes a name."""
    if not isinstance(source, (Schedule, str, Path, Mapping)):
        raise UserError(f"a schedule is a preset, a file or a table, got {source!r}")
    found = source if isinstance(source, Schedule) else Schedule.load(source, force=True)
    return json.dumps(found.inline(), sort_keys=True)
