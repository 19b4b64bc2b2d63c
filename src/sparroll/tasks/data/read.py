"""Reads the rows of one file one at a time: Parquet, JSONL, CSV, and JSON that is one array of any size. Knows no
schema.

It holds one row in memory (for Parquet one batch of rows), so a JSON array of 2 GB is streamed like JSONL. The library
`datasets` would load such an array completely, and write a second copy of all data to its cache. A row has a largest
size, so that a broken file cannot fill the memory. pyarrow is needed only for Parquet.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from sparroll.errors import CHECK_PATH, UserError
from sparroll.tasks.data.rows import Raw

FORMATS = (".parquet", ".jsonl", ".json", ".csv")
"""Known formats. If a folder holds several, the first of them is preferred."""

_BATCH_ROWS = 256
_ONE_ROW_A_LINE = "a file has one row a line; is this another kind of file?"
_CHUNK_CHARACTERS = 1 << 20
LONGEST_ROW = 1 << 28
"""Characters of the longest row: far more than the largest published problem has with all its tests."""
_LONGEST_CELL = 1 << 27


def rows(path: Path, columns: tuple[str, ...] | None = None) -> Iterator[Raw]:
    """The rows in the file's order. columns: those that are needed, so that formats which can skip the others do so.

    Raises UserError if the file is missing, has another format, or is damaged; then the message names the place.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"cannot read {path}: unknown format {path.suffix!r}", f"known: {', '.join(FORMATS)}")
    if suffix == ".parquet":
        yield from _parquet(path, columns)
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as source:
            yield from _TEXT[suffix](path, source)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", CHECK_PATH) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error.reason}") from None


def bounded_lines(path: Path, source: TextIO, most: int) -> Iterator[str]:
    """The lines of an open file. Raises UserError for one with more than `most` characters, and does not read it to its
    end."""
    number = 0
    while line := source.readline(most + 1):
        number += 1
        if len(line) > most:
            raise UserError(f"line {number} of {path} is longer than {most:,} characters", _ONE_ROW_A_LINE)
        yield line


def _parquet(path: Path, columns: tuple[str, ...] | None) -> Iterator[Raw]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet files need pyarrow, which is not installed", "pip install -e '.[data]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                for place, column in enumerate(batch.schema):
                    if pyarrow.types.is_float32(column.type) or pyarrow.types.is_float16(column.type):
                        # As doubles, .1 would become .10000000149: the shortest digits that say the same number count.
                        shortest = [None if one is None else float(str(one)) for one in _narrow(batch.column(place))]
                        batch = batch.set_column(place, column.name, pyarrow.array(shortest, pyarrow.float64()))
                yield from batch.to_pylist()
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        # Some columns, such as times in nanoseconds, have no value in Python.
        raise UserError(f"cannot read {path}: {error}") from None


def _narrow(column: Any) -> Iterator[Any]:
    """The values of a column of narrow floats, as numpy's numbers of that width; None where there is none."""
    for value, missing in zip(column.to_numpy(zero_copy_only=False), column.is_null().to_pylist(), strict=True):
        yield None if missing else value


def _jsonl(path: Path, source: TextIO) -> Iterator[Raw]:
    for number, line in enumerate(bounded_lines(path, source, LONGEST_ROW), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                said = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else error
                raise UserError(f"line {number} of {path} is not valid JSON: {said}", _ONE_ROW_A_LINE) from None
            yield _object(row, f"line {number} of {path}")


def _json(path: Path, source: TextIO) -> Iterator[Raw]:
    """Reads an array of objects, or objects one after the other, as in some files named .json."""
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
            rest = iter(lambda: source.read(_CHUNK_CHARACTERS), "")
            if _skip(text, at + 1, " \t\r\n") < len(text) or any(part.strip() for part in rest):
                raise UserError(f"{path} goes on after the end of its array")
            return
        try:
            if at == len(text):
                raise ValueError("the end")
            row, after = decoder.raw_decode(text, at)
        except RecursionError as error:
            raise UserError(f"{path} is not valid JSON after row {number}: {error}") from None
        except ValueError as error:
            if len(text) - at > LONGEST_ROW:
                raise UserError(
                    f"row {number + 1} of {path} is longer than {LONGEST_ROW:,} characters, or its JSON never ends"
                ) from None
            if not read_all:
                # Read as much again as the row has so far, so that a long row is not parsed too often.
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
        lines = bounded_lines(path, source, LONGEST_ROW)
        table = csv.DictReader(lines, strict=True)
        names = list(table.fieldnames or ())
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise UserError(f"{path} has the column {twice[0]!r} twice", "rename one of them, or leave it out")
        for number, row in enumerate(table, 1):
            if None in row or None in row.values():
                raise UserError(f"row {number} of {path} has more or fewer cells than the header")
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
