"""`SparseRollouts`, what a user of TRL says about sparse rollouts, and `SparseSetup`, the same checked against the rest of
TRL's configuration. Guard, controller, corrections and their settings are those of our own loop. Neither TRL nor vLLM is
imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparroll.control.watcher import Watcher
from sparroll.corrections import Correction
from sparroll.draft_check import DraftCheck
from sparroll.engines.make import roomiest
from sparroll.engines.vllm.rescoring import RescoringSettings, check_sampling
from sparroll.errors import UserError
from sparroll.integrations.corrections import check_usable
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.schedule import Schedule
from sparroll.train.config.base import Section
from sparroll.train.config.control import ByControllerSection
from sparroll.train.config.file import config_from
from sparroll.train.config.run import TrainConfig
from sparroll.train.schedules import check_events, make_controller, make_empty_steps, make_guard, starting_schedule
from sparroll.types import check_seed, is_whole

DENSE = "dense"
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
    probe_rollouts: int | None = 32
    """How many rollouts of a step are re-scored, over all processes. A length bin needs 8 to say anything. None: all."""
    top_k: int = 20
    """How many of the most likely tokens of both policies are compared at each position."""
    seed: int = 0
    """Of the rollouts' draws (colocate mode) and of the choice of the probe."""
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
        if self.probe_rollouts is not None and (
            not is_whole(self.probe_rollouts) or self.probe_rollouts < LEAST_ROLLOUTS
        ):
            raise UserError(
                f"probe_rollouts = {self.probe_rollouts!r}, and a length bin needs {LEAST_ROLLOUTS} to say anything",
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
class SparseSetup:
    """The settings, checked.

    >>> setup = SparseSetup.of(SparseRollouts("qwen3-4b-0.86"), facts)
    """

    config: TrainConfig
    """The same as a configuration of our own loop."""
    sparse: SparseRollouts
    facts: TrainerFacts
    start: Schedule | None
    """What the rollouts start under; None: dense, with a controller that makes them sparse."""

    @staticmethod
    def of(sparse: SparseRollouts, facts: TrainerFacts) -> SparseSetup:
        """Raises UserError where a value or a combination is wrong, by the names that a user of TRL types."""
        try:
            return _checked(sparse, facts)
        except UserError as error:
            raise UserError(in_trls_words(error.message), error.hint and in_trls_words(error.hint)) from None

    @property
    def correction(self) -> Correction:
        return self.config.correction.make()

    def watchers(self) -> tuple[Watcher, ...]:
        """The guard, the watch on empty steps, and the controller where the run has one."""
        guard = make_guard(self.config, self.start)
        controller = make_controller(self.config, self.start, self.facts.longest_context_tokens)
        made = (guard, make_empty_steps(self.config), controller)
        return tuple(each for each in made if each is not None)

    def first_schedule(self) -> Schedule | None:
        """The schedule of the first step: the controller's, where the run has one."""
        controller = make_controller(self.config, self.start, self.facts.longest_context_tokens)
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

    def events(self) -> list[str]:
        """What the start of a run says: what the guard cannot watch, and which check holds where a file says another."""
        guard = make_guard(self.config, self.start)
        lines = [*guard.notice(self.first_schedule() is None), *check_events(self.config, self.start)]
        return [in_trls_words(line) for line in lines]

    def rescoring(self) -> RescoringSettings:
        """Those of one process, so that all together re-score at least as many rollouts as asked."""
        asked = self.sparse.probe_rollouts
        return RescoringSettings(
            top_k=min(self.sparse.top_k, self.facts.vocabulary),
            probe_rollouts=None if asked is None else -(-asked // self.facts.processes),
            bin_tokens=self.config.mismatch.bin_tokens,
            seed=self.sparse.seed,
            temperature=self.facts.temperature,
        )

    def table(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run that wrote the checkpoint, as plain data."""
        config = self.config.model_dump(mode="json")
        table = {name: config[name] for name in ("attention", "check", "control", "guard", "correction", "mismatch")}
        rescoring = {"probe_rollouts": self.sparse.probe_rollouts, "top_k": self.sparse.top_k, "seed": self.sparse.seed}
        return table | rescoring


def in_trls_words(text: str) -> str:
    """A message or hint about our own configuration, with the names that a user of TRL types."""
    for ours, theirs in _HERE.items():
        text = text.replace(f"--set {ours}", theirs).replace(ours, theirs)
    return re.sub(rf"--set ({_SECTIONS})\.([a-z_]+)=(\S+?)(?=[,;.)]?(?:\s|$))", r'\1={"\2": \3}', text)


_SECTIONS = "guard|control|mismatch|correction"
_HERE = {
    "--force-schedule, attention.force = true": "force_schedule=True",
    "rollout.samples_per_prompt": "num_generations",
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
        },
        "train": {"prompts_per_step": facts.prompts_per_step, "seed": sparse.seed},
        "attention": _attention(sparse),
        "correction": {"name": correction} if isinstance(correction, str) else _plain(correction),
    }
    for name in ("guard", "control", "mismatch"):
        table = _plain(getattr(sparse, name))
        if "stricter" in table:
            table["stricter"] = [each if each == DENSE else _as_text(each) for each in table["stricter"]]
        if table:
            ours[name] = table
    # A dense ceiling of its own takes as long as a whole response; each evaluation brings one along.
    ours["mismatch"] = {"ceiling_every_steps": 0} | ours.get("mismatch", {})
    if sparse.verify is not None:
        # TRL computes the dense log-probabilities of its loss itself.
        ours["check"] = sparse.verify.table() | {"dense_logp": "trainer"}
    if ours.get("control", {}).get("by") == "cheaper":
        raise UserError(
            'control.by = "cheaper" waits for an adapter of DistillSparse, which TRL does not train',
            "choose nobody, guard or controller; `sparroll train` runs DistillSparse",
        )
    config = config_from(ours)
    check_usable(config.correction.make())
    start = starting_schedule(config)
    if start is None and not isinstance(config.control, ByControllerSection):
        raise UserError(
            'schedule="dense" leaves nothing for sparroll to do',
            'name a schedule, let the controller make one (control={"by": "controller", "target": 0.86}), or use '
            "TRL's own GRPOTrainer",
        )
    setup = SparseSetup(config, sparse, facts, start)
    # What these refuse is to be refused before anything starts.
    capacity = setup.capacity()
    if capacity.check is None:
        try:
            check_sampling(facts.temperature, 1.0, sparse.top_k, facts.vocabulary)
        except UserError as error:
            raise UserError(
                error.message,
                "temperature=1.0; or verified rollouts, which are measured at any temperature: "
                "verify=DraftCheck(window_tokens=64)",
            ) from None
    return setup


def _attention(sparse: SparseRollouts) -> dict[str, Any]:
    source = sparse.schedule
    if isinstance(source, str) and source == DENSE:
        return {"kind": "dense"}
    forced = sparse.force_schedule or (isinstance(source, Schedule) and source.any_model)
    return {"kind": "schedule", "name": _as_text(source), "force": forced}


def _as_text(source: Any) -> str:
    """The schedule itself as JSON, which Schedule.load takes wherever it takes a name."""
    if not isinstance(source, (Schedule, str, Path, Mapping)):
        raise UserError(f"a schedule is a preset, a file, a table or a Schedule, got {source!r}")
    found = source if isinstance(source, Schedule) else Schedule.load(source, force=True)
    return json.dumps(found.inline(), sort_keys=True)


def _plain(table: Any) -> dict[str, Any]:
    return table.model_dump(mode="json") if isinstance(table, Section) else dict(table)
