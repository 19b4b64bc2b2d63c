"""One run of verl with two replicas and a control group on a CPU, killed in its third step and resumed: what is sampled,
measured, corrected, compared, decided, saved and restored. It takes minutes, so all facts share it."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import runs
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from sparroll.control.control_group import dense_flags
from sparroll.errors import UserError
from sparroll.integrations import saved_state
from sparroll.integrations.verl import refusals
from sparroll.integrations.verl.settings import PREFIX, RunFacts, SparseSettings
from sparroll.schedule import Schedule

Metrics = dict[str, float]
SAMPLES = 8
"""Rollouts of each prompt: so many that the guard is sure of the low tail after one step. With 12 sparse ones it was not
always, as some may end after a few tokens."""
ROLLOUTS = runs.PROMPTS * SAMPLES
CONTROLS, SEED = 4, 3
"""Rollouts of the control group in each step, one of each prompt, and the seed that draws them."""
SPARSE = ROLLOUTS - CONTROLS


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
        "actor_rollout_ref.rollout.n": str(SAMPLES),
        f"+{PREFIX}.schedule": str(narrow),
        f"+{PREFIX}.correction.name": "icepop",
        f"+{PREFIX}.rescoring.probe_rollouts": "null",
        f"+{PREFIX}.mismatch.bin_tokens": "64",
        f"+{PREFIX}.guard.at_least": "0.9",
        f"+{PREFIX}.control.by": "guard",
        f"+{PREFIX}.control.stricter": f"[{wide}]",
        f"+{PREFIX}.control_group.share": str(CONTROLS / ROLLOUTS / 2),
        f"+{PREFIX}.control_group.share_first": str(CONTROLS / ROLLOUTS),
        f"+{PREFIX}.control_group.seed": str(SEED),
        "trainer.rollout_data_dir": str(folder / "rollouts"),
        "trainer.n_gpus_per_node": "2",
        "+ray_kwargs.ray_init.num_gpus": "2",
        # One process less for each replica. The verified run has vLLM's worker in a process of its own.
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "uni",
        "trainer.total_training_steps": "3",
        "trainer.save_freq": "1",
    }


def long_run(folder: Path) -> Finished:
    runs.write_world(folder)
    asked = settings(folder)
    log = runs.run(folder, asked | {"trainer.val_before_train": "True"}, "killed", kill_after_step=2)
    _, first, second, *_ = runs.steps(folder, "killed")
    resumed = runs.run(folder, asked, "resumed")
    assert (folder / "resumed.jsonl").is_file(), resumed[-4000:]
    (third,) = runs.steps(folder, "resumed")
    return Finished(folder, log, first, second, third)


@pytest.fixture(scope="module")
def run(long_runs: dict[str, Future[Finished]]) -> Finished:
    return long_runs[__name__].result()


def tokens(step: Metrics) -> int:
    return round(step["response_length/mean"] * ROLLOUTS)


def control_tokens(step: Metrics) -> int:
    """Response tokens of the control group: each prompt has one dense rollout, so the step's gap is D / 4 - S / 28."""
    return round((SPARSE * step["control/step_length_gap"] + tokens(step)) / SAMPLES)


