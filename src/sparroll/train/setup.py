"""From a configuration and a folder to everything that a run works with. The run is new, or continues from the newest
whole checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from sparroll import files
from sparroll.control.cheaper_schedules import CheaperSchedules
from sparroll.control.controller import Controller
from sparroll.control.guard import Guard
from sparroll.control.watcher import Stateful, Watcher, refuse_two_hands, restore_all, states_of
from sparroll.corrections import Correction
from sparroll.engines.base import Engine, samples_densely
from sparroll.engines.make import check_available, make_engine, roomiest
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.locks import locked
from sparroll.resume import check_flag, refuse_another_command, refuse_changes
from sparroll.schedule import Schedule
from sparroll.tasks import Task
from sparroll.train.config.control import ByCheaperSection
from sparroll.train.config.control_group import notices as control_group_notices
from sparroll.train.config.distill import DistillConfig
from sparroll.train.config.file import refuse_other_config, write_config
from sparroll.train.config.rollout import CompressionAttention
from sparroll.train.config.run import TrainConfig
from sparroll.train.distill.schedule_replay import ScheduleReplay
from sparroll.train.runtime import checkpoint
from sparroll.train.runtime.checkpoint import RunState
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.runtime.randomness import generator_state, restore_generators, seed_everything
from sparroll.train.runtime.sinks import JsonLines, Sink, check_packages, open_sinks
from sparroll.train.sampling.control_group import ControlGroup
from sparroll.train.sampling.prompts import PromptStream
from sparroll.train.sampling.rewards import Rewards
from sparroll.train.sampling.rollouts import Sampling
from sparroll.train.sampling.task_data import (
    make_task,
    refuse_other_rows,
    refuse_prompts_without_room,
    training_prompts,
    write_record,
)
from sparroll.train.sampling.task_data import notices as task_notices
from sparroll.train.sampling.weight_sync import EngineWeights
from sparroll.train.schedules import (
    caveat_events,
    check_events,
    make_cheaper_schedules,
    make_controller,
    make_empty_steps,
    make_guard,
    make_unrewarded_steps,
    read_schedule_tables,
    schedule_tables,
    starting_schedule,
)
from sparroll.train.staleness import PastWeights
from sparroll.train.tail_metrics import ControlCeiling
from sparroll.train.update.optimizer import restore_optimizer
from sparroll.train.update.policy import PolicyUpdate
from sparroll.types import StepReport

if TYPE_CHECKING:
    from sparroll.engines.adapter import Adapter
    from sparroll.train.distill.adapter_update import AdapterUpdate

_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCHEDULES = "schedules.json"
_OTHER_FOLDER = "choose another folder with --out"
"""What to do about a file of the run that cannot be read."""
"""The schedules that the run began with, by what names them in the configuration."""


@dataclass
class Parts:
    """Everything a run works with."""

    asked: TrainConfig | DistillConfig
    """The configuration as it was given; config.json holds it."""
    config: TrainConfig
    """The same as a TrainConfig, which is all that the loop reads."""
    out: Path
    ranks: Ranks
    task: Task
    prompts: PromptStream
    scorer: Scorer
    """Holds the policy: `scorer.model` is what is trained."""
    reference: Scorer | None
    """The initial model, for the KL term; None where the loss has none."""
    encoder: PromptEncoder
    """From prompts to the token ids that the policy sees."""
    engine: Engine
    weights: EngineWeights
    """Keeps the engine's weights in step with the policy, and with the adapter where there is one."""
    correction: Correction
    update: PolicyUpdate
    past: PastWeights | None
    """The weights of the last steps, where rollouts come from older ones than the newest; else None."""
    distill: AdapterUpdate | None
    """The adapter and its update; None without DistillSparse."""
    sampling: Sampling
    rewards: Rewards
    watchers: tuple[Watcher, ...]
    """They are shown each step in this order; the controller and the cheaper schedules below are among them."""
    control_group: ControlGroup | None
    """Draws the dense rollouts beside sparse ones, which the guard compares; None where the run has none."""
    ceiling: ControlCeiling | None
    """The dense ceiling of the control group; None where that has its own rollouts."""
    controller: Controller | None
    """Each checkpoint writes its schedule; None where the run has none."""
    cheaper: CheaperSchedules | None
    """Says in which steps a replay is due; None where the run names no cheaper schedules."""
    replay: ScheduleReplay | None
    """Measures the tail that `cheaper` decides by."""
    state: RunState
    resumed_from: Path | None
    """The checkpoint folder; None for a new run."""
    notices: list[str] = field(default_factory=list)
    """Events for the first step of a new run."""
    frozen: bool = False
    """Whether only the adapter is trained. Checkpoints then leave the policy out."""
    metrics: JsonLines | None = None
    """Open only on the main process, like the sinks."""
    sinks: list[Sink] = field(default_factory=list)

    @property
    def stateful(self) -> tuple[Stateful, ...]:
        """Everything that a checkpoint keeps under RunState.watchers."""
        return _stateful(self.watchers, self.ceiling)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def decode(self, response_ids: list[int]) -> str:
        """The text that a task reads."""
        return str(self.encoder.tokenizer.decode(response_ids, skip_special_tokens=True))

    def log(self, step: int, report: StepReport, events: list[str]) -> int:
        """Write to metrics.jsonl and all sinks; -> length of metrics.jsonl."""
        for sink in self.sinks:
            sink.write(step, report, events)
        return self.metrics.write(step, report, events) if self.metrics is not None else 0

    def close(self) -> None:
        """Close the files and connections of the run; the engine is closed by whoever entered it."""
        self.rewards.calls.close()
        for sink in [*self.sinks, *([self.metrics] if self.metrics is not None else [])]:
            sink.close()


