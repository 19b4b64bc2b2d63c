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

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from sparroll.control.watcher import StepEvidence
from sparroll.engines.base import samples_densely
from sparroll.engines.scoring import Scorer
from sparroll.mismatch import TailStatistics, TailTable
from sparroll.mismatch.step_metrics import ESTIMATOR, ceiling_report, tail_report
from sparroll.progress import OnProgress
from sparroll.rounding import rounded_down
from sparroll.train.between_steps import SteppedRun
from sparroll.train.config.run import TrainConfig
from sparroll.train.dense_checks import dense_ceiling
from sparroll.train.result import TrainResult
from sparroll.train.runtime.clock import Clock
from sparroll.train.runtime.randomness import rollout_seeds
from sparroll.train.sampling.control_group import ControlGroup, gap_in_words, in_control_group
from sparroll.train.sampling.groups import Groups, Rounds
from sparroll.train.sampling.rewards import Graded, agreed
from sparroll.train.sampling.rollouts import check_report, compression_report, rollout_report, sample
from sparroll.train.setup import Parts, held_by_main, open_run
from sparroll.train.step_correction import correct_step
from sparroll.train.step_scores import StepScores
from sparroll.train.tail_metrics import measure_tail, where
from sparroll.train.update.gradient_step import autocast
from sparroll.types import Prompt, Rollout, StepReport, TokenBatch, TokenScores

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


class Trainer(SteppedRun):
    """A run whose steps sample, score, correct and update."""

    def __init__(
        self,
        parts: Parts,
        first_accuracy: StepReport | None = None,
        also_measure: MeasureStep | None = None,
    ):
        super().__init__(parts, first_accuracy)
        self.also_measure = also_measure
        self.scores = StepScores(parts)

    def step(self) -> StepReport:
        number, clock = self.state.step + 1, Clock(self.tell_part)
        with clock("ceiling"):
            self.measure_ceiling_when_due()
        groups = self.sample_groups(number, clock)
        rollouts, report = groups.rollouts, groups.report | self.sampled_report(groups.sampled)
        control = [self.control is not None and in_control_group(rollout) for rollout in rollouts]
        self.engine.sleep(self.config.engine.sleep_level)
        batch = groups.batch(self.config.train.normalise_advantage)
        with clock("score"):
            scores, stale = self.score_with_past(rollouts)
            report |= stale
            batch.add_scores(scores)
            batch.reference_logp_BT = self.scores.reference(rollouts)
            at_dense = self.score_union(rollouts, scores)
        with clock("measure"):
            self.measure_ceiling(*where(rollouts, scores, control), number)
            sparse = where(rollouts, scores, [not each for each in control])
            measured = measure_tail(*sparse, self.config.mismatch.bin_tokens, self.ranks, number)
            report |= self.mismatch_report(measured.table("exact" if self.scores.checks_say_it_all else ESTIMATOR))
            report |= self.also_measure(*sparse) if self.also_measure is not None else {}
            replay = self.replay_when_due(rollouts, scores, number)
        seed = self.config.train.seed
        report |= correct_step(
            self.parts.correction, batch, rollouts, scores, self.ranks, seed, number, control, at_dense
        )
        with clock("update"):
            report |= self.parts.update(batch, number, self.before_weights_move)
        self.keep_past()
        if self.parts.distill is not None:
            with clock("distill"):
                report |= self.distill(self.parts.distill, batch, number)
        with clock("weights"):
            self.parts.weights.bring_sampler(number)
        events, stopped = self.watch(number, report, measured, replay)
        self.complete(number, report | clock.report(), groups.events + events, stopped)
        return report

    def in_words(self, report: StepReport) -> str:
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
        return self.control is not None and not self.scores.checks_say_it_all

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
        if self.scores.checks_say_it_all and "top_k" not in self.parts.correction.needs:
            sampling = replace(sampling, top_k=0)
        seeds = rollout_seeds(self.config.train.seed, "rollout", number, numbers, sampling.samples_per_prompt)
        prompt_ids = self.parts.encoder.ids(list(prompts.values()))
        rollouts = sample(self.engine, prompt_ids, numbers, seeds, sampling, self.tell_rollouts, control)
        self.parts.weights.check_sampled(rollouts, self.state.step)
        return rollouts

    def sampled_report(self, sampled: list[Rollout]) -> StepReport:
        """What the engine did to sample these rollouts, which are all of the step's."""
        report = rollout_report(sampled, self.engine, self.ranks)
        report |= compression_report(self.engine, self.ranks)
        report |= check_report(sampled, self.engine, self.ranks)
        return report | (self.control.report() if self.control is not None else {})

    def score(self, rollouts: list[Rollout], scorer: Scorer | None = None) -> list[TokenScores]:
        """See `StepScores.dense`."""
        return self.scores.dense(rollouts, scorer)

    def score_union(self, rollouts: list[Rollout], scores: list[TokenScores]) -> list[Tensor] | None:
        """See `StepScores.union`."""
        return self.scores.union(rollouts, scores, self.engine.schedule)

    def score_with_past(self, rollouts: list[Rollout]) -> tuple[list[TokenScores], StepReport]:
        """The dense scores that the step goes on with; where older weights sampled, also what their age makes."""
        now, past = self.score(rollouts), self.parts.past
        if past is None:
            return now, {}
        return past.scores(rollouts, now, self.config.train.dense_of, self.score, self.ranks)

    def keep_past(self) -> None:
        """With rollouts of older weights: take in the policy as it is after the update, or after none."""
        if self.parts.past is not None:
            # Also where no token moved a weight: from here on the versions are those after this step.
            self.before_weights_move()
            self.parts.past.keep()

    def mismatch_report(self, tail: TailTable) -> StepReport:
        """The tail, always with the dense ceiling beside it."""
        if samples_densely(self.engine):
            self.ceiling = ceiling_report(tail, self.state.step)
        return tail_report(tail, self.config.mismatch.least_tokens) | self.ceiling

    def distill(self, update: AdapterUpdate, batch: TokenBatch, number: int) -> StepReport:
        """The adapter's update on the same rollouts, under the schedule that sampled them."""
        assert self.engine.schedule is not None, "an adapter without sparse rollouts"
        return update(batch, self.engine.schedule, number, self.before_weights_move)

    def replay_when_due(self, rollouts: list[Rollout], scores: list[TokenScores], number: int) -> TailTable | None:
        """The tail under the next cheaper schedule, or None in a step without such a measurement. Comes before the
        weights move, because the step's dense scores belong to the present weights."""
        cheaper, replay = self.parts.cheaper, self.parts.replay
        if cheaper is None or replay is None or cheaper.following is None or not cheaper.due(number):
            return None
        with autocast(self.config.train.dtype, self.ranks.device):
            return replay.measure(cheaper.following, rollouts, scores, self.ranks, number)

    def watch(
        self, number: int, report: StepReport, measured: TailStatistics, replay: TailTable | None
    ) -> tuple[list[str], str]:
        """Show the step to every watcher and carry out its decision. Figures that they computed are added to `report`.
        -> (events to log, reasons to stop, empty to go on)"""
        dense = samples_densely(self.engine)
        pairs = self.control.pairs() if self.control is not None else None
        evidence = StepEvidence(number, self.engine.schedule, dense, measured, dict(report), replay, pairs)
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
