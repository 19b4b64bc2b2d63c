"""What a program in the sandbox may use, and how its run can end. Data only; the boundaries and the runner enforce
it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from sparroll.errors import UserError

Status = Literal["passed", "wrong answer", "timeout", "memory", "crash", "output limit", "sandbox error"]
"""The reason of a verdict. For everything but "sandbox error" the program is responsible."""


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one test. Those on memory, processes and files are for everything in the sandbox together."""

    wall_seconds: float = 10.0
    """From the start of a test to its answer. The clock runs outside of the sandbox."""
    cpu_seconds: int = 10
    """Processor time of each process. Reaching it is a timeout, as for the wall clock."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and resident memory of all processes together."""
    processes: int = 32
    """Processes and threads at the same time."""
    file_bytes: int = 32 << 20
    """Size of the largest file."""
    folder_bytes: int = 64 << 20
    """Size of all files in /tmp together. Test inputs pass through this folder."""
    files: int = 4096
    """Number of files in /tmp."""
    output_bytes: int = 8 << 20
    """Standard output of a test, or the serialised result of a call. No more than this is ever read."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise UserError(
                    f"{field.name} must be positive and finite, got {value!r}", "leave it out for the default"
                )

    def with_test(self, seconds: float | None, memory_gib: float | None) -> SandboxLimits:
        """The same with other limits of time, wall clock and processor alike, and of memory; None changes nothing."""
        limits = self
        if seconds is not None:
            limits = replace(limits, wall_seconds=float(seconds), cpu_seconds=math.ceil(seconds))
        if memory_gib is not None:
            limits = replace(limits, memory_bytes=int(memory_gib * 2**30))
        return limits


class SandboxError(RuntimeError):
    """The sandbox failed, and not the program in it. This never counts as a failure of the model."""
