"""Kernels that are compiled and checked in processes of their own before a sweep times them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence


def failures(command: Sequence[str], count: int, seconds: float) -> dict[int, str]:
    """Why tasks failed, by number. All run at a time, because compiling is what takes the time.

    command: what is called with the number of each task behind it.  seconds: that all of them may take; what is not
    ready then, or was not begun, has failed.
    """
    waiting, running, failed = list(range(count)), {}, {}
    ends = time.monotonic() + seconds
    most = max(2, (os.cpu_count() or 2) - 1)
    while waiting or running:
        while waiting and len(running) < most:
            number = waiting.pop(0)
            running[number] = subprocess.Popen(
                [*command, str(number)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        number, process = next(iter(running.items()))
        try:
            _, told = process.communicate(timeout=max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            told = f"not ready after {seconds:g} s"
            failed |= dict.fromkeys(waiting, "not begun in time")
            waiting.clear()
        if process.returncode:
            failed[number] = told.strip().splitlines()[-1] if told.strip() else f"exit {process.returncode}"
        del running[number]
    return failed
