"""Which training rows stay: by difficulty, and each question once. Reads rows; counts what it leaves out."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable

from sparroll.errors import UserError
from sparroll.tasks.data.rows import Row
from sparroll.tasks.data.settings import DataSettings


def by_difficulty(rows: list[Row], settings: DataSettings, removed: Counter[str]) -> list[Row]:
    """Rows with the wanted difficulty. Raises UserError if no row has a difficulty of that name, or of that kind."""
    low, high = settings.min_difficulty, settings.max_difficulty
    names = {name.casefold() for name in settings.difficulties}
    if names:
        known = {row.difficulty.casefold() for row in rows if row.difficulty}
        if unknown := sorted(names - known):
            found = ", ".join(sorted(known)[:12]) or "none"
            raise UserError(f"no training row has the difficulty {unknown[0]!r}", f"difficulties there: {found}")
        rows = _keep(rows, [row.difficulty.casefold() in names for row in rows], "difficulty", removed)
    if low is None and high is None:
        return rows
    numbers = [row.difficulty_number for row in rows]
    if rows and all(number is None for number in numbers):
        raise UserError(
            "no training row has a difficulty that is a number, so data.min_difficulty and max_difficulty mean nothing",
            "if the difficulties are names, use data.difficulties",
        )
    fits = [n is not None and (low is None or n >= low) and (high is None or n <= high) for n in numbers]
    return _keep(rows, fits, "difficulty", removed)


def in_window(day: str, settings: DataSettings) -> bool:
    """Whether a contest's day, such as 2024-08-03, lies in the wanted window."""
    first, end = settings.contest_from, settings.contest_before
    return (first is None or day >= first.isoformat()) and (end is None or day < end.isoformat())


def refuse_window_without_dates(settings: DataSettings, dated: bool) -> None:
    """Raise UserError if a window is asked for but no row has a date, because the window would change nothing."""
    if (settings.contest_from or settings.contest_before) and not dated:
        raise UserError("a contest window is asked for, but no row has a contest date", "livecodebench has dates")


def once_each(rows: list[Row], removed: Counter[str]) -> list[Row]:
    """The first row of each question. Later rows are left out; those with another answer are counted separately."""
    first: dict[bytes, str] = {}
    kept = []
    for row in rows:
        key = hashlib.blake2b(same_words(row.text).encode(), digest_size=16).digest()
        if key not in first:
            first[key] = row.answer
            kept.append(row)
        else:
            removed["duplicate" if first[key] == row.answer else "duplicate with another answer"] += 1
    return kept


def same_words(text: str) -> str:
    """The text in one Unicode form, case and spacing."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def held_out(rows: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    """(training rows, eval rows), in the file's order. The `count` rows with the lowest checksums are the eval rows."""
    if count >= len(rows) > 0 and count:
        raise UserError(
            f"data.holdout_rows is {count} of {len(rows)} training rows",
            "lower data.holdout_rows, or give more rows with an answer or tests; `sparroll data show` counts them",
        )
    lowest = sorted(range(len(rows)), key=lambda place: hashlib.sha256(rows[place].text.encode()).digest())
    chosen = set(lowest[:count])
    return (
        [row for place, row in enumerate(rows) if place not in chosen],
        [row for place, row in enumerate(rows) if place in chosen],
    )


def _keep(rows: list[Row], fits: Iterable[bool], reason: str, removed: Counter[str]) -> list[Row]:
    kept = [row for row, fit in zip(rows, fits, strict=True) if fit]
    if len(kept) < len(rows):
        removed[reason] += len(rows) - len(kept)
    return kept
