"""Stands in front of a server's vLLM engine: asks it for the lists that the acceptance is made of, and keeps what was
sampled until the driver asks for its measurement. Everything else passes through. No verl here; vLLM is imported only where
a request is made.

In verl's asynchronous modes a request is aborted when the weights change, and the trainer sends it again with the tokens
that it has so far as a longer prompt. Each part was sampled with one set of weights, so each counts by itself: the first
one is dropped and counted as aborted, since its weights are gone, and the last one is measured with its own weights. So
long responses are not left out, and old weights never count as a sparse policy.

Lists cost the engine time, so only as many requests get them as the probe needs, and some to spare. Which ones is drawn
when they begin, so it depends neither on their lengths nor on their rewards.
"""

# T response tokens, K top-k entries

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparroll.engines.vllm import outputs
from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT, asks_dense
from sparroll.engines.vllm.rescoring import InForce, Rescorer, RescoringCounts, RescoringSettings, measure_async
from sparroll.engines.vllm.windows.packing import unpacked
from sparroll.integrations.measured import CheckSums
from sparroll.integrations.tail import State
from sparroll.integrations.verl.checked_logp import CheckedResponse, digest
from sparroll.types import Rollout

VALIDATION = "sparroll_validation"
"""The key in `SamplingParams.extra_args` of requests of a validation."""


@dataclass(frozen=True)
class _Begun:
    """A request of training, as it was when it began."""

    rollout_id: str
    prompt_id: str
    prompt_ids: list[int]
    in_force: InForce
    dense: bool
    """Whether it is of the control group."""
    listed: bool
    """Whether the engine gives lists of its tokens, so that it can be re-scored."""


@dataclass
class _Unsaid:
    """A finished rollout whose checks have not been asked for yet."""

    rollout: Rollout
    begun: _Begun


