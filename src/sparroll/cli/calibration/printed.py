"""What `sparroll calibrate` prints: a line per bin, and what the schedule was chosen among."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.layer_groups import budgets_in_words
from sparroll.rounding import percent_up, rounded_down, rounded_up

if TYPE_CHECKING:
    from sparroll.calibrate.allocation.wanted import Point, Tradeoff
    from sparroll.calibrate.choice import CheckChoice
    from sparroll.calibrate.run import Calibration


def text(found: Calibration) -> list[str]:
    """A line per bin with its budget, its tail and the dense ceiling, then the notes."""
    keys = ("q05", "q05_low", "dense_ceiling_q05")
    heads = ("tail", "low", "dense ceiling")
    said: Callable[[float | None], str] = rounded_down
    if ImpossibleLimit.of_target(found.schedule.target) is not None:
        keys = ("impossible_share", "impossible_share_high", "dense_impossible_share")
        heads, said = ("share", "high", "dense rollouts"), _share
    lines = [f"{'from context':>12}{'KV budget':>11}{heads[0]:>8}{heads[1]:>8}{heads[2]:>15}"]
    for row in found.rows():
        cells = "".join(f"{said(row[key]):>{width}}" for key, width in zip(keys, (8, 8, 15), strict=True))
        lines.append(f"{row['from_context_tokens']:>12,}{budgets_in_words(row['kv_budget_tokens']):>11}{cells}")
    lines += checked_text(found, found.choice) if found.choice else ()
    lines += traded_text(found.tradeoff) if found.tradeoff else ()
    lines += ["", str(found.spent)]
    return [*lines, *(f"- {note}" for note in found.notes)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def traded_text(tradeoff: Tradeoff) -> list[str]:
    """The chosen point and its rivals of every selector: the best allocation in no more time."""
    lines = ["", f"{'selector':<28}{'of a dense step':>16}{'KL':>10}{'over 20 nats':>14}{'worst tail':>12}"]
    rivals: dict[str, Point] = {}
    for point in tradeoff.points:
        if point.how == "allocated" and point.step_seconds <= tradeoff.point.step_seconds * 1.001:
            rivals[point.selector] = point
    others = [point for selector, point in rivals.items() if selector != tradeoff.point.selector]
    verified = [tradeoff.verified] if tradeoff.verified else []
    for point in (tradeoff.point, *verified, *others):
        name = point.selector if point.how == "allocated" else f"{point.selector}, {point.how}"
        lines.append(
            f"{name:<28}{percent_up(point.step_time_share, 1):>16}{rounded_up(point.kl, 5):>10}"
            f"{point.over(20):>14.1e}{rounded_down(point.worst_tail):>12}"
        )
    return [*lines, tradeoff.said()]


def checked_text(found: Calibration, choice: CheckChoice) -> list[str]:
    """The fastest candidates, and what the checks did in the last round of the verification."""
    shown = choice.candidates[:5]
    several = choice.several
    wide = max(len(each.label) for each in shown) if several else 0
    head = f"{'window':>12}{'floor':>11}{'from budget':>13}{'drafted/kept':>14}{'ms a token':>12}{'times dense':>13}"
    lines = ["", ("selector" if several else "").ljust(wide) + head]
    for each in shown:
        about = each.label.ljust(wide) if several else ""
        lines.append(
            f"{about}{each.check.window_tokens:>12,}{each.check.floor:>11g}{each.least_budget_tokens:>13,}"
            f"{rounded_up(each.drafted_per_kept, 3):>14}{rounded_up(1e3 * each.token_seconds, 3):>12}"
            f"{rounded_down(each.dense_seconds / each.token_seconds, 2):>12}x"
        )
    lines.append(
        f"{len(choice.candidates)} schedules hold what is asked for; times are predicted for {choice.hardware}"
    )
    if found.verification is None:
        return lines
    last = found.verification.measurement
    if last.divergence is not None:
        start, worst = max(last.divergence.bins().items(), key=lambda each: each[1].kl)
        lines.append(
            f"KL of what is kept, in the last round: {rounded_up(last.divergence.overall().kl, 4)} over all lengths, "
            f"{rounded_up(worst.kl, 4)} at most, from {start:,} tokens on"
        )
    return [*lines, f"checks in the last round: {last.checked}"]
