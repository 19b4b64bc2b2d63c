"""What a schedule would save: tokens per second and speed-up of decoding, predicted from the model's config alone.

The model is a roofline: a decode step takes its memory time or its compute time, whichever is larger. The reads of a
request are averaged over the mix of context lengths. Where the kernels of the selector were timed on this GPU
(kernel_times.py), the plan also says what a step takes with them: everything else is then read as fast as it was there. A
TimeModel that was fitted to this machine can replace both. Prefill, sampling and the trainer are not part of the
prediction, so a real training step gains less. Checks of drafts are not at peak rates; check_time.py has their constants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparroll.attention.selectors import Selector
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.plan.check_rate import CheckRate, rate_for
from sparroll.plan.check_time import ATTENTION_SHARE, LAYERS_SHARE, SCORING_SHARE, check_time, scoring_seconds
from sparroll.plan.hardware import Hardware, find_hardware
from sparroll.plan.kernel_times import KernelTimes, if_timed, kernel_times_of, timed_as
from sparroll.plan.length_mix import LengthMix, LengthsAre
from sparroll.plan.model_shape import ModelShape, model_shape, name_to_check
from sparroll.plan.step_reads import StepReads
from sparroll.plan.time_model import TimeModel, other_type
from sparroll.schedule import MOST_TOKENS, Schedule
from sparroll.types import is_whole

Bound = Literal["memory", "compute", "kernels", "measured"]


@dataclass(frozen=True)
class StepTime:
    """One decode step of the whole batch, and where its seconds go."""

    weight_seconds: float
    kv_seconds: float
    index_seconds: float
    compute_seconds: float
    overhead_seconds: float
    seconds: float
    bound: Bound
    """What decides `seconds`. "kernels": memory, where sparse layers take what their kernels took; `kv_seconds` has the
    attention then, and `index_seconds` scores and choice. "measured": the seconds come from a fitted time model, and only
    the parts from the roofline."""
    tokens_per_second: float


@dataclass(frozen=True)
class VerifiedTime:
    """What one token of each request costs where the dense policy checks windows of drafts.

    seconds = drafted_per_kept * (a sparse step + check_seconds / (window_tokens - 1))
    """

    window_tokens: int
    floor: float
    drafted_per_kept: float
    drafted_per_kept_is: str
    """Where that number comes from."""
    check_seconds: float
    """One dense pass over a window of each request of the batch, on its own. Parts: see check_time.py. With a fitted time
    model, attention and layers together take at least as long as a dense step."""
    check_attention_seconds: float
    check_layers_seconds: float
    check_logits_seconds: float
    seconds: float
    tokens_per_second: float
    scoring_seconds: float
    """What the trainer's own scoring pass takes for a token of each request, without prompts. A training step on verified
    rollouts leaves it out."""


@dataclass(frozen=True)
class ControlTime:
    """A sparse step some of whose requests read all of their context, because they are rollouts of the control group.

    Where drafts are checked, theirs are, too. Their drafts are the dense policy's own, so all of them stand: of windows
    of w they draft (w - 1) / w for each token."""

    share: float
    """Of the requests."""
    step: StepTime
    """With checks: of the step that drafts."""
    seconds: float
    """In which each request of the batch gets a token, on average; with checks, one that stands."""
    lost_share: float
    """Of the tokens per second that the batch would have without them."""


@dataclass(frozen=True)
class KernelSteps:
    """The same steps where sparse layers take what their kernels took on this GPU, weights are read at the speed of a copy,
    and dense layers as fast as in decode steps that were timed there."""

    dense: StepTime
    sparse: StepTime

    @property
    def speedup(self) -> float:
        return self.dense.seconds / self.sparse.seconds


@dataclass(frozen=True)
class LengthRow:
    """The schedule at one context length, for the plan's batch with all requests at that length."""

    context_tokens: int
    kv_budget_tokens: int | tuple[int, ...]
    """One for each group of layers, where the schedule has groups."""
    kv_read_share: float
    """Tokens attended / tokens in context, over all layers, dense ones included."""
    speedup: float