def held_by_main(out: Path, who: str, device: str) -> AbstractContextManager[object]:
    """Hold the run's folder in the main process, for all of them. Raises UserError there if another run has it."""
    return locked(out, who) if Ranks(device).is_main else nullcontext()


def open_run(asked: TrainConfig | DistillConfig, out: Path, resume: bool, *, task: Task | None = None) -> Parts:
    """Build a run, or load it to continue. Raises UserError where the folder, the configuration or a name in it is
    wrong, before anything is computed.

    With a DistillConfig the policy is frozen and not saved. task: used instead of the one that the configuration names.
    """
    frozen = isinstance(asked, DistillConfig)
    config = asked.for_trainer() if isinstance(asked, DistillConfig) else asked
    ranks = Ranks(config.model.device)
    found = _find_checkpoint(asked, out, resume, quiet=not ranks.is_main)
    task = task or make_task(config)
    if found is not None:
        refuse_other_rows(task, out)
    schedule = starting_schedule(config)
    if found is not None:
        refuse_other_schedules(config, schedule, out)
    guard = make_guard(config, schedule)
    cheaper = make_cheaper_schedules(config, schedule)
    rewards = Rewards(config.reward, config.rollout.samples_per_prompt, config.rollout.max_new_tokens)
    check_packages(config)
    check_available(config.engine.kind)
    files.output_folder(out)
    scorer = _policy(found / "model" if found and not frozen else config.model.name, config, ranks)
    encoder = PromptEncoder(scorer.tokenizer, config.task.chat_template, config.task.thinking)
    prompts = training_prompts(task, config, encoder)
    context_limit = getattr(scorer.model.config, "max_position_embeddings", None)
    refuse_prompts_without_room(task, config, prompts, encoder, context_limit)
    controller = _controller(config, schedule, prompts, encoder)
    empty, unrewarded = make_empty_steps(config), make_unrewarded_steps(config, task)
    watchers = tuple(each for each in (guard, cheaper, empty, unrewarded, controller) if each is not None)
    refuse_two_hands(watchers)
    control_group, ceiling = _control_group(config, guard, ranks)
    start = controller.schedule() if controller else schedule
    state = (
        checkpoint.load_state(found)
        if found
        else RunState(schedule=start, watchers=states_of(_stateful(watchers, ceiling)))
    )
    later = [each for watcher in watchers for each in watcher.may_switch_to]
    # The first one names the index and the dense layers: the controller's widest schedule, or else the one in force.
    engine = _engine(config, state.schedule, later if controller else [state.schedule, *later], ranks)
    with ExitStack() as unless_opened:
        # Whoever gets the run closes its engine; until then an error must not leave it open.
        unless_opened.callback(engine.close)
        distill = _distill(config, scorer.model, ranks)
        adapter = distill.adapter if distill else None
        past = _past(scorer.model, config)
        parts = Parts(
            asked=asked,
            config=config,
            out=out,
            ranks=ranks,
            task=task,
            prompts=prompts,
            scorer=scorer,
            reference=_policy(config.model.name, config, ranks) if config.train.kl_coefficient > 0 else None,
            encoder=encoder,
            engine=engine,
            weights=EngineWeights(scorer.model, engine, adapter or past, _DTYPE[config.rollout.dtype]),
            correction=config.correction.make(),
            update=PolicyUpdate(scorer.model, config.train, config.rollout.temperature, ranks),
            past=past,
            distill=distill,
            sampling=_sampling(config, engine.vocabulary),
            rewards=rewards,
            watchers=watchers,
            control_group=control_group,
            ceiling=ceiling,
            controller=controller,
            cheaper=cheaper,
            replay=_replay(config, adapter),
            state=state,
            resumed_from=found,
            notices=[] if state.step else [*task_notices(task), *_notices(asked, config, guard, engine, schedule)],
            frozen=frozen,
        )
        seed_everything(config.train.seed)
        if found:
            _restore(parts, found)
        else:
            state.generators = ranks.gather([generator_state()])
        ranks.wait()
        if ranks.is_main:
            _begin_writing(parts)
        unless_opened.pop_all()
    return parts


