"""Ctrl-C while the weights move: the first one waits, the second one does not."""

from __future__ import annotations

import os
import signal

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
    assert "finishing the update" in capsys.readouterr().err
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
