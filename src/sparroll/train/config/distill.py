"""DistillConfig: everything that a run of `sparroll distill` depends on, which trains an adapter against a frozen
model. It has only the sections and fields that such a run reads."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sparroll.engines.make import check_samples_at
from sparroll.mismatch.checks import check_bins
from sparroll.tasks.data.settings import DataSettings
from sparroll.train.config.adapter import KLSection
from sparroll.train.config.base import Section
from sparroll.train.config.control import GuardSection
from sparroll.train.config.outputs import (
    CheckpointSection,
    EvaluateSection,
    HeldOutSection,
    LogSection,
    MismatchSection,
)
from sparroll.train.config.rollout import (
    BudgetAttention,
    EngineSection,
    HFEngineSection,
    RolloutSection,
    SamplingSection,
    ScheduleAttention,
)
from sparroll.train.config.run import TrainConfig
from sparroll.train.config.task import ModelSection, TaskSection
from sparroll.train.config.training import StepsSection, TrainSection


class FrozenSection(KLSection):
    """[distill] of a run without a policy update: the objective is the KL alone, by default over top-k lists, and the
    adapter has its own learning rate."""

    kl: Literal["k3", "top_k"] = "top_k"
    """Estimate of the KL between the sparse and the dense policy. k3: from the sampled tokens (published). top_k: over
    the dense policy's rollout.top_k most likely tokens at each position and one bucket for the rest, which gives the
    same direction with far less noise."""
    lr: float = Field(default=1e-4, gt=0)
    """Learning rate of the adapter's AdamW after the warm-up of train.warmup_steps steps."""


class DistillConfig(Section):
    """A run's whole configuration, immutable. `model_dump(mode="json")` is written beside the results."""

    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    data: DataSettings = DataSettings()
    engine: EngineSection = HFEngineSection()
    """What samples the rollouts."""
    rollout: SamplingSection = SamplingSection()
    attention: ScheduleAttention | BudgetAttention = Field(examples=["sparroll distill --budget 512"])
    """What a decode step of the rollouts reads."""
    train: StepsSection = StepsSection()
    mismatch: MismatchSection = MismatchSection()
    distill: FrozenSection = FrozenSection()
    evaluate: HeldOutSection = HeldOutSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _the_engine_samples_at_the_temperature(self) -> Self:
        check_samples_at(self.engine.kind, self.rollout.temperature, "rollout.temperature")
        return self

    @model_validator(mode="after")
    def _the_tail_has_few_bins(self) -> Self:
        check_bins(self.mismatch.bin_tokens, self.rollout.max_new_tokens)
        return self

    def for_trainer(self) -> TrainConfig:
        """The same run as a TrainConfig, which is what the trainer reads. It has no guard, and settings that only a
        policy update reads are at their defaults."""
        return TrainConfig(
            model=self.model,
            task=self.task,
            data=self.data,
            engine=self.engine,
            rollout=RolloutSection(**dict(self.rollout)),
            attention=self.attention,
            guard=GuardSection(action="off"),
            train=TrainSection(**dict(self.train)),
            mismatch=self.mismatch,
            distill=KLSection(**dict(self.distill)),
            evaluate=EvaluateSection(**dict(self.evaluate)),
            checkpoint=self.checkpoint,
            log=self.log,
        )
