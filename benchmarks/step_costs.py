"""What a trainer's steps say of the costs: which of them count, the median of those, what sparroll adds by its parts, and
what re-scoring the default probe would take. Arithmetic on the rows of a record; nothing is measured here.

All that sparroll adds to a step has five parts:

    measure   choosing the probe, taking its lists, re-scoring it
    correct   the correction
    watch     merging what was measured, and deciding
    ceiling   the dense ceiling, which only some steps measure: its seconds over `ceiling_every_steps`
    sampling  rollouts in the trainer, less those of the plugin without a trainer on the same requests

Without the plugin's case at the same length the last part is not known, and there is no whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sparroll.integrations.settings import AUTO, probe_of

MEASURED_PARTS = ("measure", "correct", "watch")
MOST_RESCORING = 0.03
"""The largest share of a step that re-scoring may take at 16K tokens by default."""
ROLLOUTS = (16, 32, 64, 128, 256)
"""Of a step, for which the share of the default probe is said."""

MOST_ROLLOUTS = 1024
Row = Mapping[str, Any]


def counted(row: Row) -> list[Row]:
    """The steps of a case that count: not the first one, which compiles and may be shorter, and where a guard moved the
    schedule, only those under the schedule that the case began with."""
    steps = row["steps"][1:]
    first = row["steps"][0].get("schedule") if row["steps"] else None
    return [step for step in steps if step.get("schedule") == first]


def middle(row: Row) -> dict[str, Any] | None:
    """The median of each figure over the steps that count, with `steps_counted`; None where no step counts. A figure that
    some of them lack is left out.

    >>> middle({"steps": [{"step_seconds": 90.0}, {"step_seconds": 3.0}, {"step_seconds": 1.0}, {"step_seconds": 2.0}]})
    {'step_seconds': 2.0, 'steps_counted': 3}
    """
    steps = counted(row)
    if not steps:
        return None
    found: dict[str, Any] = _medians(steps)
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    if len(metrics) == len(steps):
        found["metrics"] = _medians(metrics)
    return found | {"steps_counted": len(steps)}


def _medians(steps: Sequence[Row]) -> dict[str, Any]:
    numbers = [name for name, value in steps[0].items() if isinstance(value, (int, float)) and name != "step"]
    return {name: statistics.median(s[name] for s in steps) for name in numbers if all(name in s for s in steps)}


def ceiling_seconds(row: Row) -> float:
    """What one measurement of the dense ceiling took, the median of all of the case's; 0.0 where it had none."""
    every = [step["metrics"].get("time/sparroll_ceiling_seconds", 0.0) for step in row["steps"] if "metrics" in step]
    return statistics.median([each for each in every if each] or [0.0])


def added_seconds(inside: Row, ceiling: float, ceiling_every_steps: int, alone: Row | None = None) -> dict[str, float]:
    """Seconds of a step that sparroll adds, by part.

    inside: the trainer's step.  ceiling: of one measurement.  ceiling_every_steps: 0 where it is measured once in a run.
    alone: the plugin's step on the same requests, where it is known.
    """
    parts = {part: float(inside["metrics"].get(f"time/sparroll_{part}_seconds", 0.0)) for part in MEASURED_PARTS}
    parts["ceiling"] = ceiling / ceiling_every_steps if ceiling_every_steps else 0.0
    if alone is not None:
        # Nothing is gained by a plugin that happened to be slower.
        parts["sampling"] = max(0.0, inside["rollout_seconds"] - inside["rollout_tokens"] / alone["tokens_per_second"])
    return parts


def added_shares(parts: Mapping[str, float], step_seconds: float) -> dict[str, float]:
    """Shares of a step, with its part of the ceiling, by part; `known` is the sum without sampling, and `whole` all of it,
    where the sampling is known.

    >>> added_shares({"measure": 1.0, "ceiling": 2.0, "sampling": 3.0}, 98.0)
    {'measure': 0.01, 'ceiling': 0.02, 'sampling': 0.03, 'known': 0.03, 'whole': 0.06}
    """
    step = step_seconds + parts.get("ceiling", 0.0)
    shares = {part: seconds / step for part, seconds in parts.items()}
    known = sum(seconds for part, seconds in parts.items() if part != "sampling") / step
    if "sampling" not in parts:
        return shares | {"known": known}
    return shares | {"known": known, "whole": sum(parts.values()) / step}


def rescoring(inside: Row, rollouts: int) -> dict[str, float]:
    """What re-scoring costs in this step, and what the default probe would cost in steps of more or fewer rollouts.

    How long a step of other rollouts takes is not known here, so there are two bounds: all of it goes by the rollouts, or
    its sampling takes as long as here, since requests decode at the same time, and only the rest goes by them. The default
    takes `MOST_RESCORING` or less from `rollouts_for_3_percent` on, by the larger bound. Empty where nothing was re-scored.
    """
    metrics = inside["metrics"]
    seconds, measured = metrics.get("rescoring/seconds", 0.0), metrics.get("rescoring/measured", 0.0)
    if not measured or not metrics.get("rescoring/read_tokens"):
        return {}
    step, sampling = inside["step_seconds"] - seconds, inside["rollout_seconds"]
    said = {
        "share": seconds / inside["step_seconds"],
        "probe_share": measured / rollouts,
        "tokens_per_second": metrics["rescoring/read_tokens"] / seconds,
        "step_tokens_per_second": inside["rollout_tokens"] / step,
    }

    def shares(of: int) -> tuple[float, float]:
        probe_seconds = seconds / measured * (probe_of(AUTO, of) or of)
        longer = of / rollouts
        bounds = [
            probe_seconds / (probe_seconds + rest) for rest in (step * longer, sampling + (step - sampling) * longer)
        ]
        return min(bounds), max(bounds)

    for of in ROLLOUTS:
        said[f"default_of_{of}_low"], said[f"default_of_{of}_high"] = shares(of)
    too_much = [of for of in range(1, MOST_ROLLOUTS) if shares(of)[1] > MOST_RESCORING]
    return said | {"rollouts_for_3_percent": float(max(too_much, default=0) + 1)}
