"""Keeps code of the user's, such as a reward function, from harming the run that calls it: what it prints goes to
standard error, `os._exit` is an exception, and the current folder stays the same. It is for code that means well and is
no sandbox; programs that a model wrote run in tasks/code/."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import NoReturn


@contextmanager
def contained() -> Iterator[None]:
    """Run the block, which calls the user's code, so that the run's own standard output, process and current folder
    are safe from it. `os._exit` raises SystemExit."""
    with _prints_on_stderr(), _same_folder(), _exit_raises():
        yield


@contextmanager
def signals_noted(*numbers: signal.Signals) -> Iterator[Callable[[], bool]]:
    """-> whether one of these signals came since. It tells a KeyboardInterrupt of Ctrl-C from one that the code raised
    by itself. The signals do what they did before."""
    came: list[int] = []
    before = {}
    # Signals reach only the main thread.
    if threading.current_thread() is threading.main_thread():
        before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """Standard output is for results. Programs that the code starts, and libraries in C, write to descriptor 1."""
    with redirect_stdout(sys.stderr), _descriptor_one_is_two():
        yield


@contextmanager
def _descriptor_one_is_two() -> Iterator[None]:
    _flush()
    try:
        before = os.dup(1)
    except OSError:
        # Standard output is closed, so nothing can get there.
        yield
        return
    try:
        # Where standard error is closed there is no better place.
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        _flush()
        os.dup2(before, 1)
        os.close(before)


def _flush() -> None:
    """Write out what waits in the buffer of the process's own standard output, before its descriptor changes."""
    if sys.__stdout__ is not None and not sys.__stdout__.closed:
        sys.__stdout__.flush()


@contextmanager
def _same_folder() -> Iterator[None]:
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _exit_raises() -> Iterator[None]:
    process, real = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            # A process that the code forked ends in this way.
            real(status)
        raise SystemExit(f"os._exit({status})")

    setattr(os, "_exit", refuse)  # noqa: B010
    try:
        yield
    finally:
        setattr(os, "_exit", real)  # noqa: B010