@dataclass(frozen=True)
class Plan:
    """A prediction, with everything that it is based on."""

    model: ModelShape
    schedule: str
    hardware: Hardware
    lengths: str
    mean_context_tokens: float
    batch: int
    batch_is: Literal["given", "what memory holds"]
    kv_bytes_per_token: float
    dense: StepTime
    sparse: StepTime
    kv_read_share: float
    by_length: tuple[LengthRow, ...]
    assumptions: tuple[str, ...]
    verified: VerifiedTime | None = None
    """None where the schedule has no check."""
    control: ControlTime | None = None
    """None where no control group was asked for."""
    kernels: KernelSteps | None = None
    """None where the kernels of the selector were not timed on this GPU, or the steps above are with them already."""

    @property
    def verified_speedup(self) -> float:
        """Seconds of a dense step / seconds of a token of each request with checks."""
        assert self.verified is not None, "the schedule checks no drafts"
        return self.dense.seconds / self.verified.seconds

    @property
    def speedup(self) -> float:
        """Seconds of a dense step / seconds of a sparse step."""
        return self.dense.seconds / self.sparse.seconds

    def table(self) -> dict[str, Any]:
        """Plain data for printing and JSON."""
        table = {**dataclasses.asdict(self), "speedup": self.speedup}
        for name in ("verified", "control", "kernels"):
            if table[name] is None:
                del table[name]
        return table if self.verified is None else table | {"verified_speedup": self.verified_speedup}


@dataclass(frozen=True)
class _Decoder:
    """A batch on a device. Gives the time of a step for any mix of lengths."""

    reads: StepReads
    device: Hardware
    batch: int
    overhead_seconds: float
    time_model: TimeModel | None
    kernels: KernelTimes | None

    def step(self, mix: LengthMix, *, sparse: bool, dense_share: float = 0.0) -> StepTime:
        """dense_share: of the requests of a sparse step, those that read all of their context."""
        shape, batch, bandwidth = self.reads.shape, self.batch, self.device.bandwidth_bytes_per_second
        if self.kernels is not None:
            bandwidth = self.kernels.copy_bytes_per_second
        attended, index = shape.layers * mix.mean_tokens, 0.0
        if sparse:
            few, scored = self.reads.layer_sums(mix)
            attended, index = dense_share * attended + (1 - dense_share) * few, (1 - dense_share) * scored
        kv_bytes, index_bytes = (batch * tokens * self.reads.token_bytes for tokens in (attended, index))
        weight_seconds = shape.parameters_used(batch) * self.reads.element_bytes / bandwidth
        cache_bandwidth = bandwidth if self.kernels is None else self.kernels.dense_bytes_per_second
        kv_seconds, index_seconds = kv_bytes / cache_bandwidth, index_bytes / cache_bandwidth
        bound: Bound = "memory"
        if sparse and self.timed_kernels is not None:
            kv_seconds, index_seconds = self._kernel_seconds(self.timed_kernels, mix, dense_share)
            bound = "kernels"
        memory = weight_seconds + kv_seconds + index_seconds
        # Q.K and A.V: 4 FLOPs per query head, channel and attended token. Scoring: 2 per query head and index number.
        attention = batch * shape.query_heads * shape.head_dim * (4 * attended + 2 * index)
        compute = (2 * shape.parameters_used(1) * batch + attention) / self.device.flops_per_second
        seconds = max(memory, compute) + self.overhead_seconds
        bound = bound if memory >= compute else "compute"
        if self.time_model is not None:
            selecting = self.reads.selecting_layers(mix) if sparse else 0
            seconds, bound = self.time_model.seconds(batch, kv_bytes + index_bytes, selecting), "measured"
        return StepTime(
            weight_seconds=weight_seconds,
            kv_seconds=kv_seconds,
            index_seconds=index_seconds,
            compute_seconds=compute,
            overhead_seconds=self.overhead_seconds,
            seconds=seconds,
            bound=bound,
            tokens_per_second=batch / seconds,
        )

    @property
    def timed_kernels(self) -> KernelTimes | None:
        """The kernels that steps are predicted with; None where those of the selector are not among them."""
        return if_timed(self.kernels, self.reads.schedule.selector, self.reads.shape.gqa_ratio)

    def _kernel_seconds(self, kernels: KernelTimes, mix: LengthMix, dense_share: float) -> tuple[float, float]:
        """(seconds of all attention, seconds of scores and choice) with the kernels of the selector."""
        shape, schedule = self.reads.shape, self.reads.schedule
        parts = schedule.parts(shape.layers)
        dense_layers = shape.layers - sum(len(layers) for layers, _ in parts)
        dense_bytes = self.batch * dense_layers * mix.mean_tokens * self.reads.token_bytes
        attention, choosing = dense_bytes / kernels.dense_bytes_per_second, 0.0
        for layers, own in parts:
            found = kernels.layer(schedule.selector, self.reads.load(own, mix, self.batch, dense_share))
            assert found is not None, "the kernels were timed"
            choosing += len(layers) * found[0]
            attention += len(layers) * found[1]
        return attention, choosing

    def verified(self, mix: LengthMix, check: DraftCheck, rate: CheckRate) -> VerifiedTime:
        shape = self.reads.shape
        parts = check_time(
            shape,
            self.device,
            batch=self.batch,
            mean_context_tokens=mix.mean_tokens,
            window_tokens=check.window_tokens,
            element_bytes=self.reads.element_bytes,
        )
        check_seconds = parts.seconds + self.overhead_seconds
        if self.time_model is not None:
            step = self.step(mix, sparse=False).seconds
            check_seconds = max(step, parts.attention_seconds + parts.layers_seconds) + parts.logits_seconds
        seconds = rate.drafted_per_kept * (self.step(mix, sparse=True).seconds + check_seconds / check.drafts)
        return VerifiedTime(
            window_tokens=check.window_tokens,
            floor=check.floor,
            drafted_per_kept=rate.drafted_per_kept,
            drafted_per_kept_is=rate.source,
            check_seconds=check_seconds,
            check_attention_seconds=parts.attention_seconds,
            check_layers_seconds=parts.layers_seconds,
            check_logits_seconds=parts.logits_seconds,
            seconds=seconds,
            tokens_per_second=self.batch / seconds,
            scoring_seconds=scoring_seconds(shape, self.device, self.batch, mix.mean_tokens),
        )

    def control(self, mix: LengthMix, share: float, verified: VerifiedTime | None) -> ControlTime:
        """verified: what a token takes without them, where drafts are checked."""
        mixed = self.step(mix, sparse=True, dense_share=share)
        if verified is None:
            return ControlTime(share, mixed, mixed.seconds, 1 - self.step(mix, sparse=True).seconds / mixed.seconds)
        window = verified.window_tokens
        drafted_per_kept = (1 - share) * verified.drafted_per_kept + share * (window - 1) / window
        seconds = drafted_per_kept * (mixed.seconds + verified.check_seconds / (window - 1))
        return ControlTime(share, mixed, seconds, 1 - verified.seconds / seconds)

    def row(self, context: int) -> LengthRow:
        here = LengthMix.parse(context)
        speedup = self.step(here, sparse=False).seconds / self.step(here, sparse=True).seconds
        budget = self.reads.schedule.step_at(context).kv_budget_tokens
        return LengthRow(context, budget, self.reads.kv_read_share(here), speedup)


