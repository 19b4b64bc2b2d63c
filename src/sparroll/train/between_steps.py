"""Everything of a run but its steps: their order, progress, evaluations, checkpoints, and what is left after Ctrl-C or an
error. What a step does is in loop.py."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from dataclasses import replace

from sparroll import records
from sparroll.control.controller import Controller
from sparroll.control.watcher import states_of
from sparroll.errors import UserError, of_machine
from sparroll.models import fingerprint
from sparroll.progress import OnProgress
from sparroll.train.config.file import as_command
from sparroll.train.dense_checks import dense_accuracy
from sparroll.train.result import TrainResult, summarise
from sparroll.train.runtime import checkpoint
from sparroll.train.runtime.checkpoint import RunState, SavedAdapter
from sparroll.train.runtime.interrupts import Interrupts
from sparroll.train.runtime.randomness import generator_state
from sparroll.train.setup import Parts
from sparroll.types import StepReport


class SteppedRun(ABC):
    """A run, whose steps a subclass defines."""

    def __init__(self, parts: Parts, first_accuracy: StepReport | None = None):
        self.parts, self.first_accuracy = parts, first_accuracy
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
            # Where another process ended, this one sees a broken connection, whatever ended the other.
            if known is None and not isinstance(error, UserError) and self.ranks.count == 1:
                raise
            self.leave_resumable("stopped by an error")
            if known is None:
                raise
            raise known from error
        finally:
            self.interrupts.restore()
            self.parts.close()

    @abstractmethod
    def step(self) -> StepReport:
        """Run the next step and `complete` it. -> its metrics"""

    @abstractmethod
    def in_words(self, report: StepReport) -> str:
        """One step in short, for the progress bar."""

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

    # -- a step's end, and checkpoints -------------------------------------------------------------------------------------

    def before_weights_move(self) -> None:
        self.interrupts.hold()
        self.weights_moved = True

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

    # -- progress ----------------------------------------------------------------------------------------------------------

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
