"""Two steps of verl on a CPU in which the dense policy checks every draft, and the loss takes its old log-probabilities from
the checks."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs

from sparroll.integrations import saved_state
from sparroll.integrations.verl.settings import PREFIX
from sparroll.schedule import Schedule


@dataclass
class Finished:
    folder: Path
    steps: list[dict[str, float]]


def long_run(folder: Path) -> Finished:
    runs.write_world(folder)
    verified = {
        f"+{PREFIX}.schedule": str(Schedule.fixed(64).save(folder / "read64.toml")),
        f"+{PREFIX}.verify.window": "16",
        f"+{PREFIX}.verify.dense_logp": "engine",
        f"+{PREFIX}.mismatch.ceiling_prompts": "1",
        f"+{PREFIX}.control_group.share": "0.25",
        f"+{PREFIX}.control_group.share_first": "0.25",
        # So tight that a token whose two log-probabilities differ by more than .001 counts as clipped.
        "actor_rollout_ref.actor.clip_ratio_low": "0.001",
        "actor_rollout_ref.actor.clip_ratio_high": "0.001",
        "trainer.total_training_steps": "2",
        "trainer.save_freq": "1",
    }
    printed = runs.run(folder, runs.overrides(folder) | verified, "verified", standing=True)
    assert (folder / "verified.jsonl").is_file(), printed[-4000:]
    first, second = runs.steps(folder, "verified")
    return Finished(folder, [first, second])


@pytest.fixture(scope="module")
def finished(long_runs: dict[str, Future[Finished]]) -> Finished:
    return long_runs[__name__].result()


@pytest.fixture(scope="module")
def steps(finished: Finished) -> list[dict[str, float]]:
    return finished.steps


def test_every_rollout_but_the_control_group_was_drafted_sparsely_and_checked(steps: list[dict[str, float]]) -> None:
    for step in steps:
        # But for the control group of one rollout of each prompt.
        assert step["rescoring/checked"] == step["rescoring/held"] == runs.ROLLOUTS - runs.PROMPTS
        assert step["rollout/sparse_steps"] > 0
        assert step["check/windows"] >= runs.ROLLOUTS and step["check/floor"] == 0.01
        assert 0 < step["check/cut_share"] < 1
        # No token is less likely under the dense policy than the floor allows: log(1 / 0.01) nats.
        assert step["check/largest_nats"] < 4.61


def test_the_checks_log_probabilities_are_the_trainers_own(steps: list[dict[str, float]]) -> None:
    # Before an update changes anything, the loss compares the policy with itself: with the engine's numbers on one side
    # and the trainer's on the other. In the second step the weights have moved, by some thousandths in the mean over
    # tokens, and arrived.
    assert steps[0]["actor/grad_norm"] > 0
    for step in steps:
        assert "actor/entropy" not in step
        assert abs(step["actor/ppo_kl"]) < 1e-5 and step["actor/pg_clipfrac"] == 0


def test_the_control_groups_drafts_were_dense_and_its_rollouts_compared(steps: list[dict[str, float]]) -> None:
    for step in steps:
        assert step["control/rollouts"] == step["control/share"] * runs.ROLLOUTS == runs.PROMPTS
        dense_tokens = (12 * step["control/step_length_gap"] + step["response_length/mean"] * runs.ROLLOUTS) / 4
        # Each window gives one token behind its drafts, which no decode step drafts.
        assert 0 < step["control/dense_steps"] <= dense_tokens
        assert step["rollout/dense_steps"] >= step["control/dense_steps"]
    assert [step["control/pairs"] for step in steps] == [runs.PROMPTS, 2 * runs.PROMPTS]
    # The checks compare whole distributions, so the ceiling has a measurement of its own, as without a control group.
    assert [step["mismatch/dense_ceiling_step"] for step in steps] == [1, 1]


def test_a_checkpoint_holds_the_ceiling_that_was_measured_after_verl_had_written_it(finished: Finished) -> None:
    saved = saved_state.read(finished.folder / "checkpoints" / "global_step_1", "")
    assert saved["ceiling"]["mismatch/dense_ceiling_step"] == 1
