"""The share of a round that re-scoring takes is that of the same round, by a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import trl_runs
from sparroll.integrations.trl.round_clock import RoundClock

STEP_SECONDS = (60.0, 5.0, 20.0, 40.0)


class Hands(TrainerCallback):  # type: ignore[misc]
    """Steps take STEP_SECONDS, and there is an evaluation of 1,000 s after each of them."""

    seconds = 0.0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += STEP_SECONDS[state.global_step]

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += 7

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += 1000


def shares(folder: Path, **changes: Any) -> list[tuple[float | None, float | None]]:
    """(the share, re-scoring's seconds) that each optimizer step logged."""
    hands = Hands()
    evaluations = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": trl_runs.GROUP}
    trainer = trl_runs.make(folder, changes={"save_strategy": "no"} | evaluations | changes, callbacks=[hands])
    trainer._round_clock = RoundClock(lambda: hands.seconds)
    trainer.train()
    assert sum("eval_loss" in each for each in trainer.state.log_history) == len(STEP_SECONDS)
    history = [each for each in trainer.state.log_history if "loss" in each]
    return [(each.get("rescoring/share_of_step"), each.get("rescoring/seconds")) for each in history]


def test_every_round_logs_the_share_of_its_own_step(tmp_path: Path) -> None:
    found = shares(tmp_path)
    assert len(found) == len(STEP_SECONDS)
    for (share, seconds), step_seconds in zip(found, STEP_SECONDS, strict=True):
        assert seconds is not None and share == pytest.approx(seconds / step_seconds)


def test_a_round_of_two_steps_logs_the_share_of_both_with_the_second(tmp_path: Path) -> None:
    found = shares(tmp_path, num_iterations=2)
    assert [share is None for share, _ in found] == [True, False] * 2
    for (_, seconds), (share, _), took in zip(found[::2], found[1::2], (65.0, 60.0), strict=True):
        assert seconds is not None and share == pytest.approx(seconds / took)
