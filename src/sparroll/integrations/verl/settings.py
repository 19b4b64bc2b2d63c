"""The settings under `actor_rollout_ref.rollout.custom.sparroll`: read, checked, and turned into the configuration of our
own loop, whose guard, controller and corrections a run in verl uses. Nothing of verl is imported.

    schedule: qwen3-4b-0.86            preset, file, or the schedule itself (Schedule.inline); dense to begin dense
    correction: {name: tis}            and its settings
    verify: {window: 64, floor: 0.01}  check drafts; default: as the schedule's file says
    guard, control, mismatch           the sections of `sparroll train`
    rescoring: {probe_rollouts: 32}    what is re-scored; default: a quarter of a step's rollouts, 8 to 32
    control_group: {share: 0.03125}    rollouts that are decoded densely, to compare with; default: none
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from sparroll.control.control_group import MOST_SHARE, ControlGroupSettings
from sparroll.draft_check import LEAST_WINDOW_TOKENS, MOST_WINDOW_TOKENS, DraftCheck
from sparroll.engines.vllm.rescoring import RescoringSettings
from sparroll.errors import UserError, nearest
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
from sparroll.train.config.check import one_line
from sparroll.train.schedules import make_guard, starting_schedule

CEILING_EVERY_STEPS = 50
"""How often the dense ceiling is measured, unless `mismatch.ceiling_every_steps` says it."""
PREFIX = "actor_rollout_ref.rollout.custom.sparroll"
_SECTIONS = ("correction", "guard", "control", "mismatch")
_KEYS = ("schedule", "force_schedule", "attention", "verify", "rescoring", "control_group", *_SECTIONS)
_HERE = {
    "--force-schedule, attention.force = true, Schedule.load(..., force=True)": f"{PREFIX}.force_schedule=true",
    "rollout.samples_per_prompt": "actor_rollout_ref.rollout.n",
    "rollout.control_share_first": f"{PREFIX}.control_group.share_first",
    "rollout.control_share": f"{PREFIX}.control_group.share",
    "rollout.control_first_steps": f"{PREFIX}.control_group.first_steps",
    "rollout.temperature": "actor_rollout_ref.rollout.temperature",
    "rollout.top_k": f"{PREFIX}.rescoring.top_k",
    "rollout.max_new_tokens": "data.max_response_length",
    "train.prompts_per_step": "data.train_batch_size",
    "attention.force": f"{PREFIX}.force_schedule",
    "attention.name": f"{PREFIX}.schedule",
    "check.window_tokens": f"{PREFIX}.verify.window",
    "check.floor": f"{PREFIX}.verify.floor",
    "check.dense_logp": f"{PREFIX}.verify.dense_logp",
    'attention.kind = "dense"': f"{PREFIX}.schedule=dense",
    'attention.kind = "schedule"': f"{PREFIX}.schedule",
    "attention.kind": f"{PREFIX}.schedule",
}
"""What the fields of our own configuration are called here."""


class VerifySection(Section):
    """Verified rollouts: the dense policy checks what sparse attention drafts, window by window."""

    window: int | None = Field(default=None, ge=LEAST_WINDOW_TOKENS, le=MOST_WINDOW_TOKENS)
    """Tokens that one dense pass gives at most; all but the last one are drafted. None: as the schedule's file says, or
    64."""
    floor: float | None = Field(default=None, gt=0, le=1)
    """A sampled token is at most log(1 / floor) nats less likely under the dense policy than under the one that sampled
    it. None: as the schedule's file says, or 0.01."""
    dense_logp: Literal["trainer", "engine"] = "trainer"
    """Where the loss takes its old log-probabilities from. trainer: verl's own pass over the batch. engine: the checks,
    which have computed them; that pass is then left out."""


class RescoringSection(Section):
    """Which rollouts the replicas read once more, densely, and how long the lists of both sides are."""

    probe_rollouts: Annotated[int, Field(ge=1)] | Literal["auto"] | None = AUTO
    """How many rollouts of a step are re-scored, over all replicas. A length bin needs 8 to say anything. auto: a quarter
    of the step's, but 8 at least and 32 at most. null: all."""
    top_k: int = Field(default=20, ge=1)
    """How many of the most likely tokens of both policies are compared at each position."""
    seed: int = Field(default=0, ge=0)
    """Chooses the probe."""


