"""What a report shows, as plain data. Reads no files and draws nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparroll.calibrate.fit import MIN_TOKENS
from sparroll.control.guard import is_alarm
from sparroll.draft_check import DraftCheck
from sparroll.mismatch.table import TailRow
from sparroll.plan.model_shape import built_in
from sparroll.resume import flat
from sparroll.schedule import Schedule


def thin(row: TailRow) -> bool:
    """Whether a bin has too little data to say anything. Calibration leaves such bins out as well."""
    return not row.counts(MIN_TOKENS)


@dataclass(frozen=True)
class TailCurve:
    """One line of the tail plot."""

    name: str
    kind: Literal["budget", "schedule", "ceiling"]
    points: tuple[TailRow, ...]
    kv_budget_tokens: int | None = None
    check: DraftCheck | None = None
    """How the dense policy checked the drafts; None: nothing was checked."""
    checked: dict[str, Any] | None = None
    """What these checks did, as the record has it."""
    overall: TailRow | None = None
    """The figures of all tokens together."""


@dataclass(frozen=True)
class Measured:
    """What one profile or calibration measured."""

    folder: str
    """Relative to the folder of the report; "." is that folder itself."""
    model: str
    curves: tuple[TailCurve, ...]
    estimator: str
    quantile: float = 0.05
    target: float | None = None
    """None for a profile, which has no target."""
    schedule: Schedule | None = None
    """None for a profile."""
    bound: Literal["value", "low"] | None = None
    """What had to meet the target in the verification: the measured tail, or the lower end of its interval. None: there
    was no verification."""
    notes: tuple[str, ...] = ()
    tradeoff: dict[str, Any] | None = None
    """What a decode step's time buys, as the record has it; None where nothing but the target was asked for."""

    @property
    def verified(self) -> TailCurve | None:
        """What rollouts with the schedule itself measured; None where nobody did."""
        return next((curve for curve in self.curves if curve.kind == "schedule"), None)


@dataclass(frozen=True)
class AccuracyPoint:
    """Dense accuracy after a step, with its 95 % interval."""

    step: int
    value: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True)
class GapPoint:
    """The control group's reward gap after a step, over its window, with its 95 % interval."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TrainingRun:
    """What one RL run logged, by step."""

    name: str
    steps: tuple[int, ...]
    reward: tuple[float, ...]
    reward_first: float
    """Mean over the first `reward_window_steps` steps, as `sparroll train` prints it."""
    reward_last: float
    reward_window_steps: int
    tail_q05: tuple[float | None, ...]
    """Over the tokens of all lengths together."""
    worst_bin_q05: tuple[float | None, ...]
    """Of the bin of lengths with the lowest tail; None in a step in which no bin had enough tokens."""
    kv_read_share: tuple[float, ...]
    """Of its rollouts without the control group, where there is one."""
    accuracy: tuple[AccuracyPoint, ...]
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration: section -> field -> value."""
    rollouts: str = ""
    """What its rollouts read, in words."""
    schedule: Schedule | None = None
    """The schedule that its last checkpoint holds."""
    target: float | None = None
    """Target of its guard: what the worst bin's tail should hold."""
    reward_gap: tuple[GapPoint, ...] = ()
    """Dense minus sparse; empty without a control group."""
    tolerated_gap: float | None = None
    """The reward gap that its guard tolerates; None without a control group, and where no gap raises an alarm."""
    events: tuple[str, ...] = ()
    gone_on: bool = False
    """Whether it was resumed after its result.json was written, and has not ended since."""

    @property
    def model(self) -> str:
        return str(self.config.get("model", {}).get("name", ""))

    @property
    def dense(self) -> bool:
        """Whether its rollouts read the whole context."""
        kind = self.config.get("attention", {}).get("kind")
        return kind == "dense" and self.config.get("control", {}).get("by", "nobody") == "nobody"

    @property
    def read_share(self) -> float:
        """Share of the KV cache that its rollouts read, those of a control group left out, mean over steps."""
        return sum(self.kv_read_share) / len(self.kv_read_share)

    @property
    def alarms(self) -> tuple[str, ...]:
        """The guard's alarms among the events."""
        return tuple(filter(is_alarm, self.events))


