"""Models by name: `resolve` gives the folder of a packaged model, `whole_model` refuses what holds none, and
`trained_from` is the model that the training of a checkpoint began with. Nothing is loaded here."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from sparroll.errors import UserError

_HERE = Path(__file__).resolve().parent
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
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


def find(name: str) -> str:
    """As `resolve`. Raises UserError for a file, and for a path that does not exist, because transformers would ask the
    hub for it, which takes long without a network."""
    if not name:
        raise UserError("the name of the model is empty", "give a folder, or a name on the hub as owner/name")
    place = Path(name)
    if place.is_file():
        raise UserError(f"a model is a folder or a name on the hub, and {name!r} is a file", f"give {place.parent}")
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if is_path and not place.is_dir():
        raise UserError(f"there is no folder {name!r}", "give a folder, or a name on the hub as owner/name")
    return resolve(name)


def whole_model(name: str) -> str:
    """As `find`. Raises UserError also for a folder that holds no model: a training run, weights in another format, or
    a generation_config.json that is damaged. transformers would pass over the last one, and no rollout would end
    where it says."""
    found = find(name)
    folder = Path(found)
    if not folder.is_dir():
        return found
    has_weights = any(folder.glob("*.safetensors*"))
    trained = sorted(folder.glob("checkpoints/step-*/model"))
    if trained and not has_weights:
        raise UserError(
            f"{name!r} is the folder of a training run, not of a model", f"its newest model is {trained[-1]}"
        )
    if not (folder / "config.json").exists():
        raise UserError(f"there is no config.json in {name!r}, so it is no model", "give the folder of a model")
    others = sorted(each.name for kind in _OTHER_WEIGHTS for each in folder.glob(kind))
    if others and not has_weights:
        raise UserError(
            f"the weights in {name!r} are no safetensors, but {others[0]}",
            "load and save them once with transformers: model.save_pretrained(folder)",
        )
    _check_generation_config(folder / "generation_config.json")
    return found


def _check_generation_config(path: Path) -> None:
    if not path.exists():
        return
    try:
        sound = isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (ValueError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"{path} is damaged: it holds no JSON object", "copy it again, or remove it")


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