class ControlGroupSection(Section):
    """Which share of a step's rollouts is decoded densely, to compare with the sparse ones of the same prompts."""

    share: float = Field(default=0.0, ge=0, le=MOST_SHARE)
    """Share of a step's rollouts; 0: there is no control group. 1/32 (0.03125) is the usual one."""
    share_first: float = Field(default=ControlGroupSettings.share_first, gt=0, le=MOST_SHARE)
    """The share over the first steps under a schedule, and later in steps in which there may well be a gap."""
    first_steps: int = Field(default=ControlGroupSettings.first_steps, ge=0)
    """How many steps under one schedule are its first steps."""
    seed: int = Field(default=0, ge=0)
    """Draws who is in it."""

    @property
    def of_rollout(self) -> dict[str, Any]:
        """The fields of [rollout] in our own configuration."""
        return {
            "control_share": self.share,
            "control_share_first": self.share_first,
            "control_first_steps": self.first_steps,
        }


@dataclass(frozen=True)
class SparseSettings(CommonSettings):
    """The settings, checked.

    >>> settings = SparseSettings.read({"schedule": "qwen3-4b-0.86", "correction": {"name": "tis"}}, facts)
    """

    rescoring: RescoringSection
    attention: Literal["triton", "fa3_pages"]
    rollouts_per_step: int

    @staticmethod
    def read(table: Mapping[str, Any] | None, facts: RunFacts) -> SparseSettings:
        """Raises UserError where a key, a value or a combination is wrong, by the names that a verl user types."""
        try:
            return _read(dict(table or {}), facts)
        except UserError as error:
            raise UserError(in_verls_words(error.message), error.hint and in_verls_words(error.hint)) from None

    def in_their_words(self, text: str) -> str:
        return in_verls_words(text)

    def rescoring_settings(self, probe_rollouts: int | None) -> RescoringSettings:
        """Those of one replica, which re-scores that many rollouts a step."""
        return RescoringSettings(
            top_k=self.rescoring.top_k,
            probe_rollouts=probe_rollouts,
            bin_tokens=self.config.mismatch.bin_tokens,
            seed=self.rescoring.seed,
            temperature=self.config.rollout.temperature,
        )

    @property
    def probe_rollouts(self) -> int | None:
        """How many rollouts of a step are re-scored, over all replicas; None: all."""
        return probe_of(self.rescoring.probe_rollouts, self.rollouts_per_step)

    def table(self) -> dict[str, Any]:
        group = {"control_seed": self.config.train.seed} if self.config.rollout.control_share else {}
        return super().table() | group | {"rescoring": self.rescoring.model_dump(mode="json")}

    def engine_table(self) -> dict[str, Any]:
        """What a replica's server needs to know, as plain data."""
        first, capacity = self.first_schedule(), self.capacity()
        return {
            "capacity": capacity.inline(),
            "start": None if first is None else first.inline(),
            "forced": first is None or first.any_model,
            "rescoring": dataclasses.asdict(self.rescoring_settings(None)),
            "attention": self.attention,
            "keeps_dense_logp": self.dense_logp_from_engine,
        }

    @property
    def dense_logp_from_engine(self) -> bool:
        """Whether the loss reads the dense log-probabilities that the checks of drafts have computed."""
        return self.config.check is not None and self.config.check.dense_logp == "engine"

    def inline(self) -> dict[str, Any]:
        """The settings as plain data that mean the same on every machine: schedules are given themselves instead of by
        a path, and every default is written out."""
        config = self.config.model_dump(mode="json", exclude_none=True)
        table: dict[str, Any] = {name: config[name] for name in _SECTIONS}
        attention = config["attention"]
        table["schedule"] = attention["name"] if attention["kind"] == "schedule" else DENSE
        table["force_schedule"] = attention.get("force", False)
        if self.config.check is not None:
            check = self.config.check
            table["verify"] = {"window": check.window_tokens, "floor": check.floor, "dense_logp": check.dense_logp}
        table["rescoring"] = self.rescoring.model_dump(mode="json")
        rollout = self.config.rollout
        if rollout.control_share:
            table["control_group"] = {
                "share": rollout.control_share,
                "share_first": rollout.control_share_first,
                "first_steps": rollout.control_first_steps,
                "seed": self.config.train.seed,
            }
            # Left out, it would have its default.
            table["guard"] |= {"reward_gap": self.config.guard.reward_gap}
        return table | {"attention": self.attention}


