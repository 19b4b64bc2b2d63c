"""The mean rewards at both ends of a run, which its summary and a report show. Plain numbers; loads nothing."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_STEPS = 5
"""The means are over this many steps, or over half the run if that is less."""


def reward_ends(rewards: Sequence[float]) -> tuple[float, float, int]:
    """(mean of the first steps, mean of the last steps, over how many steps these are).

    >>> reward_ends([0.0, 0.5, 0.5, 1.0])
    (0.25, 0.75, 2)
    """
    window = max(1, min(WINDOW_STEPS, len(rewards) // 2))
    return sum(rewards[:window]) / window, sum(rewards[-window:]) / window, window
