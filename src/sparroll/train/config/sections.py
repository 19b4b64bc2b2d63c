"""What a training run can be told, field by field: the unit and what happens when you change it. Reading files and
overrides is file.py's part."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparroll.compression import Compression, make_compression
from sparroll.corrections import Correction, check_needs, correction
from sparroll.errors import UserError, nearest
from sparroll.tasks import is_data
from sparroll.tasks.async_calls import AT_ONCE, SECONDS
from sparroll.tasks.data.settings import DataSettings

TASK = "task"
"""Names the reward term that is the task's own verdict."""


class Section(BaseModel):
    # config.json holds every value, and JSON has no infinity.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class ModelSection(Section):
    name: str = "tiny-reasoner"
    """Packaged name, hub name or folder of the model to train; also where the reference of the KL term comes from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of this process if there is one."""


class TaskSection(Section):
    name: str = "synthetic"
    """Task family that writes the prompts and checks the answers."""
    level: int = Field(default=1, ge=0)
    """Difficulty; what a level means is the task's business."""
    train_prompts: int | None = Field(default=None, ge=1)
    """Distinct training prompts; after the last one they all come again, in another order. None: every row of real data,
    1024 of a task that never ends."""
    chat_template: bool = False
    """Wrap each prompt as a user's turn with the tokenizer's chat template. For instruction-tuned models."""
    thinking: bool | None = None
    """Thinking mode of the chat template; refused where the template has none. None: the template's own default."""

    @model_validator(mode="after")
    def _thinking_has_a_template(self) -> Self:
        if self.thinking is not None and not self.chat_template:
            raise ValueError(f"task.thinking = {str(self.thinking).lower()} needs task.chat_template = true")
        return self


class RolloutSection(Section):
    engine: Literal["hf", "vllm"] = "hf"
    """Who samples. hf: the reference engine on transformers. vllm: vLLM in the trainer's process, one process only."""
    schedule: str = "dense"
    """Preset name or file of the KV budgets to sample under; "dense" reads the whole context."""
    kv_budget_tokens: int | None = Field(default=None, gt=0)
    """One budget at every length instead of a schedule, in tokens. Lower is faster and further from the dense policy."""
    force_schedule: bool = False
    """Use a schedule that was made for another model."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Rollouts that are judged against each other. More give steadier advantages and cost rollout time."""
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
    dynamic_sampling: bool = False
    """Drop prompts whose rollouts all got the same reward, and sample others until `train.prompts_per_step` are left whose
    rollouts differ (DAPO). Dropped rollouts cost sampling and rewards, no training."""
    dynamic_sampling_rounds: int = Field(default=10, ge=1)
    """Rounds of sampling a step at most. After the last one the step goes on with the groups there are, an event; a step
    without any counts for `guard.empty_steps`."""
    dynamic_sampling_by: str | None = None
    """Name of the one reward term whose differences count; none: all terms, weighted and added up. The overlong penalty
    never counts."""
    gpu_memory_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU for vLLM's weights and cache; the trainer has the rest. Only for the engine vllm."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """vLLM's cache, index included, in GiB; none: what is left of gpu_memory_share after a measurement, which is wrong while
    other processes take or free memory of the same GPU. Only for the engine vllm."""
    sleep_level: Literal[0, 1, 2] = 0
    """What vLLM gives up while the policy is updated. 0: nothing. 1: its cache, and its weights to host memory. 2: both for
    good, since new weights come anyway. Only for the engine vllm on a GPU."""

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.kv_budget_tokens is not None and self.schedule != "dense":
            raise ValueError("rollout.schedule and rollout.kv_budget_tokens exclude each other; leave one out")
        if self.sleep_level and self.engine != "vllm":
            raise ValueError(f'rollout.sleep_level = {self.sleep_level} needs rollout.engine = "vllm"')
        if self.kv_cache_gib is not None and self.engine != "vllm":
            raise ValueError(f'rollout.kv_cache_gib = {self.kv_cache_gib} needs rollout.engine = "vllm"')
        return self


class TrainSection(Section):
    steps: int = Field(default=100, ge=1)
    """Steps in all. A resumed run may raise it."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts of one step, over all processes; each gets `samples_per_prompt` rollouts."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW after the warm-up; constant from there on, so more steps do not change earlier ones."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from lr / warmup_steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW, on matrices only."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Memory of AdamW's gradient mean."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Memory of AdamW's gradient square. Lower adapts faster in short runs."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients longer than this are scaled down to it; none leaves them."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Updates on the same rollouts. From the second on the clip bites."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token's ratio now/dense below 1 - clip_low brings no more gain."""
    clip_high: float = Field(default=0.28, gt=0)
    """Same above 1 + clip_high. Higher than clip_low lets unlikely tokens grow (clip-higher)."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the initial model (k3 estimate). Above 0 a second copy of the model stays in memory."""
    normalise_advantage: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Padded tokens of one forward and backward pass. Bounds memory; does not change the result."""
    micro_batch_rollouts: int | None = Field(default=None, ge=1)
    """Also bound the rollouts of a pass."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the trainer's arithmetic. Weights and optimizer stay fp32, since bf16 would swallow small updates."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time. Models with dropout are refused."""
    seed: int = Field(default=0, ge=0)
    """Of prompts, sampling and everything else that is drawn."""


TRAINER_GIVES: tuple[str, ...] = ("uniforms", "top_k")
"""What the loop hands to a correction beside dense_logp, sparse_logp and mask."""


class CorrectionSection(BaseModel):
    """The name, and beside it the settings of that correction: `name = "tis"`, `weight_max = 2.0`."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    name: str = "tis"
    """What makes up for sampling from the sparse policy; see corrections/."""

    @model_validator(mode="after")
    def _exists(self) -> Self:
        check_needs(self.make(), TRAINER_GIVES)
        return self

    def make(self) -> Correction:
        settings: dict[str, Any] = self.model_extra or {}
        return correction(self.name, **settings)


