"""Launches kernels that follow each other closely. On Hopper and later, a kernel can be set up while the one before it
still runs (programmatic dependent launch). This saves a decode step a microsecond or two for each of its small kernels.

A kernel that is launched with `**overlapping(...)` must call `after_previous` before it touches memory. Then every
kernel after it, overlapping or not, also runs after everything before it.

Numbers that change from step to step are kept out of Triton's specialization (`do_not_specialize`): a batch whose size
happens to be a multiple of 16 would otherwise wait for a compiler in the middle of serving.
"""

from __future__ import annotations

from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


def overlapping(tensor: Tensor) -> dict[str, Any]:
    """Launch options for kernels on the tensor's device."""
    return {"launch_pdl": True} if tensor.is_cuda and _capability(tensor.device) >= (9, 0) else {}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
@no_type_check
def after_previous(launch_pdl: tl.constexpr):
    """Let the next kernel be set up, and wait until the previous one has written everything."""
    if launch_pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
