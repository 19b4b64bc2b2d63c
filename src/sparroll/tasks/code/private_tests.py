"""Reads the private tests of LiveCodeBench: JSON, or base64 of zlib of a pickled JSON text. Runs nothing of what it
reads.

A pickle is a program for the unpickler. The unpickler here knows no class at all. So it can build strings, numbers,
lists and dictionaries, and refuses everything else.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any

from sparroll.errors import UserError

MAX_BYTES = 1 << 30
"""Limit of the unpacked text. The largest ones in the data have a few hundred MB; a zip bomb would have no end."""


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names an object outside")


def load_private_tests(text: str, max_bytes: int = MAX_BYTES) -> list[dict[str, str]]:
    """The tests in a row's `private_test_cases`: [{"input", "output", "testtype"}, ...], where all values are strings.

    Raises UserError for anything else, and never runs any of it.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = _unpacked(text, max_bytes)
    return _checked(found)


def _unpacked(text: str, max_bytes: int) -> Any:
    try:
        worker = zlib.decompressobj()
        data = worker.decompress(base64.b64decode(text, validate=True), max_bytes)
        if worker.unconsumed_tail or not worker.eof:
            raise UserError(f"private tests do not unpack to a whole text of at most {max_bytes} bytes")
        found = _DataOnly(io.BytesIO(data)).load()
        return json.loads(found) if isinstance(found, str) else found
    except UserError:
        raise
    except (binascii.Error, zlib.error, pickle.UnpicklingError, ValueError) as error:
        raise UserError(f"private tests are neither JSON nor packed data: {error}", "download the file again") from None
    except (
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        MemoryError,
        RecursionError,
        OverflowError,
    ) as error:
        raise UserError(
            f"private tests hold a broken pickle: {type(error).__name__}", "download the file again"
        ) from None


def _checked(found: Any) -> list[dict[str, str]]:
    if type(found) is not list:
        raise UserError(f"private tests must be a list, got {type(found).__name__}")
    for place, test in enumerate(found):
        if type(test) is not dict or not {"input", "output"} <= set(test):
            raise UserError(f"private test {place} must have input and output, got {str(test)[:80]!r}")
        if not all(type(key) is str and type(value) is str for key, value in test.items()):
            raise UserError(f"private test {place} must hold strings only")
    return found
