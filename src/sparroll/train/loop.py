"""GRPO on sparse rollouts. `Trainer.step` is the table of contents: it has one call for each stage of a step, in order.
The file that a call comes from says how the stage works; docs/life-of-a-step.md lists these files.

How the algorithm differs from textbook GRPO and PPO:

- Advantages are GRPO's: a rollout's reward minus the mean reward of its prompt's rollouts, divided by their standard
  deviation (`train.normalise_advantage = false` leaves the division out, as Dr. GRPO does). There is no value model and
  no GAE, because a response has one reward, at its end.
- The loss is the mean over all kept tokens of the step, as in DAPO. GRPO takes a mean per response, in which a token of
  a long response counts less than one of a short response. Micro batches and processes add up to exactly this mean.
- PPO's clip has two bounds (clip-higher, DAPO). The clipped ratio is now/dense, both with full attention. The gap
  between dense and sparse is left to the correction's weight, outside the clip, so the two stay separate decisions.
- A step makes one update, or as many as `train.epochs_per_batch` says, each on the whole batch. Every step samples from
  the newest weights, so staleness never enters the ratio dense/sparse, unless `train.rollouts_behind_steps` asks for
  older rollouts; `train.dense_of` then says which of the two ratios takes their staleness in.
- By default there is no KL to the initial model (`train.kl_coefficient` adds its k3 estimate to the loss). There is no
  entropy bonus. DAPO's overlong penalty, overlong filtering and dynamic sampling are available and off by default.
- In addition, each step measures the tail of the acceptance from the scores that it needs anyway, and a control group
  of dense rollouts, where there is one, what sparsity costs in reward. The watchers of both (control/) may change the
  schedule or end the run.

Left out: asynchronous and sharded training, reward models, tools, several turns. Each process holds a whole policy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from sparroll import records
from sparroll.control.controller import Controller
from sparroll.control.watcher import StepEvidence, states_of
from sparroll.engines.base import samples_densely
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError, of_machine
from sparroll.mismatch import TailTable
from sparroll.mismatch.step_metrics import ESTIMATOR, ceiling_report, tail_report
from sparroll.models import fingerprint
from sparroll.progress import OnProgress
from sparroll.rounding import rounded_down
from sparroll.train.config.file import as_command
from sparroll.train.config.run import TrainConfig
from sparroll.train.dense_checks import dense_accuracy, dense_ceiling
from sparroll.train.result import TrainResult, summarise
from sparroll.train.runtime import checkpoint
from sparroll.train.runtime.checkpoint import RunState, SavedAdapter
from sparroll.train.runtime.interrupts import Interrupts
from sparroll.train.runtime.randomness import generator_state, rollout_seeds
from sparroll.train.sampling.control_group import ControlGroup, gap_in_words, in_control_group
from sparroll.train.sampling.groups import Groups, Rounds
from sparroll.train.sampling.rewards import Graded, agreed
from sparroll.train.sampling.rollouts import check_report, compression_report, rollout_report, sample
from sparroll.train.setup import Parts, held_by_main, open_run
from sparroll.train.staleness import PastWeights, staleness_report
from sparroll.train.step_correction import correct_step, engine_lists
from sparroll.train.tail_metrics import measure_tail, where
from sparroll.train.update.gradient_step import autocast
from sparroll.types import Prompt, Rollout, StepReport, TokenBatch, TokenScores, padded

if TYPE_CHECKING:
    from sparroll.train.distill.adapter_update import AdapterUpdate


MeasureStep = Callable[[list[Rollout], list[TokenScores]], StepReport]
"""Called in every step with this process's rollouts, without those of a control group, and their dense scores, before
the weights move. What it returns is logged among the step's metrics."""


