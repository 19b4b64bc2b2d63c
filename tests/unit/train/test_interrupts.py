"""Ctrl-C and SIGTERM while something changes: the first one waits, the second one does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from sparroll.train.runtime.interrupts import Interrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_one_waits_for_release(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    interrupts.hold()
    press()
    reached = True
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert reached
    assert signal.getsignal(signal.SIGINT) is before
    assert "finishing what has begun" in capsys.readouterr().err
    interrupts.release()


def test_the_second_one_acts_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    interrupts.hold()
    press()
    with pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is before


def test_without_one_release_puts_the_handler_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    for _ in range(2):
        interrupts.hold()
        interrupts.hold()
        interrupts.release()
        assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def terminable() -> Iterator[None]:
    """SIGTERM interrupts Python, as under the command line."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("terminable")
def test_sigterm_waits_too_where_it_interrupts_as_ctrl_c_does() -> None:
    interrupts = Interrupts()
    interrupts.hold()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_another_handler_of_sigterm_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts()
    interrupts.hold()
    assert signal.getsignal(signal.SIGTERM) is before
    interrupts.restore()
