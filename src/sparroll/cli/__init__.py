"""The command line: one verb, one file. A verb reads its options, calls the library and prints; it computes nothing
itself. This file starts it: what must hold before the first slow import is here, and app.py has the verbs."""

from __future__ import annotations

import codecs
import os
import signal
import sys
import threading

__all__ = ["main"]

_PLAIN = str.maketrans("█▇▆▅▄▃▂▁·┤└─│“”’–—×≥≤", '##++==--.|+-|""\'--x><')
"""How plots and sentences look in an encoding that lacks these characters."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line. Returns the exit code: 0, 2 after a UserError, 130 when interrupted."""
    _print_in_any_encoding()
    _let_others_work()
    before = signal.getsignal(signal.SIGTERM)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread:
        # Job schedulers end a job with SIGTERM; it leaves the same resumable state as Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # This import takes a second or more, in which Ctrl-C must not show where it is.
        from sparroll.cli.app import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("interrupted before anything was written", file=sys.stderr)
        return 130
    finally:
        if on_main_thread:
            signal.signal(signal.SIGTERM, before)


def _let_others_work() -> None:
    """Threads of a CPU computation that wait for each other sleep, unless the user chose. By default they spin, and where
    something else needs the core that the last of them needs, everything takes many times as long. OpenMP reads this when
    torch is first imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _print_in_any_encoding() -> None:
    """Print what the encoding of standard output lacks in other characters, instead of failing on it. Standard error
    does so by itself."""
    codecs.register_error("sparroll.plain", _plain)
    if getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="sparroll.plain")  # type: ignore[union-attr]


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "only printing asks for this"
    lacking = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(letter if letter.isascii() else "?" for letter in lacking), error.end
