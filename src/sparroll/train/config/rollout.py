"""The sections [engine], [rollout], [attention] and [check]: what samples, how many and how long rollouts, what a decode
step reads, and how drafts are checked."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from sparroll.compression import Compression, compression_kinds, make_compression
from sparroll.control.control_group import MOST_SHARE, ControlGroupSettings
from sparroll.draft_check import LEAST_WINDOW_TOKENS, MOST_WINDOW_TOKENS, DraftCheck
from sparroll.schedule import MOST_TOKENS
from sparroll.train.config.base import Section
from sparroll.types import LEAST_TEMPERATURE, MOST_SAMPLES


class HFEngineSection(Section):
    tag = "kind"
    kind: Literal["hf"] = "hf"
    """hf: the reference engine on transformers. vllm: vLLM inside the trainer's process, for runs of one process."""

    sleep_level: ClassVar[Literal[0]] = 0

    def options(self) -> dict[str, Any]:
        """What `make_engine` takes beside what all engines do."""
        return {}


class VLLMEngineSection(Section):
    tag = "kind"
    kind: Literal["vllm"] = "vllm"
    """vLLM inside the trainer's process, for runs of one process."""
    gpu_memory_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU for vLLM's weights and cache; the trainer has the rest."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Size of vLLM's cache, index included, in GiB; "none": vLLM measures what is left of gpu_memory_share. That
    measurement is wrong while other processes take or free memory of the same GPU."""
    sleep_level: Literal[0, 1, 2] = 0
    """What vLLM frees on the GPU while the policy is updated. 0: nothing. 1: the cache is dropped, and the weights move
    to host memory. 2: both are dropped, since new weights come anyway."""

    def options(self) -> dict[str, Any]:
        """What `make_engine` takes beside what all engines do."""
        return {
            "gpu_memory_share": self.gpu_memory_share,
            "kv_cache_gib": self.kv_cache_gib,
            "sleep_mode": self.sleep_level > 0,
        }


EngineSection = HFEngineSection | VLLMEngineSection


class SamplingSection(Section):
    """The fields of every run that samples. `sparroll distill` has no other fields in [rollout]."""

    samples_per_prompt: int = Field(default=2, ge=2, le=MOST_SAMPLES)
    """Rollouts of each prompt."""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """Temperature of sampling, and of every log-probability in the run. The engine vllm samples at 0.01 or more."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Responses are cut at this many tokens. A cut response usually has no answer, so its reward is 0."""
    max_batch: int = Field(default=64, ge=1)
    """How many rollouts decode together at most. This bounds the KV cache's memory."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the engine's weights and cache. bf16 halves memory and lowers the dense ceiling a little."""
    top_k: int = Field(default=20, ge=1)
    """How many of the most likely tokens of both policies are kept at each position, to estimate the acceptance."""


class RolloutSection(SamplingSection):
    samples_per_prompt: int = Field(default=8, ge=2, le=MOST_SAMPLES)
    """Rollouts of each prompt, which are compared with each other. More of them give steadier advantages and cost
    rollout time."""
    dynamic_sampling: bool = False
    """Drop prompts whose rollouts all got the same reward, and sample others until `train.prompts_per_step` prompts
    have rollouts that differ (DAPO). Dropped rollouts cost time for sampling and rewards, but none for training."""
    dynamic_sampling_rounds: int = Field(default=10, ge=1)
    """A step has at most this many rounds of sampling. After the last one it goes on with the groups it has, and logs
    that as an event. A step without any group counts for `guard.empty_steps`."""
    dynamic_sampling_by: str | None = None
    """Name of the reward term in which rollouts must differ; "none": the sum of all weighted terms. The overlong
    penalty never counts."""
    control_share: float | None = Field(default=None, ge=0, le=MOST_SHARE)
    """Share of a step's rollouts that is decoded densely, as a control group: compared with the sparse rollouts of the
    same prompts, it shows what sparsity costs in reward. They are trained on like the others. 0: there is none. "none",
    the default: 1/32 (0.03125) with sparse rollouts, and 0 where there can be no control group: with dense rollouts, with
    [distill], train.whole_union or train.rollouts_behind_steps. `--print-config` shows which of them a run has."""
    control_share_first: float = Field(default=ControlGroupSettings.share_first, gt=0, le=MOST_SHARE)
    """The share over the first steps under a schedule, where nothing is known yet, and later in steps in which there may
    well be a gap, but not surely. At least `control_share`; as large as it, the share never changes."""
    control_first_steps: int = Field(default=ControlGroupSettings.first_steps, ge=0)
    """How many steps under one schedule are its first steps."""


class DenseAttention(Section):
    tag = "kind"
    kind: Literal["dense"] = "dense"
    """What a decode step reads. dense: the whole context. schedule: the budget that a schedule has for this length.
    budget: the same budget at every length. compression: what a compression policy has left in the cache."""


class ScheduleAttention(Section):
    tag = "kind"
    kind: Literal["schedule"] = "schedule"
    """The budget that a schedule has for this length."""
    name: str = Field(examples=["qwen3-1.7b-0.86"])
    """Preset or file of the schedule to sample under."""
    force: bool = False
    """Use a schedule that was made for another model."""


class BudgetAttention(Section):
    tag = "kind"
    kind: Literal["budget"] = "budget"
    """The same budget at every length."""
    kv_budget_tokens: int = Field(gt=0, le=MOST_TOKENS, examples=[512])
    """Tokens that a decode step reads, in whole pages of 16. Lower is faster and further from the dense policy."""


class CompressionAttention(Section):
    """The name of the policy, and beside it that policy's own settings. Settings that are left out are filled in with
    their defaults, so that a run records what it ran with."""

    model_config = ConfigDict(extra="allow")
    tag = "kind"
    kind: Literal["compression"] = "compression"
    """What a compression policy has left in the cache; only with engine.kind = "hf"."""
    policy: str = Field(examples=["r_kv"])
    """Which tokens leave the KV cache for good: r_kv, snap_kv or streaming; see docs/compression.md."""

    @classmethod
    def further(cls) -> dict[str, Any]:
        return {name: make_compression(name) for name in compression_kinds()}

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


class CheckSection(Section):
    """The section [check]: the dense policy checks what is drafted, window by window, under every schedule of the run and
    in place of the checks of their files. Without the section, each file's own check holds, and a schedule whose file has
    none goes on with the check of the one before it."""

    window_tokens: int = Field(default=DraftCheck.window_tokens, ge=LEAST_WINDOW_TOKENS, le=MOST_WINDOW_TOKENS)
    """Tokens that one dense pass gives at most; all but the last one are drafted."""
    floor: float = Field(default=DraftCheck.floor, gt=0, le=1)
    """A sampled token is at most log(1 / floor) nats less likely under the dense policy than under the one that sampled
    it. 1 samples from the dense policy exactly, and drafts many more tokens than it keeps."""
    dense_logp: Literal["engine", "trainer"] = "engine"
    """Where the dense log-probabilities of a step come from. engine: from the checks, so that the trainer's own scoring
    pass is left out. trainer: from that pass, in the trainer's precision; the dense ceiling in the metrics says how far
    the two are apart."""

    def of_drafts(self) -> DraftCheck:
        return DraftCheck(self.window_tokens, self.floor)


AttentionSection = DenseAttention | ScheduleAttention | BudgetAttention | CompressionAttention
