"""How long work says how far it is: lines where there is no terminal, and lines above the bars where there is one."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from sparroll import progress
from sparroll.progress import Progress, ProgressLines, Stages, duration, say
from sparroll.train.runtime.sinks import ConsoleLine


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written() -> list[str]:
    return []


@pytest.fixture
def lines(clock: Clock, written: list[str]) -> ProgressLines:
    return ProgressLines(written.append, clock)


def test_a_line_says_how_far_the_work_is_and_how_long_it_will_take(
    lines: ProgressLines, clock: Clock, written: list[str]
) -> None:
    on_progress = lines.add("calibrate")
    clock.seconds = 10
    on_progress(0, 400)
    clock.seconds = 40
    on_progress(100, 400, "budget 512: 3/8 rollouts")
    lines.report()
    assert written == ["calibrate: 25%, budget 512: 3/8 rollouts, 40 s so far, about 1 min 30 s left"]


def test_resumed_work_is_as_fast_as_what_it_did_since(lines: ProgressLines, clock: Clock, written: list[str]) -> None:
    on_progress = lines.add("rollouts")
    on_progress(90, 100)
    lines.report()
    clock.seconds = 60
    on_progress(95, 100)
    lines.report()
    assert written == ["rollouts: 90%, 0 s so far", "rollouts: 95%, 1 min 00 s so far, about 1 min 00 s left"]


def test_there_is_a_line_before_anything_is_told(lines: ProgressLines, clock: Clock, written: list[str]) -> None:
    clock.seconds = 30
    lines.report()
    lines.add("train")
    clock.seconds = 60
    lines.report()
    assert written == ["loading, 30 s so far", "train: loading, 30 s so far"]


def test_what_has_ended_is_told_once(lines: ProgressLines, clock: Clock, written: list[str]) -> None:
    first, second = lines.add("budget 128"), lines.add("budget 256")
    first(0, 2)
    second(0, 2)
    clock.seconds = 100
    first(2, 2)
    clock.seconds = 120
    lines.report()
    lines.report()
    assert written == [
        "budget 128: done after 1 min 40 s",
        "budget 256: 0%, 2 min 00 s so far",
        "budget 256: 0%, 2 min 00 s so far",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min 00 s"), (150, "2 min 30 s"), (7500, "2 h 05 min")]
)
def test_durations_are_for_readers(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_log_file_gets_the_lines_and_nothing_is_said_where_silence_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    log = Console(file=io.StringIO(), force_terminal=False)
    with Progress(console=log) as bars:
        bars.bar("train")(1, 4, "step 1/4")
        # The reporter says it as often as it can; one line is enough.
        while "step 1/4" not in capsys.readouterr().err:
            pass
    capsys.readouterr()
    with Progress(quiet=True, console=log) as bars:
        bars.bar("train")(1, 4, "step 1/4")
    assert capsys.readouterr() == ("", "") and log.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_run_s_lines_are_not_glued_to_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(console=Console(file=terminal, force_terminal=True, width=100, color_system=None)) as bars:
        bars.bar("train")(0, 10, "")
        ConsoleLine(10).write(3, {"reward/mean": 0.5}, ["an alarm"])
        say("another line")
    shown = terminal.getvalue().splitlines()
    assert [line for line in shown if line.endswith(("step 3/10  reward 0.500", "  an alarm", "another line"))]
    assert not [line for line in shown if "train" in line and ("reward" in line or "alarm" in line)]


def test_bars_show_a_share_and_no_question_mark() -> None:
    terminal = io.StringIO()
    with Progress(console=Console(file=terminal, force_terminal=True, width=100)) as bars:
        on_progress = bars.bar("evaluate")
        bars._bars.refresh()
        assert "loading" in terminal.getvalue()
        assert "?" not in terminal.getvalue().replace("[?25l", "")
        Stages(on_progress, 4).next("dense ceiling")
        on_progress(150, 400, "budget 512")
    assert "38%" in terminal.getvalue()
    assert "400" not in terminal.getvalue()
