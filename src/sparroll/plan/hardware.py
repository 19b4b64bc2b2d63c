"""What a device can do at best: its peak rate of dense bf16 arithmetic, its memory bandwidth and its memory. From data
sheets, or from a quick measurement.

`measure` is no benchmark: it takes a second or two and gives the order of magnitude that a plan needs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparroll import files
from sparroll.errors import CHECK_PATH, UserError, nearest
from sparroll.types import is_real, is_whole

_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Hardware:
    """One device.

    >>> Hardware("H200", flops_per_second=989e12, bandwidth_bytes_per_second=4.8e12, memory_bytes=141e9, source="...")
    """

    name: str
    flops_per_second: float
    """Rate of dense matrix multiplication: in bf16 if it is from a data sheet, in `dtype` if it was measured."""
    bandwidth_bytes_per_second: float
    memory_bytes: float
    source: str = ""
    dtype: str = "bfloat16"
    processors: int = 1
    """Multiprocessors, each of which works on a tile of attention of its own; 1: all of the device on one tile after the
    other, so that none of it is ever idle."""

    def __post_init__(self) -> None:
        for name in ("name", "source", "dtype"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"the {name} of hardware must be text, got {getattr(self, name)!r}")
        for name in ("flops_per_second", "bandwidth_bytes_per_second", "memory_bytes"):
            value = getattr(self, name)
            if not is_real(value) or not 0 < value <= _LARGEST:
                raise UserError(
                    f"{name} of hardware {self.name!r} must be positive and finite, got {reprlib.repr(value)}",
                    "an H200 has 989e12 FLOPs and 4.8e12 bytes a second and 141e9 bytes",
                )
        if not is_whole(self.processors) or not 0 < self.processors <= _LARGEST:
            raise UserError(
                f"processors of hardware {self.name!r} must be a whole number from 1 on, got "
                f"{reprlib.repr(self.processors)}",
                "an H200 has 132; leave it out where it is not known",
            )

    def intensity(self, element_bytes: int = 2) -> float:
        """FLOPs that the device could do while it reads one element of the cache, which sparroll.cost calls
        `intensity`."""
        return self.flops_per_second * element_bytes / self.bandwidth_bytes_per_second

    def table(self) -> dict[str, Any]:
        """Plain data. Written to a JSON file, it can be given wherever a device is asked for."""
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> Path:
        """Write the JSON file that `find_hardware` reads."""
        return files.write_json(path, self.table())


# Peak rates are without 2:4 sparsity. Bandwidth and memory are in the decimal units of the makers.
PROFILES: dict[str, Hardware] = {
    profile.name: profile
    for profile in (
        # NVIDIA A100 80GB SXM data sheet (2021): 312 TFLOPS bf16, 2,039 GB/s.
        Hardware("A100", 312e12, 2.039e12, 80e9, "NVIDIA A100 80GB SXM data sheet", processors=108),
        # NVIDIA H100 SXM5 data sheet (2023): 1,979 TFLOPS bf16 with sparsity, 3.35 TB/s.
        Hardware("H100", 989e12, 3.35e12, 80e9, "NVIDIA H100 SXM data sheet", processors=132),
        # NVIDIA H200 SXM data sheet (2024): 1,979 TFLOPS bf16 with sparsity, 4.8 TB/s. Real copies reach 4.3-4.4 TB/s.
        Hardware("H200", 989e12, 4.8e12, 141e9, "NVIDIA H200 SXM data sheet", processors=132),
        # NVIDIA HGX/DGX B200 data sheet (2024), an eighth of the system: 4.5 PFLOPS bf16 with sparsity, 8 TB/s, 180 GB.
        Hardware("B200", 2.25e15, 8.0e12, 180e9, "NVIDIA DGX B200 data sheet, one GPU of eight", processors=148),
        # AMD Instinct MI300X data sheet (2023): 1,307.4 TFLOPS bf16, 5.3 TB/s.
        Hardware("MI300X", 1307.4e12, 5.3e12, 192e9, "AMD Instinct MI300X data sheet", processors=304),
    )
}


def find_hardware(name_or_path: str | Path) -> Hardware:
    """A profile by name ("H200", any case), or a JSON file written by `Hardware.save`."""
    text = str(name_or_path)
    for name, profile in PROFILES.items():
        if name.lower() == text.lower():
            return profile
    if not text.endswith(".json"):
        raise UserError(f"unknown hardware {text!r}", f"{nearest(text.upper(), list(PROFILES))}; or give a JSON file")
    try:
        return Hardware(**json.loads(Path(text).read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read the hardware file {text}: {error.strerror}", CHECK_PATH) from None
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"{text} is not a hardware file: {error}", "write one with Hardware.save") from None


def measure(device: torch.device | str | None = None, seed: int = 0) -> Hardware:
    """Measure this machine: the best copy bandwidth (bytes read + written) and the best matrix rate of a few tries.

    On CUDA it copies 1 GiB and multiplies 8,192-square bf16 matrices; on the CPU 64 MiB and 1,024-square float32 ones,
    with the threads that torch may use. `memory_bytes` is the whole memory of the device, or of the machine.
    """
    target = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type not in ("cpu", "cuda"):
        raise UserError(f"only cpu and cuda devices can be measured, got {str(target)!r}")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available to measure", "pass device='cpu'")
    on_gpu = target.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator(target).manual_seed(seed)
    return Hardware(
        name=torch.cuda.get_device_name(target) if on_gpu else f"cpu-{torch.get_num_threads()}-threads",
        flops_per_second=_matrix_rate(8192 if on_gpu else 1024, dtype, generator, target),
        bandwidth_bytes_per_second=_copy_rate(2**30 if on_gpu else 2**26, generator, target),
        memory_bytes=float(torch.cuda.get_device_properties(target).total_memory if on_gpu else _memory_bytes()),
        processors=torch.cuda.get_device_properties(target).multi_processor_count if on_gpu else 1,
        source=f"measured, seed {seed}, torch {torch.__version__}",
        dtype=str(dtype).removeprefix("torch."),
    )


def _copy_rate(size_bytes: int, generator: torch.Generator, device: torch.device) -> float:
    source = torch.rand(size_bytes // 4, generator=generator, device=device)
    sink = torch.empty_like(source)
    return 2 * size_bytes / _best_seconds(lambda: sink.copy_(source), device)


def _matrix_rate(size: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> float:
    left, right = (torch.rand(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right, out=out), device)


def _best_seconds(work: Callable[[], object], device: torch.device, tries: int = 6) -> float:
    best = math.inf
    # The first try warms up and is not counted.
    for attempt in range(tries + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
