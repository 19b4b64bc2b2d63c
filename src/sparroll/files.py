"""Writing files so that a kill at any moment leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from sparroll.errors import UserError

_UNFINISHED = re.compile(r"\..+\.[a-z]+\.[a-z0-9_]{8}\.tmp")
"""The name of what `write_bytes` has not finished: .NAME.json.RANDOM.tmp."""

last_written: Path | None = None
"""The last file that this process wrote; an interrupted command says so."""


def write_text(path: Path | str, text: str) -> Path:
    """Replace `path` by a file that holds `text` in UTF-8."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Replace `path` by a file that holds `data`. Writes a temporary file beside it, flushes it to disk, then renames
    it."""
    global last_written
    path = output_file(path)
    folder = output_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        last_written = path
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def remove_unfinished(folder: Path) -> None:
    """Remove what a kill left in a folder while `write_bytes` wrote there; files of that form alone, since the folder may
    hold others. Nobody else may be writing to it."""
    for left_behind in folder.glob(".*.tmp"):
        if _UNFINISHED.fullmatch(left_behind.name) and left_behind.is_file():
            left_behind.unlink()


def write_json(path: Path | str, value: Any) -> Path:
    """Replace `path` by a file that holds `value` as JSON. NaN and infinities are refused, because JSON has none."""
    return write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_table(path: Path, hint: str | None = None) -> dict[str, Any]:
    """The JSON table in a file that sparroll wrote. Raises UserError with the hint if there is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", hint) from None
    if not isinstance(table, dict):
        raise UserError(f"cannot read {path}: it is not a table", hint)
    return table


def existing_folder(path: Path | str, hint: str) -> Path:
    """The path of a folder that must exist. Raises UserError with the hint if it does not."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder" if path.exists() else f"there is no folder {path}", hint)
    return path


def sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in hex digits."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def output_file(path: Path | str, example: str | None = None) -> Path:
    """The path of a file that is to be written. Raises UserError if it is a folder. example: a name for a file in it."""
    path = Path(path)
    if path.is_dir():
        hint = "move the folder elsewhere" if example is None else f"name a file in it, such as {path / example}"
        raise UserError(f"{path} is a folder, and a file is to be written there", hint)
    return path


def output_folder(path: Path | str) -> Path:
    """The folder, created if it is missing. Raises UserError if nothing can be written to it."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder", "choose another folder with --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {path} ({error.strerror or error})", "choose another folder with --out"
        ) from None
    return path
