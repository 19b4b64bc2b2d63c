"""What a resumed run needs of sparroll, beside the files of another trainer's checkpoint: the schedule in force, the state
of guard and controller, the latest dense ceiling, and the settings under which that is right. Plain data and tensors;
nothing is pickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from sparroll import files, records
from sparroll.errors import UserError
from sparroll.resume import refuse_changes

FORMAT = 2
PLAIN = "sparroll.json"
"""Names the file of the tensors, whose own name follows from what it holds."""
Settings = Mapping[str, Any]
"""What a run that goes on must have in common with the one that wrote the state: CommonSettings.table()."""


def write(folder: Path | str, state: dict[str, Any], settings: Settings | None = None) -> None:
    """Write a state, or another one in its place: plain data, but for the tensors in its tables under "watchers". The plain
    file comes last: where it is, the state that it describes is whole, whenever the process was killed.

    settings: those of the run, which `read` compares."""
    folder = Path(folder)
    if settings is not None:
        state = state | {"settings": _plain(settings)}
    watchers: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, table in state["watchers"].items():
        watchers[name] = {key: value for key, value in table.items() if not isinstance(value, torch.Tensor)}
        tensors |= {f"{name}/{key}": value for key, value in table.items() if isinstance(value, torch.Tensor)}
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    named = f"sparroll-{hashlib.blake2b(data, digest_size=8).hexdigest()}.safetensors"
    files.write_bytes(folder / named, data)
    files.write_json(folder / PLAIN, state | {"format": FORMAT, "tensors": named, "watchers": watchers})
    for before in folder.glob("sparroll-*.safetensors"):
        if before.name != named:
            before.unlink()


def read(
    folder: Path | str,
    hint: str,
    settings: Settings | None = None,
    *,
    in_their_words: Callable[[str], str] = str,
) -> dict[str, Any]:
    """The state that `write` wrote. Raises UserError with the hint where there is none, since a run whose guard forgot
    everything would look like one that goes on.

    settings: those of the run that is to go on. Raises UserError with the first one that the state was not written with,
    both values and the hint. A state that was written without settings has nothing to compare.  in_their_words: puts the
    names that a user types in the place of ours.
    """
    folder = Path(folder)
    if not (folder / PLAIN).is_file():
        raise UserError(f"the checkpoint {folder} has no {PLAIN}: it was not written by a run with sparroll", hint)
    state = files.read_table(folder / PLAIN, hint)
    if state.pop("format", None) != FORMAT:
        raise UserError(f"{folder / PLAIN} was written by another version of sparroll", hint)
    tensors, before = _tensors(folder, state.pop("tensors", None), hint), state.pop("settings", None)
    if settings is not None and before is not None:
        try:
            refuse_changes(folder, before, _plain(settings), way_out=hint)
        except UserError as error:
            raise UserError(in_their_words(error.message), error.hint) from None
    for place, tensor in tensors.items():
        name, _, key = place.partition("/")
        state["watchers"][name][key] = tensor
    return state


def _tensors(folder: Path, named: object, hint: str) -> dict[str, torch.Tensor]:
    """Those of the file of that name. Raises UserError where it is missing, or not whole."""
    try:
        return load((folder / str(named)).read_bytes())
    except (OSError, SafetensorError) as error:
        reason = f"it has no {named}" if isinstance(error, FileNotFoundError) else f"{named}: {error}"
        raise UserError(f"the checkpoint {folder} is damaged: {reason}", hint) from None


def _plain(settings: Settings) -> dict[str, Any]:
    """As they come back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(records.plain(dict(settings))))
    return found
