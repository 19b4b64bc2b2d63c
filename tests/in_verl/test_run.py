"""One run of verl with two replicas on a CPU, killed in its third step and resumed: what is sampled, measured, corrected,
decided, saved and restored. It takes minutes, so all facts share it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import runs

from sparroll.integrations import saved_state
from sparroll.integrations.verl.settings import PREFIX
from sparroll.schedule import Schedule

Metrics = dict[str, float]


@dataclass
class Finished:
    folder: Path
    log: str
    """What the killed run printed."""
    first: Metrics
    second: Metrics
    third: Metrics
    """Of the resumed run."""


def settings(folder: Path) -> dict[str, str]:
    """Sparse rollouts at a budget of 64, with a guard that is sure to go on to a schedule that reads everything."""
    narrow, wide = (Schedule.fixed(budget).save(folder / f"read{budget}.toml") for budget in (64, 512))
    return runs.overrides(folder) | {
        f"+{PREFIX}.schedule": str(narrow),
        f"+{PREFIX}.correction.name": "icepop",
        f"+{PREFIX}.mismatch.bin_tokens": "64",
        f"+{PREFIX}.guard.at_least": "0.9",
        f"+{PREFIX}.control.by": "guard",
        f"+{PREFIX}.control.stricter": f"[{wide}]",
        "trainer.n_gpus_per_node": "2",
        "+ray_kwargs.ray_init.num_gpus": "2",
        "trainer.total_training_steps": "3",
        "trainer.save_freq": "1",
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("verl")
    runs.write_world(folder)
    asked = settings(folder)
    log = runs.run(folder, asked | {"trainer.val_before_train": "True"}, "killed", kill_after_step=2)
    _, first, second, *_ = runs.steps(folder, "killed")
    resumed = runs.run(folder, asked, "resumed")
    assert (folder / "resumed.jsonl").is_file(), resumed[-4000:]
    (third,) = runs.steps(folder, "resumed")
    return Finished(folder, log, first, second, third)


def tokens(step: Metrics) -> int:
    return round(step["response_length/mean"] * runs.ROLLOUTS)


def test_every_decode_step_of_every_replica_was_sparse(run: Finished) -> None:
    # The first token of a response comes from the prefill.
    assert run.first["rollout/sparse_steps"] == tokens(run.first) - runs.ROLLOUTS
    assert run.first["rollout/dense_steps"] == 0
    assert run.first["rollout/kv_read_share"] < 0.7


def test_validation_was_dense_and_is_counted_as_dense(run: Finished) -> None:
    assert run.first["validation/sparse_steps"] == 0 < run.first["validation/dense_steps"]
    assert run.first["validation/kv_read_share"] == 1


def test_the_replicas_measured_every_rollout(run: Finished) -> None:
    for step in (run.first, run.second, run.third):
        assert step["rescoring/measured"] == step["rescoring/held"] == runs.ROLLOUTS
        # A rollout that fills the engine's context has no score of its last token.
        assert tokens(step) - runs.ROLLOUTS <= step["rescoring/measured_tokens"] <= tokens(step)
        assert 0 < step["rescoring/share_of_step"] < 1
    assert run.first["mismatch/acceptance_q05"] < 0.5 and run.first["mismatch/kl_sparse_to_dense"] > 0.1


def test_the_correction_reached_the_loss(run: Finished) -> None:
    dropped = run.first["correction/masked_token_share"]
    assert 0.02 < dropped < 1
    assert run.first["policy/kept_tokens"] == pytest.approx((1 - dropped) * tokens(run.first), abs=1)
    # Every advantage sums to about 0 over its group, so only the weights give a loss before the first update.
    assert abs(run.first["actor/pg_loss"]) > 1e-4


def test_the_guard_moved_the_schedule_on_both_replicas(run: Finished) -> None:
    assert "surely under 0.900" in run.log and "read64 -> read512" in run.log
    assert run.second["rollout/sparse_steps"] == 0
    assert run.second["rollout/dense_steps"] == tokens(run.second) - runs.ROLLOUTS


def test_weights_really_arrive(run: Finished) -> None:
    # Under a schedule that reads everything, the replicas and the trainer are the same policy after a real update.
    assert run.first["actor/grad_norm"] > 0 and run.first["actor/lr"] > 0
    for step in (run.second, run.third):
        assert abs(step["mismatch/kl_sparse_to_dense"]) < 1e-5 and abs(step["rollout_corr/kl"]) < 1e-5
        assert step["correction/weight_mean"] == pytest.approx(1, abs=1e-3)
        # Both leave out the mass outside lists of 20 tokens, which differs a little from rollout to rollout.
        assert step["mismatch/acceptance_q05"] == pytest.approx(step["mismatch/dense_ceiling_q05"], abs=1e-2)


def test_a_killed_run_goes_on_where_its_checkpoint_was(run: Finished) -> None:
    checkpoints = [saved_state.read(run.folder / "checkpoints" / f"global_step_{step}", "") for step in (1, 2, 3)]
    assert [each["schedule"]["name"] for each in checkpoints] == ["read512"] * 3
    guards = [each["watchers"]["guard"] for each in checkpoints]
    assert [each["switches"] for each in guards] == [1, 1, 1]
    steps = [{int(name.partition("/")[0]) for name in each if "/" in name} for each in guards]
    # The alarm of step 1 emptied the window; the resumed run has added step 3 to what was saved of step 2.
    assert steps == [set(), {2}, {2, 3}]
    assert run.third["training/global_step"] == 3 and run.third["rollout/sparse_steps"] == 0
    assert run.third["mismatch/dense_ceiling_step"] == 1