def plan(
    model: Any,
    schedule: Schedule | str | Path | int,
    *,
    hardware: Hardware | str | Path = "H200",
    lengths: LengthMix | str | int | Path | Sequence[int] = "0-32768",
    lengths_are: LengthsAre = "contexts",
    prompt_tokens: int = 0,
    batch: int | None = None,
    element_bytes: int | None = None,
    memory_share: float = 0.85,
    reserved_bytes: float = 3e9,
    overhead_seconds_per_layer: float = 0.0,
    time_model: TimeModel | None = None,
    kernels: KernelTimes | None = None,
    cut_share: float | None = None,
    drafted_per_kept: float | None = None,
    control_share: float = 0.0,
    force_schedule: bool = False,
) -> Plan:
    """Predict dense and sparse decoding of `model` on one device.

    model: see `model_shape`; weights are never read.  schedule: a Schedule, a preset name or file, or a fixed budget.
    lengths: see `LengthMix.parse`.  lengths_are: "contexts" if these are context lengths of the requests in flight;
    "rollouts" if they are final lengths, from which the contexts in flight follow, and decoding starts at
    `prompt_tokens`.
    batch: by default as many requests as fit: (memory_share * memory - weights - reserved_bytes) / cache of one request
    at the mean context.  element_bytes: bytes per weight and per cached number; by default those of the time model's
    steps, or 2.
    overhead_seconds_per_layer: launch gaps and the like, added to the dense and the sparse step.
    time_model: replaces the roofline.  kernels: the steps are those with these kernels (see KernelSteps); where it is None
    and they are known, the plan has them beside its own.
    cut_share or drafted_per_kept: what checks take back, for a schedule with a check: the share of windows that are cut,
    or the tokens drafted for each that stands; by default as measured on the study's model (see check_rate.py); of sparse
    requests alone.  control_share: of the requests, those that a control group decodes densely; 0: there is none.
    """
    shape, mix = model_shape(model), _contexts(LengthMix.parse(lengths), lengths_are, prompt_tokens)
    device = hardware if isinstance(hardware, Hardware) else find_hardware(hardware)
    if element_bytes is None:
        element_bytes = time_model.element_bytes if time_model is not None else 2
    elif time_model is not None and element_bytes != time_model.element_bytes:
        raise other_type(element_bytes, time_model.element_bytes)
    reads = StepReads(shape, _schedule(schedule, model, shape, force_schedule), element_bytes)
    kv_bytes = shape.layers * reads.token_bytes
    room = memory_share * device.memory_bytes - reserved_bytes
    weight_bytes = shape.parameters * element_bytes
    size = batch if batch is not None else _batch(shape, device, mix, kv_bytes, weight_bytes, room)
    if batch is not None and not (is_whole(batch) and 1 <= batch <= MOST_TOKENS):
        raise UserError(f"batch must be a whole number from 1 to {MOST_TOKENS:,}, got {batch}")
    check, taken_back = reads.schedule.check, (cut_share, drafted_per_kept)
    _check_asked(reads.schedule, taken_back != (None, None), control_share)
    decoder = _Decoder(reads, device, size, overhead_seconds_per_layer * shape.layers, time_model, kernels)
    beside = None if time_model is not None or kernels is not None else _with_kernels(decoder, mix)
    verified = decoder.verified(mix, check, rate_for(check, *taken_back)) if check is not None else None
    return Plan(
        model=shape,
        schedule=reads.schedule.name,
        hardware=device,
        lengths=mix.text,
        mean_context_tokens=mix.mean_tokens,
        batch=size,
        batch_is="what memory holds" if batch is None else "given",
        kv_bytes_per_token=kv_bytes,
        dense=decoder.step(mix, sparse=False),
        sparse=decoder.step(mix, sparse=True),
        kv_read_share=reads.kv_read_share(mix),
        by_length=tuple(decoder.row(context) for context in _eighths(mix)),
        assumptions=(
            *([f"the schedule is {reads.schedule.caveat}"] if reads.schedule.caveat else ()),
            *_beyond_memory(device, size, weight_bytes, size * kv_bytes * mix.mean_tokens),
            *_assumptions(element_bytes, memory_share, reserved_bytes, batch, time_model, kernels is not None),
            *(
                []
                if time_model is not None
                else [kernels_said(device.name, reads.schedule.selector, shape.gqa_ratio, kernels)]
            ),
            *_said_of(verified),
        ),
        verified=verified,
        control=decoder.control(mix, control_share, verified) if control_share else None,
        kernels=beside,
    )


