"""The tables of docs/math.md, from the records of benchmarks/verdicts.py. Measures nothing."""

from __future__ import annotations

from typing import Any

from record_tables import results, table
from verdicts import FIRST_SIGHT, first_sight_record


def _total(families: dict[str, dict[str, int]]) -> dict[str, int]:
    return {name: sum(counts[name] for counts in families.values()) for name in next(iter(families.values()))}


def _agreement(counts: dict[str, int]) -> str:
    pairs = counts["right"] + counts["wrong"]
    # Rounded down, so that 100.0% means all.
    return f"{(pairs - counts['right_refused'] - counts['wrong_accepted']) * 1000 // pairs / 10:.1f}%"


def _row(name: str, counts: dict[str, int]) -> list[str]:
    figures = [counts[key] for key in ("right", "right_refused", "wrong", "wrong_accepted")]
    return [name, *map(str, figures), _agreement(counts)]


HEAD = ["right answers", "refused", "wrong answers", "accepted", "as graded"]


def _at_first_sight() -> dict[str, dict[str, dict[str, int]]]:
    """Counts by family, for each file of pairs that the grader had not seen."""
    return {
        name: results(first_sight_record(name), "verdicts-math")["graded"][name]["families"] for name in FIRST_SIGHT
    }


def first_sight() -> str:
    """Verdicts on the pairs that the grader had not seen, by file."""
    files = {f"`{name}.toml`": _total(families) for name, families in _at_first_sight().items()}
    rows = [_row(name, counts) for name, counts in files.items()]
    return table(["pairs", *HEAD], [*rows, _row("**all**", _total(files))])


def first_sight_families() -> str:
    """The same by family. Families of the same subject are added up, and those that were judged without a fault are in
    one row."""
    pooled: dict[str, dict[str, int]] = {}
    for families in _at_first_sight().values():
        for family, counts in families.items():
            subject = family.removesuffix(", rougher")
            pooled[subject] = _total({"": counts} | ({"before": pooled[subject]} if subject in pooled else {}))
    faulty = {name: counts for name, counts in pooled.items() if counts["right_refused"] + counts["wrong_accepted"]}
    others = _total({name: counts for name, counts in pooled.items() if name not in faulty})
    rows = [_row(name, counts) for name, counts in faulty.items()]
    return table(["family", *HEAD], [*rows, _row(f"the other {len(pooled) - len(faulty)} families", others)])


def now() -> str:
    """Verdicts of today's grader on every file of graded pairs."""
    graded: dict[str, Any] = results("verdicts-math-cpu", "verdicts-math")["graded"]
    return table(
        ["pairs", *HEAD], [_row(f"`{name}.toml`", _total(found["families"])) for name, found in graded.items()]
    )


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
