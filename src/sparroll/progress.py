"""How long work reports its progress: the callback that it calls, a callback for work in several stages, progress bars,
and lines of text where there is no terminal.

The library calls `OnProgress` and knows no bars. Only the command line makes `Progress`, which imports rich.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 30.0
"""How often long work says how far it is where no bars can be drawn."""


class OnProgress(Protocol):
    """A function that long work calls whenever it has made progress."""

    def __call__(self, done: int, total: int, text: str = "", /) -> None:
        """`done` of `total` things are finished. `text`, if it is given, says what is going on."""


class Stages:
    """Joins the progress of several stages that follow each other into one, in hundredths of a stage. `done` never
    falls, and `total` stays the same.

    >>> stages = Stages(on_progress, 2)
    >>> rollouts = engine.generate(prompts, max_new_tokens=64, on_progress=stages.next("rollouts"))
    >>> scores = scorer.dense(rollouts, on_progress=stages.next("scores"))
    >>> stages.end()
    """

    def __init__(self, on_progress: OnProgress | None, stages: int):
        self._on_progress, self._stages, self._begun = on_progress, stages, 0

    def next(self, what: str, stages: int = 1) -> OnProgress | None:
        """The callback for the next stage, or the next few as one, which is called `what`; None if nobody listens."""
        report, begun, whole, own = self._on_progress, 100 * self._begun, 100 * self._stages, 100 * stages
        self._begun += stages
        if report is None:
            return None

        def on_progress(done: int, total: int, text: str = "", /) -> None:
            report(begun + own * done // max(total, 1), whole, f"{what}: {text}" if text else what)

        report(begun, whole, what)
        return on_progress

    def end(self) -> None:
        """Report that all stages are done."""
        if self._on_progress is not None:
            self._on_progress(100 * self._stages, 100 * self._stages, "done")


def counted(on_progress: OnProgress | None, what: str) -> OnProgress | None:
    """A callback for work that gives no text itself, such as an engine's. It adds the text "3/8 rollouts" if `what` is
    "rollouts"."""
    if on_progress is None:
        return None
    return lambda done, total, _="": on_progress(done, total, f"{done}/{total} {what}")


class Progress:
    """A group of progress bars with an ETA on standard error. Where that is no terminal, such as in a log file, a line
    every LINE_SECONDS says how far each piece of work is. Nothing is shown if `quiet` is set.

    >>> with Progress() as progress:
    ...     engine.generate(prompts, max_new_tokens=64, on_progress=progress.bar("rollouts"))
    """

    def __init__(self, quiet: bool = False, console: Console | None = None):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.console = console or Console(stderr=True)
        self.silent = quiet
        """Whether nothing at all is to be printed, not even lines of text."""
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[share]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self.lines = ProgressLines(say)
        self._ended = threading.Event()
        self._reporter: threading.Thread | None = None

    def bar(self, what: str) -> OnProgress:
        """A callback `(done, total[, text])` that draws a bar named `what`, with the text beside it."""
        task = self._bars.add_task(what, total=None, share="", note="loading", start=True)
        line = self.lines.add(what)

        def on_progress(done: int, total: int, text: str = "", /) -> None:
            self._bars.update(task, completed=done, total=total, share=f"{done / max(total, 1):4.0%}", note=text)
            line(done, total, text)

        return on_progress

    def __enter__(self) -> Progress:
        if not self._bars.disable:
            self._bars.start()
        elif not self.silent:
            self._reporter = threading.Thread(target=self._report, daemon=True)
            self._reporter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._reporter is not None:
            self._reporter.join()
        if not self._bars.disable:
            self._bars.stop()

    def _report(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            self.lines.report()


class ProgressLines:
    """The same as lines of text, one for each piece of work that has not ended.

    write: takes a line.  clock: seconds since some moment.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write, self._clock = write, clock
        self._began = clock()
        self._works: list[_Work] = []

    def add(self, what: str) -> OnProgress:
        """A callback for one more piece of work."""
        work = _Work(what, self._clock())
        self._works.append(work)

        def on_progress(done: int, total: int, text: str = "", /) -> None:
            work.tell(done, total, text, self._clock())

        return on_progress

    def report(self) -> None:
        """Write the lines. A piece of work that has ended is said to be done once."""
        now = self._clock()
        works = [work for work in self._works if not work.told]
        if not self._works:
            self._write(f"loading, {duration(now - self._began)} so far")
        for work in works:
            self._write(work.line(now))
            work.told = work.ended is not None


@dataclass
class _Work:
    what: str
    began: float
    done: int = 0
    total: int = 0
    """0 until the first report."""
    text: str = ""
    first: tuple[int, float] | None = None
    """What was done at the first report, and when that was: a resumed piece of work does not begin at 0."""
    ended: float | None = None
    told: bool = False

    def tell(self, done: int, total: int, text: str, now: float) -> None:
        self.first = self.first or (done, now)
        self.done, self.total, self.text = done, total, text
        self.ended = now if done >= total else None

    def line(self, now: float) -> str:
        if self.first is None:
            return f"{self.what}: loading, {duration(now - self.began)} so far"
        if self.ended is not None:
            return f"{self.what}: done after {duration(self.ended - self.began)}"
        parts = [f"{self.done / max(self.total, 1):.0%}", self.text, f"{duration(now - self.began)} so far"]
        if self.done > self.first[0]:
            left = (now - self.first[1]) * (self.total - self.done) / (self.done - self.first[0])
            parts.append(f"about {duration(left)} left")
        return f"{self.what}: {', '.join(part for part in parts if part)}"


def duration(seconds: float) -> str:
    """Seconds for readers.

    >>> duration(45), duration(150), duration(7500)
    ('45 s', '2 min 30 s', '2 h 05 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def say(text: str, quiet: bool = False, alarm: bool = False) -> None:
    """Print a line to standard error; an alarm is yellow on a terminal. Standard output is only for results.

    This goes through `sys.stderr`, which is how a line gets above the bars that are drawn there.
    """
    if quiet:
        return
    if alarm and sys.stderr.isatty():
        text = f"\x1b[33m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


def quiet_transformers() -> None:
    """Turn off the progress bars and notices of transformers, which would appear between ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
