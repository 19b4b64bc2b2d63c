"""What is said when this process dies within code of the user's, in C or by a signal, where no exception can say it. A
small child reads a pipe that closes with this process, and prints the last note that was not taken back.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHILD = """
import sys
last = b""
for line in sys.stdin.buffer:
    last = line
if last.strip():
    sys.stderr.buffer.write(last.replace(b"\\0", b"\\n"))
"""
_children: dict[int, subprocess.Popen[bytes]] = {}
"""The child of each process; a forked process finds its parent's and starts its own."""


@contextmanager
def last_words(message: str, hint: str) -> Iterator[None]:
    """Have the message and the hint printed, as those of a UserError are, if this process dies within the block."""
    lines = (" ".join(text.split()) for text in (f"error: {message}", f"hint: {hint}"))
    _note("\0".join(lines))
    try:
        yield
    finally:
        _note("")


def _note(text: str) -> None:
    child = _children.get(os.getpid()) or _start()
    assert child.stdin is not None
    # A child that somebody ended says nothing, and the work goes on.
    with suppress(BrokenPipeError):
        os.write(child.stdin.fileno(), f"{text}\n".encode(errors="replace"))


def _start() -> subprocess.Popen[bytes]:
    # In a session of its own it outlives a Ctrl-C, which is for everyone in the terminal.
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    _children[os.getpid()] = child
    atexit.register(_end, os.getpid(), child)
    return child


def _end(process: int, child: subprocess.Popen[bytes]) -> None:
    if process == os.getpid():
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
