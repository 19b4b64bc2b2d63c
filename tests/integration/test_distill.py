"""DistillSparse in whole runs: the adapter learns from the sparse rollouts, and nothing dense ever sees it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from integration.deaths import Death, run_until
from integration.train_runs import short_config
from sparroll.engines.adapter import Adapter
from sparroll.engines.scoring import response_logp
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train import TrainConfig, train
from sparroll.train.distill import adapter_update as distill
from sparroll.train.distill.adapter_update import MOST_NATS_OFF, AdapterUpdate
from sparroll.train.loop import Trainer
from sparroll.train.runtime import checkpoint
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.setup import open_run
from sparroll.types import Rollout, TokenBatch

Given = tuple[TokenBatch, Schedule]
ON = {"lr": 1e-2, "rank": 4}


def config(model: str, /, **changes: dict[str, Any]) -> TrainConfig:
    return short_config(model, **({"distill": {}} | changes | {"distill": ON | changes.get("distill", {})}))


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    train(config(model), out)
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_lines(out / "metrics.jsonl")]


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def absurd(trainer: Trainer) -> None:
    assert trainer.parts.distill is not None
    for parameter in trainer.parts.distill.adapter.parameters:
        torch.nn.init.normal_(parameter, std=1.0)


def one_step(trainer: Trainer) -> dict[str, float]:
    report = trainer.step()
    trainer.interrupts.release()
    return report


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[list[Rollout]]:
    """The rollouts of every step, as the trainer got them."""
    seen: list[list[Rollout]] = []
    original = Trainer.sample

    def sample(self: Trainer, *args: Any) -> list[Rollout]:
        seen.append(original(self, *args))
        return seen[-1]

    monkeypatch.setattr(Trainer, "sample", sample)
    return seen


def test_every_step_logs_the_adapters_update_and_its_share_of_the_time(straight: Path) -> None:
    steps = [line for line in read_lines(straight / "metrics.jsonl") if "reward/mean" in line]
    assert len(steps) == 4
    for line in steps:
        assert line["distill/kl"] > 0
        assert line["distill/gradient_norm"] > 0
        assert line["distill/learning_rate"] == 1e-2
        assert line["distill/tokens"] == line["rollout/count"] * line["rollout/response_tokens_mean"]
        assert 0 < line["time/distill_share"] < 1
        assert line["time/distill_share"] == pytest.approx(line["time/distill_seconds"] / line["time/step_seconds"])


def test_the_first_steps_policy_update_is_that_of_a_run_without_an_adapter(
    model: str, straight: Path, tmp_path: Path
) -> None:
    """Rollouts of a new adapter are those of the model, so the policy's first update is the same to the bit."""
    train(short_config(model), tmp_path / "plain")
    with_adapter, plain = lines(straight)[:2], lines(tmp_path / "plain")[:2]
    assert with_adapter[0] == plain[0]
    assert {k: v for k, v in with_adapter[1].items() if not k.startswith("distill/")} == plain[1]
    assert lines(straight)[2]["reward/mean"] != lines(tmp_path / "plain")[2]["reward/mean"]


def at_phase_two(model: str, tmp_path: Path, **settings: Any) -> tuple[Trainer, AdapterUpdate, list[Rollout], Given]:
    """Step 2 before the adapter's update: rollouts of an adapter that has moved in step 1, and what the update takes."""
    trainer = Trainer(open_run(config(model, train=settings), tmp_path / "run", resume=False))
    one_step(trainer)
    update, schedule = trainer.parts.distill, trainer.engine.schedule
    assert update is not None
    assert schedule is not None
    prompts = trainer.next_prompts()
    rollouts = trainer.sample(prompts, 2)
    batch = TokenBatch.from_rollouts(rollouts, pad_id=0)
    batch.advantage_B = torch.randn(len(rollouts))
    batch.add_scores(trainer.score(rollouts))
    return trainer, update, rollouts, (batch, schedule)


def test_phase_two_leaves_every_base_weight_and_the_policys_optimizer_alone(model: str, tmp_path: Path) -> None:
    trainer, distill, _, given = at_phase_two(model, tmp_path, steps=10, prompts_per_step=1)
    update = trainer.parts.update
    before, optimizer = state_of(trainer.policy), str(update.optimizer.state_dict())
    adapter = [parameter.clone() for parameter in distill.adapter.parameters]
    for step in range(10):
        distill(*given, step + 1, lambda: None)
    assert equal(state_of(trainer.policy), before)
    assert str(update.optimizer.state_dict()) == optimizer
    assert all(parameter.requires_grad and parameter.grad is None for parameter in trainer.policy.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(adapter, distill.adapter.parameters, strict=True))