@dataclass(frozen=True)
class PlannedDecoding:
    """A prediction of `sparroll plan`."""

    model: str
    """As it was asked for; the results may have another form of the name."""
    results: dict[str, Any]
    folder: str = "."
    """Relative to the folder of the report."""

    @property
    def device(self) -> str:
        return str(self.results["hardware"]["name"])

    @property
    def checked(self) -> bool:
        """Whether the dense policy checks the drafts of its schedule."""
        return bool(self.results.get("verified"))

    @property
    def speedup(self) -> float:
        """Over dense decoding, with the checks of drafts where there are any."""
        return float(self.results["verified_speedup" if self.checked else "speedup"])

    @property
    def tokens_per_second(self) -> float:
        """Of sparse decoding, with the checks of drafts where there are any."""
        return float(self.results["verified" if self.checked else "sparse"]["tokens_per_second"])

    @property
    def basis(self) -> Literal["data sheet", "measured rates", "measured steps"]:
        """What is known of its device."""
        if self.results["sparse"]["bound"] == "measured":
            return "measured steps"
        return "measured rates" if str(self.results["hardware"].get("source")).startswith("measured") else "data sheet"


def told_apart(plans: Sequence[PlannedDecoding], model: bool = False) -> list[str]:
    """The device of each plan, after its model if that is asked for, with as much behind it as no other plan shares."""
    forms = []
    for plan in plans:
        on = f"{plan.results['model']['name']} on {plan.device}" if model else plan.device
        under = f"{on} under {plan.results['schedule']}"
        at = f"{under} at lengths {plan.results['lengths']}"
        forms.append((on, under, at, f"{at} ({plan.folder})"))
    counts = [Counter(form) for form in zip(*forms, strict=True)]
    return [next((name for name, count in zip(own, counts, strict=True) if count[name] == 1), own[-1]) for own in forms]


def model_key(name: str) -> str:
    """The same for two spellings of one model: those that `sparroll plan` has built in need no owner."""
    shape = built_in(name)
    return name if shape is None else shape.name


@dataclass(frozen=True)
class Evaluated:
    """Results of `sparroll evaluate`."""

    folder: str
    model: str
    results: dict[str, Any]


Level = Literal["yes", "probably", "no", "unknown"]
"""How an answer turned out, which is also its colour."""


@dataclass(frozen=True)
class Answer:
    """An answer in words to one of the reader's questions."""

    question: str
    level: Level
    answer: str
    reasons: tuple[str, ...] = ()
    """What the answer rests on, and what it leaves open."""


@dataclass(frozen=True)
class Provenance:
    """Which record a part of the report comes from."""

    what: str
    file: str
    record: dict[str, Any]


@dataclass(frozen=True)
class ReportData:
    """Everything on the page. A part that is empty, because the folder has no such results, is left out."""

    title: str
    models: tuple[str, ...] = ()
    """The models that were measured, trained or evaluated; those of plans only where nothing else is there."""
    answers: tuple[Answer, ...] = ()
    measured: tuple[Measured, ...] = ()
    plans: tuple[PlannedDecoding, ...] = ()
    runs: tuple[TrainingRun, ...] = ()
    evaluations: tuple[Evaluated, ...] = ()
    unfinished: tuple[str, ...] = ()
    """Folders of runs that have not ended yet, which are not among the runs."""
    facts: dict[str, str] = field(default_factory=dict)
    """Short figures for the top of the page, by name."""
    provenance: tuple[Provenance, ...] = ()


_OF_A_CONTROL_GROUP = ("rollout.control_share", "rollout.control_share_first", "rollout.control_first_steps")
"""Settings that a run with dense rollouts cannot have."""


def differences(runs: Sequence[TrainingRun], without: Sequence[str] = ()) -> dict[str, tuple[Any, ...]]:
    """Fields of the configurations in which the runs differ: "train.seed" -> (0, 1). Sections in `without` are left
    out. Settings of a control group are compared among the sparse runs alone."""
    tables = [flat(run.config) for run in runs]
    sparse = [table for run, table in zip(runs, tables, strict=True) if not run.dense]
    names = dict.fromkeys(name for table in tables for name in table)
    values = {
        name: tuple(table.get(name) for table in (sparse if name in _OF_A_CONTROL_GROUP else tables)) for name in names
    }
    return {
        name: found
        for name, found in values.items()
        if name.partition(".")[0] not in without and any(value != found[0] for value in found)
    }
