"""The samples of an evaluation on disk. A kill at any moment loses at most the chunk that was being sampled.

The log is a JSONL file that only grows. It has one line for each problem and policy, with all its samples, and after
the lines of each chunk a line that commits them. Whatever follows the last commit is cut off when the file is opened
again. A Parquet file could not grow like this, because its index is written last; parquet.py makes one of the finished
log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any


class SampleLog:
    """The log file. Whoever opens it must hold its folder (locks.py).

    >>> with SampleLog(Path("out/samples.jsonl")) as log:
    ...     log.add([{"task": "aime24", "policy": "dense", "problem": 0, "samples": []}], {"seconds": 1.5})
    """

    def __init__(self, path: Path):
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._handle, _committed_bytes(path))

    def add(self, groups: list[dict[str, Any]], commit: dict[str, Any]) -> None:
        """Append the groups of a chunk and their commit, and wait until they are on disk."""
        for group in groups:
            _write(self._handle, {"kind": "group", **group})
        os.fsync(self._handle)
        _write(self._handle, {"kind": "commit", **commit})
        os.fsync(self._handle)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Groups and commits in the order in which they were added. Holds one at a time in memory."""
        with self.path.open(encoding="utf-8") as source:
            for line in source:
                yield json.loads(line)

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)


def _write(handle: int, row: dict[str, Any]) -> None:
    data = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
    while data:
        data = data[os.write(handle, data) :]


def _committed_bytes(path: Path) -> int:
    """The size of the file up to the end of the last complete commit."""
    end = committed = 0
    with path.open("rb") as source:
        for line in source:
            end += len(line)
            if line.endswith(b"\n") and line.startswith(b'{"kind": "commit"'):
                committed = end
    return committed
