"""Launches kernels that follow each other closely. On Hopper and later, a kernel can be set up while the one before it
still runs (programmatic dependent launch). This saves a decode step a microsecond or two for each of its small kernels.

A kernel that is launched with `**overlapping(...)` calls `let_next_begin`, and each of its programs `wait_for_previous`
at least once before it ends, and before it writes, or reads what kernels of its layer write. Then every kernel after it,
overlapping or not, also runs after everything before it. Before that it may read what a step's plan is made of, and the
plan (contexts, budgets, block tables): `plan_step` ends with a kernel that does not overlap, so that these are complete
before any kernel of a layer begins.

A program may also begin with what one program of the kernel before has announced (`announce`, `wait_until_announced`),
while others of that kernel still run. All of these have begun by then, so none waits for a program that has no room. A
kernel that announces calls `let_next_begin` after `wait_for_previous`. So whoever waits for an announcement knows that all
kernels before the announcing one have ended, and that what they announced has been taken back.

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

_TRIES = tl.constexpr(256)
"""To see something announced; each takes most of a microsecond."""


def overlapping(tensor: Tensor) -> dict[str, Any]:
    """Launch options for kernels on the tensor's device."""
    return {"launch_pdl": True} if runs_ptx(tensor) and _capability(tensor.device) >= (9, 0) else {}


def runs_ptx(tensor: Tensor) -> bool:
    """Whether kernels on the tensor's device may hold NVIDIA's own instructions: not in the interpreter, nor on ROCm, whose
    devices are also called "cuda"."""
    return tensor.is_cuda and torch.version.hip is None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
@no_type_check
def let_next_begin(launch_pdl: tl.constexpr):
    """Let the next kernel be set up."""
    if launch_pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
@no_type_check
def wait_for_previous(launch_pdl: tl.constexpr):
    """Wait until the previous kernel has written everything. To wait again costs nothing."""
    if launch_pdl:
        tl.extra.cuda.gdc_wait()


@triton.jit
@no_type_check
def after_previous(launch_pdl: tl.constexpr):
    """Both at once, of a kernel that can do nothing before."""
    let_next_begin(launch_pdl)
    wait_for_previous(launch_pdl)


@triton.jit
@no_type_check
def announce(flag):
    """Say that everything is complete which this program has written so far. `flag` is 0."""
    # All threads have written before one of them says so.
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release")


@triton.jit
@no_type_check
def wait_until_announced(flag, launch_pdl: tl.constexpr):
    """Wait until a program of the previous kernel has announced that it is done, or, where that takes long, until that
    kernel has ended."""
    tries = 0
    while tries < _TRIES:
        tries += 1
        if tl.atomic_add(flag, 0, sem="acquire") != 0:
            tries = 2 * _TRIES
    if tries == _TRIES:
        wait_for_previous(launch_pdl)
