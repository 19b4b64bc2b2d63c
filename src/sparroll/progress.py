"""How long work reports its progress: the callback that it calls, a callback for work in several stages, and progress
bars.

The library calls `OnProgress` and knows no bars. Only the command line makes `Progress`, which imports rich.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


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
        self._on_progress, self._stages, self._begun = on_progress, stages, -1

    def next(self, what: str) -> OnProgress | None:
        """The callback for the next stage, which is called `what`; None if nobody listens."""
        self._begun += 1
        report, begun, whole = self._on_progress, 100 * self._begun, 100 * self._stages
        if report is None:
            return None

        def on_progress(done: int, total: int, text: str = "", /) -> None:
            report(begun + 100 * done // max(total, 1), whole, f"{what}: {text}" if text else what)

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
    """A group of progress bars with an ETA on standard error. Draws nothing if that is not a terminal, or if `quiet` is
    set.

    >>> with Progress() as progress:
    ...     engine.generate(prompts, max_new_tokens=64, on_progress=progress.bar("rollouts"))
    """

    def __init__(self, quiet: bool = False, console: Console | None = None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.console = console or Console(stderr=True)
        self.silent = quiet
        """Whether nothing at all is to be printed, not even lines of text."""
        self.quiet = quiet or not self.console.is_terminal
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=self.quiet,
        )

    def bar(self, what: str) -> OnProgress:
        """A callback `(done, total[, text])` that draws a bar named `what`, with the text beside it."""
        task = self._bars.add_task(what, total=None, note="", start=True)

        def on_progress(done: int, total: int, text: str = "", /) -> None:
            self._bars.update(task, completed=done, total=total, note=text)

        return on_progress

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def say(text: str, quiet: bool = False) -> None:
    """Print a line to standard error. Standard output is only for results."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def quiet_transformers() -> None:
    """Turn off the progress bars and notices of transformers, which would appear between ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