class Tap:
    """`tap = Tap(AsyncLLM, ...)`; verl calls `tap.generate`, and the driver `measure` and `take`."""

    def __init__(
        self,
        engine: Any,
        settings: RescoringSettings,
        *,
        replica: int,
        vocabulary: int,
        context_limit: int,
        checks_drafts: bool,
        keeps_dense_logp: bool = False,
    ):
        self._engine = engine
        self.rescorer = Rescorer(settings)
        self.control = Rescorer(settings)
        """Measures the dense rollouts of the control group, which show the dense ceiling."""
        self.measures = True
        """Whether what is sampled now is kept. False in dense validation."""
        self.expected_rollouts: int | None = None
        """How many rollouts of a step this replica samples, about. None: not known, and all of them get lists."""
        self.replica, self.vocabulary, self.context_limit = replica, vocabulary, context_limit
        self.checks_drafts = checks_drafts
        self._keeps_dense_logp = keeps_dense_logp
        self.top_k = min(settings.top_k, vocabulary)
        self.checked = CheckSums()
        self._samples: Counter[tuple[int, str]] = Counter()
        """Requests that began, by the weights' version and the prompt."""
        self._prompts: dict[str, list[int]] = {}
        """Those of the last step in which there were any, by their digests."""
        self._new_prompts: dict[str, list[int]] = {}
        self._resumes = False
        """Whether a request was aborted, so that later ones may go on with its tokens as a longer prompt."""
        self._under_way: set[str] = set()
        """Requests of training whose end `generate` has not seen. vLLM may have ended them already."""
        self._unsaid: dict[str, _Unsaid] = {}
        self._said: dict[str, list[dict[str, Any]]] = {}
        self._responses: list[CheckedResponse] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        """`AsyncLLM.generate`. The outputs are those that were asked for: the lists are taken out again."""
        if not self._is_rollout(sampling_params):
            async for output in self._engine.generate(
                prompt=prompt, sampling_params=sampling_params, request_id=request_id, **more
            ):
                yield output
            return
        begun = self._begin(list(prompt["prompt_token_ids"]), asks_dense(sampling_params))
        if begun.listed:
            sampling_params.logprobs = self.top_k
        sampling_params.flat_logprobs = True
        if not sampling_params.stop:
            sampling_params.detokenize = False
        if begun.dense:
            prompt = {**prompt, "cache_salt": CACHE_SALT}
        finished = None
        self._under_way.add(request_id)
        try:
            async for output in self._engine.generate(
                prompt=prompt, sampling_params=sampling_params, request_id=request_id, **more
            ):
                if output.finished:
                    finished = output
                    self._keep(output, request_id, begun)
                yield output
        finally:
            self._under_way.discard(request_id)
            if finished is None:
                self._count_aborted(begun)

    def _begin(self, prompt_ids: list[int], dense: bool) -> _Begun:
        in_force, prompt_id = self.rescorer.in_force, digest(prompt_ids)
        sample = in_force.weight_version, prompt_id
        name = f"{in_force.weight_version}/{self.replica}/{prompt_id}#{self._samples[sample]}"
        self._samples[sample] += 1
        listed = not self.checks_drafts and (dense or self._is_drawn(name))
        return _Begun(name, prompt_id, prompt_ids, in_force, dense, listed)

    def _is_drawn(self, rollout_id: str) -> bool:
        """Whether a request gets lists. So many more than the probe needs do that hardly ever fewer end with them."""
        settings, expected = self.rescorer.settings, self.expected_rollouts
        if settings.probe_rollouts is None or expected is None:
            return True
        wanted = settings.probe_rollouts + 3 * math.sqrt(settings.probe_rollouts) + 3
        draw = hashlib.blake2b(f"{settings.seed}/lists/{rollout_id}".encode(), digest_size=8).digest()
        return int.from_bytes(draw, "big") < wanted / expected * 2**64

    def _rescorer_of(self, dense: bool) -> Rescorer:
        """That of sparse rollouts, or of the control group's; with the weights and the schedule that are in force."""
        self.control.in_force = self.rescorer.in_force
        return self.control if dense else self.rescorer

    async def pause_generation(self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True) -> None:
        """verl's call, in the words of the vLLM that runs: later ones name the mode."""
        pause = self._engine.pause_generation
        if "mode" in inspect.signature(pause).parameters:
            await pause(mode="wait" if wait_for_inflight_requests else "abort", clear_cache=clear_cache)
        else:
            await pause(wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache)

    def _is_rollout(self, parameters: Any) -> bool:
        """Whether a request is one of training: its tokens' log-probabilities are asked for, and it is sampled as rollouts
        are. Where training and validation run at the same time, verl asks for log-probabilities in both."""
        if not self.measures or parameters.logprobs is None or is_validation(parameters):
            return False
        same_temperature = float(parameters.temperature) == self.rescorer.settings.temperature
        return same_temperature and float(parameters.top_p) == 1 and int(parameters.top_k) in (-1, 0)

    def _keep(self, output: Any, request_id: str, begun: _Begun) -> None:
        """Hold a finished rollout, and take the lists out of the output again."""
        if not output.outputs or not len(output.outputs[0].token_ids):
            self._count_aborted(begun)
            return
        sampled = output.outputs[0]
        tokens, flat = list(sampled.token_ids), sampled.logprobs
        logp_T, lists = outputs.log_probs(flat, tokens, self.top_k if begun.listed else 0)
        sampled.logprobs = outputs.SampledOnly(tokens, logp_T.tolist())
        if sampled.finish_reason not in ("stop", "length"):
            self._count_aborted(begun)
            return
        self._new_prompts[begun.prompt_id] = begun.prompt_ids
        rollout = Rollout(begun.prompt_ids, tokens, logp_T, sampled.finish_reason, top_k=lists)
        if self.checks_drafts:
            self._unsaid[request_id] = _Unsaid(rollout, begun)
        elif begun.listed:
            self._hold(rollout, begun)
        else:
            self._rescorer_of(begun.dense).pass_over()

    def _count_aborted(self, begun: _Begun) -> None:
        self._resumes = True
        self._rescorer_of(begun.dense).count_aborted()

    def _hold(self, rollout: Rollout, begun: _Begun) -> None:
        # A rollout that goes on with another's tokens has a prompt of its own. Probes take one rollout of each prompt first,
        # so they would prefer these, which are the longer ones: with every rollout as a prompt the draw is even.
        prompt_id = begun.rollout_id if self._resumes else begun.prompt_id
        self._rescorer_of(begun.dense).hold(rollout, begun.rollout_id, prompt_id, begun.in_force)

    async def measure(self) -> None:
        """Measure what is held: by the checks of drafts where the engine makes them, else by re-scoring. Call it before
        weights, cache or schedule change."""
        for held in await self._hear():
            if self._keeps_dense_logp:
                self._responses.append(_response(held))
            if held.begun.dense:
                self.checked.count_windows(held.rollout)
                continue
            self.checked.count(held.rollout)
            self._hold(held.rollout, held.begun)
        for rescorer in (self.rescorer, self._rescorer_of(dense=True)):
            await measure_async(rescorer, self._engine.generate, self.vocabulary, self.context_limit)

    def change_schedule(self) -> None:
        """Another schedule is in force from now on. What was measured and not taken yet is dropped."""
        for rescorer in (self.rescorer, self.control):
            rescorer.change_schedule()
        self.checked = CheckSums()

    async def _hear(self) -> list[_Unsaid]:
        """The finished rollouts, with what the checks said of them. The first worker is asked; the others know the
        same."""
        if not self.checks_drafts:
            return []
        packed, *_ = await self._engine.collective_rpc("sparroll_take_checked_packed")
        for name, said in unpacked(packed).items():
            self._said.setdefault(name, []).append(said)
        names = {self._name(name): name for name in self._said}
        whole = []
        for request_id in [each for each in self._unsaid if each in names]:
            held, said = self._unsaid.pop(request_id), _joined(self._said.pop(names[request_id]))
            rollout = replace(held.rollout, **outputs.checked(said, len(held.rollout.response_ids)))
            whole.append(replace(held, rollout=rollout))
        running = {*self._engine.output_processor.request_states, *self._under_way}
        self._said = {
            name: parts for name, parts in self._said.items() if not running.isdisjoint((name, _without_suffix(name)))
        }
        return whole

    def _name(self, name: str) -> str:
        return name if name in self._unsaid else _without_suffix(name)

    async def dense_ceiling(self, prompts: int, max_tokens: int) -> State:
        """TailStatistics.packed_state() of dense rollouts: one response to each of so many prompts of the last step. Dense
        attention must be set and nothing else may run.

        Where the engine checks drafts, dense drafts are checked by dense passes, and the acceptance is that of the
        drafts.
        """
        from vllm import SamplingParams

        rollouts, kept = self.rescorer, (self.measures, self._samples)
        settings = replace(rollouts.settings, probe_rollouts=None)
        self.rescorer, self.measures, self._samples = Rescorer(settings, rollouts.in_force), True, Counter()

        async def sample(ids: list[int]) -> None:
            parameters = SamplingParams(
                max_tokens=min(max_tokens, self.context_limit - len(ids)), temperature=settings.temperature, logprobs=0
            )
            name = f"ceiling-{uuid.uuid4().hex}"
            async for _ in self.generate({"prompt_token_ids": ids}, parameters, name):
                pass

        try:
            await asyncio.gather(*(sample(self._prompts[name]) for name in sorted(self._prompts)[:prompts]))
            for held in await self._hear():
                rollout = replace(held.rollout, acceptance=_at_most_one(held.rollout))
                self._hold(rollout, held.begun)
            await self.measure()
            return self.rescorer.take()[0]
        finally:
            self.rescorer, (self.measures, self._samples) = rollouts, kept

    def take(self) -> tuple[State, RescoringCounts, str, CheckSums]:
        """(TailStatistics.packed_state(), what was counted, the estimator, what the checks said) since the last call."""
        estimator = self.rescorer.estimator
        state, counts = self.rescorer.take()
        checked, self.checked = self.checked, CheckSums()
        version = self.rescorer.in_force.weight_version
        self._samples = Counter({sample: count for sample, count in self._samples.items() if sample[0] == version})
        self._prompts, self._new_prompts = self._new_prompts or self._prompts, {}
        return state, counts, estimator, checked

    def take_control(self) -> tuple[State | None, RescoringCounts]:
        """(TailStatistics.packed_state() of the control group's rollouts, what measuring them cost) since the last call;
        None where none was measured."""
        state, counts = self.control.take()
        return (state if counts.measured else None), counts

    def take_responses(self) -> list[CheckedResponse]:
        """The dense log-probabilities of what was measured since the last call, where they are kept."""
        taken, self._responses = self._responses, []
        return taken


