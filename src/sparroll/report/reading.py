"""Reads the records of a folder, and says of a damaged one which file it is and what to do. Knows no figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparroll.errors import UserError

FOLDERS = ("", "*/", "*/*/")
"""Where a report looks: in the folder, and up to two folders down."""

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
    _look(results, _NEEDED.get(kind, ()))
    if kind == "evaluation":
        for task in results["tasks"].values():
            _look(task, _OF_A_TASK)
            for policy in task["policies"].values():
                _look(policy, _OF_A_POLICY)
    if kind == "calibration" and results.get("tradeoff") is not None:
        _look(results["tradeoff"], _OF_A_TRADEOFF)


def _look(table: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        found: Any = table
        for part in name.split("."):
            if part not in found:
                raise KeyError(name)
            found = found[part]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise UserError with the name of the file for everything that a table without the expected keys leads to."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise damaged(path, f"it lacks {error}") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise damaged(path, f"it is not as sparroll writes it ({error})") from None


def damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"cannot read {path}: {reason}",
        "make it anew with the command that wrote it, or move it elsewhere to have a page without it",
    )
