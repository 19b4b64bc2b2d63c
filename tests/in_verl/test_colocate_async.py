"""Five steps of verl's asynchronous trainer on a CPU, with a controller: requests that span a change of the weights are
dropped and counted, their tokens are told apart by the weights they were sampled with, and the budgets that the controller
moves are those that the replica reads by."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import runs

from sparroll.integrations.verl.settings import PREFIX
from sparroll.schedule import Schedule

Metrics = dict[str, float]


def long_run(folder: Path) -> list[Metrics]:
    runs.write_world(folder)
    asked = runs.overrides(folder, "sparroll_colocate_async") | {
        f"+{PREFIX}.schedule": str(Schedule.fixed(64).save(folder / "read64.toml")),
        # A bin is judged by 8 rollouts with tokens of the new weights. How many such tokens a rollout has depends on how
        # fast the machine trains and samples; enough rollouts of a step or two have some in a bin of 128.
        f"+{PREFIX}.mismatch.bin_tokens": "128",
        f"+{PREFIX}.rescoring.probe_rollouts": "8",
        f"+{PREFIX}.control.by": "controller",
        f"+{PREFIX}.control.target": "0.97",
        # More prompts are under way than a step trains on, so some are when the weights change. Two at a time, the others
        # take longer than the trainer may need to stop them, on a slow machine, too.
        "trainer.v1.colocate_async.num_warmup_batches": "1",
        "actor_rollout_ref.rollout.max_num_seqs": "2",
        "trainer.total_training_steps": "5",
        # A validation that is sampled as training is, so that only what its requests say tells it from training.
        "trainer.test_freq": "3",
        "actor_rollout_ref.rollout.val_kwargs.do_sample": "True",
        "actor_rollout_ref.rollout.val_kwargs.temperature": "1.0",
    }
    printed = runs.run(folder, asked, "async", standing=True)
    assert (folder / "async.jsonl").is_file(), printed[-4000:]
    return runs.steps(folder, "async")


@pytest.fixture(scope="module")
def steps(long_runs: dict[str, Future[list[Metrics]]]) -> list[Metrics]:
    return long_runs[__name__].result()


def test_requests_that_span_a_change_are_dropped_and_counted_and_others_measured(steps: list[Metrics]) -> None:
    parts = ("measured", "not_chosen", "aborted", "weights_changed", "schedule_changed")
    for step in steps:
        assert sum(step[f"rescoring/{part}"] for part in parts) == step["rescoring/held"]
        assert step["rescoring/measured"] <= 8
    assert sum(step["rescoring/aborted"] for step in steps) > 0
    assert max(step["rescoring/measured"] for step in steps) == 8
    # What ended was trained on, but for what is under way at the end; a validation would be 8 rollouts more.
    ended = sum(step["rescoring/measured"] + step["rescoring/not_chosen"] for step in steps)
    assert ended <= (len(steps) + 1) * runs.ROLLOUTS


def test_a_rollout_of_two_weights_is_stale_up_to_the_change(steps: list[Metrics]) -> None:
    spanning = [step for step in steps if step["training/off_policy/trajectory_spans/max"] > 1]
    assert spanning and all(0 < step["staleness/token_share"] < 1 for step in spanning)
    assert steps[0]["staleness/token_share"] == 0


def test_the_controllers_budgets_are_in_force_on_the_replica_with_the_new_weights(steps: list[Metrics]) -> None:
    # A step may train on nothing but rollouts of earlier weights, and says nothing of new ones then.
    first, last = steps[0], [step for step in steps if step["rescoring/measured"]][-1]
    assert first["rollout/dense_steps"] == 0 < first["rollout/sparse_steps"]
    # A step tells the bins in which its rollouts have tokens of the new weights: all of them, unless the machine is slow.
    longest = {0: 127, 128: 255, 256: 288}
    budgets = {start: last.get(f"controller/budget_tokens/{start}-{start + 128}") for start in longest}
    told = {start: budget for start, budget in budgets.items() if budget is not None}
    assert told and all(budget >= longest[start] for start, budget in told.items())
    assert last["rollout/sparse_steps"] == 0 < last["rollout/dense_steps"] and last["rollout/kv_read_share"] == 1
    # Everything is read, so what is left between sampler and trainer is rounding.
    assert abs(last["mismatch/kl_sparse_to_dense"]) < 1e-5