def _without_suffix(name: str) -> str:
    """A request's name without what vLLM may have appended to it."""
    return name.rpartition("-")[0]


def _response(held: _Unsaid) -> CheckedResponse:
    assert held.rollout.dense_logp is not None, "a rollout without checks"
    ids = torch.tensor(held.rollout.response_ids, dtype=torch.int32)
    return CheckedResponse(held.begun.prompt_id, ids, held.rollout.dense_logp.float().cpu())


def _at_most_one(rollout: Rollout) -> torch.Tensor:
    """The draft acceptance, which rounding may leave a little above 1."""
    assert rollout.draft_acceptance is not None, "a rollout without checks"
    return rollout.draft_acceptance.clamp_max(1)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the checks said of one request, asked for in several parts."""
    first, *others = parts
    for part in others:
        for name in ("dense_logp", "draft_acceptance", "acceptance"):
            first[name] = torch.cat([first[name], part[name]])
        first["checks"].add(part["checks"])
        for name in ("check_read_tokens", "draft_context_tokens", "draft_unread_tokens"):
            first[name] += part[name]
    return first


def is_validation(sampling_params: Any) -> bool:
    """Whether a request says that it is one of a validation (agent_loops.py)."""
    return bool((getattr(sampling_params, "extra_args", None) or {}).get(VALIDATION))
