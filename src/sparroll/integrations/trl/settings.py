"""`SparseRollouts`, what a user of TRL says about sparse rollouts, and `SparseSetup`, the same checked against the rest of
TRL's configuration. Guard, controller, corrections and their settings are those of our own loop. Neither TRL nor vLLM is
imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sparroll.control.control_group import ControlGroupSettings
from sparroll.draft_check import DraftCheck
from sparroll.engines.vllm.rescoring import RescoringSettings
from sparroll.errors import UserError
from sparroll.integrations.measured import share_of_engine
from sparroll.integrations.settings import (
    AUTO,
    DENSE,
    CommonSettings,
    as_text,
    check_rescoring,
    checked_config,
    inlined,
    outside_commands,
    probe_of,
    stays_dense,
)
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.schedule import Schedule
from sparroll.train.config.base import Section
from sparroll.train.schedules import starting_schedule
from sparroll.types import check_seed, is_whole

MOST_TOP_K = 20
"""vLLM's max_logprobs, which TRL leaves at its default."""

Table = Mapping[str, Any]
"""Settings by name, as in a section of `sparroll train`."""


@dataclass(frozen=True)
class SparseRollouts:
    """How a TRL trainer samples, measures and corrects sparse rollouts.

    >>> SparseRollouts("qwen3-4b-0.86", correction={"name": "tis", "weight_max": 2.0}, guard={"action": "stop"})
    """

    schedule: Schedule | Table | Path | str
    """Preset, file, table, or a Schedule. "dense": rollouts begin dense, and a controller makes them sparse."""
    correction: str | Table = "tis"
    """Name of the correction, or a table of its name and its settings (docs/corrections.md)."""
    verify: DraftCheck | None = None
    """Check drafts with the dense policy, window by window, under every schedule of the run. None: as the schedule's file
    says."""
    guard: Table = field(default_factory=dict)
    """The section [guard]: {"action": "stop", "at_least": 0.86, "window_steps": 10, "empty_steps": 3}."""
    control: Table = field(default_factory=dict)
    """The section [control]: {"by": "controller", "target": 0.86}, or {"by": "guard", "stricter": ["dense"]}."""
    mismatch: Table = field(default_factory=dict)
    """The section [mismatch]: bin_tokens, least_tokens, ceiling_every_steps (here 0 by default: before the first step, and
    with each evaluation), ceiling_prompts."""
    control_share: float = 0.0
    """Share of a step's rollouts that is decoded densely, as a control group: compared with the sparse rollouts of the same
    prompts, it shows what sparsity costs in reward. They are trained on like the others. 0: there is none; 1/32 is the
    usual one."""
    control_share_first: float = ControlGroupSettings.share_first
    """The share over the first steps under a schedule, and later in steps in which there may well be a gap."""
    control_first_steps: int = ControlGroupSettings.first_steps
    """How many steps under one schedule are its first steps."""
    probe_rollouts: int | Literal["auto"] | None = AUTO
    """How many rollouts of a step are re-scored, over all processes. A length bin needs 8 to say anything. "auto": a
    quarter of the step's, but 8 at least and 32 at most. None: all."""
    top_k: int = 20
    """How many of the most likely tokens of both policies are compared at each position."""
    seed: int = 0
    """Of the rollouts' draws (colocate mode), of the control group and of the choice of the probe."""
    force_schedule: bool = False
    """Use a schedule that was made for another model."""

    def __post_init__(self) -> None:
        if self.verify is not None and not isinstance(self.verify, DraftCheck):
            raise UserError(
                f"verify must be a DraftCheck, got {self.verify!r}",
                "from sparroll.draft_check import DraftCheck; verify=DraftCheck(window_tokens=64)",
            )
        for name in ("guard", "control", "mismatch"):
            if not isinstance(getattr(self, name), (Mapping, Section)):
                raise UserError(
                    f"{name} must be a table, got {getattr(self, name)!r}",
                    f"{name}={{...}}; docs/trl.md shows its keys",
                )
        probe = self.probe_rollouts
        if probe is not None and probe != AUTO and (not is_whole(probe) or probe < LEAST_ROLLOUTS):
            raise UserError(
                f"probe_rollouts = {probe!r}, and a length bin needs {LEAST_ROLLOUTS} to say anything",
                f"probe_rollouts={LEAST_ROLLOUTS} or more; None re-scores all",
            )
        if not is_whole(self.top_k) or not 1 <= self.top_k <= MOST_TOP_K:
            raise UserError(
                f"top_k must be from 1 to {MOST_TOP_K}, got {self.top_k!r}", "TRL leaves vLLM's max_logprobs at 20"
            )
        check_seed(self.seed)


@dataclass(frozen=True)
class TrainerFacts:
    """What the settings depend on of TRL's own configuration, and of the model.

    >>> TrainerFacts("Qwen/Qwen3-4B", prompts_per_step=8, samples_per_prompt=8, max_new_tokens=16_384,
    ...              longest_context_tokens=32_768, vocabulary=151_936)
    """

    model: str
    prompts_per_step: int
    """Prompts that are sampled together, over all processes."""
    samples_per_prompt: int
    max_new_tokens: int
    longest_context_tokens: int
    vocabulary: int
    temperature: float = 1.0
    processes: int = 1


