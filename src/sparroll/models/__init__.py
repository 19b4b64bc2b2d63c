"""The models that come with the package: `resolve` gives the folder that `from_pretrained` reads. Loads nothing."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
PACKAGED = {"tiny-reasoner": _HERE / "tiny_reasoner"}


def resolve(name: str) -> str:
    """The folder of a packaged model; any other name or path is returned as it is.

    >>> resolve("Qwen/Qwen3-1.7B")
    'Qwen/Qwen3-1.7B'
    """
    return str(PACKAGED[name]) if name in PACKAGED else name
