"""Jackpot in whole runs: its draws belong to the rollouts, its weights to the policy as it moves. A run that keeps nothing
stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from integration.train_runs import short_config
from sparroll.corrections import TopKLists, correction
from sparroll.errors import UserError
from sparroll.train import train
from sparroll.train.loop import Trainer
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.runtime.randomness import correction_uniforms
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.setup import open_run
from sparroll.train.step_correction import correct_step
from sparroll.train.update import policy as update
from sparroll.types import TokenBatch, TopK, padded

JACKPOT: dict[str, dict[str, Any]] = {"correction": {"name": "jackpot"}, "rollout": {"top_k": 5}}


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    train(short_config(model, **JACKPOT), out)
    return out


def steps(out: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def weights(out: Path, step: int = 4) -> dict[str, Tensor]:
    return load_file(out / f"checkpoints/step-{step:06d}/model/model.safetensors")


def test_a_run_drops_tokens_one_by_one_and_says_what_its_mass_is_worth(straight: Path) -> None:
    for line in steps(straight):
        assert 0 < line["correction/masked_token_share"] < 0.5
        assert line["correction/masked_sequence_share"] < line["correction/masked_token_share"]
        assert 0 < line["correction/accepted_mass_mean"] < 1
        # Five of 28 tokens of each side: their lists rarely agree, and leave mass out.
        assert 0 < line["correction/whole_union_share"] < 1
        assert line["correction/accepted_mass_calibration"] > 1
        assert line["correction/weight_max"] <= 3.0
        kept = 1 - line["correction/masked_token_share"]
        tokens = line["rollout/count"] * line["rollout/response_tokens_mean"]
        assert line["policy/kept_tokens"] == pytest.approx(kept * tokens)


def test_every_metric_of_a_run_is_documented(straight: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = {name for line in steps(straight) for name in line if name.startswith(("correction/", "policy/"))}
    assert len(names) > 20
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_a_resumed_run_draws_what_the_straight_one_drew(model: str, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(short_config(model, **JACKPOT, train={"steps": 2}), out)
    train(short_config(model, **JACKPOT), out, resume=True)
    assert steps(out) == steps(straight)
    one, other = weights(out), weights(straight)
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("epochs", [1, 2])
def test_micro_batches_do_not_change_the_result(epochs: int, model: str, tmp_path: Path) -> None:
    for name, cut in (("one", {"micro_batch_tokens": 100_000}), ("many", {"micro_batch_rollouts": 1})):
        train(short_config(model, **JACKPOT, train={"steps": 2, "epochs_per_batch": epochs} | cut), tmp_path / name)
    for cut_line, line in zip(steps(tmp_path / "many"), steps(tmp_path / "one"), strict=True):
        assert cut_line == pytest.approx(line, rel=1e-3, abs=1e-4)
    one, many = weights(tmp_path / "one", 2), weights(tmp_path / "many", 2)
    assert max(float((one[name] - many[name]).abs().max()) for name in one) < 2e-5


def test_the_second_update_weighs_by_the_policy_that_the_first_made(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    original = update.policy_loss

    def policy_loss(now: Tensor, dense: Tensor, advantage: Tensor, given: Tensor, *args: Any) -> Any:
        seen.append((now.detach(), given))
        return original(now, dense, advantage, given, *args)

    made: list[TokenBatch] = []
    train_one = {"epochs_per_batch": 2, "micro_batch_tokens": 100_000, "lr": 1e-2}
    trainer = Trainer(open_run(short_config(model, **JACKPOT, train=train_one), tmp_path / "run", resume=False))
    monkeypatch.setattr(update, "policy_loss", policy_loss)
    monkeypatch.setattr(
        "sparroll.train.loop.correct_step",
        lambda by, batch, *about: made.append(batch) or correct_step(by, batch, *about),
    )
    report = trainer.step()
    trainer.interrupts.release()
    (_, first), (second_now, second) = seen
    # One micro batch of every rollout, in an order of its own; rows are found by their weights.
    (batch,) = made
    assert batch.now_weights is not None
    assert not torch.allclose(first, second, atol=1e-3)
    assert torch.equal(first > 0, second > 0)
    assert report["policy/weight_mean"] == pytest.approx(float(second[second > 0].sum() / (second > 0).sum()), rel=0.02)
    order = [next(b for b in range(16) if same(first, row, batch.weight_BT, b)) for row in range(16)]
    assert sorted(order) == list(range(16))
    again = batch.now_weights.rows(order, second_now.shape[1])(second_now)
    assert torch.equal(again, second)


def same(weights_BT: Tensor, row: int, others_BT: Tensor, other: int) -> bool:
    """Up to the difference between the training forward and the scoring one."""
    return torch.allclose(weights_BT[row], others_BT[other, : weights_BT.shape[1]], rtol=1e-4, atol=1e-5)


def test_the_step_corrects_what_a_caller_with_the_lists_would(model: str, tmp_path: Path) -> None:
    config = short_config(model, **JACKPOT)
    trainer = Trainer(open_run(config, tmp_path / "run", resume=False))
    rollouts = trainer.sample(trainer.next_prompts(), 1)
    scores = trainer.score(rollouts)
    batch, other = (TokenBatch.from_rollouts(rollouts, pad_id=0) for _ in (1, 2))
    report = correct_step(trainer.parts.correction, batch, rollouts, scores, Ranks("cpu"), 3, 1)
    mask = padded([torch.ones(len(rollout.response_ids), dtype=torch.bool) for rollout in rollouts])
    sparse, dense = (
        TopK(padded([one.top_k.ids for one in side]), padded([one.top_k.logp for one in side]))
        for side in (rollouts, scores)
    )
    lists = TopKLists(sparse, dense, dense_at_sparse=padded([score.logp_at_ids for score in scores]))
    expected = correction("jackpot")(
        dense_logp=padded([score.logp for score in scores]),
        sparse_logp=padded([rollout.sparse_logp for rollout in rollouts]),
        mask=mask,
        uniforms=padded([correction_uniforms(3, 1, rollout) for rollout in rollouts]),
        top_k=lists,
    )
    assert torch.equal(batch.weight_BT, expected.weights)
    assert torch.equal(batch.kept_BT, expected.kept(mask))
    assert batch.kept_tokens == int(expected.kept(mask).sum())
    assert report.items() >= expected.metrics.items()
    correct_step(trainer.parts.correction, other, rollouts, scores, Ranks("cpu"), 3, 2)
    assert not torch.equal(other.kept_BT, batch.kept_BT)


def test_other_corrections_ask_for_no_lists_and_draw_nothing(model: str, tmp_path: Path) -> None:
    trainer = Trainer(open_run(short_config(model), tmp_path / "run", resume=False))
    rollouts = trainer.sample(trainer.next_prompts(), 1)
    scores = trainer.score(rollouts)
    assert all(score.logp_at_ids is None for score in scores)
    batch = TokenBatch.from_rollouts(rollouts, pad_id=0)
    correct_step(trainer.parts.correction, batch, rollouts, scores, Ranks("cpu"), 3, 1)
    assert batch.now_weights is None


@pytest.mark.parametrize(
    "settings", [{"name": "jackpot", "scale": 1e12}, {"name": "icepop", "weight_min": 1e5, "weight_max": 1e6}]
)
def test_a_run_in_which_nothing_is_kept_stops_and_resume_finds_it_stopped(
    settings: dict[str, Any], model: str, tmp_path: Path
) -> None:
    config = short_config(model, correction=settings, guard={"empty_steps": 2})
    result = train(config, tmp_path / "run")
    assert result.steps == 2
    assert "kept no token for 2 steps: stopped" in result.stopped
    assert result.events[0] == "step 1: the correction kept no token: the policy learned nothing"
    assert len(result.events) == 2
    assert result.checkpoint.name == "step-000002"
    assert train(config, tmp_path / "run", resume=True) == result


def test_empty_steps_are_counted_across_a_resume(model: str, tmp_path: Path) -> None:
    nothing: dict[str, dict[str, Any]] = {"correction": {"name": "icepop", "weight_min": 1e5, "weight_max": 1e6}}
    train(short_config(model, **nothing, train={"steps": 1}), tmp_path / "run")
    result = train(short_config(model, **nothing), tmp_path / "run", resume=True)
    assert result.steps == 3
    assert "for 3 steps: stopped" in result.stopped


def test_a_further_pass_gives_the_mass_of_the_whole_union(model: str, straight: Path, tmp_path: Path) -> None:
    train(short_config(model, **JACKPOT, train={"steps": 1, "whole_union": True}), tmp_path / "union")
    whole, own = steps(tmp_path / "union")[0], steps(straight)[0]
    assert whole["correction/whole_union_share"] == 1.0 > own["correction/whole_union_share"]
    assert whole["correction/accepted_mass_mean"] > own["correction/accepted_mass_mean"]
    assert whole["correction/accepted_mass_calibration"] < own["correction/accepted_mass_calibration"]
    assert whole["correction/masked_token_share"] == own["correction/masked_token_share"]


def test_the_further_pass_says_what_the_engine_would_have_said(model: str, tmp_path: Path) -> None:
    config = short_config(model, **JACKPOT, train={"whole_union": True})
    trainer = Trainer(open_run(config, tmp_path / "run", resume=False))
    rollouts = trainer.sample(trainer.next_prompts(), 1)
    scores = trainer.score(rollouts)
    at_dense = trainer.score_union(rollouts, scores)
    assert at_dense is not None
    for rollout, score, read_TK in zip(rollouts, scores, at_dense, strict=True):
        assert rollout.top_k is not None and score.top_k is not None
        same_TKK = score.top_k.ids[:, :, None] == rollout.top_k.ids[:, None, :]
        own_TK = (same_TKK * rollout.top_k.logp[:, None, :]).sum(-1)
        both_TK = same_TKK.any(-1)
        torch.testing.assert_close(read_TK[both_TK], own_TK[both_TK], atol=1e-3, rtol=1e-3)
    # Some of them differ from the dense policy's own: the pass reads under the schedule.
    assert max(float((score.top_k.logp - read).abs().max()) for score, read in zip(scores, at_dense, strict=True)) > 0.1


def test_the_union_is_refused_where_it_cannot_be_scored(model: str) -> None:
    with pytest.raises(UserError, match="whole_union does nothing with correction.name"):
        short_config(model, train={"whole_union": True})
    for section, table in (("check", {"floor": 0.1}), ("train", {"rollouts_behind_steps": 1})):
        changes = JACKPOT | {section: table}
        changes["train"] = changes.get("train", {}) | {"whole_union": True}
        with pytest.raises(UserError, match="exclude each other"):
            short_config(model, **changes)