class RewardTerm(Section):
    """One summand of the reward."""

    use: str = Field(default=TASK, pattern=r"^(task|[^\W\d][\w.]*:[^\W\d][\w.]*)$")
    """"task" is the task's own verdict, from 0 to 1; "package.module:function" a function of one's own: docs/rewards.md."""
    weight: float = 1.0
    """What its values are multiplied by. At 0 it is only measured."""
    name: str = Field(default="", pattern=r"^[\w.-]+$")
    """In metrics; by default "task" or the function's own name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Handed to the function by name."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        for key in table.keys() - cls.model_fields.keys():
            raise ValueError(f"unknown key {key!r} of reward.terms: {nearest(key, list(cls.model_fields))}")
        return {"name": str(table.get("use", TASK)).rpartition(":")[2].rpartition(".")[2]} | table

    @model_validator(mode="after")
    def _task_has_no_settings(self) -> Self:
        if self.use == TASK and self.settings:
            raise ValueError("the reward term 'task' takes no settings; those of the task are in [task] and [data]")
        return self


class RewardSection(Section):
    terms: tuple[RewardTerm, ...] = Field(default=(RewardTerm(),), min_length=1)
    """What is weighted and added up. By default the task's verdict alone."""
    async_at_once: int = Field(default=AT_ONCE, ge=1)
    """Most calls of an async function in flight at a time, of each process."""
    async_seconds: float = Field(default=SECONDS, gt=0)
    """Time limit of one such call. Beyond it the run stops, and can be resumed. Functions that are not async have none."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): responses lose reward over the last so many tokens before rollout.max_new_tokens,
    linearly from 0. 0: no such penalty."""
    overlong_penalty: float = Field(default=1.0, gt=0, le=1e6)
    """What a response of rollout.max_new_tokens loses."""
    leave_out_truncated: bool = False
    """Truncated responses stay out of the loss and its denominator (overlong filtering). Their reward still counts for their
    group's mean."""

    @model_validator(mode="after")
    def _has_a_sense(self) -> Self:
        names = [term.name for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward terms are named {name!r}; give one another `name`")
        if not any(term.weight for term in self.terms):
            raise ValueError("every weight of reward.terms is 0, so no response would be better than another")
        if self.overlong_penalty != 1.0 and not self.overlong_buffer_tokens:
            raise ValueError("reward.overlong_penalty does nothing without reward.overlong_buffer_tokens")
        return self


class CompressionSection(BaseModel):
    """The kind, and beside it the settings of that policy: `kind = "r_kv"`, `budget_tokens = 512`. Those that are left out
    are filled in, so that a run records what it ran with."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    kind: str = "none"
    """Which tokens leave the KV cache during rollouts: none, r_kv, snap_kv or streaming; see docs/compression.md."""

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, table: Any) -> Any:
        settings = dict(table)
        kind = settings.pop("kind", "none")
        if kind != "none":
            return make_compression(kind, **settings).table()
        if settings:
            raise ValueError(f"compression.{min(settings)} does nothing without a compression; set compression.kind")
        return {"kind": kind}

    def make(self) -> Compression | None:
        settings: dict[str, Any] = self.model_extra or {}
        return None if self.kind == "none" else make_compression(self.kind, **settings)


class MismatchSection(Section):
    bin_tokens: int = Field(default=2000, ge=1)
    """Width of the context-length bins that the tail is reported for, in tokens."""
    least_tokens: int = Field(default=200, ge=20)
    """A bin with fewer tokens in a step is shown, but not counted as the worst one: its 5th percentile is noise."""
    ceiling_every_steps: int = Field(default=10, ge=0)
    """How often the dense ceiling is measured on fresh dense rollouts; 0: only before the first step."""
    ceiling_prompts: int = Field(default=2, ge=1)
    """Dense rollouts of one such measurement."""


class GuardSection(Section):
    action: Literal["off", "warn", "stop", "stricter"] = "warn"
    """What happens when the tail stays under the target. stricter: go on with the next schedule of `stricter`."""
    at_least: float | None = Field(default=None, gt=0, le=1)
    """Target of the worst bin's 5th percentile (estimator top_k_lower); without one, the schedule's own target."""
    window_steps: int = Field(default=10, ge=1)
    """Last steps whose rollouts are judged together. More find smaller shortfalls; a large one is found at once."""
    stricter: tuple[str, ...] = ()
    """Presets or files to fall back to, in this order; "dense" may be the last."""
    empty_steps: int = Field(default=3, ge=0)
    """The run stops after so many steps in a row in which the correction left no token to train on, or dynamic sampling
    found no prompt to train on, whatever `action` says; 0: never. Each such step is logged as an event."""

    @model_validator(mode="after")
    def _somewhere_to_go(self) -> Self:
        if self.action == "stricter" and not self.stricter:
            raise ValueError('guard.action = "stricter" needs guard.stricter, e.g. ["qwen3-1.7b-0.86", "dense"]')
        if self.stricter and self.action in ("warn", "stop"):
            raise UserError(
                f'guard.stricter does nothing with guard.action = "{self.action}"',
                'set guard.action = "stricter", or leave guard.stricter out',
            )
        return self


class ControllerSection(Section):
    target: float | None = Field(default=None, gt=0, lt=1)
    """Lower bound of every bin's 5th percentile (estimator top_k_lower) that budgets are moved to hold. None: off. Without a
    schedule (rollout.schedule = "dense") the rollouts become sparse, from `start_share` of the context down."""
    margin: float = Field(default=0.01, gt=0, lt=1)
    """A budget is lowered only while the lower bound is at target + margin or more. Wider is dearer and steadier."""
    patience: int = Field(default=5, ge=1)
    """Steps in a row for which that must be so. After a lowering that did not hold, twice as many, and so on."""
    window_steps: int = Field(default=4, ge=1)
    """Last steps whose rollouts are judged together. More find smaller differences, and later."""
    small_step: float = Field(default=0.05, gt=0, le=0.5)
    """How far one lowering goes, as a share of the budget; at least one page."""
    start_share: float = Field(default=0.5, gt=0, le=1)
    """Share of its context that each bin reads at first where there is neither a schedule nor a budget; 1 is dense. The
    published schedules read half or less of contexts from 4k on at a target of .88."""
    most_budget_tokens: int | None = Field(default=None, ge=1)
    """No budget is raised above this, in tokens; none: up to the whole bin, which is dense."""
    least_budget_tokens: int | None = Field(default=None, ge=1)
    """No budget is lowered below this, in tokens, and none starts below it; none: the selector's least. The tail does not
    see what fewer than five tokens of a hundred lose, so a bin of easy tokens may go lower than is good."""

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if self.model_fields_set and "target" not in self.model_fields_set:
            raise UserError(
                f"controller.{min(self.model_fields_set)} does nothing without controller.target",
                "set controller.target, for example to 0.86, or leave [controller] out",
            )
        return self


class DistillSection(Section):
    """DistillSparse: a LoRA adapter that only the sparse rollouts see, trained to bring them back to the dense policy."""

    enabled: bool = False
    """Train the adapter after each policy update. Needs sparse rollouts."""
    rank: int = Field(default=16, ge=1)
    """Of the adapter's matrices. Higher holds more and costs memory and a little time."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's change of a weight is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty: all but the output head."""
    objective: Literal["ppo_kl", "kl"] = "ppo_kl"
    """ppo_kl: the clipped policy loss of the sparse policy, plus kl_coefficient times the KL. kl: the KL alone."""
    kl_coefficient: float = Field(default=1e-3, gt=0)
    """Weight of the KL between the sparse and the dense policy in ppo_kl."""
    kl: Literal["k3", "top_k"] = "k3"
    """Its estimate. k3: from the sampled tokens (published). top_k: over the dense policy's rollout.top_k most likely tokens
    at each position and one bucket for the rest; the same direction with far less noise."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the adapter's AdamW, with the policy's warm-up; without one, 5 times train.lr."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """The adapter's gradients longer than this are scaled down to it; none leaves them."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Updates of the adapter on the same rollouts."""
    cheaper: tuple[str, ...] = ()
    """Presets or files to go on with, in this order, each as soon as the adapter holds the target under it."""
    cheaper_at_least: float | None = Field(default=None, gt=0, le=1)
    """That target, for the lower bound of the worst bin's 5th percentile; without one, the first schedule's own."""
    cheaper_every_steps: int = Field(default=10, ge=1)
    """How often some of the step's rollouts are replayed under the next cheaper schedule."""
    cheaper_prompts: int = Field(default=2, ge=1)
    """Prompts whose rollouts are replayed; 8 rollouts or more, since no bin counts with fewer."""
    cheaper_patience: int = Field(default=3, ge=1)
    """So many measurements in a row must hold the target."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        given = self.model_fields_set
        if given and "enabled" not in given:
            raise UserError(
                f"distill.{min(given)} does nothing without distill.enabled",
                "set distill.enabled = true, or leave [distill] out",
            )
        if not self.enabled:
            return self
        of_cheaper = [name for name in sorted(given) if name.startswith("cheaper_")]
        if of_cheaper and "cheaper" not in given:
            raise UserError(
                f"distill.{of_cheaper[0]} does nothing without distill.cheaper",
                'name the schedules to go on with, e.g. distill.cheaper = ["qwen3-1.7b-0.80"], or leave it out',
            )
        if self.objective == "kl" and self.kl_coefficient != type(self).model_fields["kl_coefficient"].default:
            raise UserError(
                f'distill.kl_coefficient = {self.kl_coefficient} does nothing with distill.objective = "kl", the KL alone',
                'leave it out, or set distill.objective = "ppo_kl"',
            )
        return self


class EvaluateSection(Section):
    prompts: int = Field(default=64, ge=0)
    """Prompts of the eval split, always the same; 0 turns dense evaluation off."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Responses per prompt. More narrow the interval less than more prompts do."""
    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps. Before the first and after the last step it always happens."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    level: int | None = Field(default=None, ge=0)
    """Difficulty; without one, the training level."""


class CheckpointSection(Section):
    every_steps: int = Field(default=10, ge=0)
    """Save after every so many steps; 0: only at the end and on Ctrl-C. A kill loses what came after the last one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""


class LogSection(Section):
    sinks: tuple[Literal["console", "tensorboard", "wandb", "trackio"], ...] = ("console",)
    """Where metrics go beside metrics.jsonl, which is always written."""
    project: str = "sparroll"
    """Project name for W&B and trackio."""
    run_name: str | None = None
    """Run name there; without one, the output folder's name."""


class TrainConfig(Section):
    """Everything a run depends on. Frozen; `model_dump(mode="json")` is what is written beside the results."""

    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    data: DataSettings = DataSettings()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    train: TrainSection = TrainSection()
    compression: CompressionSection = CompressionSection()
    correction: CorrectionSection = CorrectionSection()
    mismatch: MismatchSection = MismatchSection()
    guard: GuardSection = GuardSection()
    controller: ControllerSection = ControllerSection()
    distill: DistillSection = DistillSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _data_is_read(self) -> Self:
        if self.data != DataSettings() and not is_data(self.task.name):
            raise ValueError(f'[data] is for task.name = "data" or the name of a set, got "{self.task.name}"')
        return self

    @model_validator(mode="after")
    def _rewards_fit_the_rollouts(self) -> Self:
        rollout, buffer, by = self.rollout, self.reward.overlong_buffer_tokens, self.rollout.dynamic_sampling_by
        if buffer > rollout.max_new_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens = {buffer} must not be more than rollout.max_new_tokens = "
                f"{rollout.max_new_tokens}"
            )
        if not rollout.dynamic_sampling and (by is not None or rollout.dynamic_sampling_rounds != 10):
            field = "dynamic_sampling_by" if by is not None else "dynamic_sampling_rounds"
            raise ValueError(f"rollout.{field} does nothing without rollout.dynamic_sampling = true")
        names = [term.name for term in self.reward.terms]
        if by is not None and by not in names:
            raise ValueError(f"rollout.dynamic_sampling_by = {by!r} is no reward term; there are {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _compression_fits(self) -> Self:
        rollout, kind = self.rollout, self.compression.kind
        if kind == "none":
            return self
        if rollout.schedule != "dense" or rollout.kv_budget_tokens is not None:
            raise ValueError(
                f'compression.kind = "{kind}" and rollout.schedule or rollout.kv_budget_tokens exclude each other; '
                "leave one out"
            )
        if self.distill.enabled:
            raise ValueError(f'distill.enabled replays a schedule, which compression.kind = "{kind}" does not have')
        if rollout.engine != "hf":
            raise ValueError(f'compression.kind = "{kind}" needs rollout.engine = "hf", got "{rollout.engine}"')
        if self.guard.action == "stricter":
            raise ValueError('guard.action = "stricter" goes through schedules, and a compression has none; use "stop"')
        if self.guard.action == "stop" and self.guard.at_least is None:
            raise ValueError('guard.action = "stop" needs guard.at_least: a compression names no target of its own')
        return self

    @model_validator(mode="after")
    def _distill_has_a_sense(self) -> Self:
        distill, rollout, guard = self.distill, self.rollout, self.guard
        if distill.cheaper and not distill.enabled:
            raise ValueError("distill.cheaper needs distill.enabled = true: without an adapter nothing gets cheaper")
        if not distill.enabled:
            return self
        if rollout.kv_budget_tokens is None and rollout.schedule == "dense" and self.controller.target is None:
            raise ValueError(
                "distill.enabled needs sparse rollouts; set rollout.schedule, rollout.kv_budget_tokens or controller.target"
            )
        for field, names in (("guard.stricter", guard.stricter), ("distill.cheaper", distill.cheaper)):
            if "dense" in names:
                raise ValueError(f'{field} names "dense", where the adapter of distill.enabled has nothing to do')
        if distill.cheaper and guard.action == "stricter":
            raise ValueError('distill.cheaper and guard.action = "stricter" would undo each other; choose one')
        return self

    @model_validator(mode="after")
    def _one_hand_on_the_budgets(self) -> Self:
        target = self.controller.target
        if target is None:
            return self
        if self.compression.kind != "none":
            raise ValueError(
                f'compression.kind = "{self.compression.kind}" has no schedule that controller.target could move; '
                "leave one of them out"
            )
        if self.distill.cheaper:
            raise ValueError("distill.cheaper and the controller would both lower the budgets; leave one of them out")
        if self.guard.action == "stricter":
            raise ValueError(
                'guard.action = "stricter" and the controller would both change the schedule; leave one of them out'
            )
        if self.guard.action != "off" and self.guard.at_least is not None and self.guard.at_least > target:
            raise ValueError(
                f"guard.at_least = {self.guard.at_least} asks for more than the controller holds, "
                f"controller.target = {target}; lower the one or raise the other"
            )
        given = [
            name for name in ("schedule", "kv_budget_tokens") if getattr(self.rollout, name) not in ("dense", None)
        ]
        start = self.controller.start_share
        if given and start != ControllerSection.model_fields["start_share"].default:
            raise UserError(
                f"controller.start_share = {start} does nothing beside rollout.{given[0]}, which the controller starts from",
                "leave one of them out",
            )
        if target + self.controller.margin >= 1:
            raise ValueError(
                f"controller.target + controller.margin must be below 1, got {target} + {self.controller.margin}"
            )
        return self
