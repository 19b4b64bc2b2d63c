"""Follows requests by what vLLM's scheduler tells a worker: which schedules they have, how many preemptions there were, and
which response tokens went through prefill because of them. vLLM is not imported; the fields of its SchedulerOutput are
read by name.

A preempted request comes back with its prompt and the tokens that it had sampled, and prefills whatever of them is not
cached. The end of that prefill samples its next token. vLLM's V1 runner treats it as the same request, resumed; its V2
runner treats it as a new one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparroll.engines.vllm.attention.decode_rows import ENGINES
from sparroll.engines.vllm.attention.request_schedules import follow_rows, number_of
from sparroll.engines.vllm.attention.state import State


@dataclass
class Resumed:
    """A preempted request until it has prefilled what it had sampled."""

    prompt_tokens: int
    known_tokens: int
    """Tokens of prompt and response when it came back."""
    prefill_tokens: int
    """Up to this token vLLM's runner calls it a prefill: V1 for the prompt, V2 for all known tokens."""
    which: int = ENGINES
    """The number of its schedule."""


@dataclass
class Follower:
    """Follows the requests of one worker. It does not know requests that began before it."""

    prompts: dict[str, int] = field(default_factory=dict)
    resumed: dict[str, Resumed] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """Requests that have another schedule than the engine's, and its number."""

    def follow(self, step: Any, state: State) -> None:
        """Update the counters from vLLM's SchedulerOutput. Called before the worker runs the step."""
        preempted = step.preempted_req_ids or ()
        state.counters.preemptions += len(preempted)
        for name in (*preempted, *step.finished_req_ids):
            self.resumed.pop(name, None)
        for name in step.finished_req_ids:
            self.prompts.pop(name, None)
            self.numbers.pop(name, None)
        self._enter(step, state)
        if not self.resumed:
            return
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for name in [name for name in self.resumed if name in starts]:
            request, start = self.resumed[name], starts[name]
            end = start + step.num_scheduled_tokens[name]
            count(request, start, end, state)
            if end >= request.known_tokens:
                del self.resumed[name]

    def _enter(self, step: Any, state: State) -> None:
        for new in step.scheduled_new_reqs:
            which = number_of(new.req_id, new.sampling_params, state)
            if which != ENGINES:
                self.numbers[new.req_id] = which
            if new.prompt_token_ids is None:
                continue
            prompt = self.prompts[new.req_id] = len(new.prompt_token_ids)
            known = len(new.prefill_token_ids or new.prompt_token_ids)
            if known > prompt:
                self.resumed[new.req_id] = Resumed(prompt, known, prefill_tokens=known, which=which)
        cached = step.scheduled_cached_reqs
        if not cached.resumed_req_ids:
            return
        for name, sampled in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if name in cached.resumed_req_ids and sampled and name in self.prompts:
                prompt = self.prompts[name]
                which = self.numbers.get(name, ENGINES)
                self.resumed[name] = Resumed(prompt, prompt + sampled, prefill_tokens=prompt, which=which)


def count(request: Resumed, start: int, end: int, state: State) -> None:
    """Count a row of a resumed request, from token `start` to `end`."""
    counters = state.counters
    decoded = state.reads.decode_rows(np.array([end]), request.which)
    samples = end == request.known_tokens
    if end - start == 1 and start >= request.prefill_tokens and not state.checks_drafts:
        # The runner and the metadata builder take this for a decode row. Unless it samples, it only repeats a token.
        if not samples:
            state.take_back(decoded)
            counters.prefill_tokens += 1
            counters.recomputed_tokens += 1
        return
    counters.recomputed_tokens += max(0, end - max(start, request.prompt_tokens))
    if samples:
        counters.resumed_tokens += 1
        counters.resumed_sparse_L = counters.resumed_sparse_L + decoded.sparse_L


def watch(runner: Any, state: State) -> None:
    """Let a Follower see each step that the model runner is given from now on. A second call changes nothing."""
    run = runner.execute_model
    if hasattr(run, "sparroll_follower"):
        return
    follower = Follower()

    @functools.wraps(run)
    def execute_model(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        # Warm-ups and profiling are not requests.
        if not named.get("dummy_run"):
            follower.follow(scheduler_output, state)
        try:
            return run(scheduler_output, *arguments, **named)
        finally:
            state.which_rows, state.row_names = None, None

    execute_model.sparroll_follower = follower  # type: ignore[attr-defined]
    runner.execute_model = execute_model
    follow_rows(runner, state, follower.numbers)


def watched(runner: Any) -> bool:
    """Whether `watch` was called for this runner."""
    return hasattr(runner.execute_model, "sparroll_follower")
