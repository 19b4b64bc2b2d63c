"""A control group of dense rollouts in whole runs of a random tiny model: who is decoded densely, what is measured on which
rollouts, what the guard does about a gap, and that a resumed run goes on to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integration.train_runs import DYNAMIC, SHORT, assert_same_run, short_config, steps
from mixed_requests import of_kind
from sparroll.control.control_group import dense_flags
from sparroll.engines.hf.engine import HFEngine
from sparroll.report import collect
from sparroll.train import TrainConfig, train
from sparroll.train.config.file import config_from
from sparroll.train.loop import Trainer
from sparroll.train.sampling.control_group import in_control_group
from sparroll.train.setup import open_run
from sparroll.types import Prompt, Rollout, TokenScores

SEED = 3
GROUP = {"control_share": 0.125, "control_share_first": 0.25, "control_first_steps": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "rollout": GROUP,
    "mismatch": {"ceiling_every_steps": 1},
    "evaluate": {"prompts": 0},
}


@dataclass
class Call:
    """One call of the engine's `generate`."""

    n: int
    dense: list[bool] | None
    rollouts: list[Rollout]


@pytest.fixture(scope="module")
def calls() -> Iterator[list[Call]]:
    """Every call of `generate`, newest last; tests clear it."""
    original, seen = HFEngine.generate, []

    def generate(self: HFEngine, prompts: Any, n: int = 1, **kwargs: Any) -> list[Rollout]:
        rollouts = original(self, prompts, n, **kwargs)
        seen.append(Call(n, kwargs.get("dense"), [replace(each) for each in rollouts]))
        return rollouts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFEngine, "generate", generate)
        yield seen


