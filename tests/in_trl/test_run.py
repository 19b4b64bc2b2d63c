"""One short run in TRL, looked at from all sides: four steps with a controller, colocated vLLM in fp32."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from sparroll.control.control_group import dense_flags
from sparroll.corrections import correction, names
from sparroll.integrations.trl import refusals
from sparroll.integrations.trl.loss import correct_batch
from sparroll.mismatch import TailStatistics, acceptance_of
from sparroll.mismatch.of_rollouts import off_nats_of
from sparroll.train.update.loss import LossSettings, policy_loss
from sparroll.types import Rollout, TokenScores, TopK
from trl_runs import GROUP, ROLLOUTS, STEPS, Observed, reward

USABLE = [name for name in names() if not correction(name).needs]


def logits(run: Observed, batch: dict[str, Tensor]) -> Tensor:
    """[B, T, V] of the policy as it is now, at the positions that the completion's tokens were drawn from."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        said: Tensor = run.trainer.model(input_ids=ids, attention_mask=mask).logits
    return said[:, batch["prompt_ids"].shape[1] - 1 : -1]


def control(number: int) -> list[bool]:
    """Which rollouts of a step are of the control group, by our own loop's draw."""
    return dense_flags(0, number, ROLLOUTS // GROUP, GROUP, 1 / 4)


def test_the_control_group_is_our_own_loops_draw_and_was_decoded_densely(run: Observed) -> None:
    for number, (step, batch) in enumerate(zip(run.history, run.batches, strict=True), 1):
        dense_B = torch.tensor(control(number))
        assert step["control/rollouts"] == int(dense_B.sum()) == ROLLOUTS // GROUP
        tokens = int(batch["completion_mask"][dense_B].sum())
        assert step["control/dense_steps"] == tokens - ROLLOUTS // GROUP > 0
        mask_BT = batch["completion_mask"].bool()
        off_BT = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs() * mask_BT
        # The trainer's own policy sampled them, and not the sparse ones, until the controller reads everything.
        assert float(off_BT[dense_B].max()) < 1e-3
        assert number > 1 or float(off_BT[~dense_B].max()) > 0.1
        sparse_BT = mask_BT & ~dense_B[:, None]
        expected = (batch["sampling_per_token_logps"] - batch["old_per_token_logps"])[sparse_BT].mean()
        assert step["mismatch/kl_sparse_to_dense"] == pytest.approx(float(expected), abs=1e-5)


def test_the_reward_gap_is_that_of_the_rewards_within_prompts(run: Observed) -> None:
    seen: list[float] = []
    for number, (step, batch) in enumerate(zip(run.history, run.batches, strict=True), 1):
        texts = run.trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
        reward_PN = torch.tensor(reward(texts)).view(-1, GROUP)
        dense_PN = torch.tensor(control(number)).view(-1, GROUP)
        gap_P = (reward_PN * dense_PN).sum(-1) - (reward_PN * ~dense_PN).sum(-1) / (GROUP - 1)
        seen += gap_P.tolist()
        assert step["control/step_reward_gap"] == pytest.approx(float(gap_P.mean()), abs=1e-5)
        # The controller moves its schedule all the time; that counts as one.
        assert step["control/reward_gap"] == pytest.approx(sum(seen) / len(seen), abs=1e-5)
        assert step["control/pairs"] == len(seen) and step["control/share"] == 1 / 4


def test_each_decode_step_is_counted_and_those_beyond_the_budget_are_sparse(run: Observed) -> None:
    sparse, dense = run.steps("rollout/sparse_steps"), run.steps("rollout/dense_steps")
    assert len(sparse) == STEPS == len(run.batches)
    for ran, whole, batch in zip(sparse, dense, run.batches, strict=True):
        # The first token of a response comes from the prefill.
        assert ran + whole == int(batch["completion_mask"].sum()) - ROLLOUTS
    assert sparse[0] > 0 and run.steps("rollout/kv_read_share")[0] < 1


def test_all_sparse_ones_are_rescored_and_the_tail_is_logged_by_length_with_its_ceiling(run: Observed) -> None:
    for number, (step, batch) in enumerate(zip(run.history, run.batches, strict=True), 1):
        sparse_B = ~torch.tensor(control(number))
        assert step["rescoring/measured"] == step["rescoring/held"] == int(sparse_B.sum())
        assert step["rescoring/measured_tokens"] == int(batch["completion_mask"][sparse_B].sum())
        assert 0.9 < step["mismatch/dense_ceiling_mean"] <= 1
        # The control group's, before the step's update.
        assert step["mismatch/dense_ceiling_step"] == number - 1
        bins = [name for name in step if name.startswith("mismatch/acceptance_q05/")]
        assert {"mismatch/acceptance_q05/0-64", "mismatch/acceptance_q05/64-128"} <= set(bins)
    first = run.history[0]
    assert first["mismatch/acceptance_mean"] < first["mismatch/dense_ceiling_mean"]


def test_what_is_added_to_a_round_is_timed_and_a_control_group_needs_no_ceiling_of_its_own(run: Observed) -> None:
    for name in ("measure", "correct", "watch"):
        assert all(seconds > 0 for seconds in run.steps(f"time/sparroll_{name}_seconds")), name
    assert run.steps("time/sparroll_ceiling_seconds") == [0.0] * STEPS
    for step in run.history:
        assert step["time/sparroll_measure_seconds"] >= step["rescoring/seconds"]
        share = step["rescoring/share_of_step"]
        assert 0 < share < 1
        # TRL's own time of the step is without its optimizer.
        assert step["rescoring/seconds"] / share >= step["step_time"]


def test_theirs_is_not_logged_beside_our_correction(run: Observed) -> None:
    assert not any(name.startswith("sampling/importance_sampling_ratio") for name in run.history[0])
    assert run.history[0]["correction/masked_token_share"] > 0
    assert run.history[0]["mismatch/kl_sparse_to_dense"] > 0


def test_the_controller_raises_budgets_and_the_engine_reads_more(run: Observed) -> None:
    rounds = run.trainer.sparse_rounds
    assert rounds.done == STEPS
    assert rounds.schedule.kv_budget_tokens(150) > 64
    assert any("controller" in event for event in run.trainer.sparse_events)
    budgets = run.steps("controller/budget_tokens/64-128")
    assert budgets[0] == 64 < budgets[-1]
    assert run.trainer._sparse_engine.schedule.kv_budget_tokens(100) == budgets[-1]


def test_an_evaluation_is_dense_and_its_weights_are_the_trained_ones(run: Observed) -> None:
    report = run.trainer.evaluate()
    assert report["eval_rollout/sparse_steps"] == 0 < report["eval_rollout/dense_steps"]
    assert report["eval_rollout/kv_read_share"] == 1
    # After real updates: the engine has exactly the trainer's weights.
    assert report["eval_sampling/sampling_logp_difference/max"] < 1e-4
    batch = run.batches.pop()
    assert not batch["training"] and torch.equal(
        batch["importance_sampling_ratio"], torch.ones_like(batch["old_per_token_logps"])
    )
    # The ceiling stays that of the control group.
    assert run.trainer.sparse_rounds.ceiling["mismatch/dense_ceiling_step"] == STEPS - 1


def test_the_acceptance_is_that_of_the_trainers_own_forward(run: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, kept = run.trainer, []
    hold = type(trainer._sparse_engine)._hold

    def keep(self: Any, rollouts: list[Rollout], names: list[str]) -> None:
        kept.extend(rollouts)
        hold(self, rollouts, names)

    monkeypatch.setattr(type(trainer._sparse_engine), "_hold", keep)
    rounds = trainer.sparse_rounds
    saved, metrics = rounds.state(), trainer._metrics["train"]
    # Each of this round's rollouts is to be measured.
    monkeypatch.setattr(rounds, "_group", None)
    trainer.model.train()
    schedule = rounds.schedule
    batch = trainer._generate_and_score_completions([{"prompt": each} for each in ["1 + 2"] * GROUP])
    run.batches.pop()
    rounds.restore(saved)
    logp_BTV = torch.log_softmax(logits(run, batch).float(), -1)
    scores, statistics = [], TailStatistics(bin_tokens=64)
    for row, rollout in enumerate(kept):
        logp_TV = logp_BTV[row, : len(rollout.response_ids)]
        best = logp_TV.topk(20, dim=-1)
        own = logp_TV.gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        scores.append(TokenScores(own, TopK(best.indices, best.values)))
    assert schedule is not None and len(kept) == GROUP
    found = acceptance_of(kept, scores, "top_k_lower")
    for row, (rollout, acceptance_T) in enumerate(zip(kept, found, strict=True)):
        statistics.add(acceptance_T, rollout.context_tokens, f"{row}", off_nats_of(rollout, scores[row]))
        tokens = len(rollout.response_ids)
        # TRL was given the sampled token's log-probability, and not the likeliest one's.
        torch.testing.assert_close(
            batch["sampling_per_token_logps"][row, :tokens], rollout.sparse_logp, atol=1e-6, rtol=0
        )
    expected = statistics.table("top_k_lower").overall
    assert metrics["mismatch/acceptance_mean"][-1] == pytest.approx(expected.mean, abs=1e-5)
    # Percentiles are read from a histogram, whose cells rounding may move a token between.
    assert metrics["mismatch/acceptance_q05"][-1] == pytest.approx(expected.q05, abs=1e-3)
    for share in expected.impossible:
        logged = [metrics[f"mismatch/impossible_share_{share.nats}{end}"][-1] for end in ("", "_low", "_high")]
        assert logged == pytest.approx([share.value, share.low, share.high], abs=1e-6)


@pytest.mark.parametrize("name", USABLE)
def test_trls_loss_is_our_own_loss_on_the_same_batch(run: Observed, name: str) -> None:
    trainer = run.trainer
    batch = {key: value for key, value in run.batches[0].items() if key not in ("training", "tool_mask")}
    batch["completion_mask"] = batch["completion_mask"].clone()
    batch["advantages"] = torch.linspace(-1.5, 1.0, ROLLOUTS)
    dense_BT, mask_BT = batch["old_per_token_logps"], batch["completion_mask"].bool()
    made = correction(name)
    ours = made(dense_logp=dense_BT, sparse_logp=batch["sampling_per_token_logps"], mask=mask_BT)
    kept_BT = ours.kept(mask_BT)
    report = correct_batch(batch, made, lambda rows: rows, 0)
    assert report["policy/kept_tokens"] == int(kept_BT.sum()) == int(batch["num_items_in_batch"])
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    theirs = trainer._compute_loss(trainer.model, batch)
    theirs.backward()
    their_gradient = trainer.model.get_input_embeddings().weight.grad.clone()
    trainer.model.zero_grad()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    said_BTV = trainer.model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    now_BT = torch.log_softmax(said_BTV.float(), -1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    expected, sums = policy_loss(
        now_BT, dense_BT, batch["advantages"], ours.weights, kept_BT, int(kept_BT.sum()), LossSettings(0.2, 0.28)
    )
    expected.backward()
    assert sums.clipped > 0 or name in ("geometric", "mis")
    assert theirs.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(their_gradient, trainer.model.get_input_embeddings().weight.grad, atol=1e-6, rtol=1e-4)
    trainer.model.zero_grad()


def test_micro_batches_add_up_to_the_same_loss(run: Observed) -> None:
    trainer = run.trainer
    batch = copy.copy(run.batches[0])
    del batch["training"]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    whole = trainer._compute_loss(trainer.model, batch).item()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 2
    try:
        halves = [
            {key: value[rows] if value.dim() else value for key, value in batch.items()}
            for rows in (slice(0, 4), slice(4, 8))
        ]
        parts = sum(trainer._compute_loss(trainer.model, half).item() for half in halves)
    finally:
        trainer.args.steps_per_generation = 1
    assert parts == pytest.approx(whole, abs=1e-6)


def test_the_refusals_know_trls_own_defaults() -> None:
    from trl import GRPOConfig

    for field in dataclasses.fields(GRPOConfig):
        wrong = [is_wrong for name, is_wrong, _, _ in refusals._WRONG if name == field.name]
        if field.name != "use_vllm":
            assert not any(is_wrong(field.default) for is_wrong in wrong), field.name
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert {name for name, *_ in refusals._WRONG} <= known


def test_other_losses_use_the_same_weights_and_masks_with_denominators_of_their_own(
    run: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = run.trainer
    batch = {key: value for key, value in run.batches[0].items() if key != "training"}
    batch["advantages"] = torch.linspace(-1.5, 1.0, ROLLOUTS)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    now_BT = torch.log_softmax(logits(run, batch).float(), -1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    ratio_BT, advantage_B1 = (now_BT - batch["old_per_token_logps"]).exp(), batch["advantages"][:, None]
    surrogate_BT = torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(0.8, 1.28) * advantage_B1)
    kept_BT = batch["completion_mask"] * batch["tool_mask"]
    assert kept_BT.sum() < batch["completion_mask"].sum()
    token_BT = -surrogate_BT * batch["importance_sampling_ratio"] * kept_BT
    expected = {
        "bnpo": token_BT.sum() / kept_BT.sum(),
        "grpo": (token_BT.sum(-1) / kept_BT.sum(-1).clamp(min=1)).mean(),
        "dr_grpo": token_BT.sum() / (ROLLOUTS * trainer.max_completion_length),
        "luspo": token_BT.sum(-1).mean(),
    }
    for name, value in expected.items():
        monkeypatch.setattr(trainer, "loss_type", name)
        with torch.no_grad():
            assert trainer._compute_loss(trainer.model, batch).item() == pytest.approx(value.item(), abs=1e-5), name
