"""Models by name: `resolve` gives the folder of a packaged model, and `trained_from` the model that the training of a
checkpoint began with. Nothing is loaded here."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from sparroll.errors import UserError

_HERE = Path(__file__).resolve().parent
PACKAGED = {"tiny-reasoner": _HERE / "tiny_reasoner"}


def resolve(name: str) -> str:
    """The folder of a packaged model; any other name or path is returned as it is. Raises UserError for a name without
    an owner that is nearly a packaged one, because the hub would be asked for it, which takes long without a network.

    >>> resolve("Qwen/Qwen3-1.7B")
    'Qwen/Qwen3-1.7B'
    """
    if name in PACKAGED:
        return str(PACKAGED[name])
    close = difflib.get_close_matches(name.lower(), PACKAGED, n=1, cutoff=0.7)
    if close and "/" not in name and not Path(name).exists():
        raise UserError(
            f"there is no packaged model and no folder {name!r}", f"did you mean {close[0]!r}? The hub has owner/name"
        )
    return name


def packaged_name(name: str) -> str:
    """The inverse of `resolve`: the name of a packaged model, given its folder; any other name or path is returned as
    it is."""
    return next((short for short, folder in PACKAGED.items() if str(folder) == name.rstrip("/")), name)


def trained_from(model: str) -> str:
    """The name of the model that the training of a checkpoint (.../step-000100/model) began with, also if several runs
    of `sparroll train` followed each other. Any other name or path is returned as it is. What was made for that model,
    such as a schedule, fits its checkpoints.
    """
    seen: set[str] = set()
    while model not in seen:
        seen.add(model)
        folder = Path(model)
        try:
            began = json.loads((folder.parent / "config.json").read_text(encoding="utf-8"))["model"]["name"]
        except (OSError, ValueError, KeyError, TypeError):
            break
        if folder.name != "model" or not isinstance(began, str):
            break
        model = began
    return model
