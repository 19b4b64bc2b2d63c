"""Progress bars with an ETA for callbacks `(done, total)` or `(done, total, text)`. Draws only; libraries below know no bar.

Silent when standard error is not a terminal, and when asked to be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

OnProgress = Callable[..., None]


class Progress:
    """A group of bars on standard error.

    >>> with Progress() as progress:
    ...     engine.generate(prompts, max_new_tokens=64, on_progress=progress.bar("rollouts"))
    """

    def __init__(self, quiet: bool = False, console: Console | None = None):
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

        def on_progress(done: int, total: int, text: str = "") -> None:
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
