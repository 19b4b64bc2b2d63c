"""Lets Ctrl-C, and the SIGTERM of a job scheduler, wait until a change is complete: after `hold` they wait for
`release`, so that they cannot leave weights, state and checkpoint half changed."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """A signal acts at once outside of hold/release. Between the two, the first one waits and a second one acts at
    once.

    SIGTERM takes part if it interrupts Python as Ctrl-C does, which the command line arranges. Signals reach only the
    main thread; in other threads this does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        """The handlers of the signals that are held back."""
        self._pending = False

    def hold(self) -> None:
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._pending = False
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._remember)
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._remember)

    def release(self) -> None:
        """Raise KeyboardInterrupt if a signal came since `hold`."""
        self.restore()
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Put the handlers back, whether or not a signal came."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self.restore()
            raise KeyboardInterrupt
        self._pending = True
        print("interrupted: finishing what has begun; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
