"""Samples every problem under every policy, judges the responses, and writes them to the log. Continues where the log
ends. Computes no figures."""

# T response tokens of one sample

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparroll.engines.base import Engine, under
from sparroll.engines.generate_arguments import check_counts, prompt_ids
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.errors import UserError
from sparroll.evaluate.log import SampleLog
from sparroll.evaluate.settings import ESTIMATOR, EvalTask, EvaluationSettings, Policy, problem_digest, sample_seeds
from sparroll.mismatch import acceptance_of
from sparroll.progress import OnProgress
from sparroll.tasks import Verdict
from sparroll.types import Rollout

if TYPE_CHECKING:
    from sparroll.engines.scoring import Scorer


def run(
    engine: Engine,
    scorer: Scorer | None,
    tasks: Sequence[EvalTask],
    policies: Sequence[Policy],
    settings: EvaluationSettings,
    log: SampleLog,
    encoder: PromptEncoder,
    on_progress: OnProgress | None = None,
    bring_adapter: Callable[[], None] | None = None,
) -> None:
    """Fill the log. scorer: scores responses with the model's weights, for the acceptance; None leaves that out.
    bring_adapter: gives the engine the adapter of the last policy, which it then keeps.

    Problems are taken in chunks of about four batches, always in the same order, and each sample has its own seed. So
    an evaluation that was killed continues with the chunks that an uninterrupted one would have made.
    """
    if (scorer is not None) != settings.tail:
        raise UserError(
            "a scorer is needed for the tail, and for nothing else", "pass one exactly if settings.tail is set"
        )
    check_counts(settings.samples, settings.max_new_tokens, settings.temperature, settings.top_k, settings.top_p)
    for policy in policies:
        if policy.schedule is not None:
            engine.check_schedule(policy.schedule)
    # Every prompt is checked before time is spent on the first response.
    ids = {task.label: prompt_ids(engine, encoder.ids(task.problems), settings.max_new_tokens) for task in tasks}
    done = {(line["task"], line["policy"], line["problem"]) for line in log.lines() if line["kind"] == "group"}
    counter = _Counter(
        on_progress, settings.samples, len(done), len(policies) * sum(len(task.problems) for task in tasks)
    )
    counter.tell("")
    step = max(1, 4 * engine.max_batch // settings.samples)
    assert not any(policy.adapter for policy in policies[:-1]), "an engine cannot give up its adapter"
    for policy in policies:
        with under(engine, schedule=policy.schedule, compression=policy.compression):
            if policy.adapter is not None:
                assert bring_adapter is not None, "the policy has an adapter"
                bring_adapter()
            for task in tasks:
                missing = [
                    number for number in range(len(task.problems)) if (task.label, policy.name, number) not in done
                ]
                for start in range(0, len(missing), step):
                    numbers = missing[start : start + step]
                    progress = counter.within(f"{task.label}, {policy.name}")
                    log.add(*_chunk(engine, scorer, task, policy, settings, numbers, ids[task.label], progress))
                    counter.problems += len(numbers)
                    progress(0, 0)


@dataclass
class _Counter:
    """Counts responses, because the first problems take long to finish."""

    on_progress: OnProgress | None
    samples: int
    problems: int
    """Finished problems, over all policies."""
    total: int
    """All problems, over all policies."""

    def tell(self, what: str, responses: int = 0) -> None:
        """`responses` more than those of the finished problems are there."""
        done, total = self.samples * self.problems + responses, self.samples * self.total
        if self.on_progress:
            self.on_progress(done, total, f"{done}/{total} responses" + (f", {what}" if what else ""))

    def within(self, what: str) -> OnProgress:
        """The callback of an engine that samples some problems."""
        return lambda done, _total, _text="": self.tell(what, done)


def _chunk(
    engine: Engine,
    scorer: Scorer | None,
    task: EvalTask,
    policy: Policy,
    settings: EvaluationSettings,
    numbers: list[int],
    ids: list[list[int]],
    on_progress: OnProgress,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The log lines of some problems, and the commit line with what was read and how long sampling took."""
    problems = [task.problems[number] for number in numbers]
    engine.reset_report()
    began = time.perf_counter()
    rollouts = engine.generate(
        [ids[number] for number in numbers],
        settings.samples,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=sample_seeds(settings.seed, problems, settings.samples),
        top_k=settings.top_k if scorer else 0,
        on_progress=on_progress,
    )
    seconds = time.perf_counter() - began
    read_tokens, context_tokens = engine.report().read_and_context_tokens
    commit: dict[str, Any] = {
        "task": task.label,
        "policy": policy.name,
        "problems": numbers,
        "generate_seconds": seconds,
        "response_tokens": sum(len(rollout.response_ids) for rollout in rollouts),
        "read_tokens": read_tokens,
        "context_tokens": context_tokens,
    }
    if policy.schedule is not None and policy.schedule.check is not None:
        commit["checks"] = dataclasses.asdict(engine.report().checks)
    texts = [rollout.text for rollout in rollouts if rollout.text is not None]
    assert len(texts) == len(rollouts), "the engine that sampled them has a tokenizer"
    asked = [prompt for prompt in problems for _ in range(settings.samples)]
    assert engine.tokenizer is not None
    verdicts = task.verdicts(asked, texts, rollouts, engine.tokenizer.decode)
    accepted = _acceptances(scorer, rollouts, settings)
    samples = [_sample(*row) for row in zip(rollouts, texts, verdicts, accepted, strict=True)]
    groups = [
        {
            "task": task.label,
            "policy": policy.name,
            "problem": number,
            "prompt_id": prompt.prompt_id,
            "digest": problem_digest(prompt),
            "prompt_tokens": len(ids[number]),
            "samples": samples[place * settings.samples : (place + 1) * settings.samples],
        }
        for place, (number, prompt) in enumerate(zip(numbers, problems, strict=True))
    ]
    return groups, commit


def _acceptances(
    scorer: Scorer | None, rollouts: list[Rollout], settings: EvaluationSettings
) -> list[list[float] | None]:
    """The acceptance of each rollout's tokens, [T]; None for each if there is no scorer."""
    if scorer is None:
        return [None] * len(rollouts)
    scores = scorer.dense(rollouts, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
    found = acceptance_of(rollouts, scores, ESTIMATOR)
    return [[round(value, 6) for value in acceptance_T.tolist()] for acceptance_T in found]


def _sample(rollout: Rollout, text: str, verdict: Verdict, accepted: list[float] | None) -> dict[str, Any]:
    return {
        "sample": rollout.sample_index,
        "seed": rollout.seed,
        "response": text,
        "response_ids": list(rollout.response_ids),
        "finish_reason": rollout.finish_reason,
        "attention": rollout.attention,
        "kv_read_share": rollout.kv_read_share,
        "reward": verdict.reward,
        "status": verdict.status,
        "answer": verdict.answer,
        "acceptance": accepted,
    }
