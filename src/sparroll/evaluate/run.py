"""Sample every problem under every policy, judge the responses, keep them in the log. Goes on where the log ends; computes
no figure."""

# T response tokens of one sample

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sparroll.engines.requests import check_counts, token_ids
from sparroll.errors import UserError
from sparroll.evaluate.log import SampleLog
from sparroll.evaluate.settings import EvalTask, Policy, Sampling, problem_digest, sample_seeds
from sparroll.mismatch import acceptance_top_k
from sparroll.progress import OnProgress
from sparroll.tasks import Verdict
from sparroll.types import Prompt, Rollout

if TYPE_CHECKING:
    from sparroll.engines.hf.engine import HFEngine
    from sparroll.engines.scoring import Scorer
    from sparroll.engines.vllm.engine import VLLMEngine

Encode = Callable[[Sequence[Prompt]], list[list[int]]]
"""Prompts to token ids, as the model is to see them."""


def run(
    engine: HFEngine | VLLMEngine,
    scorer: Scorer | None,
    tasks: Sequence[EvalTask],
    policies: Sequence[Policy],
    sampling: Sampling,
    log: SampleLog,
    encode: Encode,
    on_progress: OnProgress | None = None,
    bring_adapter: Callable[[], None] | None = None,
) -> None:
    """Fill the log. scorer: the model's weights, for the acceptance; None leaves it out. bring_adapter: gives the engine the
    adapter of the last policy, for good.

    Problems go in chunks of about four batches, in an order that is always the same, and each sample has a seed of its own:
    a run that was killed goes on with the chunks that the straight run would have made.
    """
    if (scorer is not None) != sampling.tail:
        raise UserError("the tail needs a scorer, and nothing else does", "pass one exactly where sampling.tail is set")
    check_counts(sampling.samples, sampling.max_new_tokens, sampling.temperature, sampling.top_k)
    for policy in policies:
        if policy.schedule is not None:
            engine.check_schedule(policy.schedule)
    # Every prompt is checked before the first response is paid for.
    ids = {task.label: _checked_ids(engine, encode(task.problems), sampling) for task in tasks}
    done = {(line["task"], line["policy"], line["problem"]) for line in log.lines() if line["kind"] == "group"}
    total = len(policies) * sum(len(task.problems) for task in tasks)
    step = max(1, 4 * engine.max_batch // sampling.samples)
    assert not any(policy.adapter for policy in policies[:-1]), "nobody takes an adapter away again"
    for policy in policies:
        with _in_force(engine, policy):
            if policy.adapter is not None:
                assert bring_adapter is not None, "the policy has an adapter"
                bring_adapter()
            for task in tasks:
                missing = [
                    number for number in range(len(task.problems)) if (task.label, policy.name, number) not in done
                ]
                for start in range(0, len(missing), step):
                    numbers = missing[start : start + step]
                    log.add(*_chunk(engine, scorer, task, policy, sampling, numbers, ids[task.label]))
                    done |= {(task.label, policy.name, number) for number in numbers}
                    if on_progress:
                        on_progress(len(done), total, f"{task.label}, {policy.name}")


@contextmanager
def _in_force(engine: HFEngine | VLLMEngine, policy: Policy) -> Iterator[None]:
    """The policy inside the block; what was in force before it afterwards."""
    before = engine.schedule, engine.compression
    _set(engine, policy.schedule, policy.compression)
    try:
        yield
    finally:
        _set(engine, *before)


def _set(engine: HFEngine | VLLMEngine, schedule: Any, compression: Any) -> None:
    # The two exclude each other, so both are lifted first.
    engine.set_schedule(None)
    engine.set_compression(None)
    if schedule is not None:
        engine.set_schedule(schedule)
    if compression is not None:
        engine.set_compression(compression)


def _checked_ids(engine: HFEngine | VLLMEngine, ids: list[list[int]], sampling: Sampling) -> list[list[int]]:
    from sparroll.engines.hf.engine import HFEngine

    # vLLM's engine has the config and a limit of its own; the model itself is in its workers.
    config: Any = engine.model.config if isinstance(engine, HFEngine) else engine.config
    limit = getattr(engine, "context_limit", None) or getattr(config, "max_position_embeddings", None)
    return token_ids(ids, engine.tokenizer, config.vocab_size, limit, sampling.max_new_tokens)


def _chunk(
    engine: HFEngine | VLLMEngine,
    scorer: Scorer | None,
    task: EvalTask,
    policy: Policy,
    sampling: Sampling,
    numbers: list[int],
    ids: list[list[int]],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Log lines of some problems, and what was read and how long it took to sample them."""
    problems = [task.problems[number] for number in numbers]
    engine.reset_report()
    began = time.perf_counter()
    rollouts = engine.generate(
        [ids[number] for number in numbers],
        sampling.samples,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sample_seeds(sampling.seed, problems, sampling.samples),
        top_k=sampling.top_k if scorer else 0,
    )
    seconds = time.perf_counter() - began
    layers = engine.report().layers
    commit = {
        "task": task.label,
        "policy": policy.name,
        "problems": numbers,
        "generate_seconds": seconds,
        "response_tokens": sum(len(rollout.response_ids) for rollout in rollouts),
        "read_tokens": sum(layer.read_tokens for layer in layers),
        "context_tokens": sum(layer.context_tokens for layer in layers),
    }
    assert engine.tokenizer is not None
    texts = [str(engine.tokenizer.decode(rollout.response_ids, skip_special_tokens=True)) for rollout in rollouts]
    asked = [prompt for prompt in problems for _ in range(sampling.samples)]
    verdicts = task.verdicts(asked, texts, rollouts)
    accepted = _acceptances(scorer, rollouts, sampling)
    samples = [_sample(*row) for row in zip(rollouts, texts, verdicts, accepted, strict=True)]
    groups = [
        {
            "task": task.label,
            "policy": policy.name,
            "problem": number,
            "prompt_id": prompt.prompt_id,
            "digest": problem_digest(prompt),
            "prompt_tokens": len(ids[number]),
            "samples": samples[place * sampling.samples : (place + 1) * sampling.samples],
        }
        for place, (number, prompt) in enumerate(zip(numbers, problems, strict=True))
    ]
    return groups, commit


def _acceptances(scorer: Scorer | None, rollouts: list[Rollout], sampling: Sampling) -> list[list[float] | None]:
    """[T] acceptance of each rollout's tokens by the dense policy, estimator top_k_lower."""
    if scorer is None:
        return [None] * len(rollouts)
    found: list[list[float] | None] = []
    scores = scorer.dense(rollouts, temperature=sampling.temperature, top_k=sampling.top_k)
    for rollout, score in zip(rollouts, scores, strict=True):
        assert rollout.top_k_ids is not None, "rollouts need top-k lists"
        assert rollout.top_k_logp is not None, "rollouts need top-k lists"
        assert score.top_k_ids is not None, "scores need top-k lists"
        assert score.top_k_logp is not None, "scores need top-k lists"
        lower_T, _ = acceptance_top_k(score.top_k_ids, score.top_k_logp, rollout.top_k_ids, rollout.top_k_logp)
        found.append([round(value, 6) for value in lower_T.tolist()])
    return found


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
