"""Loads all rows of a set or a file, and counts those that cannot be used. Filters are in select.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from sparroll.errors import UserError
from sparroll.tasks.data import hub, read
from sparroll.tasks.data.catalog import DataSet, named
from sparroll.tasks.data.local import QUESTIONS, VERDICTS, own
from sparroll.tasks.data.rows import Raw, Row, Skipped, check_text

Role = Literal["train", "eval"]
Columns = dict[str, tuple[str, ...]]
"""For each thing that is needed, by its name, the columns of which any one provides it."""
_ROWS_TO_JUDGE = 1000
"""If none of so many first rows has a column, it counts as missing."""


@dataclass
class Loaded:
    """The rows of a source.

    >>> Loaded("deepscaler:train", rows=[...], skipped=Counter({"no answer": 6}))
    """

    source: str
    rows: list[Row] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """How many rows cannot be used, by reason."""
    outside: int = 0
    """How many rows are of contests outside of the window."""
    dated: bool = False
    """Whether any row has the day of its contest."""


def load(
    source: str,
    role: Role | None = None,
    mirror: str | None = None,
    keep: Callable[[Row], Row] = lambda row: row,
    in_window: Callable[[str], bool] = lambda day: True,
) -> Loaded:
    """The rows of a source, which is a set's name ("gsm8k", "gsm8k:test"), its hub id, or a file.

    role: which split a plain name means; by default the one that the set is made for. keep: applied to each row when it
    is read, to make it smaller. in_window: whether a contest's day counts. Rows of other days are dropped before
    anything is made of them, since their private tests can be hundreds of MB. Raises UserError for an unknown name, for
    a file of another schema, and if no row can be used.
    """
    if Path(source).suffix.lower() in read.FORMATS or Path(source).is_file():
        return _file(Path(source), keep)
    name, _, split = source.partition(":")
    chosen = named(name)
    split = split or _split(chosen, role)
    files = hub.split_files(
        chosen.repository,
        split,
        config=chosen.config,
        names=chosen.files if split == chosen.eval else (),
        mirror=Path(mirror) if mirror is not None else None,
    )
    raw = (row for path in files for row in read.rows(path, (*chosen.columns, *chosen.also)))
    loaded = Loaded(f"{chosen.name}:{split}")
    columns: Columns = {name: (name,) for name in chosen.columns}

    def reader(row: Raw, row_id: str) -> Row | None:
        day = str(row.get(chosen.day) or "")[:10]
        loaded.dated |= bool(day)
        if day and not in_window(day):
            return None
        return replace(chosen.read(row, row_id), limits=chosen.limits)

    return _collect(loaded, raw, reader, columns, keep, f"{chosen.repository} ({files[0].name})")


def _file(path: Path, keep: Callable[[Row], Row]) -> Loaded:
    columns: Columns = {" or ".join(QUESTIONS): QUESTIONS, " or ".join(VERDICTS): VERDICTS}
    return _collect(Loaded(path.name), read.rows(path), own, columns, keep, str(path))


def _split(chosen: DataSet, role: Role | None) -> str:
    split = {"train": chosen.train, "eval": chosen.eval, None: chosen.train or chosen.eval}[role]
    if split is None:
        made_for = "evaluation" if role == "train" else "training"
        other = chosen.eval or chosen.train
        raise UserError(
            f"{chosen.name} is made for {made_for}", f"to use it in spite of that, write {chosen.name}:{other}"
        )
    return split


def _collect(
    loaded: Loaded,
    raw: Iterator[Raw],
    reader: Callable[[Raw, str], Row | None],
    columns: Columns,
    keep: Callable[[Row], Row],
    where: str,
) -> Loaded:
    """Fill `loaded`. reader: makes a row, or None if the row is not wanted."""
    seen: dict[str, None] = {}
    place = -1
    for place, row in enumerate(raw):
        seen |= dict.fromkeys(row)
        if place + 1 == _ROWS_TO_JUDGE:
            _check_columns(columns, list(seen), where)
        try:
            made = reader(row, f"{loaded.source}/{place}")
            if made is None:
                loaded.outside += 1
            else:
                check_text(made)
                loaded.rows.append(keep(made))
        except Skipped as skipped:
            loaded.skipped[skipped.reason] += 1
    if place < 0:
        raise UserError(f"there are no rows in {where}")
    _check_columns(columns, list(seen), where)
    if not loaded.rows and loaded.outside:
        raise UserError(f"no row of {loaded.source} is in the contest window", "change contest_from or contest_before")
    if not loaded.rows:
        raise UserError(f"none of the {place + 1} rows in {where} can be used", f"reasons: {counted(loaded.skipped)}")
    return loaded


def _check_columns(columns: Columns, seen: list[str], where: str) -> None:
    missing = [need for need, any_of in columns.items() if not set(any_of) & set(seen)]
    if missing:
        raise UserError(f"{where} has no column {missing[0]}", f"columns found: {', '.join(seen[:20]) or 'none'}")


def counted(counts: Counter[str]) -> str:
    """The reasons with their counts, the most frequent first."""
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.most_common()) or "none"
