"""verl's trainer and our own loop make the same five steps on the same rollouts: the same losses and the same weights.

verl's actor runs in this process, without Ray: its FSDP2 engine, its advantages, its loss, its optimizer. Old
log-probabilities, correction and update are made anew in every step by either side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import runs
import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested, response_to_nested

from free_ports import free_port
from sparroll import tasks
from sparroll.corrections import correction
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.integrations.verl.loss_fields import READS, corrected_fields
from sparroll.train.config.training import TrainSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.sampling.advantages import group_advantages
from sparroll.train.step_correction import correct_step
from sparroll.train.update.policy import PolicyUpdate
from sparroll.types import Rollout, TokenBatch, TokenScores

STEPS, PROMPTS, SAMPLES, TOKENS, LR = 5, 2, 4, 48, 1e-4
CORRECTION = correction("icepop")


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorRolloutRefWorker]:
    folder = tmp_path_factory.mktemp("actor")
    runs.write_world(folder)
    port = str(free_port())
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    settings = runs.overrides(folder, "sync") | {
        "actor_rollout_ref.actor.optim.lr": str(LR),
        "actor_rollout_ref.actor.optim.weight_decay": "0",
        "actor_rollout_ref.actor.clip_ratio_high": "0.28",
        "actor_rollout_ref.actor.ppo_mini_batch_size": str(PROMPTS * SAMPLES),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", [f"{name}={value}" for name, value in settings.items() if not name.startswith("hydra")]
        )
    with pytest.MonkeyPatch.context() as patched:
        for name, value in place.items():
            patched.setenv(name, value)
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        worker.init_model()
        yield worker
    torch.distributed.destroy_process_group()


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def sampled(engine: HFEngine, seed: int) -> tuple[list[Rollout], torch.Tensor]:
    """Dense rollouts of the first weights with log-probabilities as far off as sparse ones would be; rewards [B]."""
    prompts = [prompt.text for prompt in tasks.get("synthetic").prompts("train", 1, seed, PROMPTS)]
    rollouts = engine.generate(prompts, SAMPLES, max_new_tokens=TOKENS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for rollout in rollouts:
        noise_T = 0.5 * torch.randn(len(rollout.response_ids), generator=generator)
        rollout.sparse_logp = (rollout.sparse_logp + noise_T).clamp(max=-1e-4)
    return rollouts, torch.randint(0, 5, (len(rollouts),), generator=generator) / 4


def step_of_verl(worker: ActorRolloutRefWorker, rollouts: list[Rollout], reward_B: torch.Tensor) -> float:
    """What PPOTrainer and our mixin do between sampling and the next weight sync. -> the loss"""
    prompts = [torch.tensor(each.prompt_ids) for each in rollouts]
    responses = [torch.tensor(each.response_ids) for each in rollouts]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    mask = nested([torch.ones(len(each), dtype=torch.int64) for each in responses])
    data = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(each)) for each in whole]),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": nested([each.sparse_logp for each in rollouts]),
    }
    batch = TensorDict(data, batch_size=len(rollouts))
    asked = tu.get_tensordict(dict(batch), {"temperature": 1.0, "calculate_entropy": False, "compute_loss": False})
    old = worker.compute_log_prob(asked)["log_probs"]
    batch["old_log_probs"] = response_from_nested(old, mask)
    scores_BT = torch.zeros(mask.to_padded_tensor(0).shape)
    for row, response in enumerate(responses):
        scores_BT[row, len(response) - 1] = reward_B[row]
    proto = DataProto(batch=TensorDict({"response_mask": mask.to_padded_tensor(0)}, batch_size=len(rollouts)))
    proto.batch["token_level_scores"] = proto.batch["token_level_rewards"] = scores_BT
    proto.non_tensor_batch["uid"] = np.array([str(each.prompt_index) for each in rollouts], dtype=object)
    keys = [f"{each.prompt_index}_{each.sample_index}_0" for each in rollouts]
    proto = compute_advantage_for_multi_trajectories(proto, keys, "grpo", num_repeat=SAMPLES)
    batch["advantages"] = response_to_nested(proto.batch["advantages"], mask)
    written = corrected_fields(CORRECTION, {name: batch[name] for name in READS}, [list(range(len(rollouts)))])
    for name, tensor in written.nested.items():
        batch[name] = tensor
    size = len(rollouts)
    extra = {"global_batch_size": size, "mini_batch_size": size, "epochs": 1, "seed": 0, "temperature": 1.0}
    extra |= {"dataloader_kwargs": {"shuffle": False}, "calculate_entropy": False}
    metrics: Any = tu.get(worker.update_actor(tu.get_tensordict(dict(batch), extra)), "metrics")
    return float(metrics["loss"][0] if isinstance(metrics["loss"], list) else metrics["loss"])


def step_of_ours(
    update: PolicyUpdate, scorer: Scorer, rollouts: list[Rollout], reward_B: torch.Tensor, step: int
) -> float:
    batch = TokenBatch.from_rollouts(rollouts, pad_id=0)
    scores: list[TokenScores] = scorer.dense(rollouts)
    batch.add_scores(scores)
    batch.advantage_B = group_advantages(reward_B.view(PROMPTS, SAMPLES), True).flatten()
    correct_step(CORRECTION, batch, rollouts, scores, Ranks(), 0, step)
    return update(batch, step, lambda: None)["policy/loss"]


def test_five_steps_give_the_same_losses_and_weights(actor: ActorRolloutRefWorker) -> None:
    scorer = Scorer("tiny-reasoner", dtype=torch.float32)
    settings = TrainSection(lr=LR, clip_low=0.2, clip_high=0.28, weight_decay=0.0)
    first = {name: tensor.clone() for name, tensor in scorer.model.state_dict().items()}
    update = PolicyUpdate(scorer.model, settings, 1.0, Ranks())
    with HFEngine("tiny-reasoner") as engine:
        given = [sampled(engine, seed) for seed in range(STEPS)]
    losses = []
    for step, (rollouts, reward_B) in enumerate(given, 1):
        losses.append((step_of_verl(actor, rollouts, reward_B), step_of_ours(update, scorer, rollouts, reward_B, step)))
    for verls, ours in losses:
        assert verls == pytest.approx(ours, abs=1e-6)
    assert len({round(ours, 4) for _, ours in losses}) == STEPS
    trained = dict(actor.actor.engine.get_per_tensor_param()[0])
    own = scorer.model.state_dict()
    for name, tensor in trained.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        # AdamW divides a gradient by its own size, so rounding moves the few weights that have next to none.
        assert float((whole - own[name]).norm()) <= 0.01 * float((own[name] - first[name]).norm()), name
