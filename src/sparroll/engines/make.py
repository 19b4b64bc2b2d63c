"""Makes an engine by its name, for the command line, for training configurations and for any other caller."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparroll.engines.base import Engine
from sparroll.engines.devices import take_device
from sparroll.errors import UserError, nearest
from sparroll.models import find
from sparroll.schedule import Schedule
from sparroll.types import LEAST_TEMPERATURE, LEAST_VLLM_TEMPERATURE

ENGINES = ["hf", "vllm"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_engine(
    kind: str,
    model: str,
    *,
    schedule: Schedule | None = None,
    capacity: Schedule | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_batch: int = 64,
    gpu_memory_share: float = 0.85,
    kv_cache_gib: float | None = None,
    sleep_mode: bool = False,
) -> Engine:
    """The engine of that name. Only VLLMEngine uses `capacity` and the arguments after `max_batch`."""
    check_available(kind)
    if kind == "hf":
        from sparroll.engines.hf.engine import HFEngine

        return HFEngine(model, schedule=schedule, dtype=dtype, device=device, max_batch=max_batch)
    _check_device(device)
    from sparroll.engines.vllm.engine import VLLMEngine

    return VLLMEngine(
        model,
        schedule=schedule,
        capacity=capacity,
        dtype=dtype,
        max_batch=max_batch,
        gpu_memory_share=gpu_memory_share,
        kv_cache_gib=kv_cache_gib,
        sleep_mode=sleep_mode,
    )


def roomiest(schedules: Sequence[Schedule]) -> Schedule | None:
    """The `capacity` of an engine that is to run all of these: the first one, with the longest window of any check; None
    if there are none."""
    checks = [each.check for each in schedules if each.check is not None]
    if not schedules or schedules[0].check is None:
        return schedules[0] if schedules else None
    return schedules[0].checked(max(check.window_tokens for check in checks), checks[0].floor)


def dtype_named(name: str | None) -> torch.dtype | None:
    """The precision of weights by its name; None leaves them as they are stored."""
    if name is not None and name not in DTYPES:
        raise UserError(f"unknown --dtype {name!r}", f"known: {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def check_names(kind: str, model: str, device: str | None, dtype: str | None) -> None:
    """Raise UserError for names that `make_engine` would refuse. Loads nothing, so it can come before a command writes
    its first file."""
    check_available(kind)
    find(model)
    if kind == "vllm":
        _check_device(device)
    else:
        take_device(device)
    dtype_named(dtype)


def check_samples_at(kind: str, temperature: float, name: str = "temperature") -> None:
    """Raise UserError for a temperature that this engine cannot sample at, although others can. name: what the user calls
    the temperature."""
    if kind == "vllm" and 0 < temperature < LEAST_VLLM_TEMPERATURE:
        raise UserError(
            f"{name} = {temperature:g} is below {LEAST_VLLM_TEMPERATURE:g}, the least that the engine vllm samples at",
            f"set it to {LEAST_VLLM_TEMPERATURE:g}, or take the engine hf, which goes down to {LEAST_TEMPERATURE:g}",
        )


def check_available(kind: str) -> None:
    """Raise UserError where there is no such engine, or a package that it needs is not installed. Loads nothing."""
    if kind not in ENGINES:
        raise UserError(f"unknown engine {kind!r}", nearest(kind, ENGINES))
    if kind == "vllm":
        from sparroll.engines.vllm import launch

        launch.check_installed()


def _check_device(device: torch.device | str | None) -> None:
    """Raise UserError for another device than vLLM's, which takes the first GPU that it sees, or else the CPU."""
    if device is None:
        return
    own = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    asked = take_device(device)
    if asked.type != own.type or (asked.index or 0) != (own.index or 0):
        raise UserError(
            f"the engine vllm runs on {own}, got device {asked}",
            "leave the device out; CUDA_VISIBLE_DEVICES chooses among GPUs",
        )
