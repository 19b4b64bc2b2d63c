"""Checkpoints that survive a kill at any moment: each is written under another name, flushed, renamed, and only then
becomes the latest.

    checkpoints/latest -> step-000020
    checkpoints/step-000020/model/                a plain transformers folder
                            [adapter/]            a plain peft folder
                            [adapter_optimizer.safetensors]
                            optimizer.safetensors state.json generators.json config.json [schedule.toml]
                            [watchers.safetensors] [past-weights-0.safetensors ...]
                            manifest.json         size and SHA-256 of every file above; written last

A folder whose files do not match its manifest is damaged, and the one before it is used. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from sparroll import files
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train.update.optimizer import optimizer_tensors

if TYPE_CHECKING:
    from sparroll.engines.adapter import Adapter

FORMAT = 2
_PREFIX, _DAMAGED = "step-", "damaged-"
_MANIFEST = "manifest.json"
_WATCHERS = "watchers.safetensors"
_PAST = "past-weights-"
_FILES_OF_THEIR_OWN = ("schedule", "watchers", "generators")


@dataclass
class RunState:
    """Where a run stands after its last completed step: everything that the next step reads, apart from weights and
    optimizer."""

    step: int = 0
    """Completed steps."""
    prompts_drawn: int = 0
    metrics_bytes: int = 0
    """Length of metrics.jsonl up to this step."""
    evaluated_step: int = -1
    """The step after which the last evaluation was made; -1 before the first."""
    schedule: Schedule | None = None
    stopped: str = ""
    """Why the run was stopped before its last step; empty while it may go on."""
    watchers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of each watcher (control/watcher.py), and of the control group's ceiling, by its name: plain data, and
    tensors, which have their own file."""
    reward_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the file of each reward function that you wrote yourself, by the term's name."""
    dense_ceiling: dict[str, float] = field(default_factory=dict)
    """Metrics of the latest dense ceiling."""
    generators: list[dict[str, Any]] = field(default_factory=list)
    """State of the global random generators, one entry per process."""


@dataclass(frozen=True)
class SavedAdapter:
    """The adapter of DistillSparse, its optimizer, and the name of the model that it belongs to."""

    adapter: Adapter
    optimizer: torch.optim.Optimizer
    base_model: str


def save(
    folder: Path,
    state: RunState,
    config: dict[str, Any],
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    optimizer: torch.optim.Optimizer,
    keep: int,
    adapter: SavedAdapter | None = None,
    past: Sequence[dict[str, torch.Tensor]] = (),
) -> Path:
    """Write `step-NNNNNN`, point `latest` at it, then remove all but the `keep` newest. A frozen model is passed as
    None; there is then no model/ and no optimizer for it. past: older weights that rollouts still come from, oldest
    first.

    If an interrupt came between writing and pointing, a second call for the same step only does what is left.
    """
    final = folder / f"{_PREFIX}{state.step:06d}"
    partial = folder / f".{final.name}.partial"
    if not final.exists():
        _remove(partial)
        try:
            _write(partial, state, config, model, tokenizer, optimizer, adapter, past)
        except BaseException:
            # What was written of it would fill the disk further.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(final)
    _flush(folder)
    _point(folder, final)
    for old in _folders(folder)[keep:]:
        _remove(old)
    return final


def _write(
    partial: Path,
    state: RunState,
    config: dict[str, Any],
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    optimizer: torch.optim.Optimizer,
    adapter: SavedAdapter | None,
    past: Sequence[dict[str, torch.Tensor]],
) -> None:
    partial.mkdir(parents=True)
    if model is not None:
        _write_model(partial / "model", model, tokenizer)
        save_file(optimizer_tensors(model, optimizer), partial / "optimizer.safetensors")
    if adapter is not None:
        adapter.adapter.write(partial / "adapter", adapter.base_model)
        tensors = optimizer_tensors(adapter.adapter.adapted, adapter.optimizer)
        save_file(tensors, partial / "adapter_optimizer.safetensors")
    for number, weights in enumerate(past):
        save_file({name: each.contiguous() for name, each in weights.items()}, partial / f"{_PAST}{number}.safetensors")
    _write_plain(partial, state, config)
    _write_manifest(partial)