@pytest.fixture(scope="module")
def straight(model: str, calls: list[Call], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    """Four steps, and what its engine was asked for."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    calls.clear()
    train(short_config(model, **CHANGES), out)
    return out, list(calls)


def rewarded_if_dense(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
    """As large a gap as there can be."""
    return float(in_control_group(rollout))


def test_flags_reach_the_engine_and_there_are_no_other_dense_rollouts(straight: tuple[Path, list[Call]]) -> None:
    _, of_run = straight
    assert len(of_run) == 4
    for number, call in enumerate(of_run, 1):
        assert call.dense == dense_flags(SEED, number, 4, 4, 0.25)
        assert sum(call.dense) == 4
        for rollout, dense in zip(call.rollouts, call.dense, strict=True):
            assert in_control_group(rollout) == dense
            if dense:
                assert (rollout.attention, rollout.kv_read_share) == ("dense", 1.0)
    assert any(rollout.attention == "sparse" for call in of_run for rollout in call.rollouts)


def test_what_sparse_rollouts_read_is_told_apart_from_what_all_do(straight: tuple[Path, list[Call]]) -> None:
    out, of_run = straight
    for line, call in zip(steps(out), of_run, strict=True):
        sparse = [rollout for rollout in call.rollouts if not in_control_group(rollout)]
        # Decode steps read all tokens before the one that they sample, the prompt's end without them.
        contexts = [sum(len(each.prompt_ids) + at for at in range(1, len(each.response_ids))) for each in sparse]
        read = sum(each.kv_read_share * context for each, context in zip(sparse, contexts, strict=True))
        assert line["control/sparse_kv_read_share"] == pytest.approx(read / sum(contexts), rel=1e-6)
        assert line["control/sparse_kv_read_share"] < line["rollout/kv_read_share"] < 1


def test_the_tail_is_that_of_sparse_rollouts_and_the_ceiling_that_of_the_control_group(
    straight: tuple[Path, list[Call]],
) -> None:
    out, of_run = straight
    for line, call in zip(steps(out), of_run, strict=True):
        tokens = [len(rollout.response_ids) for rollout in call.rollouts]
        sparse = [count for count, rollout in zip(tokens, call.rollouts, strict=True) if not in_control_group(rollout)]
        assert sum(line[name] for name in line if name.startswith("mismatch/tokens/")) == sum(sparse)
        assert line["mismatch/dense_ceiling_step"] == line["step"] - 1
        # All of them are sampled, trained on and counted.
        assert line["rollout/count"] == 16 and line["control/rollouts"] == 4
        assert line["policy/kept_tokens"] == sum(tokens)
        of_dense = sum(rollout.attention == "dense" for rollout in call.rollouts)
        assert line["rollout/sparse_share"] == 1 - of_dense / 16
    first = steps(out)[0]
    assert first["mismatch/dense_ceiling_q05"] > first["mismatch/acceptance_q05"] + 0.02
    state = json.loads((out / "checkpoints/step-000004/state.json").read_text())
    assert state["dense_ceiling"]["mismatch/dense_ceiling_step"] == 3


def test_dense_scores_of_the_control_group_move_neither_the_tail_nor_the_distance(model: str, tmp_path: Path) -> None:
    reports = {}
    for shift in (0.0, -1.0):
        trainer = Trainer(open_run(short_config(model, **CHANGES), tmp_path / f"run{shift}", resume=False))
        score = trainer.score

        def shifted(rollouts: list[Rollout], shift: float = shift, score: Any = score) -> list[TokenScores]:
            pairs = zip(rollouts, score(rollouts), strict=True)
            return [replace(one, logp=one.logp + shift * in_control_group(rollout)) for rollout, one in pairs]

        trainer.score = shifted  # type: ignore[method-assign]
        reports[shift] = trainer.step()
        trainer.interrupts.release()
        trainer.parts.close()
    same, other = reports.values()
    assert same["correction/weight_mean"] != other["correction/weight_mean"]
    for name in same:
        if name.startswith(("mismatch/acceptance", "mismatch/kl", "mismatch/tokens")):
            assert same[name] == other[name], name


def test_gaps_are_logged_and_summed_up_in_the_result(straight: tuple[Path, list[Call]]) -> None:
    out, of_run = straight
    logged = steps(out)
    for line, call in zip(logged, of_run, strict=True):
        assert line["control/pairs"] == 4 * line["step"]
        # Each prompt has one dense rollout, so all weights are equal.
        dense = [len(each.response_ids) for each in call.rollouts if in_control_group(each)]
        sparse = [len(each.response_ids) for each in call.rollouts if not in_control_group(each)]
        difference = sum(dense) / 4 - sum(sparse) / 12
        assert line["control/step_length_gap"] == pytest.approx(difference)
        assert {f"control/{figure}_gap" for figure in ("reward", "length", "truncated", "surprisal")} < line.keys()
    last = logged[-1]
    assert last["control/reward_gap_low"] < last["control/reward_gap"] < last["control/reward_gap_high"]
    results = json.loads((out / "result.json").read_text())["results"]
    assert results["reward_gap"] == last["control/reward_gap"]
    assert results["reward_gap_high"] == last["control/reward_gap_high"]
    (run,) = collect(out).runs
    assert [point.step for point in run.reward_gap] == [1, 2, 3, 4]
    # Its guard is off, so no gap raises an alarm.
    assert run.config["guard"]["action"] == "off" and run.tolerated_gap is None


@pytest.mark.parametrize("kind", ["plain", "dynamic"])
def test_a_run_cut_in_the_middle_of_the_window_goes_on_to_the_bit(
    kind: str, model: str, straight: tuple[Path, list[Call]], tmp_path: Path
) -> None:
    changes, out = CHANGES, straight[0]
    if kind == "dynamic":
        changes, out = DYNAMIC | {"rollout": DYNAMIC["rollout"] | GROUP}, tmp_path / "long"
        train(short_config(model, **changes), out)
    train(short_config(model, **changes, train={"steps": 2}), tmp_path / "cut")
    train(short_config(model, **changes), tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "cut", out)
    one, other = (load_file(run / "checkpoints/step-000004/watchers.safetensors") for run in (tmp_path / "cut", out))
    assert one.keys() == other.keys() and any(key.startswith("dense_ceiling/4/") for key in one)
    assert all(one[key].equal(other[key]) for key in one)


def test_without_a_share_nothing_is_kept_logged_or_asked_for(model: str, calls: list[Call], tmp_path: Path) -> None:
    calls.clear()
    result = train(short_config(model, **SHORT), tmp_path / "run")
    assert [call.dense for call in calls] == [None] * 3
    assert not any(name.startswith("control/") for line in steps(tmp_path / "run") for name in line)
    state = json.loads((tmp_path / "run/checkpoints/step-000002/state.json").read_text())
    assert set(state["watchers"]) == {"guard", "empty_steps", "unrewarded_steps"}
    assert "reward_gap" not in state["watchers"]["guard"]
    assert result.reward_gap is None


def test_groups_that_dynamic_sampling_drops_are_compared_too(model: str, calls: list[Call], tmp_path: Path) -> None:
    calls.clear()
    changes = DYNAMIC | {"rollout": DYNAMIC["rollout"] | GROUP}
    trainer = Trainer(open_run(short_config(model, **changes), tmp_path / "run", resume=False))
    report = trainer.step()
    trainer.interrupts.release()
    assert trainer.parts.control_group is not None
    assert report["groups/sampled"] > report["groups/kept"] == 4
    drawn, expected = 0, []
    for call in calls:
        prompts = len(call.rollouts) // 4
        flags = dense_flags(SEED, 1, prompts, 4, 0.25, first_prompt=drawn)
        assert call.dense == flags
        expected += [drawn + place for place in range(prompts) if any(flags[4 * place : 4 * place + 4])]
        drawn += prompts
    assert len(calls) > 1
    assert [pair.number for pair in trainer.parts.control_group.pairs()] == expected
    assert report["control/pairs"] == len(expected) > 4


ALARMED: dict[str, dict[str, Any]] = SHORT | {
    "train": {"steps": 4},
    "reward": {"terms": [{"use": "integration.test_train_control_group:rewarded_if_dense"}]},
    "rollout": {"max_new_tokens": 30, "control_share": 0.5, "control_share_first": 0.5},
}


def alarmed(model: str, **changes: dict[str, Any]) -> TrainConfig:
    return short_config(model, **ALARMED | changes)


def test_a_reward_gap_stops_the_run(model: str, tmp_path: Path) -> None:
    result = train(alarmed(model, guard={"action": "stop"}), tmp_path / "run")
    assert 2 <= result.steps < 4
    assert "sparse rollouts get less reward than dense ones of the same prompts: by 1.000" in result.stopped
    (run,) = collect(tmp_path / "run").runs
    assert len(run.alarms) == 1


def test_a_reward_gap_is_a_warning_by_default_and_none_where_it_is_tolerated(model: str, tmp_path: Path) -> None:
    result = train(alarmed(model, guard={"action": "warn"}), tmp_path / "run")
    assert result.steps == 4 and not result.stopped
    assert any("surely and by more than the tolerated 0.05" in event for event in result.events)
    tolerant = train(alarmed(model, guard={"action": "warn", "reward_gap": 2.0}), tmp_path / "tolerant")
    assert not any("less reward" in event for event in tolerant.events)
    assert tolerant.reward_gap == 1


def test_a_reward_gap_moves_the_run_to_the_next_schedule_and_dense_rollouts_end_the_control_group(
    model: str, calls: list[Call], tmp_path: Path
) -> None:
    calls.clear()
    config = alarmed(model, guard={"action": "warn"}, control={"by": "guard", "stricter": ["dense"]})
    result = train(config, tmp_path / "run")
    (event,) = (event for event in result.events if "less reward" in event)
    assert event.endswith("-> dense")
    switched = int(event.partition(":")[0].removeprefix("step "))
    for line in steps(tmp_path / "run"):
        assert ("control/share" in line) == (line["step"] <= switched)
        assert (line["rollout/sparse_share"] == 0) >= (line["step"] > switched)
    assert [call.dense is None for call in calls] == [number > switched for number in range(1, 5)]
    assert result.dense_ceiling_q05 == steps(tmp_path / "run")[-1]["mismatch/acceptance_q05"]


def test_a_correction_that_reads_lists_has_those_of_the_control_group_too(model: str, tmp_path: Path) -> None:
    changes = SHORT | {"rollout": SHORT["rollout"] | GROUP, "correction": {"name": "jackpot"}}
    trainer = Trainer(open_run(short_config(model, **changes), tmp_path / "run", resume=False))
    report = trainer.step()
    trainer.interrupts.release()
    assert report["control/rollouts"] == 4
    assert 0.5 < report["correction/accepted_mass_mean"] <= 1


def test_where_drafts_are_checked_their_figures_are_of_sparse_drafts_and_the_ceiling_has_its_own_rollouts(
    model: str, calls: list[Call], tmp_path: Path
) -> None:
    calls.clear()
    changes = SHORT | {"rollout": SHORT["rollout"] | GROUP, "check": {"window_tokens": 16, "floor": 0.1}}
    trainer = Trainer(open_run(short_config(model, **changes), tmp_path / "run", resume=False))
    report = trainer.step()
    trainer.interrupts.release()
    ceiling, sampled = calls
    assert ceiling.dense is None and sampled.dense == dense_flags(SEED, 1, 4, 4, 0.25)
    sparse = [each for each in sampled.rollouts if not in_control_group(each)]
    drafts = torch.cat([each.draft_acceptance for each in sparse if each.draft_acceptance is not None])
    assert report["check/draft_acceptance_mean"] == pytest.approx(float(drafts.mean()))
    exact = torch.cat([each.acceptance for each in sparse if each.acceptance is not None])
    assert report["mismatch/acceptance_mean"] == pytest.approx(float(exact.mean()), abs=1e-6)
    assert report["mismatch/dense_ceiling_step"] == 0


def test_sparse_rollouts_have_a_control_group_where_nothing_is_said_of_one(model: str, tmp_path: Path) -> None:
    table = short_config(model, **SHORT).model_dump(mode="json")
    del table["rollout"]["control_share"]
    train(config_from(table), tmp_path / "run")
    taken = steps(tmp_path / "run")
    # A quarter of 16 rollouts in the first steps.
    assert [(step["control/share"], step["control/rollouts"]) for step in taken] == [(0.25, 4.0)] * 2
    assert ["0.03125 of the rollouts are dense" in step.get("events", [""])[0] for step in taken] == [True, False]
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert recorded["rollout"]["control_share"] == 1 / 32
    adapted = table | {"distill": {"lr": 1e-3, "rank": 4}}
    train(config_from(adapted), tmp_path / "adapted")
    first, *_ = steps(tmp_path / "adapted")
    assert "control/rollouts" not in first
    assert "no control group, so what sparsity costs in reward is not measured: the engine holds" in first["events"][0]


# -- under a compression -------------------------------------------------------------------------------------------------

EVICTING: dict[str, dict[str, Any]] = {
    "attention": {"kind": "compression", "policy": "snap_kv", "budget_tokens": 24, "every_tokens": 16},
}


@pytest.fixture(scope="module")
def evicted(model: str, calls: list[Call], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    """The same four steps under a compression."""
    out = tmp_path_factory.mktemp("runs") / "evicted"
    calls.clear()
    train(short_config(model, **CHANGES, **EVICTING), out)
    return out, list(calls)


def test_a_compression_has_a_control_group_of_which_nothing_is_evicted(evicted: tuple[Path, list[Call]]) -> None:
    out, of_run = evicted
    # No rollouts for the ceiling alone: the control group's are taken.
    assert len(of_run) == 4
    for line, (number, call) in zip(steps(out), enumerate(of_run, 1), strict=True):
        assert call.dense == dense_flags(SEED, number, 4, 4, 0.25)
        assert [in_control_group(rollout) for rollout in call.rollouts] == call.dense
        kinds = {flag: {each.attention for each in of_kind(call.rollouts, call.dense, flag)} for flag in (True, False)}
        assert kinds[True] == {"dense"} and "evicted" in kinds[False]
        tokens = [len(rollout.response_ids) for rollout in of_kind(call.rollouts, call.dense, False)]
        assert sum(line[name] for name in line if name.startswith("mismatch/tokens/")) == sum(tokens)
        assert line["control/rollouts"] == 4 and line["rollout/count"] == 16
        assert line["control/pairs"] == 4 * number
        assert line["mismatch/dense_ceiling_step"] == number - 1
        assert line["mismatch/dense_ceiling_mean"] > line["mismatch/acceptance_mean"] + 0.02
        assert line["compression/peak_kv_bytes"] > 0
    assert "no control group" not in (out / "metrics.jsonl").read_text()


def test_a_run_under_a_compression_goes_on_to_the_bit(
    model: str, evicted: tuple[Path, list[Call]], tmp_path: Path
) -> None:
    train(short_config(model, **CHANGES, **EVICTING, train={"steps": 2}), tmp_path / "cut")
    train(short_config(model, **CHANGES, **EVICTING), tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "cut", evicted[0])


def test_a_reward_gap_under_a_compression_stops_the_run_though_nobody_named_a_target(
    model: str, tmp_path: Path
) -> None:
    result = train(alarmed(model, **EVICTING, guard={"action": "stop"}), tmp_path / "run")
    assert 2 <= result.steps < 4
    assert "sparse rollouts get less reward than dense ones of the same prompts: by 1.000" in result.stopped


def test_a_compression_has_a_control_group_where_nothing_is_said_of_one(model: str, tmp_path: Path) -> None:
    table = short_config(model, **SHORT, **EVICTING).model_dump(mode="json")
    del table["rollout"]["control_share"]
    train(config_from(table), tmp_path / "run")
    assert [(step["control/share"], step["control/rollouts"]) for step in steps(tmp_path / "run")] == [(0.25, 4.0)] * 2
