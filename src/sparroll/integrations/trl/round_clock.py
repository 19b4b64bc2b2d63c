"""How long each round takes: from the begin of its first optimizer step to the end of its last one. Evaluations and
whatever else happens between two steps, such as checkpoints, are no part of it. No TRL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RoundClock:
    """Adds up the seconds of the steps that a round is for. A round may begin in every step, in some, or several times in
    one (see SamplingRounds).

    >>> clock = RoundClock()
    >>> clock.step_begins()
    >>> clock.round_begins()           # -> seconds of the round before, if the same step samples once more
    >>> clock.step_ends(over=True)     # -> seconds of the round, if it was for this step and no later one
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._since: float | None = None
        """Until when the step under way is counted; None while nothing is counted."""
        self._seconds: float | None = None
        """Of the round under way; None where there is none."""

    def step_begins(self) -> None:
        self._since = self._now()

    def round_begins(self) -> float | None:
        before = None if self._seconds is None else self._counted()
        self._seconds = 0.0
        return before

    def step_ends(self, over: bool) -> float | None:
        seconds = None if self._seconds is None else self._counted()
        self._since = None
        if not over:
            return None
        self._seconds = None
        return seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Count nothing inside, also in the middle of a step."""
        runs = self._since is not None
        if runs and self._seconds is not None:
            self._counted()
        self._since = None
        try:
            yield
        finally:
            if runs:
                self._since = self._now()

    def _counted(self) -> float:
        """Seconds of the round until now."""
        assert self._seconds is not None, "no round is under way"
        if self._since is not None:
            now = self._now()
            self._seconds += now - self._since
            self._since = now
        return self._seconds