def rewards(run: Finished, number: int) -> list[list[float]]:
    """verl's own record of a step's rewards, prompt by prompt in the order of the data, sample by sample."""
    lines = (run.folder / "rollouts" / f"{number}.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        prompt, sample, _ = line["uid"].rsplit("_", 2)
        found[prompt, int(sample)] = line["input"], line["score"]
    texts = [prompt[0]["content"] for prompt in pd.read_parquet(run.folder / "train.parquet")["prompt"]]
    order = texts[(number - 1) * runs.PROMPTS : number * runs.PROMPTS]
    names = {text: name for (name, _), (text, _) in found.items()}
    return [[found[_named(names, text), sample][1] for sample in range(SAMPLES)] for text in order]


def _named(names: dict[str, str], text: str) -> str:
    # verl cuts a long prompt at its left.
    (name,) = [name for shown, name in names.items() if text.strip().endswith(shown.strip())]
    return name


def gaps(run: Finished, number: int) -> list[float]:
    """Reward of each prompt's dense rollout minus the mean of its sparse ones, by the draw of our own loop."""
    flags = dense_flags(SEED, number, runs.PROMPTS, SAMPLES, CONTROLS / ROLLOUTS)
    found = []
    for place, row in enumerate(rewards(run, number)):
        dense = flags[place * SAMPLES : (place + 1) * SAMPLES].index(True)
        found.append(row[dense] - (sum(row) - row[dense]) / (SAMPLES - 1))
    return found


def test_every_decode_step_of_every_replica_was_sparse_but_those_of_the_control_group(run: Finished) -> None:
    # The first token of a response comes from the prefill.
    dense = control_tokens(run.first) - CONTROLS
    assert run.first["control/rollouts"] == CONTROLS
    assert run.first["control/dense_steps"] == run.first["rollout/dense_steps"] == dense > 0
    assert run.first["rollout/sparse_steps"] == tokens(run.first) - ROLLOUTS - dense
    assert run.first["rollout/kv_read_share"] < 0.8


def test_the_reward_gap_is_that_of_verls_own_record_by_our_own_loops_draw(run: Finished) -> None:
    for number, step in enumerate((run.first, run.second, run.third), 1):
        assert step["control/share"] == CONTROLS / ROLLOUTS
        assert step["control/step_reward_gap"] == pytest.approx(sum(gaps(run, number)) / CONTROLS, abs=1e-9)
    # A switch of the schedule begins anew; the resumed run pools its step with the one before the checkpoint.
    assert [step["control/pairs"] for step in (run.first, run.second, run.third)] == [4, 4, 8]
    pooled = sum(gaps(run, 2) + gaps(run, 3)) / (2 * CONTROLS)
    assert run.third["control/reward_gap"] == pytest.approx(pooled, abs=1e-9)
    assert run.third["control/reward_gap_low"] < pooled < run.third["control/reward_gap_high"]


def test_validation_was_dense_and_is_counted_as_dense(run: Finished) -> None:
    assert run.first["validation/sparse_steps"] == 0 < run.first["validation/dense_steps"]
    assert run.first["validation/kv_read_share"] == 1


def test_the_replicas_measured_every_sparse_rollout(run: Finished) -> None:
    for step in (run.first, run.second, run.third):
        # The tail is that of the sparse ones.
        assert step["rescoring/measured"] == step["rescoring/held"] == SPARSE
        # A rollout that fills the engine's context has no score of its last token.
        sparse = tokens(step) - control_tokens(step)
        assert sparse - SPARSE <= step["rescoring/measured_tokens"] <= sparse
        assert 0 < step["rescoring/share_of_step"] < 1
    assert run.first["mismatch/acceptance_q05"] < 0.5 and run.first["mismatch/kl_sparse_to_dense"] > 0.1


def test_the_correction_reached_the_loss(run: Finished) -> None:
    dropped = run.first["correction/masked_token_share"]
    assert 0.02 < dropped < 1
    assert run.first["policy/kept_tokens"] == pytest.approx((1 - dropped) * tokens(run.first), abs=1)
    # The advantages sum to 0 over each group. So before the first update, rollouts of one length have no loss but for the
    # weights and for rounding, which is some 1e-8. What the weights give has either sign, so it may be small by chance.
    assert abs(run.first["actor/pg_loss"]) > 1e-6


def test_the_guard_moved_the_schedule_on_both_replicas(run: Finished) -> None:
    assert "surely under 0.900" in run.log and "read64 -> read512" in run.log
    assert run.second["rollout/sparse_steps"] == 0
    assert run.second["rollout/dense_steps"] == tokens(run.second) - ROLLOUTS


def test_weights_really_arrive(run: Finished) -> None:
    # Under a schedule that reads everything, the replicas and the trainer are the same policy after a real update.
    assert run.first["actor/grad_norm"] > 0 and run.first["actor/lr"] > 0
    for step in (run.second, run.third):
        # The largest difference of any token's probability; with weights that stay behind it is some hundredths.
        assert step["training/rollout_probs_diff_max"] < 1e-4
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


def test_a_checkpoint_is_not_resumed_with_other_settings(run: Finished) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        given = settings(run.folder) | {f"+{PREFIX}.guard.at_least": "0.8"}
        asked = [f"{name}={value}" for name, value in given.items() if not name.startswith("hydra")]
        config: Any = OmegaConf.to_container(compose("ppo_trainer", overrides=asked), resolve=True)
    other = SparseSettings.read(refusals.settings_of(config), RunFacts.of(config))
    folder = run.folder / "checkpoints" / "global_step_2"
    with pytest.raises(UserError, match=r"guard\.at_least.*0\.9.*0\.8") as refused:
        saved_state.read(folder, "start anew", other.table(), in_their_words=other.in_their_words)
    assert refused.value.hint == "go on with the old value, or start anew"


def test_the_control_group_goes_on_where_its_checkpoint_was(run: Finished) -> None:
    states = [saved_state.read(run.folder / "checkpoints" / f"global_step_{step}", "")["watchers"] for step in (2, 3)]
    before, after = (each["guard"]["reward_gap"] for each in states)
    assert after["pairs"][: len(before["pairs"])] == before["pairs"]
    assert [pair[:2] for pair in after["pairs"]] == [[step, number] for step in (2, 3) for number in range(4)]


def test_the_dense_ceiling_is_that_of_the_control_group(run: Finished) -> None:
    # Before the step's update, and with dense log-probabilities on both sides.
    assert [step["mismatch/dense_ceiling_step"] for step in (run.first, run.second, run.third)] == [0, 1, 2]
    assert run.first["mismatch/dense_ceiling_q05"] > 0.95 > run.first["mismatch/acceptance_q05"]
    assert run.first["time/sparroll_ceiling_seconds"] == 0
