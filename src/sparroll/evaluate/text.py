"""Finished results as lines of text: figures by task and policy, and differences. Computes and prints nothing."""

from __future__ import annotations

import json
from typing import Any

from sparroll.rounding import percent_up, rounded_down, rounded_up

CUT_TAIL = "The tail compares both policies as top-p {top_p:g} cuts them; targets such as 0.86 are for whole policies."
"""What a tail means if the samples were drawn with top-p."""


def summary(results: dict[str, Any]) -> list[str]:
    """A line for each task and policy, then the differences."""
    k = results["samples"]
    head = [
        (f"mean@{k} [95 %]", 24),
        (f"pass@{k}", 9),
        (f"maj@{k}", 9),
        ("tokens", 8),
        ("cut", 6),
        ("KV read", 9),
        ("tail", 7),
        ("tokens/s", 10),
    ]
    wide = max(24, *(len(label) + 2 for label in results["tasks"]))
    lines = [f"{'task':<{wide}}{'policy':<9}" + "".join(f"{name:>{width}}" for name, width in head)]
    for label, task in results["tasks"].items():
        for name, found in task["policies"].items():
            tail = found["tail"]["overall"]["quantile_value"] if found["tail"] else None
            cells = [
                f"{_interval(found[f'mean@{k}']):>24}",
                f"{_figure(found[f'pass@{k}']):>9}",
                f"{_figure(found.get(f'majority@{k}')):>9}",
                f"{found['response_tokens']['mean']:>8.0f}",
                f"{found['truncated_share']:>6.0%}",
                f"{found['kv_read_share']:>9.0%}",
                f"{rounded_down(tail):>7}",
                f"{found['tokens_per_second']:>10,.0f}",
            ]
            lines.append(f"{label:<{wide}}{name:<9}{''.join(cells)}")
            if "checks" in found:
                checks = found["checks"]
                lines.append(
                    f"  checks: {checks['windows']:,} windows, {percent_up(checks['cut_share'], 1)} cut, "
                    f"{rounded_up(checks['drafted_per_kept'])} drafted per kept"
                )
            lines += [f"  left out: {count} x {status}" for status, count in found["excluded_samples"].items()]
    for label, task in results["tasks"].items():
        lines += [_difference(label, name, table) for name, table in task["paired"].items()]
    if results["top_p"] < 1 and results["estimator"]:
        lines.append(CUT_TAIL.format(top_p=results["top_p"]))
    return lines


def comparison(result: dict[str, Any]) -> list[str]:
    """The settings in which two evaluations differ, then a line for each task and policy."""
    lines = [f"{result['second']} minus {result['first']}"]
    for name, (before, after) in result["differs_in"].items():
        lines.append(f"differs in {name}: {_short(before)} and {_short(after)}")
    for label, found in result["tasks"].items():
        lines += [_difference(label, name, table) for name, table in found.items()]
    return lines + [f"{label}: not compared: {reason}" for label, reason in result["refused"].items()]


def _difference(label: str, name: str, table: dict[str, Any] | None) -> str:
    if table is None:
        return f"{label}: {name}: no problem has a verdict on both sides"
    mean, test = table["mean"], table["mean"]["sign_flip"]
    method = "exact" if test["method"] == "exact" else "Monte Carlo"
    return (
        f"{label}: {name}: {mean['value']:+.3f} [{mean['low']:+.3f}, {mean['high']:+.3f}], "
        f"p = {test['p']:.3g} ({method} sign-flip test over {test['problems']} problems, {test['different']} differ)"
    )


def _interval(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _figure(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['value']:.3f}"


def _short(value: Any) -> str:
    found = json.dumps(value)
    return found if len(found) <= 60 else f"{found[:57]}..."
