"""What a program in the sandbox may use, and how a run can end. Data only; the boundaries and the runner enforce it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from sparroll.errors import UserError

Status = Literal["passed", "wrong answer", "timeout", "memory", "crash", "output limit", "sandbox error"]
"""How a verdict came about. Everything but "sandbox error" is the program's doing."""


@dataclass(frozen=True)
class SandboxLimits:
    """Of one test, except the memory, the processes and the files, which are of everything in the sandbox together."""

    wall_seconds: float = 10.0
    """From the test's start to its answer; the clock runs outside the sandbox."""
    cpu_seconds: int = 10
    """Of each process. Ends as a timeout, like the wall clock."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and resident memory of all together. Official graders give 4 GiB."""
    processes: int = 32
    """Processes and threads at once."""
    file_bytes: int = 32 << 20
    """Largest single file."""
    folder_bytes: int = 64 << 20
    """All files in /tmp together; test inputs pass through it."""
    files: int = 4096
    """Files in /tmp together."""
    output_bytes: int = 8 << 20
    """Standard output of a test, or the serialised result of a call. Read up to here, never further."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise UserError(f"{field.name} must be positive, got {value!r}", "leave it out for the default")


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it. Never counted as the model's failure."""
