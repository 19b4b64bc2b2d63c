"""Rows of one file, one at a time: Parquet, JSONL, CSV, and JSON that is one array however large. Knows no schema.

Memory is one row (Parquet: one batch of rows), so a JSON array of 2 GB streams like JSONL. The library `datasets` would
read such an array whole, and writes a second copy of all data to its cache; pyarrow is needed for Parquet alone.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from sparroll.errors import UserError
from sparroll.tasks.data.rows import Raw

FORMATS = (".parquet", ".jsonl", ".json", ".csv")
"""In the order of preference where a folder holds several."""

_BATCH_ROWS = 256
_CHUNK_CHARACTERS = 1 << 20
_LONGEST_CELL = 1 << 27


def rows(path: Path, columns: tuple[str, ...] | None = None) -> Iterator[Raw]:
    """Rows in the file's order. columns: the only ones wanted, where the format can leave others unread.

    Raises UserError where the file is missing, of another format, or damaged, with the place.
    """
    if path.suffix not in FORMATS:
        raise UserError(f"cannot read {path}: unknown format {path.suffix!r}", f"known: {', '.join(FORMATS)}")
    if path.suffix == ".parquet":
        yield from _parquet(path, columns)
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as source:
            yield from _TEXT[path.suffix](path, source)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error.reason}") from None


def _parquet(path: Path, columns: tuple[str, ...] | None) -> Iterator[Raw]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet files need pyarrow, which is not installed", "pip install sparroll[data]") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _jsonl(path: Path, source: TextIO) -> Iterator[Raw]:
    for number, line in enumerate(source, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"line {number} of {path} is not valid JSON: {error}") from None
            yield _object(row, f"line {number} of {path}")


def _json(path: Path, source: TextIO) -> Iterator[Raw]:
    """An array of objects; or objects one after the other, as some files named .json have them."""
    decoder = json.JSONDecoder()
    text, at, read_all = "", 0, False
    inside_array: bool | None = None
    number = 0
    while True:
        at = _skip(text, at, " \t\r\n" if inside_array is not True else " \t\r\n,")
        if at < len(text) and inside_array is None:
            inside_array = text[at] == "["
            at += inside_array
            continue
        if at < len(text) and inside_array and text[at] == "]":
            if _skip(text, at + 1, " \t\r\n") < len(text) or source.read().strip():
                raise UserError(f"{path} goes on after the end of its array")
            return
        try:
            if at == len(text):
                raise ValueError("the end")
            row, after = decoder.raw_decode(text, at)
        except ValueError as error:
            if not read_all:
                # As much again as the row has needed so far, so that a long row is not parsed over and over.
                more = source.read(max(_CHUNK_CHARACTERS, len(text) - at))
                text, at, read_all = text[at:] + more, 0, not more
                continue
            if at == len(text) and inside_array is not True:
                return
            raise UserError(f"{path} is not valid JSON after row {number}: {error}") from None
        yield _object(row, f"row {number + 1} of {path}")
        number, at = number + 1, after


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _csv(path: Path, source: TextIO) -> Iterator[Raw]:
    limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        for number, row in enumerate(csv.DictReader(source, strict=True), 1):
            if None in row or None in row.values():
                raise UserError(f"row {number} of {path} has another number of cells than the header")
            yield dict(row)
    except csv.Error as error:
        raise UserError(f"{path} is not valid CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _object(row: object, where: str) -> Raw:
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}, not an object with columns")
    return row


_TEXT: dict[str, Callable[[Path, TextIO], Iterator[Raw]]] = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}
