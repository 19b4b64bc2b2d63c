"""A run that is killed goes on from TRL's checkpoint as if nothing had happened, guard and controller included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trl_runs
from sparroll import Schedule
from sparroll.errors import UserError
from sparroll.integrations import saved_state
from sparroll.integrations.trl import SparseRollouts
from sparroll.integrations.trl.engine import SparseLLM
from sparroll.types import Rollout
from trl_runs import KILLED_IN_STEP, START, STEPS, Observed


def test_a_killed_run_resumes_with_the_same_steps_and_the_same_decisions(run: Observed, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(trl_runs.__file__)), str(tmp_path), "kill"]
    killed = subprocess.run(command, env=trl_runs.environment(), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert sorted(each.name for each in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    resumed = trl_runs.train(tmp_path, resume=True)
    assert len(resumed.batches) == STEPS - KILLED_IN_STEP + 1
    for found, expected in zip(map(_untimed, resumed.history), map(_untimed, run.history), strict=True):
        # The largest difference between trainer and engine is nothing but rounding, which may differ between processes.
        largest = "sampling/sampling_logp_difference/max"
        assert found.pop(largest, 0.0) == pytest.approx(expected.pop(largest, 0.0), abs=1e-4)
        # A token that is drawn otherwise would show in every figure.
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    last = f"checkpoint-{STEPS}"
    found, expected = (_plain(folder / last) for folder in (tmp_path, Path(run.trainer.args.output_dir)))
    # Rewards, lengths and bets are the same to the bit. A log-probability may be rounded otherwise in another process.
    assert _surprisals(found) == pytest.approx(_surprisals(expected), abs=1e-5)
    assert found == expected
    assert resumed.trainer.sparse_rounds.schedule == run.trainer.sparse_rounds.schedule


def _untimed(step: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step.items() if not _is_time(name)}


def _is_time(name: str) -> bool:
    return "seconds" in name or "time" in name or name == "rescoring/share_of_step"


def _plain(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / saved_state.PLAIN).read_text())
    return {name: table[name] for name in ("rounds", "schedule", "stopped", "watchers", "settings")}


def _surprisals(state: dict[str, Any]) -> list[float]:
    """Those of the control group's pairs, which are taken out of the state."""
    pairs = state["watchers"]["guard"]["reward_gap"]["pairs"]
    assert len(pairs) == 2 * STEPS, "two prompts with one dense rollout each in every step"
    return [differences.pop("surprisal")[1] for _, _, _, differences, _ in pairs]


def test_other_settings_are_refused_on_resume(run: Observed, tmp_path: Path) -> None:
    other = trl_runs.make(tmp_path, sparse=SparseRollouts(START, correction="tis", mismatch=trl_runs.MISMATCH))
    checkpoint = str(Path(run.trainer.args.output_dir) / "checkpoint-2")
    with pytest.raises(UserError, match='control.by = "controller", and control.by = "nobody" is asked') as refused:
        other.train(resume_from_checkpoint=checkpoint)
    assert "correction.name" in refused.value.message
    assert "leave resume_from_checkpoint out" in str(refused.value.hint)


def test_a_guard_that_stops_ends_the_run_with_a_checkpoint_that_says_so(run: Observed, tmp_path: Path) -> None:
    sparse = SparseRollouts(
        START, guard={"action": "stop", "at_least": 0.97, "window_steps": 2}, mismatch=trl_runs.MISMATCH
    )
    trainer = trl_runs.make(tmp_path, sparse=sparse, changes={"save_steps": 100})
    trainer.train()
    assert 0 < trainer.state.global_step < STEPS
    assert "stopped" in trainer.sparse_events[-1]
    checkpoint = tmp_path / f"checkpoint-{trainer.state.global_step}"
    assert saved_state.read(checkpoint, "")["stopped"] == trainer.sparse_rounds.stopped != ""
    again = trl_runs.make(tmp_path, sparse=sparse)
    with pytest.raises(UserError, match="this run was stopped"):
        again.train(resume_from_checkpoint=True)


def test_a_checkpoint_without_our_state_is_refused(run: Observed, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not written by a run with sparroll"):
        saved_state.read(tmp_path, "start anew")


def test_a_guards_next_schedule_must_fit_the_engine_before_it_starts(tmp_path: Path) -> None:
    other = Schedule.fixed(128, dense_layers=(0, 1, 2)).inline()
    guard = {"at_least": 0.9}
    sparse = SparseRollouts(START, guard=guard, control={"by": "guard", "stricter": [other]})
    with pytest.raises(UserError, match="dense layers"):
        trl_runs.make(tmp_path, sparse=sparse)


def test_the_guard_goes_on_with_the_next_schedule_and_only_the_probe_has_lists(
    run: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = SparseRollouts(
        START,
        guard={"at_least": 0.97, "window_steps": 2},
        control={"by": "guard", "stricter": [Schedule.fixed(128).inline(), "dense"]},
        mismatch=trl_runs.MISMATCH,
        probe_rollouts=8,
    )
    held: list[int] = []
    hold = SparseLLM._hold

    def keep(self: SparseLLM, rollouts: list[Rollout], names: list[str]) -> None:
        held.append(sum(rollout.top_k is not None for rollout in rollouts))
        hold(self, rollouts, names)

    monkeypatch.setattr(SparseLLM, "_hold", keep)
    # Two micro batches of 6 make a step; they are sampled together.
    changes = {
        "save_strategy": "no",
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
    }
    observed = trl_runs.train(tmp_path, sparse=sparse, changes=changes)
    assert [len(batch["advantages"]) for batch in observed.batches] == [12] * 3
    assert observed.steps("rescoring/measured") == [8] * 3 and observed.steps("rescoring/not_chosen") == [4] * 3
    # The first ones are those of the dense ceiling.
    assert held == [2, 8, 8, 8]
    ceilings = observed.steps("time/sparroll_ceiling_seconds")
    assert ceilings[0] > 0 and ceilings[1:] == [0.0, 0.0]
    assert not any(name.startswith("control/") for name in observed.history[-1])
    report = observed.trainer.evaluate()
    # The evaluation's own rollouts are the next ceiling.
    assert report["eval_rollout/sparse_steps"] == 0
    assert observed.trainer.sparse_rounds.ceiling["mismatch/dense_ceiling_step"] == 3
    said = " ".join(observed.trainer.sparse_events)
    assert "fixed-64 -> fixed-128" in said
    shares = observed.steps("rollout/kv_read_share")
    assert shares[0] < shares[-1]