@dataclass(frozen=True)
class SparseSetup(CommonSettings):
    """The settings, checked.

    >>> setup = SparseSetup.of(SparseRollouts("qwen3-4b-0.86"), facts)
    """

    sparse: SparseRollouts
    facts: TrainerFacts

    @staticmethod
    def of(sparse: SparseRollouts, facts: TrainerFacts) -> SparseSetup:
        """Raises UserError where a value or a combination is wrong, by the names that a user of TRL types."""
        try:
            return _checked(sparse, facts)
        except UserError as error:
            raise UserError(in_trls_words(error.message), error.hint and in_trls_words(error.hint)) from None

    def in_their_words(self, text: str) -> str:
        return in_trls_words(text)

    def rescoring(self) -> RescoringSettings:
        """Those of one process, so that all together re-score at least as many rollouts as asked."""
        facts = self.facts
        probe = probe_of(self.sparse.probe_rollouts, facts.prompts_per_step * facts.samples_per_prompt)
        return RescoringSettings(
            top_k=min(self.sparse.top_k, facts.vocabulary),
            probe_rollouts=share_of_engine(probe, facts.processes),
            bin_tokens=self.config.mismatch.bin_tokens,
            seed=self.sparse.seed,
            temperature=facts.temperature,
        )

    def rescoring_of_control(self) -> RescoringSettings:
        """The same for the dense rollouts of the control group, which show the dense ceiling."""
        count = share_of_engine(self.config.mismatch.ceiling_prompts, self.facts.processes)
        return replace(self.rescoring(), probe_rollouts=count)

    def table(self) -> dict[str, Any]:
        sparse = self.sparse
        return super().table() | {"probe_rollouts": sparse.probe_rollouts, "top_k": sparse.top_k, "seed": sparse.seed}


def in_trls_words(text: str) -> str:
    """A message or hint about our own configuration, with the names that a user of TRL types."""
    return outside_commands(text, _renamed)


def _renamed(text: str) -> str:
    for ours, theirs in _HERE.items():
        text = text.replace(f"--set {ours}", theirs).replace(ours, theirs)
    text = re.sub(rf"--set '({_SECTIONS})\.([a-z_]+)=([^']*)'", _as_argument, text)
    return re.sub(rf"--set ({_SECTIONS})\.([a-z_]+)=(\S+?)(?=[,;.)]?(?:\s|$))", _as_argument, text)


def _as_argument(setting: re.Match[str]) -> str:
    section, key, value = setting.groups()
    return f'{section}={{"{key}": {_in_python(value)}}}'


def _in_python(value: str) -> str:
    """The value of a setting, which is JSON or else a text without quotes, as Python has it."""
    if value in ("true", "false"):
        return value.capitalize()
    try:
        json.loads(value)
    except ValueError:
        return json.dumps(value)
    return value


_SECTIONS = "guard|control|mismatch|correction"
_HERE = {
    "--force-schedule, attention.force = true": "force_schedule=True",
    "rollout.samples_per_prompt": "num_generations",
    "rollout.control_": "control_",
    "rollout.temperature": "temperature",
    "rollout.top_k": "top_k",
    "rollout.max_new_tokens": "max_completion_length",
    "train.prompts_per_step": "generation_batch_size / num_generations",
    "attention.force": "force_schedule",
    "attention.name": "schedule",
    "check.window_tokens=64": "verify=DraftCheck(window_tokens=64)",
    'attention.kind = "dense"': 'schedule="dense"',
    "attention.kind": "schedule",
}
"""What the fields of our own configuration are called here."""


def _checked(sparse: SparseRollouts, facts: TrainerFacts) -> SparseSetup:
    correction = sparse.correction
    ours: dict[str, Any] = {
        "model": {"name": facts.model},
        "rollout": {
            "samples_per_prompt": facts.samples_per_prompt,
            "temperature": facts.temperature,
            "max_new_tokens": facts.max_new_tokens,
            "top_k": sparse.top_k,
            "control_share": sparse.control_share,
            "control_share_first": sparse.control_share_first,
            "control_first_steps": sparse.control_first_steps,
        },
        "train": {"prompts_per_step": facts.prompts_per_step, "seed": sparse.seed},
        "attention": _attention(sparse),
        "correction": {"name": correction} if isinstance(correction, str) else inlined(correction),
    }
    for name in ("guard", "control", "mismatch"):
        table = inlined(getattr(sparse, name))
        if table:
            ours[name] = table
    # A dense ceiling of its own takes as long as a whole response; each evaluation brings one along.
    ours["mismatch"] = {"ceiling_every_steps": 0} | ours.get("mismatch", {})
    if sparse.verify is not None:
        # TRL computes the dense log-probabilities of its loss itself.
        ours["check"] = sparse.verify.table() | {"dense_logp": "trainer"}
    config = checked_config(ours, "TRL")
    start = starting_schedule(config)
    if stays_dense(config, start):
        raise UserError(
            'schedule="dense" leaves nothing for sparroll to do',
            'name a schedule, let the controller make one (control={"by": "controller", "target": 0.86}), or use '
            "TRL's own GRPOTrainer",
        )
    setup = SparseSetup(config, start, facts.longest_context_tokens, sparse, facts)
    # What these refuse is to be refused before anything starts.
    capacity = setup.capacity()
    if capacity.check is None:
        hint = (
            "temperature=1.0; or verified rollouts, which are measured at any temperature: "
            "verify=DraftCheck(window_tokens=64)"
        )
        check_rescoring(facts.temperature, sparse.top_k, facts.vocabulary, hint)
    return setup


def _attention(sparse: SparseRollouts) -> dict[str, Any]:
    source = sparse.schedule
    if isinstance(source, str) and source == DENSE:
        return {"kind": "dense"}
    forced = sparse.force_schedule or (isinstance(source, Schedule) and source.any_model)
    return {"kind": "schedule", "name": as_text(source), "force": forced}
