"""One progress out of several that follow each other. Draws nothing."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""Called with (done, in all, what is going on)."""


class Phases:
    """Reports in hundredths of a phase, so that done never falls and the total stays."""

    def __init__(self, on_progress: OnProgress | None, phases: int):
        self._on_progress, self._phases, self._begun = on_progress, phases, -1

    def next(self, what: str) -> OnProgress | None:
        """The callback of the next phase, which `what` names; None where nobody listens."""
        self._begun += 1
        report, begun, whole = self._on_progress, 100 * self._begun, 100 * self._phases
        if report is None:
            return None
        report(begun, whole, what)
        return lambda done, total, text: report(begun + 100 * done // max(total, 1), whole, f"{what}: {text}")

    def end(self) -> None:
        """All phases are done."""
        if self._on_progress is not None:
            self._on_progress(100 * self._phases, 100 * self._phases, "done")


def named(on_progress: OnProgress | None, what: str) -> Callable[[int, int], None] | None:
    """An engine's callback (done, total), which adds "3/8 rollouts" as the text."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(done, total, f"{done}/{total} {what}")
