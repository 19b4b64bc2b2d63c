"""The tests of one code problem, compressed in memory until a reward needs them. Runs nothing.

A large set would unpack to many gigabytes, so tests stay compressed. Private tests stay as they are in the file, and
are read by an unpickler that builds only plain data.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparroll.errors import UserError

Style = Literal["stdin", "function", "program"]

MAX_UNPACKED_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """One test. stdin: `given` and `expected` are texts. function: they are a list of arguments and the expected value.
    program: `given` is Python code that raises if the solution is wrong."""

    given: Any
    expected: Any = None


@dataclass(frozen=True)
class CodeTests:
    """All tests of a problem.

    >>> CodeTests.of("stdin", [Case("1 2\\n", "3\\n")])
    """

    style: Style
    packed: bytes
    """zlib of the JSON list of [given, expected]."""
    entry_point: str | None = None
    """The function to call; for the style "program" the function that the code checks."""
    wrapped: bool = False
    """For the style "function": the expected value may be a list with one element, which is the value (TACO, APPS)."""
    rounded: bool = False
    """For the style "stdin": fractions may be rounded otherwise than the expected ones (TACO)."""
    unopened: str | None = None
    """More cases, as their file encodes them."""
    open_more: Callable[[str], list[Case]] | None = None
    """Reads `unopened`."""
    limit: int | None = None
    """At most this many cases in all."""

    @staticmethod
    def of(style: Style, cases: Sequence[Case], entry_point: str | None = None, **more: Any) -> CodeTests:
        plain = [[case.given, case.expected] for case in cases]
        return CodeTests(style, zlib.compress(json.dumps(plain).encode(), 1), entry_point, **more)

    def cases(self) -> list[Case]:
        """All cases, the unopened ones last. If there is a limit, a spread of so many of them."""
        found = [Case(given, expected) for given, expected in json.loads(unpacked(self.packed))]
        if self.unopened is not None and self.open_more is not None:
            found += self.open_more(self.unopened)
        return spread(found, self.limit)


def spread(cases: Sequence[Case], limit: int | None) -> list[Case]:
    """At most `limit` cases, in their order. They are spread evenly, because later tests of a problem tend to be
    large."""
    if limit is None or len(cases) <= limit:
        return list(cases)
    return [cases[place * (len(cases) - 1) // max(limit - 1, 1)] for place in range(limit)]


def unpacked(data: bytes) -> bytes:
    """The content of zlib data. Raises UserError if it is damaged, or larger than tests can be."""
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(data, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise UserError(f"packed tests are damaged: {error}") from None
    if reader.unconsumed_tail:
        raise UserError(f"packed tests are larger than {MAX_UNPACKED_BYTES:,} bytes", "leave this row out")
    return content
