"""Devices by name: "cpu", "cuda" or "cuda:1". Loads nothing on them."""

from __future__ import annotations

import torch

from sparroll.errors import UserError


def take_device(device: torch.device | str | None) -> torch.device:
    """The device of that name; None is CUDA where there is a GPU, else the CPU. Raises UserError where there is no such
    device.

    A GPU with a number becomes the process's current one, since kernels are launched there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = _named(device)
    if found.type == "cuda" and found.index is not None:
        torch.cuda.set_device(found)
    return found


def _named(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, ValueError, OverflowError):
        raise UserError(f"unknown device {str(device)!r}", "cpu, cuda, or a number as in cuda:1") from None
    if found.type == "cpu":
        return found
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != found.type:
        others = "the CPU" if here is None else f"cpu and {here.type}"
        raise UserError(
            f"there is no device {str(device)!r} here, only {others}",
            "leave the device out, or use cpu; `sparroll doctor` says what is here and why",
        )
    count = torch.accelerator.device_count()
    if (found.index or 0) >= count:
        raise UserError(
            f"there is no device {str(device)!r} here, the last one is {here.type}:{count - 1}",
            "`sparroll doctor` lists the devices; CUDA_VISIBLE_DEVICES hides some of them",
        )
    return found
