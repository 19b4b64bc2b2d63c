"""Training on verified rollouts: the scoring pass is left out, floor 1 trains as dense rollouts do, and a run resumes to
the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from integration.train_runs import short_config
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train import train
from sparroll.train.runtime.sinks import read_lines

BUDGET = {"kind": "budget", "kv_budget_tokens": 64}


def verified(model: str, steps: int, **changes: dict[str, Any]) -> Any:
    sections: dict[str, Any] = {
        "attention": BUDGET,
        "check": {"window_tokens": 16, "floor": 0.9},
        "rollout": {"samples_per_prompt": 3, "max_new_tokens": 80, "top_k": 28, "temperature": 0.1},
        "train": {"steps": steps, "prompts_per_step": 2},
        "checkpoint": {"every_steps": 1},
    }
    return short_config(model, **(sections | changes))


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are steps, without wall times."""
    lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_lines(out / "metrics.jsonl")]
    return [line for line in lines if "reward/mean" in line]


def test_the_checks_scores_take_the_place_of_the_scoring_pass(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []
    dense = Scorer.dense

    def counted(self: Scorer, *args: Any, **kwargs: Any) -> Any:
        passes.append("dense")
        return dense(self, *args, **kwargs)

    monkeypatch.setattr(Scorer, "dense", counted)
    jackpot = {"correction": {"name": "jackpot"}}
    train(verified(model, 2, **jackpot), tmp_path / "engine")
    assert len(passes) == 1, "only the dense ceiling is scored"
    check = {"window_tokens": 16, "floor": 0.9, "dense_logp": "trainer"}
    train(verified(model, 2, check=check, **jackpot), tmp_path / "trainer")
    assert len(passes) == 4
    # In fp32 the engine is the trainer's own model, so both runs are the same but for rounding.
    for ours, theirs in zip(steps_of(tmp_path / "engine"), steps_of(tmp_path / "trainer"), strict=True):
        for name in ("reward/mean", "mismatch/acceptance_q05", "mismatch/kl_sparse_to_dense", "policy/loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
        assert 0 < ours["check/cut_share"] < 1 and ours["check/drafted_per_kept"] > 1
        assert ours["check/largest_nats"] <= 0.1054
        assert ours["check/draft_acceptance_q05"] < ours["mismatch/acceptance_q05"]


def test_no_lists_are_asked_for_where_the_checks_say_it_all(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    generate = HFEngine.generate

    def counted(self: HFEngine, *args: Any, **kwargs: Any) -> Any:
        if self.schedule is not None:
            asked.append(kwargs["top_k"])
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(HFEngine, "generate", counted)
    train(verified(model, 1), tmp_path / "engine")
    train(verified(model, 1, check={"window_tokens": 16, "floor": 0.9, "dense_logp": "trainer"}), tmp_path / "trainer")
    train(verified(model, 1, correction={"name": "jackpot"}), tmp_path / "jackpot")
    assert asked == [0, 28, 28]
    ours, theirs = (steps_of(tmp_path / name)[0] for name in ("engine", "trainer"))
    # The lists hold the whole vocabulary here, so their lower bound is the exact acceptance.
    for name in ("mismatch/acceptance_mean", "mismatch/acceptance_q05", "policy/loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_floor_1_has_nothing_left_to_correct(model: str, tmp_path: Path) -> None:
    train(verified(model, 1, check={"window_tokens": 8, "floor": 1.0}), tmp_path / "run")
    (step,) = steps_of(tmp_path / "run")
    assert step["mismatch/acceptance_q05"] > 0.999
    assert abs(step["mismatch/kl_sparse_to_dense"]) < 1e-5 and step["check/drafted_per_kept"] > 1.05


def test_a_verified_run_resumes_to_the_bit(model: str, tmp_path: Path) -> None:
    train(verified(model, 2), tmp_path / "straight")
    train(verified(model, 1), tmp_path / "halves")
    train(verified(model, 2), tmp_path / "halves", resume=True)
    assert steps_of(tmp_path / "halves") == steps_of(tmp_path / "straight")
    ours, theirs = (
        load_file(tmp_path / name / "checkpoints" / "step-000002" / "model" / "model.safetensors")
        for name in ("halves", "straight")
    )
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


def test_the_controller_moves_budgets_and_keeps_the_check(model: str, tmp_path: Path) -> None:
    control = {"by": "controller", "target": 0.9, "start_share": 0.4, "window_steps": 2}
    train(verified(model, 2, attention={"kind": "dense"}, control=control), tmp_path / "run")
    assert Schedule.load(tmp_path / "run" / "schedule.toml").check is not None
    assert all(line["check/windows"] > 0 for line in steps_of(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": {"kind": "dense"}}, "has none"),
        ({"attention": {"kind": "compression", "policy": "r_kv"}}, "cannot be checked against"),
        ({"distill": {"rank": 4}}, "exclude each other"),
        ({"check": {"floor": 0}}, "greater than 0"),
        ({"check": {"floor": 1.5}}, "less than or equal to 1"),
        ({"check": {"window_tokens": 1}}, "greater than or equal to 2"),
        ({"check": {"window": 64}}, "unknown key check.window"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_runs(changes: dict[str, Any], said: str, model: str) -> None:
    with pytest.raises(UserError, match=said):
        verified(model, 1, **changes)


def test_a_schedules_own_check_holds_without_a_section_and_an_adapter_refuses_it(model: str, tmp_path: Path) -> None:
    path = Schedule.fixed(64).checked(16, 0.9).save(tmp_path / "checked.toml")
    named: dict[str, Any] = {"attention": {"kind": "schedule", "name": str(path)}, "train": {"steps": 1}}
    train(short_config(model, **named), tmp_path / "run")
    assert steps_of(tmp_path / "run")[0]["check/windows"] > 0
    with pytest.raises(UserError, match="checks its drafts"):
        train(short_config(model, distill={"rank": 4}, **named), tmp_path / "distilled")