def _notices(
    asked: TrainConfig | DistillConfig, config: TrainConfig, guard: Guard, engine: Engine, schedule: Schedule | None
) -> list[str]:
    """What the start of a new run says."""
    # An adapter alone is trained without rewards, so there is nothing to compare.
    control_group = control_group_notices(config) if asked is config else []
    caveats, checks = caveat_events(config, schedule), check_events(config, schedule)
    return [*caveats, *guard.notice(samples_densely(engine)), *checks, *control_group]


def _policy(name: str | Path, config: TrainConfig, ranks: Ranks) -> Scorer:
    return Scorer(name, dtype=torch.float32, device=ranks.device, batch_tokens=config.train.micro_batch_tokens)


def _past(policy: PreTrainedModel, config: TrainConfig) -> PastWeights | None:
    steps = config.train.rollouts_behind_steps
    return PastWeights(policy, steps, config.train.micro_batch_tokens) if steps else None


def _distill(config: TrainConfig, policy: PreTrainedModel, ranks: Ranks) -> AdapterUpdate | None:
    settings = config.distill
    if settings is None:
        return None
    from sparroll.engines.adapter import Adapter, LoraSettings
    from sparroll.train.distill.adapter_update import AdapterUpdate

    lora = LoraSettings(settings.rank, settings.alpha, settings.target_modules)
    adapter = Adapter(policy, lora, config.train.seed)
    return AdapterUpdate(adapter, settings, config.train, config.rollout.temperature, ranks)


def _replay(config: TrainConfig, adapter: Adapter | None) -> ScheduleReplay | None:
    """The measurement for cheaper schedules; None where the run has no adapter or no cheaper schedules."""
    control = config.control
    if adapter is None or not isinstance(control, ByCheaperSection):
        return None
    scorer = Scorer(adapter.adapted, batch_tokens=config.train.micro_batch_tokens)
    return ScheduleReplay(scorer, control.prompts, config.rollout.temperature, config.mismatch.bin_tokens)


def _engine(config: TrainConfig, schedule: Schedule | None, others: Sequence[Schedule | None], ranks: Ranks) -> Engine:
    """An engine with the run's compression in force that can run every schedule of `others`, which the run may switch
    to."""
    rollout, attention = config.rollout, config.attention
    if config.engine.kind == "vllm" and ranks.count > 1:
        raise UserError(
            f'engine.kind = "vllm" runs in one process for now, this run has {ranks.count}',
            "start it without a launcher, or --set engine=hf",
        )
    later = [each for each in [*others, schedule] if each is not None]
    engine = make_engine(
        config.engine.kind,
        config.model.name,
        schedule=schedule,
        capacity=roomiest(later),
        dtype=_DTYPE[rollout.dtype],
        device=ranks.device,
        max_batch=rollout.max_batch,
        **config.engine.options(),
    )
    for each in later:
        engine.check_schedule(each)
    engine.set_compression(attention.make() if isinstance(attention, CompressionAttention) else None)
    return engine


def _sampling(config: TrainConfig, vocabulary: int) -> Sampling:
    rollout = config.rollout
    top_k = min(rollout.top_k, vocabulary)
    return Sampling(rollout.samples_per_prompt, rollout.max_new_tokens, rollout.temperature, top_k)


