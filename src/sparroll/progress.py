"""How far long work has come: the callback that whoever works calls, one made of several stages, and the bars that draw it.

The library calls `OnProgress` and knows no bar; only the command line makes `Progress`, which is where rich is imported.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class OnProgress(Protocol):
    """A function that long work calls as it goes on."""

    def __call__(self, done: int, total: int, text: str = "", /) -> None:
        """`done` of `total` things are finished; `text`, where it is given, says what is going on."""


class Stages:
    """One progress out of several stages that follow each other, in hundredths of a stage: `done` never falls and `total`
    stays.

    >>> stages = Stages(on_progress, 2)
    >>> rollouts = engine.generate(prompts, max_new_tokens=64, on_progress=stages.next("rollouts"))
    >>> scores = scorer.dense(rollouts, on_progress=stages.next("scores"))
    >>> stages.end()
    """

    def __init__(self, on_progress: OnProgress | None, stages: int):
        self._on_progress, self._stages, self._begun = on_progress, stages, -1

    def next(self, what: str) -> OnProgress | None:
        """The callback of the next stage, which `what` names; None where nobody listens."""
        self._begun += 1
        report, begun, whole = self._on_progress, 100 * self._begun, 100 * self._stages
        if report is None:
            return None

        def on_progress(done: int, total: int, text: str = "", /) -> None:
            report(begun + 100 * done // max(total, 1), whole, f"{what}: {text}" if text else what)

        report(begun, whole, what)
        return on_progress

    def end(self) -> None:
        """All stages are done."""
        if self._on_progress is not None:
            self._on_progress(100 * self._stages, 100 * self._stages, "done")


def counted(on_progress: OnProgress | None, what: str) -> OnProgress | None:
    """A callback for those who give no text, such as engines: it adds "3/8 rollouts", `what` being "rollouts"."""
    if on_progress is None:
        return None
    return lambda done, total, _="": on_progress(done, total, f"{done}/{total} {what}")


class Progress:
    """A group of bars with an ETA on standard error. Silent when that is no terminal, and when asked to be.

    >>> with Progress() as progress:
    ...     engine.generate(prompts, max_new_tokens=64, on_progress=progress.bar("rollouts"))
    """

    def __init__(self, quiet: bool = False, console: Console | None = None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.console = console or Console(stderr=True)
        self.silent = quiet
        """Asked to say nothing at all."""
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
        """A callback `(done, total[, text])` that draws a bar named `what`; the text stands beside it."""
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
    """A line on standard error, where standard output belongs to results."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def quiet_transformers() -> None:
    """No progress bars and notices of transformers between ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
