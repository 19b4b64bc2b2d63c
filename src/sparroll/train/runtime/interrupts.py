"""Ctrl-C between two halves of a change would leave a state that is neither; `hold` makes it wait for `release`."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Outside hold/release a Ctrl-C acts at once. Inside, the first one waits and a second one acts at once.

    Signals reach the main thread only; elsewhere this does nothing.
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
        """Raises KeyboardInterrupt if one came in between."""
        self.restore()
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Put the handler back, whatever came in between."""
        if self._held:
            signal.signal(signal.SIGINT, self._before)
            self._held = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self.restore()
            raise KeyboardInterrupt
        self._pending = True
        print("interrupted: finishing the update in progress; once more stops at once", file=sys.stderr, flush=True)