def load_state(checkpoint: Path) -> RunState:
    """The state that `save` wrote. Model and optimizer are in other files."""
    plain = read_json(checkpoint / "state.json")
    if plain.pop("format") != FORMAT:
        raise UserError(
            f"{checkpoint} was written by another version of sparroll", "start a new run from its model/ folder"
        )
    name = plain.pop("schedule_name")
    schedule = None
    if name is not None:
        table = tomllib.loads((checkpoint / "schedule.toml").read_text(encoding="utf-8"))
        # It was checked, or forced, when the run began.
        schedule = dataclasses.replace(Schedule.from_table(table, name), any_model=True)
    watchers = plain.pop("watchers")
    tensors = load_file(checkpoint / _WATCHERS) if (checkpoint / _WATCHERS).is_file() else {}
    for place, tensor in tensors.items():
        name, _, key = place.partition("/")
        watchers[name][key] = tensor
    generators = read_json(checkpoint / "generators.json")
    return RunState(**plain, schedule=schedule, watchers=watchers, generators=generators)


def load_optimizer(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "optimizer.safetensors")


def load_adapter_optimizer(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "adapter_optimizer.safetensors")


def load_past(checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    """The older weights that rollouts still come from, oldest first."""
    count = len(list(checkpoint.glob(f"{_PAST}*.safetensors")))
    return [load_file(checkpoint / f"{_PAST}{number}.safetensors") for number in range(count)]


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and a line of complaint for each newer one that is damaged."""
    complaints: list[str] = []
    for candidate in _folders(folder):
        problem = damage(candidate)
        if problem is None:
            return candidate, complaints
        complaints.append(f"checkpoint {candidate.name} is damaged ({problem}) and not used")
    return None, complaints


def tidy(folder: Path, used: Path | None) -> None:
    """Remove folders that are half written or half removed, and rename damaged ones newer than `used` to
    damaged-step-NNNNNN, so that no later run meets them."""
    for half in (*folder.glob(f".{_PREFIX}*"), *folder.glob(f".{_DAMAGED}{_PREFIX}*")):
        _remove(half)
    for newer in _folders(folder):
        if used is not None and _number(newer) <= _number(used):
            break
        aside = folder / f"{_DAMAGED}{newer.name}"
        _remove(aside)
        newer.rename(aside)
    if used is not None:
        _point(folder, used)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder; None where nothing is."""
    try:
        listed = [
            (name, int(of["bytes"]), str(of["sha256"]))
            for name, of in read_json(checkpoint / _MANIFEST)["files"].items()
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return "no readable manifest.json"
    for name, size, digest in listed:
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if files.sha256(path) != digest:
            return f"{name} has other contents than were written"
    return None


def _write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    # A progress bar per checkpoint would bury the run's own lines.
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write_plain(partial: Path, state: RunState, config: dict[str, Any]) -> None:
    plain = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in _FILES_OF_THEIR_OWN}
    watchers, tensors = _apart(state.watchers)
    plain |= {"format": FORMAT, "schedule_name": state.schedule.name if state.schedule else None, "watchers": watchers}
    (partial / "state.json").write_text(json.dumps(plain, indent=1, allow_nan=False), encoding="utf-8")
    (partial / "generators.json").write_text(json.dumps(state.generators), encoding="utf-8")
    (partial / "config.json").write_text(json.dumps(config, indent=1, allow_nan=False), encoding="utf-8")
    if tensors:
        save_file(tensors, partial / _WATCHERS)
    if state.schedule is not None:
        (partial / "schedule.toml").write_text(tomli_w.dumps(state.schedule.table()), encoding="utf-8")


def _apart(states: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """The watchers' states -> (plain data by name, tensors by "name/key")"""
    items = [(name, key, value) for name, state in states.items() for key, value in state.items()]
    plain: dict[str, dict[str, Any]] = {name: {} for name in states}
    for name, key, value in items:
        if not isinstance(value, torch.Tensor):
            plain[name][key] = value
    return plain, {f"{name}/{key}": value for name, key, value in items if isinstance(value, torch.Tensor)}


def _write_manifest(partial: Path) -> None:
    written = sorted(path for path in partial.rglob("*") if path.is_file())
    entries = {
        str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": files.sha256(path)} for path in written
    }
    manifest = partial / _MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": entries}, indent=1), encoding="utf-8")
    for path in [*written, manifest, *(p for p in partial.rglob("*") if p.is_dir()), partial]:
        _flush(path)


def _point(folder: Path, final: Path) -> None:
    pointer = folder / ".latest.partial"
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(final.name)
    pointer.replace(folder / "latest")
    _flush(folder)


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    named = (path for path in folder.glob(f"{_PREFIX}*") if path.is_dir() and path.name[len(_PREFIX) :].isdigit())
    return sorted(named, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name[len(_PREFIX) :])


def _remove(path: Path) -> None:
    """Rename the folder before it is removed, so that a kill in the middle does not leave half a folder that looks like
    a checkpoint."""
    if not path.exists():
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}.removed"))
    shutil.rmtree(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
