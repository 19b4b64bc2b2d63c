"""What a resumed run needs of sparroll, beside the files of another trainer's checkpoint: the schedule in force, the state
of guard and controller, the latest dense ceiling. Plain data and tensors; nothing is pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from sparroll import files
from sparroll.errors import UserError

FORMAT = 1
PLAIN, TENSORS = "sparroll.json", "sparroll.safetensors"


def write(folder: Path | str, state: dict[str, Any]) -> None:
    """Write a state: plain data, but for the tensors in its tables under "watchers". The plain file comes last: where it
    is, the state is whole."""
    folder = Path(folder)
    watchers: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, table in state["watchers"].items():
        watchers[name] = {key: value for key, value in table.items() if not isinstance(value, torch.Tensor)}
        tensors |= {f"{name}/{key}": value for key, value in table.items() if isinstance(value, torch.Tensor)}
    files.write_bytes(folder / TENSORS, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    files.write_json(folder / PLAIN, state | {"format": FORMAT, "watchers": watchers})


def read(folder: Path | str, hint: str) -> dict[str, Any]:
    """The state that `write` wrote. Raises UserError with the hint where there is none, since a run whose guard forgot
    everything would look like one that goes on."""
    folder = Path(folder)
    if not (folder / PLAIN).is_file():
        raise UserError(f"the checkpoint {folder} has no {PLAIN}: it was not written by a run with sparroll", hint)
    state = files.read_table(folder / PLAIN, hint)
    if state.pop("format", None) != FORMAT:
        raise UserError(f"{folder / PLAIN} was written by another version of sparroll", hint)
    for place, tensor in load((folder / TENSORS).read_bytes()).items():
        name, _, key = place.partition("/")
        state["watchers"][name][key] = tensor
    return state
