"""The sections [engine], [rollout] and [attention]: who samples, how much of it, and what each decode step reads."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from sparroll.compression import Compression, compression_kinds, make_compression
from sparroll.train.config.base import Section


class HFEngineSection(Section):
    tag = "kind"
    kind: Literal["hf"] = "hf"
    """hf: the reference engine on transformers. vllm: vLLM in the trainer's process, one process only."""

    sleep_level: ClassVar[Literal[0]] = 0

    def options(self) -> dict[str, Any]:
        """What `make_engine` takes beside what all engines do."""
        return {}


class VLLMEngineSection(Section):
    tag = "kind"
    kind: Literal["vllm"] = "vllm"
    """vLLM in the trainer's process, one process only."""
    gpu_memory_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU for vLLM's weights and cache; the trainer has the rest."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """vLLM's cache, index included, in GiB; none: what is left of gpu_memory_share after a measurement, which is wrong while
    other processes take or free memory of the same GPU."""
    sleep_level: Literal[0, 1, 2] = 0
    """What vLLM gives up while the policy is updated, on a GPU. 0: nothing. 1: its cache, and its weights to host memory.
    2: both for good, since new weights come anyway."""

    def options(self) -> dict[str, Any]:
        """What `make_engine` takes beside what all engines do."""
        return {
            "gpu_memory_share": self.gpu_memory_share,
            "kv_cache_gib": self.kv_cache_gib,
            "sleep_mode": self.sleep_level > 0,
        }


EngineSection = HFEngineSection | VLLMEngineSection


class SamplingSection(Section):
    """What every run that samples has; also the whole [rollout] of `sparroll distill`."""

    samples_per_prompt: int = Field(default=2, ge=2)
    """Rollouts of each prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling, and of every log-probability in the run."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """A response is cut here, in tokens. A cut response usually has no answer, so its reward is 0."""
    max_batch: int = Field(default=64, ge=1)
    """Rollouts that decode together. Bounds the KV cache's memory."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the engine's weights and cache. bf16 halves memory and lowers the dense ceiling a little."""
    top_k: int = Field(default=20, ge=1)
    """Most likely tokens kept of both policies at each position, to estimate the acceptance."""


class RolloutSection(SamplingSection):
    samples_per_prompt: int = Field(default=8, ge=2)
    """Rollouts that are judged against each other. More give steadier advantages and cost rollout time."""
    dynamic_sampling: bool = False
    """Drop prompts whose rollouts all got the same reward, and sample others until `train.prompts_per_step` are left whose
    rollouts differ (DAPO). Dropped rollouts cost sampling and rewards, no training."""
    dynamic_sampling_rounds: int = Field(default=10, ge=1)
    """Rounds of sampling a step at most. After the last one the step goes on with the groups there are, an event; a step
    without any counts for `guard.empty_steps`."""
    dynamic_sampling_by: str | None = None
    """Name of the one reward term whose differences count; none: all terms, weighted and added up. The overlong penalty
    never counts."""


class DenseAttention(Section):
    tag = "kind"
    kind: Literal["dense"] = "dense"
    """What a decode step reads. dense: the whole context. schedule: the budget that a schedule has for this length. budget:
    the same budget at every length. compression: what a compression policy has left in the cache."""


class ScheduleAttention(Section):
    tag = "kind"
    kind: Literal["schedule"] = "schedule"
    """The budget that a schedule has for this length."""
    name: str = Field(examples=["qwen3-1.7b-0.86"])
    """Preset or file of the KV budgets to sample under."""
    force: bool = False
    """Use a schedule that was made for another model."""


class BudgetAttention(Section):
    tag = "kind"
    kind: Literal["budget"] = "budget"
    """The same budget at every length."""
    kv_budget_tokens: int = Field(gt=0, examples=[512])
    """Tokens that a decode step reads, in whole pages of 16. Lower is faster and further from the dense policy."""


class CompressionAttention(Section):
    """The policy, and beside it that policy's own settings. Those that are left out are filled in, so that a run records
    what it ran with."""

    model_config = ConfigDict(extra="allow")
    tag = "kind"
    kind: Literal["compression"] = "compression"
    """What a compression policy has left in the cache; only with engine.kind = "hf"."""
    policy: str = Field(examples=["r_kv"])
    """Which tokens leave the KV cache for good: r_kv, snap_kv or streaming; see docs/compression.md."""

    @classmethod
    def known_keys(cls) -> list[str]:
        policies = [type(make_compression(name)) for name in compression_kinds()]
        settings = (field.name for policy in policies for field in dataclasses.fields(policy))
        return list(dict.fromkeys([*cls.model_fields, *settings]))

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, table: Any) -> Any:
        if not isinstance(table, dict) or "policy" not in table:
            return table
        settings = {key: value for key, value in table.items() if key not in cls.model_fields}
        made = make_compression(table["policy"], **settings).table()
        return {"kind": table.get("kind", "compression"), "policy": made.pop("kind"), **made}

    def make(self) -> Compression:
        return make_compression(self.policy, **(self.model_extra or {}))


AttentionSection = DenseAttention | ScheduleAttention | BudgetAttention | CompressionAttention
