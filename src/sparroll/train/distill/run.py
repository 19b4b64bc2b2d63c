"""Trains only the adapter, against a frozen model: `distill(config, out)`. There are no rewards and no policy update.
Otherwise it is a training run, with its checkpoints, processes and interrupts. The tail of held-out prompts is measured
before and after with the same seed.

>>> from sparroll.train.distill.run import distill
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparroll import records
from sparroll.errors import UserError
from sparroll.mismatch.step_metrics import ESTIMATOR
from sparroll.progress import OnProgress
from sparroll.rounding import rounded_down
from sparroll.tasks import Task
from sparroll.train.config.distill import DistillConfig
from sparroll.train.dense_checks import eval_prompt_ids
from sparroll.train.loop import Trainer
from sparroll.train.runtime.clock import Clock
from sparroll.train.runtime.randomness import rollout_seeds
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.sampling.rollouts import Sampling, rollout_report, sample
from sparroll.train.setup import held_by_main, open_run
from sparroll.train.tail_metrics import measure_tail
from sparroll.types import StepReport, TokenBatch


def distill(
    config: DistillConfig,
    out: Path | str,
    resume: bool = False,
    on_progress: OnProgress | None = None,
    task: Task | None = None,
) -> DistillResult:
    """Train an adapter, and put it into `out`/adapter. With `resume`, continue from the newest whole checkpoint; on a
    CPU the result is the same to the bit as that of an uninterrupted run.

    task: your own prompts instead of those that the configuration names.
    """
    if task is not None and task.name != config.task.name:
        raise UserError(
            f"the configuration names the task {config.task.name!r}, but the prompts given are of {task.name!r}",
            f"set task.name to {task.name!r}: the record and --resume identify the prompts by it",
        )
    with held_by_main(Path(out), "sparroll distill", config.model.device):
        run = DistillRun(open_run(config, Path(out), resume, task=task))
        with run.engine:
            run.advance(on_progress)
            return run.result()


@dataclass(frozen=True)
class HeldOut:
    """What was measured on the held-out prompts after `step` steps: the 5th percentile of the acceptance over all their
    tokens (estimator top_k_lower) with its 95 % interval, the mean acceptance, and as `kl` the mean log p_sparse - log
    p_dense of the sampled tokens that have a dense probability above 0."""

    step: int
    q05: float
    q05_low: float
    q05_high: float
    mean: float
    kl: float


@dataclass(frozen=True)
class DistillResult:
    """The outcome of a run."""

    out: Path
    adapter: Path
    """A plain peft folder."""
    steps: int
    before: HeldOut | None
    """None without held-out prompts (evaluate.prompts = 0)."""
    after: HeldOut | None
    dense_ceiling_q05: float
    kv_read_share: float
    """Tokens attended / tokens in context, mean over steps."""
    wall_seconds: float

    def table(self) -> dict[str, Any]:
        """Plain data for a record."""
        return dict(records.plain(self))


class DistillRun(Trainer):
    """A run whose step has no policy update, and whose evaluation is the tail of held-out prompts."""

    def step(self) -> StepReport:
        number, clock = self.state.step + 1, Clock(self.tell_part)
        prompts = self.next_prompts()
        with clock("ceiling"):
            self.measure_ceiling_when_due()
        with clock("rollout"):
            self.engine.reset_report()
            rollouts = self.sample(prompts, number)
            report = rollout_report(rollouts, self.engine, self.ranks)
        self.engine.sleep(self.config.engine.sleep_level)
        batch = TokenBatch.from_rollouts(rollouts, pad_id=0)
        with clock("score"):
            scores = self.score(rollouts)
            batch.add_scores(scores)
        with clock("measure"):
            measured = measure_tail(rollouts, scores, self.config.mismatch.bin_tokens, self.ranks, number)
            report |= self.mismatch_report(measured.table(ESTIMATOR))
        assert self.parts.distill is not None, "distilling without an adapter"
        with clock("distill"):
            report |= self.distill(self.parts.distill, batch, number)
        with clock("weights"):
            self.parts.weights.bring_sampler(number)
        self.complete(number, report | clock.report(), [], "")
        return report

    def in_words(self, report: StepReport) -> str:
        return f"kl {report['distill/kl']:.4f}  tail {rounded_down(report['mismatch/acceptance_q05'])}"

    def evaluate(self) -> StepReport:
        """The tail of the adapted policy on the held-out prompts, over all processes. Every evaluation uses the same
        draws."""
        config, parts = self.config, self.parts
        numbers, prompt_ids = eval_prompt_ids(parts)
        n = config.evaluate.samples_per_prompt
        seeds = rollout_seeds(config.train.seed, "evaluate", 0, numbers, n)
        sampling = Sampling(n, parts.sampling.max_new_tokens, parts.sampling.temperature, parts.sampling.top_k)
        parts.weights.bring_sampler(self.state.step)
        rollouts = sample(parts.engine, prompt_ids, numbers, seeds, sampling)
        scores = self.score(rollouts)
        measured = measure_tail(rollouts, scores, config.mismatch.bin_tokens, self.ranks, 0)
        tail = measured.table(ESTIMATOR).overall
        apart = [r.sparse_logp - score.logp for r, score in zip(rollouts, scores, strict=True)]
        # They are summed in the order of the prompts, so the result is the same on any number of processes.
        mine = [(r.prompt_index, r.sample_index, one) for r, one in zip(rollouts, apart, strict=True)]
        everyone = torch.cat([row[2] for row in sorted(self.ranks.gather(mine), key=lambda row: row[:2])])
        return {
            "distill/held_out_q05": tail.q05,
            "distill/held_out_q05_low": tail.low,
            "distill/held_out_q05_high": tail.high,
            "distill/held_out_mean": tail.mean,
            "distill/held_out_kl": float(everyone[torch.isfinite(everyone)].double().mean()),
        }

    def result(self) -> DistillResult:
        """Copy the last checkpoint's adapter to `out`/adapter, and sum the run up."""
        parts, saved = self.parts, self.parts.checkpoints / f"step-{self.state.step:06d}" / "adapter"
        lines = read_lines(parts.out / "metrics.jsonl")
        steps = [line for line in lines if "distill/kl" in line]
        held_out = [_held_out(line) for line in lines if "distill/held_out_q05" in line]
        seconds = sum(line.get("time/step_seconds", 0.0) + line.get("time/evaluate_seconds", 0.0) for line in lines)
        result = DistillResult(
            out=parts.out,
            adapter=parts.out / "adapter",
            steps=len(steps),
            before=held_out[0] if held_out else None,
            after=held_out[-1] if held_out else None,
            dense_ceiling_q05=steps[-1]["mismatch/dense_ceiling_q05"],
            kv_read_share=sum(line["rollout/kv_read_share"] for line in steps) / len(steps),
            wall_seconds=seconds,
        )
        if self.ranks.is_main:
            _replace(saved, result.adapter)
            about = {"config": parts.asked, "seed": self.config.train.seed, "wall_seconds": seconds}
            records.write(parts.out / "result.json", "distill", result.table(), **about)
        self.ranks.wait()
        return result


def _held_out(line: dict[str, Any]) -> HeldOut:
    names = ("q05", "q05_low", "q05_high", "mean", "kl")
    return HeldOut(line["step"], **{name: line[f"distill/held_out_{name}"] for name in names})


def _replace(source: Path, target: Path) -> None:
    """Replace a folder by a copy of `source`, made under another name first, so that a kill leaves no half adapter."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
