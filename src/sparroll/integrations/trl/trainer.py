"""`SparseGRPOTrainer`: TRL's GRPOTrainer with sparse rollouts that are measured, corrected and watched. The mixin comes
before TRL's class and overrides its methods; nothing is patched.

A round in time:  weights into the engine (TRL) -> sample, measure -> rewards, advantages, dense log-probabilities (TRL) ->
correct -> watch, decide on the next schedule -> loss, update, checkpoint (TRL).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object, pad_across_processes
from torch import Tensor
from transformers import AutoConfig, TrainerCallback

from sparroll.control.paired_prompts import REWARD, prompt_name
from sparroll.engines.vllm import launch, plugin
from sparroll.engines.vllm.arguments import widest
from sparroll.engines.vllm.capacity import check_fits_engine
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE
from sparroll.errors import UserError
from sparroll.integrations import saved_state
from sparroll.integrations.measured import EngineStep, ran_report
from sparroll.integrations.tail import State
from sparroll.integrations.trl import refusals
from sparroll.integrations.trl.engine import SparseLLM
from sparroll.integrations.trl.loss import correct_batch, leave_uncorrected
from sparroll.integrations.trl.round_clock import RoundClock
from sparroll.integrations.trl.rounds import SamplingRounds
from sparroll.integrations.trl.server import SparseClient
from sparroll.integrations.trl.settings import SparseRollouts, SparseSetup, TrainerFacts
from sparroll.schedule import Schedule
from sparroll.train.sampling.control_group import figures_of
from sparroll.types import StepReport

refusals.check_version()

from trl import GRPOTrainer  # noqa: E402, the version is checked first

_log = logging.getLogger("sparroll")
_THEIR_RATIOS = [f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")]
_RESUME_HINT = "start a new run from its weights, or leave resume_from_checkpoint out"


class SparseRolloutsMixin:
    """Mixed into GRPOTrainer, or a class of yours that derives from it, before it.

    >>> class MyTrainer(SparseRolloutsMixin, MyGRPOTrainer): ...
    """

    def __init__(self: Any, model: Any, *arguments: Any, sparse: SparseRollouts, **named: Any):
        if not isinstance(sparse, SparseRollouts):
            raise UserError(
                f"sparse must be a SparseRollouts, got {sparse!r}", 'sparse=SparseRollouts("qwen3-4b-0.86")'
            )
        given = dict(zip(_POSITIONAL, arguments, strict=False)) | named
        args = given.get("args")
        if args is None:
            raise UserError("sparse rollouts need vLLM", "args=GRPOConfig(use_vllm=True, ...)")
        refusals.check_arguments(args, given)
        config = _config_of(model, args)
        self.sparse_setup = SparseSetup.of(sparse, _facts(model, config, args))
        self.sparse_rounds = SamplingRounds(self.sparse_setup)
        self.sparse_events: list[str] = []
        """What the guard, the controller and others said, with the round; in the log, too."""
        self._round_clock = RoundClock()
        self._rescoring_seconds = 0.0
        """Of the round under way, which ends later than its metrics are written down."""
        self._batches_evaluated = 0
        self._dense_states: list[State] = []
        self._control: list[bool] = []
        """Which rollouts of the round are of the control group, over all processes; empty for none."""
        self._rewards: list[float] = []
        """Of the round's rollouts, over all processes."""
        capacity = _capacity(self.sparse_setup, config)
        with _environment(capacity, colocate=args.vllm_mode == "colocate"):
            super().__init__(model, *arguments, **named)  # type: ignore[call-arg]
        self._take_engine(capacity)
        self.add_callback(_Steps(self))
        for line in [*self.sparse_setup.events(), *refusals.loss_notice(args.loss_type)]:
            self._say(line)

    def _take_engine(self: Any, capacity: Schedule) -> None:
        generation, setup = self.vllm_generation, self.sparse_setup
        self._sparse_engine: SparseLLM | SparseClient | None = None
        if generation.mode == "colocate":
            generation.llm = self._sparse_engine = SparseLLM(
                generation.llm,
                capacity=capacity,
                settings=setup.rescoring(),
                of_control=setup.rescoring_of_control(),
                seed=setup.sparse.seed,
                process=self.accelerator.process_index,
            )
        elif self.accelerator.is_main_process:
            generation.vllm_client = self._sparse_engine = SparseClient(
                generation.vllm_client,
                capacity=capacity,
                settings=setup.rescoring(),
                of_control=setup.rescoring_of_control(),
            )

    # -- a round -----------------------------------------------------------------------------------------------------

    def _generate_single_turn(self: Any, *arguments: Any, **named: Any) -> Any:
        on_cpu = self.accelerator.device.type == "cpu"
        if on_cpu and self.vllm_mode == "colocate" and self.state.global_step != self._last_loaded_step:
            # One at a time: TRL merges an adapter while it gives the weights, and takes it out again behind the last one.
            named_weights = self.vllm_generation._iter_named_params()
            self._sparse_engine.load_weights((name, tensor.detach()) for name, tensor in named_weights)
            self._last_loaded_step = self.state.global_step
        return super()._generate_single_turn(*arguments, **named)  # type: ignore[misc]

    def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
        return self._sparse_round(inputs) if self.model.training else self._dense_batch(inputs)

    def _sparse_round(self: Any, inputs: Any) -> Any:
        """A training batch: sampled under the schedule in force, measured, corrected and watched."""
        rounds, engine = self.sparse_rounds, self._sparse_engine
        self._round_took(self._round_clock.round_begins())
        self._control = self._drawn(len(inputs))
        if engine is not None:
            prompts = -(-rounds.ceiling_prompts // self.sparse_setup.facts.processes)
            dense = self._control
            if self.vllm_mode == "colocate":
                dense = dense[self.accelerator.process_index * len(inputs) :][: len(inputs)]
            engine.begin(f"train/{rounds.done + 1}", rounds.schedule, ceiling_prompts=prompts, dense=dense)
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        correct_began = time.perf_counter()
        self._compare()
        made, process = self.sparse_setup.correction, self.accelerator.process_index
        policy = correct_batch(batch, made, self._gathered, process, self._control)
        watch_began = time.perf_counter()
        watched = rounds.complete(self._taken(), policy)
        spent = {
            "time/sparroll_correct_seconds": watch_began - correct_began,
            "time/sparroll_watch_seconds": time.perf_counter() - watch_began,
        }
        self._rescoring_seconds = watched.report["rescoring/seconds"]
        self._record("train", watched.report | spent)
        for line in watched.events:
            self._say(line)
        return batch

    def _step_ended(self: Any, is_last: bool) -> None:
        """Called before TRL logs the optimizer step. is_last: whether the run ends with it."""
        uses = self.args.steps_per_generation * self.num_iterations
        self._round_took(self._round_clock.step_ends(over=is_last or self._step % uses == 0))

    def _round_took(self: Any, seconds: float | None) -> None:
        if seconds:
            self._record("train", {"rescoring/share_of_step": self._rescoring_seconds / seconds})

    def _drawn(self: Any, rows: int) -> list[bool]:
        """Who is in the control group of the next round, of all processes' rows; each process has that many. Empty without
        one."""
        group = self.sparse_rounds.control_group
        if group is None:
            return []
        group.begin(self.sparse_rounds.done + 1)
        prompts = rows * self.accelerator.num_processes // group.samples
        drawn: list[bool] = group.flags(range(prompts), prompts, 0)
        return drawn

    def _calculate_rewards(self: Any, *arguments: Any, **named: Any) -> Any:
        """TRL's call, which returns every reward function's rewards of all processes' rollouts."""
        found_BF = super()._calculate_rewards(*arguments, **named)  # type: ignore[misc]
        weighted_B = (found_BF * self.reward_weights.to(found_BF.device)).nansum(dim=1)
        self._rewards = weighted_B.masked_fill(found_BF.isnan().all(dim=1), torch.nan).tolist()
        return found_BF

    def _compare(self: Any) -> None:
        """Show the control group the rollouts of all processes; every process compares all of them."""
        group, engine = self.sparse_rounds.control_group, self._sparse_engine
        if group is None:
            return
        rollouts = [] if engine is None else engine.rollouts
        mine = {"name": [prompt_name(each.prompt_ids) for each in rollouts]} | figures_of(rollouts)
        rows = gather_object(list(zip(*mine.values(), strict=True)))
        figures = dict(zip(mine, zip(*rows, strict=True), strict=True))
        names = dict(enumerate(figures.pop("name")[:: group.samples]))
        group.compare_figures(names, self._control, {REWARD: self._rewards} | figures)

    def evaluate(self: Any, *arguments: Any, **named: Any) -> Any:
        # Every evaluation uses the same draws, so two of them differ by the weights alone.
        self._batches_evaluated = 0
        self._dense_states = []
        with self._round_clock.stopped():
            report = super().evaluate(*arguments, **named)  # type: ignore[misc]
        self.sparse_rounds.evaluated(self._dense_states)
        return report

    def _dense_batch(self: Any, inputs: Any) -> Any:
        """A batch of an evaluation: dense, and counted as dense. It is re-scored for the ceiling, which costs no
        decoding."""
        self._batches_evaluated += 1
        if self._sparse_engine is not None:
            self._sparse_engine.begin(f"eval/{self._batches_evaluated}", None)
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        leave_uncorrected(batch)
        taken = self._taken()
        self._dense_states += [each.state for each in taken]
        self._record("eval", ran_report(taken))
        return batch

    def _taken(self: Any) -> list[EngineStep]:
        """What every process measured; the same on all of them."""
        mine = [] if self._sparse_engine is None else [self._sparse_engine.take()]
        return list(gather_object(mine))

    def _gathered(self: Any, rows_BT: Tensor) -> Tensor:
        every: Tensor = self.accelerator.gather(pad_across_processes(rows_BT, dim=1))
        return every

    def _record(self: Any, mode: str, report: StepReport) -> None:
        metrics = self._metrics[mode]
        for name in _THEIR_RATIOS:
            # Those of TRL's own correction, which is not applied.
            metrics.pop(name, None)
        for name, value in report.items():
            metrics[name].append(value)

    def _say(self: Any, line: str) -> None:
        self.sparse_events.append(f"round {self.sparse_rounds.done}: {line}")
        if self.accelerator.is_main_process:
            _log.warning("sparroll, round %d: %s", self.sparse_rounds.done, line)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        # TRL's own files come last, the one that names the step among them.
        if self.args.should_save:
            folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            saved_state.write(folder, self.sparse_rounds.state(), self.sparse_setup.table())
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        setup = self.sparse_setup
        state = saved_state.read(checkpoint, _RESUME_HINT, setup.table(), in_their_words=setup.in_their_words)
        self.sparse_rounds.restore(state)
        if self.sparse_rounds.stopped:
            raise UserError(f"this run was stopped: {self.sparse_rounds.stopped}", _RESUME_HINT)


class SparseGRPOTrainer(SparseRolloutsMixin, GRPOTrainer):
    """TRL's GRPOTrainer with sparse rollouts.

    >>> trainer = SparseGRPOTrainer(model="Qwen/Qwen3-4B", reward_funcs=reward, args=GRPOConfig(use_vllm=True, ...),
    ...                             train_dataset=prompts, sparse=SparseRollouts("qwen3-4b-0.86", correction="tis"))
    """


class _Steps(TrainerCallback):
    """Tells the trainer when an optimizer step begins and ends. The run ends after the step in which a watcher asked for
    it, with a checkpoint where the run writes any."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._round_clock.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer.sparse_rounds.stopped:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != "no"
        self._trainer._step_ended(is_last=control.should_training_stop)


_POSITIONAL = ("reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")


def _config_of(model: Any, args: Any) -> Any:
    if not isinstance(model, str):
        return model.config
    return AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)


def _facts(model: Any, config: Any, args: Any) -> TrainerFacts:
    if getattr(config, "vision_config", None) is not None:
        raise UserError("a model with images has never run with sparse rollouts", "use TRL's own GRPOTrainer for it")
    return TrainerFacts(
        model=model if isinstance(model, str) else str(model.config._name_or_path),
        prompts_per_step=args.generation_batch_size // args.num_generations,
        samples_per_prompt=args.num_generations,
        max_new_tokens=args.max_completion_length,
        longest_context_tokens=_context_limit(config, args),
        vocabulary=int(config.vocab_size),
        temperature=float(args.temperature),
        processes=int(args.world_size) if args.vllm_mode == "colocate" else 1,
    )


def _context_limit(config: Any, args: Any) -> int:
    return int(args.vllm_max_model_length or config.max_position_embeddings)


def _capacity(setup: SparseSetup, config: Any) -> Schedule:
    """What the engine starts with, so that it can run every schedule of the run."""
    layers = int(config.num_hidden_layers)
    capacity = widest(setup.capacity(), setup.facts.longest_context_tokens, layers)
    for schedule in setup.schedules():
        schedule.check_layers(layers)
        check_fits_engine(schedule, capacity)
    return capacity


@contextmanager
def _environment(capacity: Schedule, *, colocate: bool) -> Iterator[None]:
    """What the plugin reads while vLLM starts in this process, since TRL passes no arguments of ours to it. A server has
    its own."""
    if not colocate:
        yield
        return
    launch.check_installed()
    os.environ[SCHEDULE_VARIABLE] = json.dumps(capacity.inline(), sort_keys=True)
    set_threads = torch.set_num_threads
    try:
        plugin.register()
        launch.choose_runner(v1=capacity.check is not None)
        yield
    finally:
        del os.environ[SCHEDULE_VARIABLE]
        torch.set_num_threads = set_threads
