"""verl's three trainers with sparse rollouts that are measured, corrected and watched. `SparseTrainer` is mixed in before
verl's class and overrides its hooks; the loop, the loss, weight sync and checkpoints stay verl's.

A step in time:  sample (verl) -> measure in the replicas -> sleep, rewards, old log-probabilities, advantages (verl) ->
correct -> update (verl) -> take what was measured, watch, decide -> checkpoint, weight sync (verl) -> the next schedule.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sparroll.errors import UserError
from sparroll.integrations import saved_state
from sparroll.integrations.measured import ran_report, share_of_engine
from sparroll.integrations.verl import control_rows, refusals
from sparroll.integrations.verl.checked_logp import old_log_probs
from sparroll.integrations.verl.control_rows import ControlRows
from sparroll.integrations.verl.llm_client import SparrollLLMClient
from sparroll.integrations.verl.loss_fields import PARTS, READS, corrected_fields, rows_of_updates, stale_tokens
from sparroll.integrations.verl.settings import RunFacts, SparseSettings
from sparroll.integrations.verl.steps import Steps, average
from sparroll.schedule import Schedule
from sparroll.types import StepReport


def _replica_class() -> type[Any]:
    from sparroll.integrations.verl.server import SparrollReplica

    return SparrollReplica


_RESUME_HINT = "start a new run from its weights (actor_rollout_ref.model.path), or with trainer.resume_mode=disable"


class SparseTrainer:
    """Mixed into a trainer of verl, before it. `self` is the trainer."""

    base_mode: ClassVar[str]
    """verl's name of the trainer that is extended."""
    idle_between_steps: ClassVar[bool] = False
    """Whether no request runs between two steps, so that a dense validation and the dense ceiling are possible."""

    def __init__(self: Any, config: DictConfig):
        plain: Any = OmegaConf.to_container(config, resolve=True)
        self.settings = SparseSettings.read(refusals.settings_of(plain), RunFacts.of(plain))
        self.steps = Steps(self.settings)
        self.steps.news = refusals.notices(plain) + self.steps.news
        self._policy: list[StepReport] = []
        self._extra: StepReport = {}
        """Metrics that come after the step's own: those of validation, and of the first dense ceiling."""
        self._set_schedule: Schedule | None = self.steps.schedule
        self._spent: dict[str, float] = defaultdict(float)
        """Seconds of the driver in this step that verl alone would not have spent, by part."""
        self._restored = False
        self._saved_step = 0
        """The step of the last checkpoint that this run wrote."""
        rollout = config.actor_rollout_ref.rollout
        context_tokens = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        self.control_rows = ControlRows(int(rollout.response_length), int(context_tokens))
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
            # With a control group, one of the user's own was refused.
            rollout.agent.agent_loop_manager_class = rollout.agent.get("agent_loop_manager_class") or refusals.MANAGER
            rollout.calculate_log_probs = True
            rollout.custom.sparroll["_engine"] = self.settings.engine_table()
        RolloutReplicaRegistry.register("vllm", _replica_class)
        super().__init__(config)  # type: ignore[call-arg]

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _ask(self: Any, method: str, *arguments: Any) -> list[Any]:
        """Call a method of SparrollHttpServer on every replica. The first server of a replica has its engine."""
        replicas = [each for manager in self._rollout_server_managers() for each in manager.get_replicas()]
        return list(ray.get([getattr(each.servers[0], method).remote(*arguments) for each in replicas]))

    def _set_on_all(self: Any, schedule: Schedule | None, measures: bool = True, *, with_weights: bool = False) -> None:
        """with_weights: from the next weights on, and not at once."""
        inline = None if schedule is None else schedule.inline()
        self._ask("sparroll_set_schedule", inline, measures, with_weights)
        self._set_schedule = schedule

    def on_init_end(self: Any) -> None:
        replicas = self._ask("sparroll_take")
        settings = self.settings
        counts = settings.probe_rollouts, settings.config.mismatch.ceiling_prompts, settings.rollouts_per_step
        self._ask("sparroll_probe", *(share_of_engine(count, len(replicas)) for count in counts))
        super().on_init_end()  # type: ignore[misc]
        self._set_on_all(self.steps.schedule)
        for line in [] if self._restored else self.steps.news:
            self._say(line)
        self.steps.news = []

    # -- a step ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _spending(self: Any, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[part] += time.perf_counter() - began

    def _submit_batch_to_rollout(self: Any, batch: TensorDict) -> Any:
        """verl's call for the prompts of a step; validation has another."""
        if "agent_name" in batch:
            refusals.check_agents(list(batch["agent_name"]))
        flags = self.control_rows.draw(list(batch["uid"]))
        if flags is not None:
            batch[control_rows.FLAGS] = flags
        return super()._submit_batch_to_rollout(batch)  # type: ignore[misc]

    def on_sample_end(self: Any) -> None:
        # Of the updates between two weight syncs, only the last one is followed by a change.
        if self.local_trigger_step == self.parameter_sync_step - 1:
            with self._spending("measure"):
                self._ask("sparroll_measure")
        super().on_sample_end()  # type: ignore[misc]

    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        """From the checks of drafts where the settings say so. verl's pass, and its `actor/entropy`, are then left out."""
        if not self.settings.dense_logp_from_engine:
            return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        with self._spending("correct"):
            checked = [each for replica in self._ask("sparroll_take_responses") for each in replica]
            where = {"keys": batch.keys, "partition_id": batch.partition_id}
            data = tq.kv_batch_get(**where, select_fields=["prompts", "responses"])
            padding = [bool(tag.get("is_padding")) for tag in batch.tags]
            rows = old_log_probs(checked, data["prompts"].unbind(), data["responses"].unbind(), padding)
            fields = {"old_log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
            return tq.kv_batch_put(**where, fields=TensorDict(fields, batch_size=len(batch)))

    def _compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        with self._spending("correct"):
            return self._corrected(batch)

    def _corrected(self: Any, batch: Any) -> Any:
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        control_B = self.control_rows.dense_rows(batch.keys)
        compares = [] if control_B is None else control_rows.READS
        sampled_with = [] if self.idle_between_steps else ["extra_fields"]
        data = tq.kv_batch_get(**where, select_fields=sorted({*READS, *compares, *sampled_with}))
        self.control_rows.compare(batch.keys, data)
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        updates = rows_of_updates(len(batch), actor.ppo_mini_batch_size * rollout.n, ranks)
        fields = {name: data[name] for name in READS}
        stale = None if self.idle_between_steps else self._stale(data)
        corrected = corrected_fields(self.settings.correction, fields, updates, stale, control_B)
        self._policy.append(corrected.report)
        return tq.kv_batch_put(**where, fields=TensorDict(corrected.nested, batch_size=len(batch)))

    def _stale(self: Any, data: TensorDict) -> list[Tensor]:
        """Which tokens were sampled with other weights than those that the step began with."""
        # A list of its own kind, or a stack of tensordict's.
        said = data["extra_fields"]
        said = said.tolist() if hasattr(said, "tolist") else list(said)
        missing = sum(not isinstance(each, dict) or PARTS not in each for each in said)
        if missing:
            raise UserError(
                f"{missing} of {len(said)} rollouts do not say which weights they were sampled with",
                "an agent loop of your own must pass on the extra_fields of what the server returned",
            )
        lengths = data["response_mask"].offsets().diff().tolist()
        version = self.global_steps - 1
        return [stale_tokens(each[PARTS], length, version) for each, length in zip(said, lengths, strict=True)]

    def step(self: Any, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        self.control_rows.begin(self.steps.control_group, self.global_steps)
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        policy, self._policy = average(self._policy), []
        # Before the checkpoint, so that it holds what this step decided.
        with self._spending("watch"):
            decided = self.steps.complete(self.global_steps, self._ask("sparroll_take"), policy)
        metrics.update(decided.report)
        for line in decided.events:
            self._say(line)
        return batch

    def on_step_end(self: Any) -> None:
        if not self.idle_between_steps:
            self._take_next_schedule(with_weights=True)
        super().on_step_end()  # type: ignore[misc]
        if self.steps.stopped:
            self._stop()
        if self.idle_between_steps:
            if self.steps.ceiling_due(self.global_steps):
                with self._spending("ceiling"):
                    self._measure_ceiling()
            self._take_next_schedule()

    def _take_next_schedule(self: Any, *, with_weights: bool = False) -> None:
        if self.steps.schedule != self._set_schedule:
            with self._spending("watch"):
                self._set_on_all(self.steps.schedule, with_weights=with_weights)

    def _measure_ceiling(self: Any) -> None:
        """The tail of dense rollouts, on prompts of the step that has just ended."""
        first = not self.steps.ceiling
        self._set_on_all(None, False)
        replicas = self._ask("sparroll_take")
        count = share_of_engine(self.settings.config.mismatch.ceiling_prompts, len(replicas))
        states = self._ask("sparroll_dense_ceiling", count, self.config.actor_rollout_ref.rollout.response_length)
        self._ask("sparroll_take")
        self.steps.measured_ceiling(states, self.global_steps)
        if self._saved_step == self.global_steps:
            # verl writes the step's checkpoint before this is known.
            self._save_state()
        self._set_on_all(self.steps.schedule)
        if first:
            self._extra |= self.steps.ceiling

    def _stop(self: Any) -> None:
        """End the run after this step, with a checkpoint if the run writes any."""
        frequency = self.config.trainer.save_freq
        if frequency > 0 and self.global_steps % frequency and self.global_steps < self.total_training_steps:
            self._save_checkpoint()
        self.total_training_steps = self.global_steps

    def _compute_metrics(
        self: Any, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, Any], **more: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **more)  # type: ignore[misc]
        metrics.update(self._extra)
        self._extra = {}
        for part in ("measure", "correct", "watch", "ceiling"):
            metrics[f"time/sparroll_{part}_seconds"] = self._spent[part]
        self._spent.clear()
        if timing_raw.get("step"):
            metrics["rescoring/share_of_step"] = metrics["rescoring/seconds"] / timing_raw["step"]

    def _say(self: Any, line: str) -> None:
        print(f"sparroll, step {self.global_steps}: {line}", flush=True)

    # -- validation --------------------------------------------------------------------------------------------------

    def on_validate_begin(self: Any) -> None:
        super().on_validate_begin()  # type: ignore[misc]
        if self.idle_between_steps:
            self._ask("sparroll_take")
            self._set_on_all(None, False)

    def on_validate_end(self: Any) -> None:
        if self.idle_between_steps:
            self._extra |= ran_report(self._ask("sparroll_take"), "validation")
            self._set_on_all(self.steps.schedule)
        super().on_validate_end()  # type: ignore[misc]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self: Any) -> None:
        # verl's own files come last, the one that names the newest checkpoint among them.
        self._save_state()
        super()._save_checkpoint()  # type: ignore[misc]
        self._saved_step = self.global_steps

    def _save_state(self: Any) -> None:
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        os.makedirs(folder, exist_ok=True)
        saved_state.write(folder, self.steps.state(), self.settings.table())

    def _load_checkpoint(self: Any) -> None:
        super()._load_checkpoint()  # type: ignore[misc]
        if not self.global_steps:
            return
        trainer = self.config.trainer
        folder = trainer.default_local_dir
        if trainer.resume_mode == "resume_path":
            folder = os.path.dirname(trainer.resume_from_path.rstrip("/"))
        folder = os.path.join(folder, f"global_step_{self.global_steps}")
        settings = self.settings
        words = settings.in_their_words
        self.steps.restore(saved_state.read(folder, _RESUME_HINT, settings.table(), in_their_words=words))
        self._restored = True
        if self.steps.stopped:
            raise UserError(
                f"this run was stopped at step {self.global_steps}: {self.steps.stopped}",
                "start a new run from its weights (actor_rollout_ref.model.path) with other settings",
            )


@register_trainer("sparroll_sync")
class SparrollSync(SparseTrainer, PPOTrainerSync):
    base_mode = refusals.MODES["sparroll_sync"]
    idle_between_steps = True


@register_trainer("sparroll_colocate_async")
class SparrollColocateAsync(SparseTrainer, PPOTrainerColocateAsync):
    base_mode = refusals.MODES["sparroll_colocate_async"]

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=SparrollLLMClient)


@register_trainer("sparroll_separate_async")
class SparrollSeparateAsync(SparseTrainer, PPOTrainerSeparateAsync):
    base_mode = refusals.MODES["sparroll_separate_async"]

    def get_llm_client(self) -> LLMServerClient:
        return self.standalone_server_manager.get_client(client_cls=SparrollLLMClient)

    def _setup(self) -> None:
        # Without hybrid replicas verl 0.9.1 ends here, in a line of its log: it gives logging an argument of print's.
        log = logging.getLogger(PPOTrainerSeparateAsync.__module__)
        level = log.level
        log.setLevel(max(level, logging.WARNING))
        try:
            super()._setup()
        finally:
            log.setLevel(level)
