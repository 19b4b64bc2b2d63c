"""What one engine of another trainer's run measured and counted in a step, and the metrics of all engines together. Plain
data that can be gathered and sent; no engine, no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sparroll.draft_check import FAR_NATS
from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.rescoring import RescoringCounts
from sparroll.integrations.tail import State
from sparroll.schedule import Schedule
from sparroll.types import Checks, Rollout, StepReport


@dataclass
class CheckSums:
    """What the checks of drafts said of an engine's rollouts, as sums that engines can add up."""

    tokens: int = 0
    far_tokens: int = 0
    """Tokens whose log q~ is more than FAR_NATS above their log p."""
    largest_nats: float = -torch.inf
    draft_acceptance: float = 0.0
    checks: Checks = field(default_factory=Checks)

    def count(self, rollout: Rollout) -> None:
        assert rollout.dense_logp is not None and rollout.draft_acceptance is not None, "a rollout without checks"
        off_T = rollout.sparse_logp - rollout.dense_logp
        self.tokens += len(off_T)
        self.far_tokens += int((off_T > FAR_NATS).sum())
        self.largest_nats = max(self.largest_nats, float(off_T.max()))
        self.draft_acceptance += float(rollout.draft_acceptance.double().sum())
        if rollout.checks is not None:
            self.checks.add(rollout.checks)

    def count_windows(self, rollout: Rollout) -> None:
        """Count the windows alone. Tokens of a control group's rollout come from the dense policy itself."""
        assert rollout.checks is not None, "a rollout without checks"
        self.checks.add(rollout.checks)

    def add(self, other: CheckSums) -> None:
        """Count those of another engine, too."""
        self.tokens += other.tokens
        self.far_tokens += other.far_tokens
        self.largest_nats = max(self.largest_nats, other.largest_nats)
        self.draft_acceptance += other.draft_acceptance
        self.checks.add(other.checks)


@dataclass
class SpentSeconds:
    """Wall time of sampling that the framework alone would not have spent."""

    measure: float = 0.0
    """Around the sampling: choosing the probe, taking its lists, re-scoring it."""
    ceiling: float = 0.0
    """Dense rollouts for the ceiling, and their re-scoring."""


@dataclass
class EngineStep:
    """What one engine measured and counted since it was last asked. A replica of verl is one, and so is the vLLM of a
    TRL process, or the server that all of them share."""

    state: State
    """TailStatistics.packed_state() of its sparse rollouts."""
    counts: RescoringCounts
    estimator: str
    ran: EngineReport
    """What its attention ran, for the step's rollouts alone."""
    checked: CheckSums
    ceiling: State | None = None
    """TailStatistics.packed_state() of dense rollouts that came with the step; None where none did."""
    spent: SpentSeconds = field(default_factory=SpentSeconds)
    """Only TRL's engines say it."""


def share_of_engine(wanted: int | None, engines: int) -> int | None:
    """How many rollouts each engine re-scores, so that all together re-score at least as many as wanted. None: all."""
    return None if wanted is None else -(-wanted // engines)


def rescoring_report(steps: Sequence[EngineStep]) -> StepReport:
    """`rescoring/...` over all engines. How long the step took, and so the share of it, is known only when it ends."""
    total = RescoringCounts()
    for each in steps:
        total.add(each.counts)
    return total.report()


def spent_report(steps: Sequence[EngineStep]) -> StepReport:
    """What measuring took. Engines work at the same time, so the slowest one's counts."""
    return {
        "time/sparroll_measure_seconds": max((each.spent.measure for each in steps), default=0.0),
        "time/sparroll_ceiling_seconds": max((each.spent.ceiling for each in steps), default=0.0),
    }


def ran_report(steps: Sequence[EngineStep], name: str = "rollout") -> StepReport:
    """Which attention ran, over all engines. Steps are those of one layer of each engine, the one that was sparse most
    often: so 0 sparse steps say that no layer was sparse, whatever schedule was meant to be in force."""
    layers = [max(each.ran.layers, key=lambda layer: layer.sparse_steps) for each in steps if each.ran.layers]
    sparse = [each.ran.sparse_read_and_context_tokens for each in steps]
    beside_dense = name == "rollout" and any(each.ran.dense_request_steps for each in steps) and any(map(max, sparse))
    return {
        f"{name}/kv_read_share": _share([each.ran.read_and_context_tokens for each in steps]),
        f"{name}/sparse_steps": float(sum(layer.sparse_steps for layer in layers)),
        f"{name}/dense_steps": float(sum(layer.dense_steps for layer in layers)),
        f"{name}/preemptions": float(sum(each.ran.preemptions for each in steps)),
        **({"control/sparse_kv_read_share": _share(sparse)} if beside_dense else {}),
    }


def _share(sums: Sequence[tuple[int, int]]) -> float:
    """Read tokens of context tokens, from both sums of each engine."""
    read, context = sum(each[0] for each in sums), sum(each[1] for each in sums)
    return read / context if context else 1.0


def checked_report(steps: Sequence[EngineStep], schedule: Schedule | None) -> StepReport:
    """`check/...`, by the names of our own loop; empty where no drafts are checked."""
    if schedule is None or schedule.check is None:
        return {}
    total = CheckSums()
    for each in steps:
        total.add(each.checked)
    if not total.tokens:
        return {}
    return {
        "check/window_tokens": float(schedule.check.window_tokens),
        "check/floor": schedule.check.floor,
        "check/windows": float(total.checks.windows),
        "check/cut_share": total.checks.cut_share,
        "check/drafted_per_kept": total.checks.drafted_per_kept,
        "check/draft_acceptance_mean": total.draft_acceptance / total.tokens,
        "check/over_2_nats_share": total.far_tokens / total.tokens,
        "check/largest_nats": total.largest_nats,
        "time/check_seconds": max(each.ran.check_seconds for each in steps),
    }
