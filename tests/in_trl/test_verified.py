"""Verified rollouts in TRL: one setting, and the checks say how far every token is from dense."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import trl_runs
from sparroll.control.control_group import dense_flags
from sparroll.draft_check import DraftCheck
from sparroll.integrations.trl import SparseRollouts
from trl_runs import GROUP, GROUP_OF_CONTROL, MISMATCH, ROLLOUTS, START, Observed

FLOOR = 0.05


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """At temperature 0.9, which checks measure and re-scoring could not."""
    folder: Path = tmp_path_factory.mktemp("verified")
    verify = DraftCheck(16, FLOOR)
    sparse = SparseRollouts(START, correction="tis", verify=verify, mismatch=MISMATCH, **GROUP_OF_CONTROL)
    return trl_runs.train(folder, sparse=sparse, changes={"max_steps": 2, "temperature": 0.9, "save_strategy": "no"})


def test_the_acceptance_is_the_checks_own_and_nothing_is_read_again(verified: Observed) -> None:
    for number, (step, batch) in enumerate(zip(verified.history, verified.batches, strict=True), 1):
        sparse_B = ~torch.tensor(dense_flags(0, number, ROLLOUTS // GROUP, GROUP, 1 / 4))
        assert step["rescoring/checked"] == step["rescoring/measured"] == ROLLOUTS - step["control/rollouts"]
        assert step["rescoring/measured_tokens"] == int(batch["completion_mask"][sparse_B].sum())
        assert step["rescoring/read_tokens"] == 0
        assert step["check/windows"] > 0 and step["check/window_tokens"] == 16 and step["check/floor"] == FLOOR
        assert step["mismatch/acceptance_mean"] >= step["check/draft_acceptance_mean"]
        assert "mismatch/dense_ceiling_q05" not in step
        assert step["control/dense_steps"] > 0 and step["control/pairs"] == number * ROLLOUTS // GROUP


def test_no_token_is_less_likely_under_the_trainers_policy_than_the_floor_allows(verified: Observed) -> None:
    for step, batch in zip(verified.history, verified.batches, strict=True):
        off = (batch["sampling_per_token_logps"] - batch["old_per_token_logps"])[batch["completion_mask"].bool()]
        # The control group's tokens are the dense policy's own.
        assert 0.01 < float(off.max()) <= math.log(1 / FLOOR) + 1e-3
        assert step["check/largest_nats"] == pytest.approx(float(off.max()), abs=1e-3)


def test_an_evaluation_on_the_same_engine_is_dense(verified: Observed) -> None:
    report = verified.trainer.evaluate()
    assert report["eval_rollout/sparse_steps"] == 0 < report["eval_rollout/dense_steps"]
    assert report["eval_sampling/sampling_logp_difference/max"] < 1e-4


def test_a_guard_that_changes_to_dense_rollouts_lets_the_run_go_on(tmp_path: Path) -> None:
    """Nothing is checked then, so nothing is measured."""
    sparse = SparseRollouts(
        START,
        correction="tis",
        verify=DraftCheck(16, FLOOR),
        mismatch=MISMATCH,
        guard={"at_least": 0.9999, "window_steps": 1},
        control={"by": "guard", "stricter": ["dense"]},
    )
    run = trl_runs.train(tmp_path, sparse=sparse, changes={"max_steps": 3, "save_strategy": "no"})
    drafted = [step["rollout/sparse_steps"] for step in run.history]
    assert drafted[0] > 0 == drafted[-1] and len(drafted) == 3
    assert run.history[-1]["rescoring/measured"] == 0