def _with_kernels(decoder: _Decoder, mix: LengthMix) -> KernelSteps | None:
    """The steps with the kernels as they were timed on this GPU; None where they were not."""
    with_them = dataclasses.replace(decoder, kernels=kernel_times_of(decoder.device.name))
    if with_them.timed_kernels is None:
        return None
    return KernelSteps(with_them.step(mix, sparse=False), with_them.step(mix, sparse=True))


_SLOW_REMAINDER = (
    "; a layer with a remainder takes far longer, up to twice as long as one without where its kernels weigh groups while "
    "they score, and several times as long where they do not (docs/selectors.md), so do not believe these seconds"
)


def kernels_said(gpu: str, selector: Selector, gqa_ratio: float, used: KernelTimes | None = None) -> str:
    """What a prediction has for the kernels of a selector in a model with so many query heads per KV head. used: those that
    its steps were predicted with; None: by bytes, with the kernels that are known beside it."""
    known, name = used or kernel_times_of(gpu), timed_as(selector)
    slow = "" if selector.remainder is None else _SLOW_REMAINDER
    if known is None:
        return f"no kernels were timed on {gpu}: sparse layers count by their bytes alone{slow}"
    times = known.of(selector, gqa_ratio)
    if times is None:
        name += f" with {gqa_ratio:g} query heads per KV head" if name in known.selectors else ""
        at = "the rate of dense layers" if used is not None else "the device's peak rate"
        return (
            f"no kernels of {name} were timed on {gpu}: its sparse layers count by their bytes alone, at {at}, and it has "
            f"no time for the choice{slow}"
        )
    return (
        f"kernels of {name} as they were timed on {known.gpu} ({', '.join(known.records)}) with 32 requests of 8 KV heads "
        f"of 128 channels, whose layers they add up to within {times.worst_layer_error:.1%}; other shapes and batches are "
        "extrapolated, and the rest of a step but its reads is left out"
    )