def test_the_sparse_training_forward_is_what_the_rollouts_said(
    model: str, tmp_path: Path, sampled: list[list[Rollout]]
) -> None:
    """Step 2 samples from merged weights, with an adapter that has moved: at the start of phase two the ratio is 1."""
    trainer, distill, rollouts, given = at_phase_two(model, tmp_path, lr=1e-30)
    assert any(rollout.attention == "sparse" for rollout in rollouts)
    batch, schedule = given
    with torch.no_grad():
        now = response_logp(distill.adapter.adapted, batch, 1.0, schedule)
        plain = response_logp(trainer.policy, batch, 1.0, schedule)
    assert (now - batch.sparse_logp_BT).abs().max() < 1e-5
    assert (plain - batch.sparse_logp_BT).abs().max() > 1e-2
    report = distill(*given, 2, lambda: None)
    assert report["distill/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert report["distill/left_out_share"] == 0.0


def test_a_token_that_was_sampled_from_other_units_counts_and_moves_nothing(
    model: str, tmp_path: Path, sampled: list[list[Rollout]]
) -> None:
    _, distill, _, (batch, schedule) = at_phase_two(model, tmp_path, lr=1e-30)
    rows, tokens = list(range(len(batch))), int(batch.mask_BT.sum())
    loss = partial(distill.loss, schedule=schedule, tokens=tokens)
    said = float(batch.sparse_logp_BT[0, 1])
    moved = {}
    for nats in (0.0, 1.0, -5.0, 5.0, 30.0):
        batch.sparse_logp_BT[0, 1] = said + nats
        sums = distill.gradient_step.gradient(batch, rows, loss)
        assert sums.tokens == tokens - (abs(nats) > MOST_NATS_OFF)
        moved[nats] = torch.cat([parameter.grad.flatten().clone() for parameter in distill.adapter.parameters])
    assert moved[5.0].equal(moved[-5.0]) and moved[5.0].equal(moved[30.0])
    assert not moved[5.0].equal(moved[0.0]) and not moved[1.0].equal(moved[0.0])


def test_dense_evaluation_and_ceiling_never_see_an_absurd_adapter(
    model: str, tmp_path: Path, sampled: list[list[Rollout]]
) -> None:
    changes = {"train": {"lr": 1e-30, "steps": 2}, "mismatch": {"ceiling_every_steps": 1}}
    train(short_config(model, **changes), tmp_path / "plain")
    trainer = Trainer(open_run(config(model, **changes), tmp_path / "adapted", resume=False))
    before = state_of(trainer.policy)
    absurd(trainer)
    trainer.parts.weights.bring_sampler(0)
    trainer.run()
    plain, adapted = lines(tmp_path / "plain"), lines(tmp_path / "adapted")
    for one, other in zip(plain, adapted, strict=True):
        for name in one:
            if name.startswith(("evaluate/", "mismatch/dense_ceiling")):
                assert one[name] == other[name], name
    assert adapted[1]["mismatch/acceptance_mean"] < plain[1]["mismatch/acceptance_mean"] - 0.3
    # Zeros have moved by a learning rate of 1e-30.
    assert all(
        torch.allclose(value, before[name], rtol=0, atol=1e-25) for name, value in state_of(trainer.policy).items()
    )


def test_the_engine_has_merged_weights_for_rollouts_and_the_policys_for_evaluation(
    model: str, tmp_path: Path, sampled: list[list[Rollout]]
) -> None:
    trainer = Trainer(open_run(config(model, mismatch={"ceiling_every_steps": 1}), tmp_path / "run", resume=False))
    assert trainer.parts.distill is not None
    weights = trainer.parts.weights
    for step in (1, 2):
        one_step(trainer)
        merged = trainer.parts.distill.adapter.merged()
        assert equal(state_of(trainer.engine.model), merged)
        weights.bring_policy(step)
        assert equal(state_of(trainer.engine.model), state_of(trainer.policy))
        assert not equal(merged, state_of(trainer.policy))
    versions = [{rollout.weight_version for rollout in rollouts} for rollouts in sampled]
    assert all(len(version) == 1 for version in versions)
    assert versions[0] != versions[1]
    with pytest.raises(AssertionError, match="the engine has"):
        weights.check_sampled(sampled[-1], 2)
    weights.bring_sampler(2)
    with pytest.raises(AssertionError, match="was sampled with weights"):
        weights.check_sampled(sampled[-1], 2)
    trainer.engine.weight_version += 1
    with pytest.raises(AssertionError, match="the engine has weights"):
        one_step(trainer)


def assert_same_checkpoints(out: Path, expected: Path, step: str = "step-000004") -> None:
    here, there = (folder / "checkpoints" / step for folder in (out, expected))
    for name in ("model/model", "optimizer", "adapter/adapter_model", "adapter_optimizer"):
        assert equal(load_file(here / f"{name}.safetensors"), load_file(there / f"{name}.safetensors")), name
    for name in ("generators.json", "adapter/adapter_config.json"):
        assert (here / name).read_text() == (there / name).read_text(), name
    state, expected_state = (json.loads((folder / "state.json").read_text()) for folder in (here, there))
    assert state | {"metrics_bytes": 0} == expected_state | {"metrics_bytes": 0}


def test_a_resumed_run_is_the_run_that_was_not_interrupted(model: str, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(config(model), out)
    # The newest checkpoint is lost, so the last two steps are taken again.
    shutil.rmtree(out / "checkpoints" / "step-000004")
    train(config(model), out, resume=True)
    assert lines(out) == lines(straight)
    assert_same_checkpoints(out, straight)
    assert (out / "checkpoints" / "step-000004" / "model" / "config.json").is_file()
    assert not [name for name in load_file(out / "checkpoints/latest/model/model.safetensors") if "lora" in name]


@pytest.mark.parametrize(
    "death",
    [
        # Calls alternate between policy and adapter: before the adapter's second update, when the policy has moved already.
        Death(torch.optim.AdamW, "step", 4),
        Death(Adapter, "merged", 3),
        Death(checkpoint, "optimizer_tensors", 4),
    ],
    ids=["update", "merge", "save"],
)
def test_a_run_killed_between_policy_and_adapter_resumes_to_the_bit(
    death: Death, model: str, straight: Path, tmp_path: Path
) -> None:
    run_until(death, lambda: train(config(model, checkpoint={"every_steps": 1}), tmp_path / "run"))
    train(config(model, checkpoint={"every_steps": 1}), tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(straight)
    assert_same_checkpoints(tmp_path / "run", straight)


def test_a_run_without_an_adapter_cannot_be_resumed_with_one(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    plain = short_config(model, train={"steps": 2}, evaluate={"prompts": 0})
    train(plain, out)
    more = {"train": {"steps": 3}, "evaluate": {"prompts": 0}}
    with pytest.raises(UserError, match=r"was made with distill\.objective = null"):
        train(config(model, **more), out, resume=True)


def sealed(folder: Path) -> None:
    """Make a checkpoint whole again after a change."""
    (folder / "manifest.json").unlink()
    checkpoint._write_manifest(folder)


def test_an_adapter_of_another_shape_in_a_checkpoint_is_refused(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(config(model, train={"steps": 2}, evaluate={"prompts": 0}), out)
    folder = out / "checkpoints" / "step-000002"
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({name: value[..., :1].contiguous() for name, value in load_file(path).items()}, path)
    sealed(folder)
    with pytest.raises(UserError, match="must have shape"):
        train(config(model, train={"steps": 3}, evaluate={"prompts": 0}), out, resume=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"distill": {"objective": "kl"}},
        {"distill": {"epochs_per_batch": 2, "max_gradient_norm": None, "target_modules": ["q_proj", "o_proj"]}},
        {"train": {"dtype": "bf16"}, "rollout": {"dtype": "bf16"}},
    ],
)
def test_objectives_epochs_checkpointing_and_bf16_run(
    model: str, straight: Path, tmp_path: Path, changes: dict[str, dict[str, Any]]
) -> None:
    changes = changes | {"train": {"steps": 2} | changes.get("train", {})}
    train(config(model, **changes), tmp_path / "run")
    steps = [line for line in lines(tmp_path / "run") if "reward/mean" in line]
    assert all(line["distill/gradient_norm"] > 0 for line in steps)
    if changes.get("distill", {}).get("objective") == "kl":
        assert steps[0]["distill/loss"] == pytest.approx(steps[0]["distill/kl"], rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_adapted_layers_are_checkpointed_where_the_policys_are(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    modes = []

    def recorded(adapted: torch.nn.Module, *given: Any) -> Tensor:
        modes.append(adapted.training)
        return response_logp(adapted, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(distill, "response_logp", recorded)
    train(config(model, train={"steps": 1, "gradient_checkpointing": checkpointing}), tmp_path / "run")
    assert modes and set(modes) == {checkpointing}


def test_checkpointed_activations_do_not_change_the_adapter(model: str, straight: Path, tmp_path: Path) -> None:
    train(config(model, train={"gradient_checkpointing": True, "steps": 2}, evaluate={"prompts": 0}), tmp_path / "run")
    assert_same_adapter(tmp_path / "run", straight)


def assert_same_adapter(out: Path, expected: Path) -> None:
    """After two steps, up to rounding."""
    name = "checkpoints/step-000002/adapter/adapter_model.safetensors"
    one, other = load_file(out / name), load_file(expected / name)
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 2e-4


def test_micro_batches_do_not_change_the_adapter(model: str, straight: Path, tmp_path: Path) -> None:
    train(config(model, train={"micro_batch_rollouts": 1, "steps": 2}, evaluate={"prompts": 0}), tmp_path / "many")
    assert_same_adapter(tmp_path / "many", straight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"kind": "dense"}}, r"\[distill\] needs the sparse rollouts of a schedule"),
        (
            {"guard": {"action": "warn", "at_least": 0.9}, "control": {"by": "guard", "stricter": ["dense"]}},
            r'control\.by = "guard" goes on to "dense"',
        ),
        ({"control": {"by": "cheaper", "schedules": ["dense"]}}, r'control\.by = "cheaper" goes on to "dense"'),
        ({"distill": {"rank": 0}}, r"distill\.rank"),
        ({"distill": {"lr": 0}}, r"distill\.lr"),
        ({"distill": {"objective": "ppo"}}, r"distill\.objective"),
    ],
)
def test_combinations_without_a_sense_are_refused_when_the_config_is_read(
    changes: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        config("no-model", **changes)


def test_layers_that_the_model_does_not_have_are_refused_at_the_start(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the adapter does not fit"):
        train(config(model, distill={"target_modules": ["query"]}), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


CHEAPER: dict[str, dict[str, Any]] = {
    # A target that every measurement meets, so that it is known when the switches come.
    "control": {"by": "cheaper", "at_least": 0.01, "every_steps": 1, "patience": 2, "prompts": 4},
    "distill": {"lr": 1e-4},
    "mismatch": {"least_tokens": 20, "bin_tokens": 200},
    "attention": {"kind": "budget", "kv_budget_tokens": 96},
}


@pytest.fixture
def cheaper(tmp_path: Path) -> dict[str, dict[str, Any]]:
    names = []
    for tokens in (80, 64):
        path = tmp_path / f"cheap-{tokens}.toml"
        Schedule.fixed(tokens).save(path)
        names.append(str(path))
    return CHEAPER | {"control": CHEAPER["control"] | {"schedules": names}}


def test_the_run_goes_on_to_cheaper_schedules_and_a_resumed_one_too(
    model: str, tmp_path: Path, cheaper: dict[str, dict[str, Any]]
) -> None:
    result = train(config(model, **cheaper), tmp_path / "run")
    assert [event.partition(":")[0] for event in result.events] == ["step 2", "step 4"]
    assert result.events[0].endswith("fixed-96 -> cheap-80")
    assert result.events[1].endswith("cheap-80 -> cheap-64")
    steps = [line for line in lines(tmp_path / "run") if "reward/mean" in line]
    assert steps[2]["rollout/kv_read_share"] < steps[1]["rollout/kv_read_share"]
    assert [line["distill/cheaper_held"] for line in steps] == [1, 2, 1, 2]
    shutil.copytree(tmp_path / "run", tmp_path / "cut", symlinks=True)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000004")
    assert train(config(model, **cheaper), tmp_path / "cut", resume=True).events == result.events
    assert lines(tmp_path / "cut") == lines(tmp_path / "run")
    assert_same_checkpoints(tmp_path / "cut", tmp_path / "run")


def test_a_target_that_is_not_held_changes_nothing(
    model: str, tmp_path: Path, cheaper: dict[str, dict[str, Any]]
) -> None:
    high = cheaper | {"control": cheaper["control"] | {"at_least": 0.999}}
    assert train(config(model, **high), tmp_path / "run").events == ()


def test_the_replay_of_the_own_schedule_is_the_tail_of_the_rollouts(
    model: str, tmp_path: Path, cheaper: dict[str, dict[str, Any]]
) -> None:
    """All prompts, the schedule that sampled: replaying measures what sampling measured."""
    Schedule.fixed(96).save(tmp_path / "same.toml")
    same = cheaper | {"control": cheaper["control"] | {"schedules": [str(tmp_path / "same.toml")]}}
    train(config(model, **same), tmp_path / "run")
    steps = [line for line in lines(tmp_path / "run") if "distill/cheaper_q05" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["distill/cheaper_q05"] == pytest.approx(line["mismatch/acceptance_q05_worst_bin"], abs=1e-5)


def test_cheaper_schedules_need_a_target(model: str, tmp_path: Path, cheaper: dict[str, dict[str, Any]]) -> None:
    without = cheaper | {"control": cheaper["control"] | {"at_least": None}}
    with pytest.raises(UserError, match=r"(?s)'fixed-96' names none.*control\.at_least"):
        train(config(model, **without), tmp_path / "run")