def train(
    config: TrainConfig,
    out: Path | str,
    resume: bool = False,
    on_progress: OnProgress | None = None,
    first_accuracy: StepReport | None = None,
    also_measure: MeasureStep | None = None,
) -> TrainResult:
    """Train, with results in the folder `out`. With `resume`, continue from its newest whole checkpoint; on a CPU the
    result is the same to the bit as that of an uninterrupted run.

    Writes config.json, metrics.jsonl, checkpoints/ and result.json, and with a controller also schedule.toml. On Ctrl-C
    it saves the last completed step, if the weights have not moved since, and then raises KeyboardInterrupt.

    first_accuracy: what `dense_checks.first_accuracy` returned for a configuration with the same model and the same
    evaluation; it is logged in the place of an evaluation before the first step.
    also_measure: see `MeasureStep`; a resumed run needs the same one.
    """
    with held_by_main(Path(out), "sparroll train", config.model.device):
        trainer = Trainer(open_run(config, Path(out), resume), first_accuracy, also_measure)
        with trainer.engine:
            return trainer.run(on_progress)


class Trainer:
    def __init__(
        self,
        parts: Parts,
        first_accuracy: StepReport | None = None,
        also_measure: MeasureStep | None = None,
    ):
        self.parts, self.first_accuracy, self.also_measure = parts, first_accuracy, also_measure
        self.config, self.ranks, self.engine = parts.config, parts.ranks, parts.engine
        self.policy = parts.scorer.model
        self.state = parts.state
        """Where the run stood after its last completed step."""
        self.ceiling = dict(parts.state.dense_ceiling)
        self.interrupts = Interrupts()
        self.on_progress: OnProgress | None = None
        self.weights_moved = False
        """Whether the weights are ahead of `state`: true from the first update of a step until the step is complete."""
        self.saved_step = parts.state.step if parts.resumed_from else -1
        self.news = [
            *parts.notices,
            *parts.rewards.changes(parts.state.reward_files),
        ]
        """Events since the last completed step; the next step's log line takes them."""

    def run(self, on_progress: OnProgress | None = None) -> TrainResult:
        self.advance(on_progress)
        return self.summary()

    def advance(self, on_progress: OnProgress | None = None) -> None:
        """Run all remaining steps, with evaluations and checkpoints between them."""
        steps = self.config.train.steps
        self.on_progress = on_progress
        self.tell("")
        try:
            self.evaluate_when_due()
            while self.state.step < steps and not self.state.stopped:
                report = self.step()
                self.interrupts.release()
                self.evaluate_when_due()
                self.save_when_due()
                self.tell(f"step {self.state.step}/{steps}  {self.in_words(report)}")
            self.save()
        except KeyboardInterrupt as stop:
            stop.add_note(self.leave_resumable("interrupted"))
            raise
        except Exception as error:
            known = of_machine(error)
            if known is None and not isinstance(error, UserError):
                raise
            self.leave_resumable("stopped by an error")
            if known is None:
                raise
            raise known from error
        finally:
            self.interrupts.restore()
            self.parts.close()

    def step(self) -> StepReport:
        number, clock = self.state.step + 1, Clock(self.tell_part)
        with clock("ceiling"):
            self.measure_ceiling_when_due()
        groups = self.sample_groups(number, clock)
        rollouts, report = groups.rollouts, groups.report
        control = [self.control is not None and in_control_group(rollout) for rollout in rollouts]
        report |= rollout_report(groups.sampled, self.engine, self.ranks)
        report |= compression_report(self.engine, self.ranks)
        report |= check_report(groups.sampled, self.engine, self.ranks)
        report |= self.control.report() if self.control is not None else {}
        self.engine.sleep(self.config.engine.sleep_level)
        batch = groups.batch(self.config.train.normalise_advantage)
        with clock("score"):
            scores = self.score(rollouts)
            if self.parts.past is not None:
                scores, stale = self.score_past(self.parts.past, rollouts, scores)
                report |= stale
            batch.add_scores(scores)
            batch.reference_logp_BT = self.score_reference(rollouts)
            at_dense = self.score_union(rollouts, scores)
        with clock("measure"):
            self.measure_ceiling(*where(rollouts, scores, control), number)
            sparse = where(rollouts, scores, [not each for each in control])
            measured = measure_tail(*sparse, self.config.mismatch.bin_tokens, self.ranks, number)
            report |= self.mismatch_report(measured.table("exact" if self.checks_say_it_all else ESTIMATOR))
            report |= self.also_measure(*sparse) if self.also_measure is not None else {}
            replay = self.replay_when_due(rollouts, scores, number)
        seed = self.config.train.seed
        report |= correct_step(
            self.parts.correction, batch, rollouts, scores, self.ranks, seed, number, control, at_dense
        )
        with clock("update"):
            report |= self.parts.update(batch, number, self.before_weights_move)
        if self.parts.past is not None:
            # Also where no token moved a weight: from here on the versions are those after this step.
            self.before_weights_move()
            self.parts.past.keep()
        if self.parts.distill is not None:
            with clock("distill"):
                report |= self.distill(self.parts.distill, batch, number)
        with clock("weights"):
            self.parts.weights.bring_sampler(number)
        dense = samples_densely(self.engine)
        pairs = self.control.pairs() if self.control is not None else None
        evidence = StepEvidence(number, self.engine.schedule, dense, measured, dict(report), replay, pairs)
        events, stopped = self.watch(evidence, report)
        self.complete(number, report | clock.report(), groups.events + events, stopped)
        return report

    def tell(self, text: str) -> None:
        """Report how many steps are done; the text says what is going on."""
        if self.on_progress:
            self.on_progress(self.state.step, self.config.train.steps, text)

    def tell_part(self, part: str) -> None:
        """Say which part of a step has begun."""
        self.tell(f"step {self.state.step + 1}/{self.config.train.steps}: {part}")

    def tell_rollouts(self, done: int, total: int, _text: str = "", /) -> None:
        """The callback of the engine while it samples the rollouts of a step."""
        self.tell_part(f"{done}/{total} rollouts")

    def in_words(self, report: StepReport) -> str:
        """One step in short, for the progress bar."""
        gap = gap_in_words(report)
        said = f"reward {report['reward/mean']:.3f}  tail {rounded_down(report['mismatch/acceptance_q05'])}"
        return f"{said}  gap {gap}" if gap else said

    # -- the parts of a step ---------------------------------------------------------------------------------------------

    def next_prompts(self, count: int | None = None, first: int = 0) -> dict[int, Prompt]:
        """This process's share of the next prompts, by their number within the step; numbers start at `first`. count:
        prompts over all processes; default, those of a whole step."""
        drawn = self.parts.prompts.next(self.config.train.prompts_per_step if count is None else count)
        return dict(self.ranks.share(list(enumerate(drawn, first))))

    @property
    def control(self) -> ControlGroup | None:
        """The control group; None in a run without one, and while all rollouts are dense."""
        return None if samples_densely(self.engine) else self.parts.control_group

    @property
    def control_shows_ceiling(self) -> bool:
        """Whether the dense ceiling is measured on the control group. Where checks of drafts give the dense
        log-probabilities, the trainer scores none of the step's rollouts, so that the ceiling needs its own."""
        return self.control is not None and not self.checks_say_it_all

    def measure_ceiling_when_due(self) -> None:
        every, step = self.config.mismatch.ceiling_every_steps, self.state.step
        regular = every and step % every == 0
        # A run with dense rollouts measures its ceiling on them, in `mismatch_report`.
        if not samples_densely(self.engine) and not self.control_shows_ceiling and (regular or not self.ceiling):
            self.ceiling = dense_ceiling(self.parts, step, self.score)

    def measure_ceiling(self, dense: list[Rollout], scores: list[TokenScores], number: int) -> None:
        """The dense ceiling of the control group's rollouts, pooled with those of steps before where they are few."""
        if self.control_shows_ceiling and self.parts.ceiling is not None:
            measured = measure_tail(dense, scores, self.config.mismatch.bin_tokens, self.ranks, number)
            if table := self.parts.ceiling.add(number, measured):
                self.ceiling = ceiling_report(table, self.state.step)

    def sample_groups(self, number: int, clock: Clock) -> Groups:
        """Rollouts with rewards. Dynamic sampling takes as many rounds as it needs to fill the step, else there is
        one."""
        self.engine.reset_report()
        rounds, control = Rounds(self.config, self.ranks), self.control
        if control is not None:
            control.begin(number)
        while count := rounds.asks_for:
            prompts = self.next_prompts(count, rounds.drawn)
            flags = control.flags(prompts, count, rounds.drawn) if control is not None else None
            with clock("rollout"):
                rollouts = self.sample(prompts, number, flags)
            with clock("reward"):
                graded = self.grade(prompts, rollouts)
            if control is not None:
                control.add(list(prompts), rollouts, graded)
            rounds.add(prompts, rollouts, graded)
        return rounds.groups()

    def grade(self, prompts: dict[int, Prompt], rollouts: list[Rollout]) -> Graded:
        task, decode = self.parts.task, self.parts.decode
        return agreed(lambda: self.parts.rewards(task, list(prompts.values()), rollouts, decode), self.ranks)

    def sample(self, prompts: dict[int, Prompt], number: int, control: list[bool] | None = None) -> list[Rollout]:
        self.parts.weights.bring_sampler(self.state.step)
        numbers, sampling = list(prompts), self.parts.sampling
        if self.checks_say_it_all and "top_k" not in self.parts.correction.needs:
            sampling = replace(sampling, top_k=0)
        seeds = rollout_seeds(self.config.train.seed, "rollout", number, numbers, sampling.samples_per_prompt)
        prompt_ids = self.parts.encoder.ids(list(prompts.values()))
        rollouts = sample(self.engine, prompt_ids, numbers, seeds, sampling, self.tell_rollouts, control)
        self.parts.weights.check_sampled(rollouts, self.state.step)
        return rollouts

    @property
    def trusts_checks(self) -> bool:
        """Whether dense log-probabilities are those of the engine's checks, where there are any."""
        return self.config.check is None or self.config.check.dense_logp == "engine"

    @property
    def checks_say_it_all(self) -> bool:
        """Whether the checks of the schedule in force give a step's dense log-probabilities and acceptance."""
        schedule = self.engine.schedule
        return self.trusts_checks and schedule is not None and schedule.check is not None

    def score(self, rollouts: list[Rollout], scorer: Scorer | None = None) -> list[TokenScores]:
        """Dense log-probabilities, which the loss needs, and top-k lists, which the acceptance needs, in one pass; or what
        the engine's checks of its drafts have seen, which needs no lists for the acceptance. Where the correction
        compares both policies' lists, the dense log-probabilities of the engine's list come with them. scorer: other than
        that of the policy."""
        if not rollouts:
            return []
        seen = [rollout.dense for rollout in rollouts if rollout.dense is not None]
        if len(seen) == len(rollouts) and self.trusts_checks:
            return seen
        sampling = self.parts.sampling
        with autocast(self.config.train.dtype, self.ranks.device):
            return (scorer or self.parts.scorer).dense(
                rollouts,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                at_ids=engine_lists(rollouts) if "top_k" in self.parts.correction.needs else None,
            )

    def score_past(
        self, past: PastWeights, rollouts: list[Rollout], now: list[TokenScores]
    ) -> tuple[list[TokenScores], StepReport]:
        """With rollouts of older weights: the dense scores that the step goes on with, those of the policy (`now`) or of
        the weights that sampled, and how far apart sparsity and staleness are."""
        sampler = self.score(rollouts, past.scorer)
        report = staleness_report(rollouts, sampler, now, past.behind, self.ranks)
        return (sampler if self.config.train.dense_of == "sampler" else now), report

    def score_union(self, rollouts: list[Rollout], scores: list[TokenScores]) -> list[Tensor] | None:
        """[T, K] of each rollout: the sparse policy's log-probabilities of the dense list; None unless
        `train.whole_union` asks for them. They are the scorer's, in the trainer's precision."""
        if not self.config.train.whole_union or not rollouts:
            return None
        lists = [score.top_k for score in scores if score.top_k is not None]
        if self.engine.schedule is None:
            return [each.logp for each in lists]
        with autocast(self.config.train.dtype, self.ranks.device):
            temperature, ids = self.parts.sampling.temperature, [each.ids for each in lists]
            read = self.parts.scorer.sparse(rollouts, self.engine.schedule, temperature=temperature, at_ids=ids)
        return [each.logp_at_ids for each in read if each.logp_at_ids is not None]

    def score_reference(self, rollouts: list[Rollout]) -> Tensor | None:
        """[B, T] log-probabilities under the model that the run began with; None where the loss has no KL term."""
        if self.parts.reference is None or not rollouts:
            return None
        with autocast(self.config.train.dtype, self.ranks.device):
            scores = self.parts.reference.dense(rollouts, temperature=self.parts.sampling.temperature)
        return padded([score.logp for score in scores])

    def mismatch_report(self, tail: TailTable) -> StepReport:
        """The tail, always with the dense ceiling beside it."""
        if samples_densely(self.engine):
            self.ceiling = ceiling_report(tail, self.state.step)
        return tail_report(tail, self.config.mismatch.least_tokens) | self.ceiling

    def distill(self, update: AdapterUpdate, batch: TokenBatch, number: int) -> StepReport:
        """The adapter's update on the same rollouts, under the schedule that sampled them."""
        assert self.engine.schedule is not None, "an adapter without sparse rollouts"
        return update(batch, self.engine.schedule, number, self.before_weights_move)

    def before_weights_move(self) -> None:
        self.interrupts.hold()
        self.weights_moved = True

    def replay_when_due(self, rollouts: list[Rollout], scores: list[TokenScores], number: int) -> TailTable | None:
        """The tail under the next cheaper schedule, or None in a step without such a measurement. Comes before the
        weights move, because the step's dense scores belong to the present weights."""
        cheaper, replay = self.parts.cheaper, self.parts.replay
        if cheaper is None or replay is None or cheaper.following is None or not cheaper.due(number):
            return None
        with autocast(self.config.train.dtype, self.ranks.device):
            return replay.measure(cheaper.following, rollouts, scores, self.ranks, number)

    def watch(self, evidence: StepEvidence, report: StepReport) -> tuple[list[str], str]:
        """Show the step to every watcher and carry out its decision. Figures that they computed are added to `report`.
        -> (events to log, reasons to stop, empty to go on)"""
        events: list[str] = []
        stopped: list[str] = []
        for watcher in self.parts.watchers:
            decision = watcher.watch(evidence)
            report |= decision.report
            events += decision.events
            if decision.action == "stop":
                stopped += decision.events
            elif decision.action == "switch":
                self.engine.set_schedule(decision.schedule)
        return events, "; ".join(stopped)

    def complete(self, number: int, report: StepReport, events: list[str], stopped: str) -> None:
        """Log the finished step, and make it the state that the next checkpoint holds."""
        metrics_bytes = self.parts.log(number, report, self.news + events)
        self.news = []
        self.state = RunState(
            step=number,
            prompts_drawn=self.parts.prompts.drawn,
            metrics_bytes=metrics_bytes,
            evaluated_step=self.state.evaluated_step,
            schedule=self.engine.schedule,
            stopped=stopped,
            watchers=states_of(self.parts.stateful),
            reward_files=self.parts.rewards.digests(),
            dense_ceiling=dict(self.ceiling),
            generators=self.ranks.gather([generator_state()]),
        )
        self.weights_moved = False

    # -- between steps ---------------------------------------------------------------------------------------------------

    def evaluate_when_due(self) -> None:
        """Evaluate before the first step, every `evaluate.every_steps` steps, and after the last."""
        settings, step = self.config.evaluate, self.state.step
        regular = settings.every_steps and step % settings.every_steps == 0
        due = step in (0, self.config.train.steps) or regular or self.state.stopped
        if settings.prompts and due and self.state.evaluated_step != step:
            self.tell("evaluation")
            began = time.perf_counter()
            report = self.evaluate()
            report["time/evaluate_seconds"] = time.perf_counter() - began
            self.state.metrics_bytes = self.parts.log(step, report, [])
            self.state.evaluated_step = step

    def evaluate(self) -> StepReport:
        if self.state.step == 0 and self.first_accuracy is not None:
            return dict(self.first_accuracy)
        return dense_accuracy(self.parts, self.state.step)

    def save_when_due(self) -> None:
        every = self.config.checkpoint.every_steps
        if every and self.state.step % every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last completed step, unless there is one already."""
        if self.saved_step != self.state.step:
            self.interrupts.hold()
            self.save_on_main()
            self.interrupts.release()
            self.ranks.wait()

    def save_on_main(self) -> None:
        parts = self.parts
        if parts.metrics is not None:
            parts.metrics.flush()
            config, tokenizer = parts.asked.model_dump(mode="json"), parts.scorer.tokenizer
            optimizer, keep = parts.update.optimizer, self.config.checkpoint.keep
            adapter = None
            if parts.distill is not None:
                from sparroll.engines.adapter import BESIDE

                base = self.config.model.name if parts.frozen else BESIDE
                adapter = SavedAdapter(parts.distill.adapter, parts.distill.optimizer, base)
            policy = None if parts.frozen else self.policy
            past = parts.past.state() if parts.past is not None else ()
            checkpoint.save(parts.checkpoints, self.state, config, policy, tokenizer, optimizer, keep, adapter, past)
            if parts.controller is not None:
                self.write_schedule(parts.controller)
        self.saved_step = self.state.step

    def write_schedule(self, controller: Controller) -> None:
        """Write the present budgets, with what was measured under them, as a schedule that another run can start
        from."""
        command = f"{as_command(self.config)}  # the budgets after step {self.state.step}"
        made = controller.measured_schedule(records.made_by(command))
        made = replace(made, fingerprint=fingerprint.of_model(self.config.model.name))
        made.save(self.parts.out / "schedule.toml")

    def leave_resumable(self, why: str) -> str:
        """After Ctrl-C or an error that the user can fix: save the last completed step, unless the weights have already
        moved on from it, and say which step a resumed run starts from. -> what was said"""
        self.interrupts.hold()
        if self.weights_moved:
            cut, saved = self.state.step + 1, max(self.saved_step, 0)
            kept = f"the update of step {cut} was cut off, the last checkpoint is of step {saved}"
        else:
            kept = f"step {self.state.step} is saved"
            try:
                if self.saved_step != self.state.step:
                    # Do not wait for the other processes here: they may be anywhere.
                    self.save_on_main()
            except Exception as error:
                if of_machine(error) is None:
                    raise
                kept = f"step {self.state.step} could not be saved, the last checkpoint is of step {max(self.saved_step, 0)}"
        said = f"{why}: {kept}; --resume goes on there"
        if self.ranks.is_main:
            print(said, file=sys.stderr, flush=True)
        return said

    def summary(self) -> TrainResult:
        parts = self.parts
        result = summarise(parts.out, parts.checkpoints / f"step-{self.state.step:06d}", self.state.stopped)
        if self.ranks.is_main:
            about = {"config": self.config, "seed": self.config.train.seed, "wall_seconds": result.wall_seconds}
            functions = parts.rewards.record()
            table = result.table() | ({"reward_functions": functions} if functions else {})
            records.write(parts.out / "result.json", "train", table, **about)
        return result


class Clock:
    """Seconds per part of a step; those of a part that runs several times are added up.

    on_part: told the name of each part when it begins.
    """

    def __init__(self, on_part: Callable[[str], None]):
        self._on_part = on_part
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._on_part(part)
        began = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def report(self) -> StepReport:
        parts = {f"time/{part}_seconds": seconds for part, seconds in self._seconds.items()}
        whole = time.perf_counter() - self._began
        share = {"time/distill_share": self._seconds["distill"] / whole} if "distill" in self._seconds else {}
        return parts | share | {"time/step_seconds": whole}