@dataclass(frozen=True)
class RunFacts:
    """What the settings depend on of verl's own configuration."""

    model: str
    prompts_per_step: int
    samples_per_prompt: int
    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float = 1.0
    vocabulary: int | None = None
    """Number of token ids; None where the model's files are not on this machine."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> RunFacts:
        """From verl's whole configuration, as plain tables."""
        rollout, data = config["actor_rollout_ref"]["rollout"], config["data"]
        model = str(config["actor_rollout_ref"]["model"]["path"])
        return RunFacts(
            model=model,
            prompts_per_step=int(data["train_batch_size"]),
            samples_per_prompt=int(rollout["n"]),
            max_prompt_tokens=int(data["max_prompt_length"]),
            max_new_tokens=int(data["max_response_length"]),
            temperature=float(rollout["temperature"]),
            vocabulary=_vocabulary(model),
        )


def in_verls_words(text: str) -> str:
    """A message or hint about our own configuration, with the names that a verl user types."""
    return outside_commands(text, _renamed)


def _renamed(text: str) -> str:
    for ours, theirs in _HERE.items():
        text = text.replace(f"--set {ours}", theirs).replace(ours, theirs)
    text = re.sub(rf"--set ('?)(?={'|'.join(_SECTIONS)})", rf"\1+{PREFIX}.", text)
    text = re.sub(rf"(?<![\w.])((?:{'|'.join(_SECTIONS)})\.[a-z_]+)", rf"{PREFIX}.\1", text)
    text = re.sub(rf"({re.escape(PREFIX)}[\w.]*) = (\[[^]]*\])", _list_of_hydra, text)
    # Hydra adds a key that verl's own files do not have only where a plus says so.
    return re.sub(rf"(?<!\+)({re.escape(PREFIX)}[\w.]*=)", r"+\1", text)


def _list_of_hydra(found: re.Match[str]) -> str:
    key, items = found[1], found[2].replace(" ", "").replace('"', "")
    return f"'+{key}={items}'"


def _read(table: dict[str, Any], facts: RunFacts) -> SparseSettings:
    for key in table:
        if key not in _KEYS:
            raise UserError(f"unknown key {PREFIX}.{key}", nearest(str(key), list(_KEYS)))
    ours: dict[str, Any] = {name: inlined(table[name]) for name in _SECTIONS if table.get(name) is not None}
    ours["model"] = {"name": facts.model}
    rescoring, group = _section(RescoringSection, table, "rescoring"), _control_group(table, facts)
    ours["rollout"] = {
        "samples_per_prompt": max(facts.samples_per_prompt, 2),
        "temperature": facts.temperature,
        "max_new_tokens": facts.max_new_tokens,
        "top_k": rescoring.top_k,
    } | group.of_rollout
    ours["train"] = {"prompts_per_step": facts.prompts_per_step, "seed": group.seed}
    ours["attention"] = _attention(table)
    # It takes as long as a whole response.
    mismatch = ours.setdefault("mismatch", {})
    if isinstance(mismatch, dict):
        ours["mismatch"] = {"ceiling_every_steps": CEILING_EVERY_STEPS} | mismatch
    if table.get("verify") is not None:
        ours["check"] = _check(_section(VerifySection, table, "verify"), table["schedule"])
    config = checked_config(ours, "verl")
    attention = table.get("attention", "triton")
    if attention not in ("triton", "fa3_pages"):
        raise UserError(f"unknown {PREFIX}.attention {attention!r}", nearest(str(attention), ["triton", "fa3_pages"]))
    start = starting_schedule(config)
    if stays_dense(config, start):
        raise UserError(
            f"{PREFIX}.schedule = dense leaves nothing for sparroll to do",
            "name a schedule, let the controller make one (control.by=controller), or use verl's own trainer_mode",
        )
    longest = facts.max_prompt_tokens + facts.max_new_tokens
    rollouts = facts.prompts_per_step * facts.samples_per_prompt
    settings = SparseSettings(config, start, longest, rescoring, attention, rollouts)
    # What these refuse is to be refused before anything starts.
    settings.capacity()
    _check_windows(settings)
    _check_measurable(settings, facts)
    return settings


