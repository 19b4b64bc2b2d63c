"""What a run measures with the engine in dense mode: the dense ceiling of the acceptance, and the dense accuracy. The
schedule is in force again afterwards, and no state of the run changes. The adapter takes no part: dense rollouts come
from the policy alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from sparroll.engines.base import under
from sparroll.evaluate.accuracy import Accuracy, grade
from sparroll.mismatch.step_metrics import ESTIMATOR, ceiling_report
from sparroll.train.config.run import TrainConfig
from sparroll.train.runtime.randomness import rollout_seeds
from sparroll.train.sampling.rollouts import Sampling, sample
from sparroll.train.setup import Parts, open_run
from sparroll.train.tail_metrics import measure_tail
from sparroll.types import Prompt, Rollout, StepReport, TokenScores


def dense_ceiling(parts: Parts, step: int, score: Callable[[list[Rollout]], list[TokenScores]]) -> StepReport:
    """The tail between the engine in dense mode and the trainer, on a few fresh dense rollouts. This is the noise
    floor."""
    config, sampling = parts.config, parts.sampling
    mine = _eval_share(parts, config.task.level, config.mismatch.ceiling_prompts)
    seeds = rollout_seeds(config.train.seed, "ceiling", step, list(mine), 1)
    once = Sampling(1, sampling.max_new_tokens, sampling.temperature, sampling.top_k)
    parts.weights.bring_policy(step)
    with under(parts.engine, schedule=None):
        rollouts = sample(parts.engine, parts.encoder.ids(list(mine.values())), list(mine), seeds, once)
    measured = measure_tail(rollouts, score(rollouts), config.mismatch.bin_tokens, parts.ranks, step)
    return ceiling_report(measured.table(ESTIMATOR), step)


def dense_accuracy(parts: Parts, step: int) -> StepReport:
    """Accuracy on the eval split under full attention, over all processes."""
    settings, seed = parts.config.evaluate, parts.config.train.seed
    mine = _eval_share(parts, parts.config.eval_level, settings.prompts)
    graded = []
    if mine:
        parts.weights.bring_policy(step)
        with under(parts.engine, schedule=None):
            graded = grade(
                parts.engine,
                parts.task,
                list(mine.values()),
                parts.encoder.ids(list(mine.values())),
                parts.decode,
                n=settings.samples_per_prompt,
                max_new_tokens=parts.sampling.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                # Every evaluation uses the same draws, so two of them differ by the weights alone.
                seed=rollout_seeds(seed, "evaluate", 0, list(mine), settings.samples_per_prompt),
            )
    everyone = dict(parts.ranks.gather(list(zip(mine, graded, strict=True))))
    accuracy = Accuracy.of([everyone[number] for number in sorted(everyone)])
    return {
        "evaluate/dense_accuracy": accuracy.value,
        "evaluate/dense_accuracy_low": accuracy.low,
        "evaluate/dense_accuracy_high": accuracy.high,
        "evaluate/prompts": float(accuracy.prompts),
        "evaluate/response_tokens_mean": accuracy.response_tokens,
        "evaluate/cut_share": accuracy.cut_share,
    }


def first_accuracy(config: TrainConfig) -> StepReport:
    """What a run of this configuration measures before its first step. Several runs of one model that differ in their
    rollouts alone begin with the same figures, so one measurement serves them all. Leaves no files and logs nothing."""
    silent = config.model_copy(update={"log": config.log.model_copy(update={"sinks": ()})})
    with TemporaryDirectory() as folder:
        parts = open_run(silent, Path(folder) / "run", resume=False)
        with parts.engine, closing(parts):
            return dense_accuracy(parts, step=0)


def eval_prompt_ids(parts: Parts) -> tuple[list[int], list[list[int]]]:
    """This process's share of the evaluation prompts: their numbers, and their token ids."""
    mine = _eval_share(parts, parts.config.eval_level, parts.config.evaluate.prompts)
    return list(mine), parts.encoder.ids(list(mine.values()))


def _eval_share(parts: Parts, level: int, count: int) -> dict[int, Prompt]:
    prompts = parts.task.prompts("eval", level, parts.config.train.seed, count)
    return dict(parts.ranks.share(list(enumerate(prompts))))
