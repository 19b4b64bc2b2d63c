"""Which commit of the source is running, and whether its files were changed since. Git says it; where files were copied
to a machine without their history, a stamp that travelled with them does. Knows nothing of records or machines.

`make stamp` writes the stamp before the files are copied. It holds the commit and a digest of all tracked files, so a
file that is changed later shows.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from sparroll import files
from sparroll.errors import UserError

ROOT = Path(__file__).parents[2]
STAMP = ".commit.json"
"""Beside pyproject.toml; git ignores it."""
RECORDS = "benchmarks/results"
"""What the programs write is no part of them: a new record here is no change of the source."""
WEIGHTS = ".safetensors"
"""Such files may stay behind, since they are large and what needs them stops without them. Other ones in their places
are a change."""


def commit(root: Path = ROOT) -> dict[str, Any]:
    """The source's commit, whether tracked files differ from it, and who says so: {"id", "dirty", "said_by"}.

    All three are None if sparroll was installed from a wheel, or if neither git nor a stamp knows.

    >>> commit()
    {'id': 'f1863efb...', 'dirty': False, 'said_by': 'git'}
    """
    if not (root / "pyproject.toml").is_file():
        return {"id": None, "dirty": None, "said_by": None}
    told, stamp = _of_git(root), _read_stamp(root)
    if stamp is None:
        return told
    # A history without the stamped commit is another one's: that of the machine that the files were copied to.
    own_history = _git(root, "cat-file", "-e", f"{stamp['id']}^{{commit}}") is not None and told["id"] is not None
    if own_history and told["dirty"] is False:
        return told
    if _digest(root, stamp["files"]) == stamp["sha256"] and _same_weights(root, stamp.get("weights", {})):
        return {"id": stamp["id"], "dirty": stamp["dirty"], "said_by": "stamp"}
    return told if own_history else {"id": stamp["id"], "dirty": True, "said_by": "stamp"}


def write_stamp(root: Path = ROOT) -> Path:
    """Write the stamp of this checkout. Raises UserError where git does not hold its history."""
    told = _of_git(root)
    listed = _git(root, "ls-files", "-z")
    if told["id"] is None or told["dirty"] is None or listed is None:
        raise UserError(f"git knows no commit of {root}", "stamp the checkout that the files are copied from")
    names = sorted(name for name in listed.split("\0") if name and not name.startswith(f"{RECORDS}/"))
    code = [name for name in names if not name.endswith(WEIGHTS)]
    weights = {name: files.sha256(root / name) for name in names if name.endswith(WEIGHTS) and (root / name).is_file()}
    stamp = {"id": told["id"], "dirty": told["dirty"], "sha256": _digest(root, code), "files": code, "weights": weights}
    return files.write_json(root / STAMP, stamp)


def _of_git(root: Path) -> dict[str, Any]:
    top = _git(root, "rev-parse", "--show-toplevel")
    # A copy inside another checkout must not take that one's commit for its own.
    if not top or Path(top).resolve() != root.resolve():
        return {"id": None, "dirty": None, "said_by": None}
    head = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){RECORDS}")
    if not head or status is None:
        return {"id": None, "dirty": None, "said_by": None}
    # A line is two letters of state, a space and the name, in quotes where it needs them.
    changes = [
        line for line in status.splitlines() if not (line.startswith(" D ") and line.strip('"').endswith(WEIGHTS))
    ]
    return {"id": head, "dirty": bool(changes), "said_by": "git"}


def _read_stamp(root: Path) -> dict[str, Any] | None:
    path = root / STAMP
    if not path.is_file():
        return None
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
        return stamp | {name: stamp[name] for name in ("id", "dirty", "sha256", "files")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a stamp: {error!r}", "write it anew with `make stamp`, or remove it") from None


def _digest(root: Path, names: list[str]) -> str:
    """Of the names and contents of these files; one that is missing counts as such."""
    found = hashlib.sha256()
    for name in names:
        path = root / name
        found.update(f"{name}\0{files.sha256(path) if path.is_file() else 'missing'}\n".encode())
    return found.hexdigest()


def _same_weights(root: Path, weights: dict[str, str]) -> bool:
    """Whether those weights that are there are the stamped ones."""
    return all(not (root / name).is_file() or files.sha256(root / name) == of for name, of in weights.items())


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, without the end of its last line; None if it fails or is not there."""
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.rstrip("\n") if result.returncode == 0 else None
