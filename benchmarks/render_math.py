"""The tables of docs/math.md, from the records of benchmarks/verdicts.py. Measures nothing."""

from __future__ import annotations

from typing import Any

from record_tables import results, table


def _total(families: dict[str, dict[str, int]]) -> dict[str, int]:
    return {name: sum(counts[name] for counts in families.values()) for name in next(iter(families.values()))}


def _agreement(counts: dict[str, int]) -> str:
    pairs = counts["right"] + counts["wrong"]
    # Rounded down, so that 100.0% means all.
    return f"{(pairs - counts['right_refused'] - counts['wrong_accepted']) * 1000 // pairs / 10:.1f}%"


def _row(name: str, counts: dict[str, int]) -> list[str]:
    figures = [counts[key] for key in ("right", "right_refused", "wrong", "wrong_accepted")]
    return [name, *map(str, figures), _agreement(counts)]


def first_sight() -> str:
    """Verdicts on the pairs that the grader had not seen, by family."""
    families: dict[str, dict[str, int]] = results("verdicts-math-first-sight-cpu", "verdicts-math")["graded"][
        "first_sight"
    ]["families"]
    rows = [_row(name, counts) for name, counts in families.items()]
    head = ["family", "right answers", "refused", "wrong answers", "accepted", "as graded"]
    return table(head, [*rows, _row("**all**", _total(families))])


def now() -> str:
    """Verdicts of today's grader on every file of graded pairs."""
    graded: dict[str, Any] = results("verdicts-math-cpu", "verdicts-math")["graded"]
    head = ["pairs", "right answers", "refused", "wrong answers", "accepted", "as graded"]
    return table(head, [_row(f"`{name}.toml`", _total(found["families"])) for name, found in graded.items()])


def misjudged() -> str:
    """The graded pairs on which today's grader disagrees."""
    graded: dict[str, Any] = results("verdicts-math-cpu", "verdicts-math")["graded"]
    word = {True: "right", False: "wrong"}
    rows = [
        [f"`{one['gold']}`", f"`{one['response']}`", word[one["right"]], one["status"]]
        for found in graded.values()
        for one in found["misjudged"]
    ]
    return table(["gold", "response", "as graded", "verdict"], rows)
