"""Models shipped with the package, by name."""

from __future__ import annotations

from pathlib import Path

_PACKAGED = {"tiny-reasoner": "tiny_reasoner"}


def resolve(name: str) -> str:
    """The folder of a packaged model ("tiny-reasoner"); any other name, a hub name or a folder, unchanged."""
    return str(Path(__file__).parent / _PACKAGED[name]) if name in _PACKAGED else name
