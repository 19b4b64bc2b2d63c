"""Lets Ctrl-C wait until a change is complete: after `hold` it waits for `release`, so that it cannot leave weights and
state half changed."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """A Ctrl-C acts at once outside of hold/release. Between the two, the first one waits and a second one acts at
    once.

    Signals reach only the main thread; in other threads this does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._held = False
        self._pending = False

    def hold(self) -> None:
        if self._held or threading.current_thread() is not threading.main_thread():
            return
        self._held, self._pending = True, False
        self._before = signal.signal(signal.SIGINT, self._remember)

    def release(self) -> None:
        """Raise KeyboardInterrupt if a Ctrl-C came since `hold`."""
        self.restore()
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Put the handler back, whether or not a Ctrl-C came."""
        if self._held:
            signal.signal(signal.SIGINT, self._before)
            self._held = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self.restore()
            raise KeyboardInterrupt
        self._pending = True
        print("interrupted: finishing the update; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
