"""What the modules of claims are made with: the figures of a sentence, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparroll.rounding import rounded_down, rounded_up

Figures = Mapping[str, str]
"""By the names that stand in a claim's words."""
Claims = Mapping[str, Callable[[], Figures]]
"""Where the figures come from, by the claim's words."""


def down(value: float, decimals: int = 0) -> str:
    return rounded_down(value, decimals)


def up(value: float, decimals: int = 0) -> str:
    return rounded_up(value, decimals)


def bare(figure: str) -> str:
    """0.207 as .207, as sentences have it."""
    return figure.replace("0.", ".", 1) if figure.lstrip("+-").startswith("0.") else figure
