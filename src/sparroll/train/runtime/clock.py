"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparroll.types import StepReport


class Clock:
    """Seconds per part of a step; those of a part that runs several times are added up.

    on_part: told the name of each part when it begins.
    """

    def __init__(self, on_part: Callable[[str], None]):
        self._on_part = on_part
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._on_part(part)
        began = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def report(self) -> StepReport:
        parts = {f"time/{part}_seconds": seconds for part, seconds in self._seconds.items()}
        whole = time.perf_counter() - self._began
        share = {"time/distill_share": self._seconds["distill"] / whole} if "distill" in self._seconds else {}
        return parts | share | {"time/step_seconds": whole}
