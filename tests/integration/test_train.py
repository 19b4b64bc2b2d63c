"""Whole training runs on a random tiny model: what they log, what they leave, and that nothing depends on how they were cut
into micro batches, processes or sittings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from integration.train_runs import short_config, write_model
from sparroll.corrections import correction
from sparroll.engines.hf.engine import HFEngine
from sparroll.errors import UserError
from sparroll.train import TrainResult, train
from sparroll.train.config.file import config_from
from sparroll.train.loop import Trainer
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.setup import open_run
from sparroll.types import Rollout, TokenScores


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """Four steps without a stop: what the other tests compare with."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    return out, train(short_config(model), out)


def weights(out: Path, step: int = 4) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(out / "checkpoints" / f"step-{step:06d}" / "model").state_dict()


def lines(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without wall times."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_lines(out / "metrics.jsonl")]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_every_step_logs_reward_tail_ceiling_correction_and_times(straight: tuple[Path, TrainResult]) -> None:
    logged = read_lines(straight[0] / "metrics.jsonl")
    assert [line["step"] for line in logged] == [0, 1, 2, 3, 4, 4]
    assert [line["step"] for line in logged if "evaluate/dense_accuracy" in line] == [0, 4]
    for line in (line for line in logged if "reward/mean" in line):
        assert (
            0
            <= line["mismatch/acceptance_q05_low"]
            <= line["mismatch/acceptance_q05"]
            <= line["mismatch/acceptance_mean"]
            < 1
        )
        assert 0.8 < line["mismatch/dense_ceiling_q05"] < 1
        assert line["rollout/count"] == 16
        assert 0 < line["rollout/kv_read_share"] < 1
        assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert line["policy/gradient_norm"] > 0
        assert "correction/weight_mean" in line
        assert "time/rollout_seconds" in line
        assert any(name.startswith("mismatch/acceptance_q05/50-100") for name in line)
    ceiling_steps = [line["mismatch/dense_ceiling_step"] for line in logged if "reward/mean" in line]
    assert ceiling_steps == [0, 0, 2, 2]


def test_the_result_sums_up_the_lines(straight: tuple[Path, TrainResult]) -> None:
    out, result = straight
    rewards = [line["reward/mean"] for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]
    assert (result.steps, result.reward_window_steps, result.rollouts_per_step) == (4, 2, 16)
    assert result.reward_first == pytest.approx(sum(rewards[:2]) / 2)
    assert result.reward_last == pytest.approx(sum(rewards[2:]) / 2)
    assert result.dense_accuracy_first is not None
    assert result.dense_accuracy_first.low <= result.dense_accuracy_first.value <= result.dense_accuracy_first.high
    record = json.loads((out / "result.json").read_text())
    assert record["kind"] == "train"
    assert record["results"]["reward_last"] == result.reward_last
    assert record["config"]["train"]["lr"] == 1e-3
    assert record["config"] == json.loads((out / "config.json").read_text())


def test_training_moves_the_weights_and_the_checkpoint_is_a_transformers_folder(
    model: str, straight: tuple[Path, TrainResult]
) -> None:
    out, result = straight
    assert result.checkpoint == out / "checkpoints" / "step-000004"
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert difference(before, weights(out)) > 1e-3
    assert difference(weights(out, 2), weights(out)) > 1e-4


def test_the_same_configuration_gives_the_same_run(
    model: str, straight: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    train(short_config(model), tmp_path / "again")
    assert lines(tmp_path / "again") == lines(straight[0])
    assert difference(weights(tmp_path / "again"), weights(straight[0])) == 0


def test_micro_batches_do_not_change_the_result(model: str, straight: tuple[Path, TrainResult], tmp_path: Path) -> None:
    train(short_config(model, train={"micro_batch_tokens": 100_000}), tmp_path / "one")
    train(short_config(model, train={"micro_batch_rollouts": 1}), tmp_path / "many")
    for name in ("one", "many"):
        for cut, whole in zip(lines(tmp_path / name), lines(straight[0]), strict=True):
            assert cut == pytest.approx(whole, rel=1e-3, abs=1e-4)
        assert difference(weights(tmp_path / name), weights(straight[0])) < 2e-5


def test_the_engine_has_the_trainers_weights_after_every_step(model: str, tmp_path: Path) -> None:
    trainer = Trainer(open_run(short_config(model), tmp_path / "run", resume=False))
    for step in (1, 2):
        trainer.step()
        trainer.interrupts.release()
        assert trainer.engine.weight_version == step
        assert trainer.engine.model is not trainer.policy
        assert difference(trainer.engine.model.state_dict(), trainer.policy.state_dict()) == 0
    trainer.engine.weight_version = 7
    with pytest.raises(AssertionError, match="the engine has weights 7, the trainer 2"):
        trainer.step()


def test_dense_rollouts_are_their_own_ceiling_and_read_everything(model: str, tmp_path: Path) -> None:
    result = train(short_config(model, attention={"kind": "dense"}, train={"steps": 2}), tmp_path / "run")
    assert result.kv_read_share == 1.0
    for line in lines(tmp_path / "run"):
        if "reward/mean" in line:
            assert line["mismatch/dense_ceiling_q05"] == line["mismatch/acceptance_q05"]
            assert line["correction/weight_max"] == pytest.approx(1.0, abs=1e-4)
            assert line["rollout/sparse_share"] == 0


def test_rollouts_without_an_advantage_cost_no_pass_but_count_as_tokens(model: str, tmp_path: Path) -> None:
    class Constant:
        name = "constant"

        def __getattr__(self, name: str) -> Any:
            return getattr(trainer_task, name)

        def reward(self, prompt: Any, response_text: str) -> float:
            return trainer_task.reward(prompt, response_text) if prompt.prompt_id.endswith(("1", "2", "3")) else 0.5

    trainer = Trainer(open_run(short_config(model), tmp_path / "run", resume=False))
    trainer_task, trainer.parts.task = trainer.parts.task, Constant()  # type: ignore[assignment]
    report = trainer.step()
    trainer.interrupts.release()
    assert 0 < report["policy/trained_rollouts"] < 16
    assert report["policy/trained_tokens"] < report["policy/kept_tokens"]
    assert report["policy/kept_tokens"] == 16 * report["rollout/response_tokens_mean"]


def test_a_step_that_teaches_nothing_leaves_the_weights_alone(model: str, tmp_path: Path) -> None:
    trainer = Trainer(open_run(short_config(model), tmp_path / "run", resume=False))
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.parts.task.reward = lambda prompt, text: 1.0  # type: ignore[method-assign]
    report = trainer.step()
    assert report["reward/groups_all_equal_share"] == 1.0
    assert report["policy/trained_rollouts"] == 0
    assert difference(before, trainer.policy.state_dict()) == 0
    assert trainer.engine.weight_version == 1


@pytest.mark.parametrize("kept_before", [True, False])
def test_a_step_of_which_the_correction_keeps_nothing_leaves_the_weights_alone(
    kept_before: bool, model: str, tmp_path: Path
) -> None:
    """AdamW moves on without a gradient: by what it remembers of the steps before, and by the weight decay."""
    trainer = Trainer(open_run(short_config(model, train={"weight_decay": 0.1}), tmp_path / "run", resume=False))
    if kept_before:
        trainer.step()
        trainer.interrupts.release()
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.parts.correction = correction("icepop", weight_min=1e5, weight_max=1e6)
    report = trainer.step()
    trainer.interrupts.release()
    assert report["policy/trained_rollouts"] > 0
    assert report["policy/kept_tokens"] == report["policy/gradient_norm"] == 0
    assert difference(before, trainer.policy.state_dict()) == 0


def test_a_step_of_which_the_dense_policy_can_say_no_token_is_logged_and_moves_nothing(
    model: str, tmp_path: Path
) -> None:
    config = short_config(model, correction={"name": "sparse_rl"})
    trainer = Trainer(open_run(config, tmp_path / "run", resume=False))
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    score = trainer.score

    def impossible(rollouts: list[Rollout]) -> list[TokenScores]:
        return [replace(each, logp=torch.full_like(each.logp, -torch.inf)) for each in score(rollouts)]

    trainer.score = impossible  # type: ignore[method-assign]
    report = trainer.step()
    trainer.interrupts.release()
    assert "mismatch/kl_sparse_to_dense" not in report
    assert report["correction/vetoed_sequence_share"] == 1
    assert difference(before, trainer.policy.state_dict()) == 0
    assert any("the policy learned nothing" in event for event in lines(tmp_path / "run")[-1]["events"])


@pytest.mark.parametrize("adapted", [False, True])
def test_checkpointed_activations_of_a_model_with_dropout_are_refused_at_the_start(
    adapted: bool, tmp_path: Path
) -> None:
    """Training mode would drop activations: now would not be the dense policy, though no weight has moved."""
    folder = write_model(tmp_path / "model")
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
    changes: dict[str, Any] = {
        "train": {"steps": 1},
        **({"distill": {"rank": 4}} if adapted else {}),
        "evaluate": {"prompts": 0},
    }
    train(short_config(folder, **changes), tmp_path / "plain")
    assert lines(tmp_path / "plain")[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    changes["train"] = {"steps": 1, "gradient_checkpointing": True}
    with pytest.raises(UserError, match=r"(?s)Qwen3ForCausalLM in training mode.*dropout probabilities"):
        train(short_config(folder, **changes), tmp_path / "checkpointed")
    assert not (tmp_path / "checkpointed" / "metrics.jsonl").exists()


def test_a_run_whose_guard_has_no_target_begins_with_an_event_that_a_resumed_one_does_not_repeat(
    model: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "guard": {"action": "warn"},
        "evaluate": {"prompts": 0},
        "checkpoint": {"every_steps": 1},
    }
    train(short_config(model, train={"steps": 1}, **changes), tmp_path / "run")
    result = train(short_config(model, train={"steps": 2}, **changes), tmp_path / "run", resume=True)
    assert len(result.events) == 1
    assert result.events[0].startswith("step 1: the guard watches nothing: there is no target for the tail")


def test_epochs_kl_corrections_and_checkpointed_activations_run(model: str, tmp_path: Path) -> None:
    changes = {"steps": 2, "epochs_per_batch": 2, "kl_coefficient": 0.05, "gradient_checkpointing": True, "lr": 1e-2}
    train(short_config(model, train=changes, correction={"name": "icepop"}), tmp_path / "run")
    first, second = (line for line in lines(tmp_path / "run") if "reward/mean" in line)
    assert first["policy/kl_to_reference"] >= 0
    assert second["policy/kl_to_reference"] > 0
    # The second epoch's ratio is of weights that have moved.
    assert abs(first["policy/ratio_mean"] - 1) > 1e-5
    assert first["policy/trained_rollouts"] == 16


def test_checkpointed_activations_do_not_change_the_result(
    model: str, straight: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    train(short_config(model, train={"gradient_checkpointing": True}), tmp_path / "run")
    assert difference(weights(tmp_path / "run"), weights(straight[0])) < 2e-5


def test_bf16_computes_coarsely_on_fp32_weights(model: str, tmp_path: Path) -> None:
    config = short_config(model, train={"dtype": "bf16", "steps": 2}, rollout={"dtype": "bf16"})
    trainer = Trainer(open_run(config, tmp_path / "run", resume=False))
    result = trainer.run()
    assert trainer.engine.model.dtype == torch.bfloat16
    assert {value.dtype for value in weights(tmp_path / "run", 2).values()} == {torch.float32}
    assert 0.5 < result.dense_ceiling_q05 < 1
    for line in lines(tmp_path / "run"):
        if "reward/mean" in line:
            assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=0.02)
            assert math.isfinite(line["policy/gradient_norm"])


def test_the_guard_falls_back_to_the_next_schedule_and_says_why(model: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "control": {"by": "guard", "stricter": ["dense"]},
        "guard": {"action": "warn", "at_least": 0.999, "window_steps": 1},
        "mismatch": {"least_tokens": 20},
        "train": {"steps": 3},
    }
    result = train(short_config(model, **changes), tmp_path / "run")
    assert len(result.events) == 1
    assert result.events[0].startswith("step 1: the tail")
    assert result.events[0].endswith("fixed-64 -> dense")
    shares = [line["rollout/kv_read_share"] for line in lines(tmp_path / "run") if "reward/mean" in line]
    assert shares[0] < 1
    assert shares[1:] == [1.0, 1.0]


def test_the_guard_stops_the_run_and_resume_finds_it_stopped(model: str, tmp_path: Path) -> None:
    guard = {"action": "stop", "at_least": 0.999}
    config = short_config(model, guard=guard, mismatch={"least_tokens": 20})
    result = train(config, tmp_path / "run")
    assert result.steps == 1
    assert result.stopped.endswith("stopped")
    assert result.dense_accuracy_last is not None
    assert result.dense_accuracy_last.step == 1
    again = train(config, tmp_path / "run", resume=True)
    assert again == result


def test_a_gradient_that_is_not_finite_stops_before_a_weight_moves(model: str, tmp_path: Path) -> None:
    trainer = Trainer(open_run(short_config(model), tmp_path / "run", resume=False))
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    next(iter(trainer.policy.parameters())).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(UserError, match="the gradient of step 1 is not finite"):
        trainer.step()
    assert difference(before, trainer.policy.state_dict()) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"name": "vowel"}}, r"(?s)unknown task 'vowel'.*did you mean 'vowels'"),
        ({"attention": {"kv_budget_tokens": 100}}, "must be a multiple of page_tokens"),
        ({"attention": {"kind": "schedule", "name": "qwen3-1.7b-0.68"}}, "unknown schedule preset"),
        ({"attention": {"kind": "schedule", "name": "qwen3-1.7b-0.86"}}, "was made for Qwen/Qwen3-1.7B"),
        pytest.param(
            {"model": {"device": "cuda"}},
            "there is no device .cuda. here, only the CPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (
            {"guard": {"action": "stop"}},
            r'(?s)"stop" needs guard\.at_least: attention\.kind = "budget" names no target',
        ),
        ({"rollout": {"max_new_tokens": 5000}}, "more than the model's context of 512"),
    ],
)
def test_mistakes_are_found_before_the_first_step(
    model: str, tmp_path: Path, changes: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(short_config(model, **changes), tmp_path / "run")


def test_a_start_that_fails_after_the_engine_was_made_closes_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[HFEngine] = []
    monkeypatch.setattr(HFEngine, "close", lambda engine: closed.append(engine))
    monkeypatch.setattr("sparroll.train.setup.PolicyUpdate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(short_config(model), tmp_path / "run")
    assert len(closed) == 1


def test_a_folder_with_a_run_is_neither_overwritten_nor_made_up(
    model: str, straight: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"(?s)already holds a run.*--resume"):
        train(short_config(model), straight[0])
    with pytest.raises(UserError, match="there is no run to resume"):
        train(short_config(model), tmp_path / "nothing", resume=True)
    with pytest.raises(UserError, match=r"was made with train\.lr = 0\.001, and train\.lr = 0\.0001"):
        train(short_config(model, train={"lr": 1e-4}), straight[0], resume=True)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot write to the folder"):
        train(short_config(model), blocked / "run")


@pytest.mark.slow
def test_a_sparse_run_learns(model: str, tmp_path: Path) -> None:
    """From about 15 % vowels to nearly all of them, in the dense evaluation and not only in the sparse rollouts."""
    changes: dict[str, Any] = {
        "train": {"steps": 20, "lr": 3e-3},
        "evaluate": {"prompts": 24},
        "mismatch": {"ceiling_every_steps": 0},
        "checkpoint": {"every_steps": 0},
    }
    result = train(short_config(model, **changes), tmp_path / "run")
    assert result.kv_read_share < 0.95
    assert result.reward_last > result.reward_first + 0.3
    assert result.dense_accuracy_first is not None
    assert result.dense_accuracy_last is not None
    assert result.dense_accuracy_last.low > result.dense_accuracy_first.high + 0.3


def test_progress_is_told_after_every_step(model: str, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    config = config_from(short_config(model).model_dump() | {"evaluate": {"prompts": 0}})
    result = train(config, tmp_path / "run", on_progress=lambda *about: told.append(about))
    assert {total for _, total, _ in told} == {4}
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    after = {done: text for done, _, text in told if "reward 0." in text}
    assert list(after) == [1, 2, 3, 4]
    assert after[1].startswith("step 1/4  reward 0.")
    # A long step says what it is at.
    within = [text for done, _, text in told if done == 1 and text.startswith("step 2/4: ")]
    assert {"step 2/4: rollout", "step 2/4: score", "step 2/4: update"} <= set(within)
    assert any(text.endswith(" rollouts") for text in within)
    assert result.dense_accuracy_first is None