def _check_windows(settings: SparseSettings) -> None:
    """Raise UserError where the run may come to schedules with windows of different lengths."""
    stricter = make_guard(settings.config, settings.start).stricter
    windows = {each.check.window_tokens for each in (settings.start, *stricter) if each is not None and each.check}
    if len(windows) > 1:
        raise UserError(
            f"the schedules of the run check windows of {' and '.join(map(str, sorted(windows)))} tokens, and a replica's "
            "scheduler gives all windows one length",
            f"+{PREFIX}.verify.window={max(windows)} makes them alike",
        )


def _check_measurable(settings: SparseSettings, facts: RunFacts) -> None:
    """Raise UserError where re-scoring could not say how far the rollouts are from dense, or never of enough of them."""
    probe, schedule = settings.rescoring.probe_rollouts, settings.first_schedule()
    if isinstance(probe, int) and probe < LEAST_ROLLOUTS:
        raise UserError(
            f"{PREFIX}.rescoring.probe_rollouts = {probe}, and a length bin needs {LEAST_ROLLOUTS} rollouts to say anything",
            f"+{PREFIX}.rescoring.probe_rollouts={LEAST_ROLLOUTS} or more; null re-scores all",
        )
    if schedule is None or schedule.check is None:
        # A vocabulary that is not known here is taken for a large one.
        vocabulary = facts.vocabulary or settings.rescoring.top_k + 1
        hint = (
            "actor_rollout_ref.rollout.temperature=1; or verified rollouts, which are measured at any temperature: "
            f"+{PREFIX}.verify.window=64"
        )
        check_rescoring(facts.temperature, settings.rescoring.top_k, vocabulary, hint)


def _vocabulary(model: str) -> int | None:
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False).vocab_size)
    except (OSError, ValueError, AttributeError):
        return None


def _attention(table: dict[str, Any]) -> dict[str, Any]:
    source = table.get("schedule")
    if source is None:
        raise UserError(
            f"{PREFIX}.schedule is missing",
            f"name a preset or a file, +{PREFIX}.schedule=qwen3-4b-0.86; `sparroll schedule list` names the presets",
        )
    if source == DENSE:
        return {"kind": "dense"}
    return {"kind": "schedule", "name": as_text(source), "force": table.get("force_schedule", False)}


def _check(verify: VerifySection, source: Any) -> dict[str, Any]:
    """The section [check] of our own loop; what the user leaves open is as the schedule says."""
    said = (None if source == DENSE else Schedule.load(as_text(source)).check) or DraftCheck()
    return {
        "window_tokens": said.window_tokens if verify.window is None else verify.window,
        "floor": said.floor if verify.floor is None else verify.floor,
        "dense_logp": verify.dense_logp,
    }


def _control_group(table: dict[str, Any], facts: RunFacts) -> ControlGroupSection:
    group: ControlGroupSection = _section(ControlGroupSection, table, "control_group")
    if group.share and facts.samples_per_prompt < 2:
        raise UserError(
            f"{PREFIX}.control_group.share = {group.share:g} compares rollouts of one prompt, and "
            f"actor_rollout_ref.rollout.n = {facts.samples_per_prompt}",
            "actor_rollout_ref.rollout.n=8, or leave control_group out",
        )
    return group


def _section(kind: type[Any], table: dict[str, Any], name: str) -> Any:
    given, where = table.get(name), f"{PREFIX}.{name}"
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise UserError(
            f"{where} must be a table, got {given!r}",
            f"its keys are {', '.join(kind.model_fields)}; null leaves it out",
        )
    for key in given:
        if key not in kind.model_fields:
            raise UserError(f"unknown key {where}.{key}", nearest(str(key), list(kind.model_fields)))
    try:
        return kind(**given)
    except ValidationError as error:
        raise one_line(error, where, kind) from None