def _contexts(mix: LengthMix, lengths_are: LengthsAre, prompt_tokens: int) -> LengthMix:
    """The contexts of the requests in flight."""
    if lengths_are == "rollouts":
        return mix.decode_contexts(prompt_tokens)
    if lengths_are != "contexts":
        raise UserError(f"lengths_are must be 'contexts' or 'rollouts', got {lengths_are!r}")
    return mix


def _eighths(mix: LengthMix) -> list[int]:
    """Context lengths up to the longest one."""
    return sorted({max(1, round(mix.longest_tokens * eighth / 8)) for eighth in range(1, 9)})


def _check_asked(schedule: Schedule, takes_back: bool, control_share: float) -> None:
    """Raise UserError for what cannot be planned for the schedule. takes_back: whether it is given what checks take
    back."""
    if schedule.check is None and takes_back:
        raise UserError(
            f"the schedule {schedule.name!r} checks no drafts, so nothing is taken back",
            "give the schedule a check: --check-window, or Schedule.checked",
        )
    if not 0 <= control_share < 1:
        raise UserError(f"control_share must be from 0 to below 1, got {control_share!r}", "1/32 is usual")


def _said_of(verified: VerifiedTime | None) -> list[str]:
    if verified is None:
        return []
    return [
        f"{verified.drafted_per_kept:.3f} tokens are drafted for each that stands: {verified.drafted_per_kept_is}",
        "a check is a pass of its own, which shares its read of the weights with no decode step; of the device's "
        f"arithmetic its attention reaches {ATTENTION_SHARE:.0%} and its layers {LAYERS_SHARE:.0%}, as in vLLM on an H200, "
        f"and a trainer's scoring pass {SCORING_SHARE:.0%}",
    ]


def _schedule(schedule: Schedule | str | Path | int, model: Any, shape: ModelShape, force: bool) -> Schedule:
    if isinstance(schedule, int):
        # The published recipe keeps layers 0 and 1 dense; a model of one layer has no layer 1.
        loaded = Schedule.fixed(schedule, dense_layers=tuple(range(min(2, shape.layers))))
    else:
        loaded = schedule if isinstance(schedule, Schedule) else Schedule.load(schedule)
    if not force:
        loaded.check_model(name_to_check(model, shape))
    loaded.check_layers(shape.layers)
    return loaded


def _batch(
    shape: ModelShape, device: Hardware, mix: LengthMix, kv_bytes: float, weight_bytes: float, room: float
) -> int:
    request_bytes = kv_bytes * mix.mean_tokens
    size = math.floor((room - weight_bytes) / request_bytes)
    if size < 1:
        raise UserError(
            f"{shape.name} ({weight_bytes / 1e9:.1f} GB of weights) leaves no room for a request of "
            f"{mix.mean_tokens:.0f} tokens ({request_bytes / 1e9:.2f} GB) on {device.name} "
            f"({device.memory_bytes / 1e9:.0f} GB)",
            "take a larger device or shorter lengths, or set the batch yourself",
        )
    return size


def _beyond_memory(device: Hardware, batch: int, weight_bytes: float, cache_bytes: float) -> list[str]:
    """A line about a batch that the device cannot hold, which only one that was given can be."""
    if weight_bytes + cache_bytes <= device.memory_bytes:
        return []
    return [
        f"{device.name} cannot hold this batch: with {weight_bytes / 1e9:,.1f} GB of weights and "
        f"{cache_bytes / 1e9:,.1f} GB of cache, {batch:,} requests at the mean context need more than its "
        f"{device.memory_bytes / 1e9:,.1f} GB; without a given batch the plan has as many as fit"
    ]


def _assumptions(
    element_bytes: int,
    memory_share: float,
    reserved_bytes: float,
    batch: int | None,
    time_model: TimeModel | None,
    with_kernels: bool,
) -> list[str]:
    lines = [
        f"{element_bytes} bytes per weight and per cached number; all weights are read once per step",
        "a sparse layer reads its budget and the index, together at most the context; dense layers read the whole context",
    ]
    if batch is None:
        lines.append(
            f"the batch fills {memory_share:.0%} of the memory, minus the weights and {reserved_bytes / 1e9:.1f} GB, with "
            "requests at the mean context; it is the same for dense and sparse"
        )
    if time_model is None and not with_kernels:
        lines.append(
            "roofline: a step takes the larger of its memory and compute time at the device's peak rates; an upper bound"
        )
    elif time_model is not None:
        lines.append(
            f"a time model was fitted to {time_model.steps} measured steps; its worst error is "
            f"{time_model.worst_relative_error:.1%}"
        )
        lines.extend(time_model.notes)
    return lines