def _restore(parts: Parts, found: Path) -> None:
    """Restore from the checkpoint whatever was not already built from it."""
    policy, state = parts.scorer.model, parts.state
    if not parts.frozen:
        restore_optimizer(policy, parts.update.optimizer, checkpoint.load_optimizer(found))
    parts.prompts.drawn = state.prompts_drawn
    restore_all(parts.stateful, state.watchers)
    if parts.distill is not None:
        parts.distill.adapter.read(found / "adapter")
        restore_optimizer(
            parts.distill.adapter.adapted, parts.distill.optimizer, checkpoint.load_adapter_optimizer(found)
        )
    if parts.past is not None:
        parts.past.restore(checkpoint.load_past(found))
    parts.weights.bring_sampler(state.step)
    if parts.ranks.rank < len(state.generators):
        restore_generators(state.generators[parts.ranks.rank])


def refuse_other_schedules(config: TrainConfig, schedule: Schedule | None, out: Path) -> None:
    """Raise UserError where a run is resumed and a file of its schedules has changed since it began: the configuration
    has their paths alone."""
    if (out / _SCHEDULES).is_file():
        before = read_schedule_tables(files.read_table(out / _SCHEDULES, _OTHER_FOLDER))
        refuse_changes(out, before, schedule_tables(config, schedule))


def _begin_writing(parts: Parts) -> None:
    """Write the run's first files. This comes last, so that a run that fails to start leaves nothing that looks like a
    run."""
    out = parts.out
    write_config(parts.asked, out / "config.json")
    write_record(parts.task, out)
    if schedules := schedule_tables(parts.config, starting_schedule(parts.config)):
        files.write_json(out / _SCHEDULES, schedules)
    if functions := parts.rewards.record():
        files.write_json(out / "rewards.json", functions)
    checkpoint.tidy(parts.checkpoints, parts.resumed_from)
    parts.metrics = JsonLines(out / "metrics.jsonl", parts.state.metrics_bytes)
    parts.sinks = open_sinks(parts.asked, out, parts.state.step if parts.resumed_from else None)


def _control_group(
    config: TrainConfig, guard: Guard, ranks: Ranks
) -> tuple[ControlGroup | None, ControlCeiling | None]:
    if guard.reward_gap is None:
        return None, None
    group = ControlGroup(guard.reward_gap, config.train.seed, config.rollout.samples_per_prompt, ranks.gather)
    return group, ControlCeiling(config.mismatch.ceiling_prompts)


def _stateful(watchers: tuple[Watcher, ...], ceiling: ControlCeiling | None) -> tuple[Stateful, ...]:
    return watchers if ceiling is None else (*watchers, ceiling)


def _controller(
    config: TrainConfig,
    schedule: Schedule | None,
    prompts: PromptStream,
    encoder: PromptEncoder,
) -> Controller | None:
    """A controller for contexts up to the longest prompt and a whole response."""
    if config.control.by != "controller":
        return None
    longest = max(len(ids) for ids in encoder.ids(prompts.prompts))
    return make_controller(config, schedule, longest + config.rollout.max_new_tokens)


def _find_checkpoint(asked: TrainConfig | DistillConfig, out: Path, resume: bool, quiet: bool) -> Path | None:
    metrics = out / "metrics.jsonl"
    begun = (metrics.is_file() and metrics.stat().st_size > 0) or (out / "checkpoints").exists()
    config = out / "config.json"
    check_flag(out, resume, holds_run=begun, can_go_on=config.is_file())
    if not resume:
        if config.is_file():
            refuse_another_command(config, files.read_table(config, _OTHER_FOLDER), type(asked).model_fields)
        return None
    found, complaints = checkpoint.newest(out / "checkpoints")
    before = files.read_table((found or out) / "config.json", _OTHER_FOLDER)
    _refuse_another_verb(before, asked, out)
    refuse_other_config(out, before, asked)
    resolution = f"resuming from {found.name}" if found else f"{out} has no whole checkpoint: starting from step 1"
    for line in [*complaints, resolution] if not quiet else []:
        print(line, file=sys.stderr, flush=True)
    return found


def _refuse_another_verb(before: dict[str, Any], asked: TrainConfig | DistillConfig, out: Path) -> None:
    """Raise UserError where the folder holds a run of `train` and this is a run of `distill`, or the other way
    round."""
    verbs = {TrainConfig: "train", DistillConfig: "distill"}
    # A policy update needs a correction; an adapter alone has none.
    made = "train" if "correction" in before else "distill"
    was, now = (f"sparroll {verb}" for verb in (made, verbs[type(asked)]))
    refuse_changes(out, {"command": was}, {"command": now})
