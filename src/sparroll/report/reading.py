"""Reads the records of a folder, and says of a damaged one which file it is and what to do. Knows no figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from sparroll.errors import UserError
from sparroll.mismatch.impossible import ImpossibleShare
from sparroll.mismatch.table import TailRow

FOLDERS = ("", "*/", "*/*/")
"""Where a report looks: in the folder, and up to two folders down."""

_AGAIN = "make it anew with the command that wrote it, or move it elsewhere to have a page without it"
_NAMES = {"profile.json", "calibration.json", "plan.json", "evaluation.json", "result.json", "quickstart.json"}
_BEGIN = re.compile(rb'\{\s*"format": \d+,\s*"kind": "(profile|calibration|plan|train|evaluation|quickstart)"')

_NEEDED = {
    "plan": (
        "model.name", "hardware.name", "schedule", "lengths", "batch", "kv_read_share", "dense.tokens_per_second",
        "sparse.tokens_per_second", "sparse.bound", "speedup", "by_length", "assumptions",
    ),
    "evaluation": ("samples", "estimator", "top_p", "tasks"),
    "quickstart": ("kv_read_share", "wall_seconds"),
}  # fmt: skip
"""What the page shows of the results of each kind of record, with dots between the keys of nested tables."""
_OF_A_ROW = tuple(each.name for each in fields(TailRow) if each.default is MISSING)
"""What a row of tails had from the beginning. Older records lack the rest."""
_OF_A_SHARE = tuple(each.name for each in fields(ImpossibleShare) if each.default is MISSING)
_OF_A_TASK = ("paired", "policies")
_OF_A_POLICY = (
    "tail", "response_tokens.mean", "truncated_share", "kv_read_share", "tokens_per_second", "excluded_samples",
)  # fmt: skip
_OF_A_TRADEOFF = (
    "most_step_seconds", "objective", "target", "hardware", "dense_step_seconds", "chosen", "points", "refused",
)  # fmt: skip


def records_in(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Records of sparroll in the folder and up to two folders down, in the order of their paths. Raises UserError for one
    that is damaged; JSON files of other programs are left out."""
    for path in sorted(found for place in FOLDERS for found in folder.glob(f"{place}*.json") if found.is_file()):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if _is_ours(path):
                raise damaged(path, str(error)) from None
            continue
        if isinstance(record, dict) and {"kind", "results", "versions"} <= record.keys():
            with reading(path):
                check_results(record["kind"], record["results"])
            yield path, record


def _is_ours(path: Path) -> bool:
    """Whether a file that cannot be read was to be a record, by its name or its beginning."""
    if path.name in _NAMES:
        return True
    try:
        with path.open("rb") as source:
            return _BEGIN.match(source.read(200)) is not None
    except OSError:
        return False


def check_results(kind: str, results: dict[str, Any]) -> None:
    """Raise KeyError, with the name of what is missing, if the results lack what the page shows."""
    _look(results, _NEEDED.get(kind, ()), or_null=kind != "plan")
    for row in _rows_of_tails(results):
        _look(row, _OF_A_ROW, or_null=False)
        for share in row.get("impossible") or ():
            _look(share, _OF_A_SHARE, or_null=False)
    if kind == "quickstart":
        written(results, "wall_seconds")
    if kind == "plan":
        texts(results["assumptions"])
    if kind == "evaluation":
        for task in results["tasks"].values():
            _look(task, _OF_A_TASK)
            for policy in task["policies"].values():
                _look(policy, _OF_A_POLICY)
    if kind == "calibration" and results.get("tradeoff") is not None:
        _look(results["tradeoff"], _OF_A_TRADEOFF)


def _look(table: dict[str, Any], names: tuple[str, ...], or_null: bool = True) -> None:
    """Raise KeyError for the first name that the table lacks. or_null: whether there may be a null."""
    for name in names:
        found: Any = table
        for part in name.split("."):
            if part not in found:
                raise KeyError(name)
            found = found[part]
        if found is None and not or_null:
            raise KeyError(name)


def _rows_of_tails(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of every table of tails in a record, wherever it lies."""
    if isinstance(table, dict):
        if "quantile_value" in table:
            yield table
        for each in table.values():
            yield from _rows_of_tails(each)
    elif isinstance(table, list):
        for each in table:
            yield from _rows_of_tails(each)


def written(table: dict[str, Any], name: str) -> Any:
    """A value that is there and is not null. Raises KeyError with its name."""
    if table[name] is None:
        raise KeyError(name)
    return table[name]


def texts(values: Any) -> tuple[str, ...]:
    """Raises TypeError for what is no list of texts."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(each, str) for each in values):
        raise TypeError(f"not a list of texts: {values!r}")
    return tuple(values)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise UserError with the name of the file for everything that a table without the expected keys leads to."""
    try:
        yield
    except UserError as error:
        raise UserError(f"cannot read {path}: {error.message}", error.hint or _AGAIN) from None
    except KeyError as error:
        raise damaged(path, f"it lacks {error}") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise damaged(path, f"it is not as sparroll writes it ({error})") from None


def damaged(path: Path, reason: str) -> UserError:
    """The error for a file that cannot be shown."""
    return UserError(f"cannot read {path}: {reason}", _AGAIN)
