"""A finished run in a few figures. They are read back from its metrics.jsonl, so a resumed run and an uninterrupted one
have the same summary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparroll import records
from sparroll.train.reward_ends import reward_ends
from sparroll.train.runtime.sinks import read_lines


@dataclass(frozen=True)
class Interval:
    """A dense accuracy with its 95 % interval, after `step` steps."""

    value: float
    low: float
    high: float
    prompts: int
    step: int


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run."""

    out: Path
    checkpoint: Path
    """The last checkpoint; its model/ is a plain transformers folder."""
    steps: int
    stopped: str
    """Why the run stopped early; empty where it did not."""
    reward_first: float
    """Mean reward of the first `reward_window_steps` steps, each with the rewards of its own rollouts."""
    reward_last: float
    """The same for the last `reward_window_steps` steps."""
    reward_window_steps: int
    rollouts_per_step: int
    """Rollouts that were sampled, kept or not; with dynamic sampling the mean over steps, rounded."""
    dense_accuracy_first: Interval | None
    """Before the first step; None without evaluation."""
    dense_accuracy_last: Interval | None
    tail_q05_min: float
    """Lowest 5th percentile of the acceptance (top_k_lower, all contexts of a step together) of any step."""
    tail_q05_worst_bin_min: float | None
    """The same for the worst bin; None where no bin ever had enough tokens and rollouts."""
    dense_ceiling_q05: float | None
    """The dense ceiling of that percentile, as measured last; None where no rollout of the control group was trained
    on."""
    reward_gap: float | None
    """Mean reward of dense rollouts minus that of sparse ones of the same prompts, over the control group's window as it
    was measured last; None without a control group, or where no prompt had graded rollouts of both kinds."""
    reward_gap_low: float | None
    """Ends of its 95 % interval; None where there are too few prompts for one."""
    reward_gap_high: float | None
    kv_read_share: float
    """Tokens attended / tokens in context, mean over steps."""
    wall_seconds: float
    """Time of steps and evaluations. Loading is not counted, nor are steps that a kill threw away."""
    events: tuple[str, ...]
    """Everything that was logged as an event, such as alarms and new budgets: "step 12: ..." each."""

    def table(self) -> dict[str, Any]:
        """Plain data for a record; intervals as {"value", "low", "high", "prompts", "step"}."""
        return dict(records.plain(self))


def summarise(out: Path, checkpoint: Path, stopped: str) -> TrainResult:
    """Compute the result from the lines of metrics.jsonl."""
    lines = read_lines(out / "metrics.jsonl")
    steps = [line for line in lines if "reward/mean" in line]
    accuracies = [_interval(line) for line in lines if "evaluate/dense_accuracy" in line]
    reward_first, reward_last, window = reward_ends([line["reward/mean"] for line in steps])
    worst = [line[name] for line in steps if (name := "mismatch/acceptance_q05_worst_bin") in line]
    gap = _last(steps, "control/reward_gap")
    return TrainResult(
        out=out,
        checkpoint=checkpoint,
        steps=len(steps),
        stopped=stopped,
        reward_first=reward_first,
        reward_last=reward_last,
        reward_window_steps=window,
        rollouts_per_step=round(sum(line["rollout/count"] for line in steps) / len(steps)),
        dense_accuracy_first=accuracies[0] if accuracies else None,
        dense_accuracy_last=accuracies[-1] if accuracies else None,
        tail_q05_min=min(line["mismatch/acceptance_q05"] for line in steps),
        tail_q05_worst_bin_min=min(worst, default=None),
        dense_ceiling_q05=_last(steps, "mismatch/dense_ceiling_q05").get("mismatch/dense_ceiling_q05"),
        reward_gap=gap.get("control/reward_gap"),
        reward_gap_low=gap.get("control/reward_gap_low"),
        reward_gap_high=gap.get("control/reward_gap_high"),
        kv_read_share=sum(line["rollout/kv_read_share"] for line in steps) / len(steps),
        wall_seconds=sum(line.get("time/step_seconds", 0.0) + line.get("time/evaluate_seconds", 0.0) for line in lines),
        events=tuple(f"step {line['step']}: {event}" for line in lines for event in line.get("events", ())),
    )


def _interval(line: dict[str, Any]) -> Interval:
    name = "evaluate/dense_accuracy"
    return Interval(line[name], line[f"{name}_low"], line[f"{name}_high"], int(line["evaluate/prompts"]), line["step"])


def _last(steps: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The last step that has this metric; empty where none has."""
    return next((line for line in reversed(steps) if name in line), {})
