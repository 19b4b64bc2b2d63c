"""Stands in front of the `vllm.LLM` that TRL made in this process (colocate mode). TRL calls `generate`; what is sampled
is measured before it returns, because TRL lets the engine sleep right afterwards. Everything else passes through.

TRL takes the first log-probability of each position for the sampled token's, which is wrong as soon as lists are asked
for. So the lists are taken out of what it gets.
"""

# T response tokens, K top-k entries

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sparroll.engines.vllm import outputs, requests, rescoring
from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT, DENSE_REQUEST
from sparroll.engines.vllm.capacity import check_fits_engine
from sparroll.engines.vllm.rescoring import RescoringSettings
from sparroll.engines.vllm.worker import WorkerExtension
from sparroll.errors import UserError
from sparroll.integrations.trl.measured_rounds import MeasuredRounds
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TokenScores

_newest: Any = None
"""The engine that the plugin's state in this process belongs to; there is one state per process."""


class SparseLLM(MeasuredRounds):
    """`vllm_generation.llm = SparseLLM(vllm_generation.llm, ...)`.

    >>> llm.begin("train/7", schedule)       # TRL then calls llm.generate(...)
    >>> step = llm.take()                    # what this process measured and counted
    """

    def __init__(
        self,
        llm: Any,
        *,
        capacity: Schedule,
        settings: RescoringSettings,
        of_control: RescoringSettings,
        seed: int,
        process: int,
    ):
        global _newest
        self._llm = _newest = llm
        self._capacity = capacity
        self._process, self._seed = process, seed
        model = llm.llm_engine.vllm_config.model_config
        self.vocabulary, self.context_limit = int(model.get_vocab_size()), int(model.max_model_len)
        super().__init__(settings, of_control)
        self._take_checked()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    # -- what TRL calls ------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False) -> list[Any]:
        """`vllm.LLM.generate` for prompts of token ids, with the sampled tokens' log-probabilities alone. use_tqdm: TRL
        gives False; there is no bar."""
        if self._llm is not _newest:
            raise UserError(
                "another trainer with sparse rollouts was made in this process, and took the plugin's state over",
                "run each of them in a process of its own",
            )
        if self._ceiling_prompts:
            several = {tuple(each["prompt_token_ids"]): each for each in prompts}
            chosen = list(several.values())[: self._ceiling_prompts]
            none = [False] * len(chosen)
            self._measure_ceiling(lambda name: self._sample(chosen, sampling_params, name, none))
        self._set_schedule(self._wanted)
        dense = self._dense or [False] * len(prompts)
        assert len(dense) == len(prompts), f"{len(prompts)} prompts, and flags of {len(dense)}"
        finished, rollouts = self._sample(prompts, sampling_params, self._round, dense)
        self.rollouts = [replace(each, top_k=None, dense=None) for each in rollouts] if self._dense else []
        return finished

    def _sample(
        self, prompts: Sequence[Any], theirs: Any, name: str, dense: Sequence[bool]
    ) -> tuple[list[Any], list[Rollout]]:
        """Sample, and measure the probe. Which rollouts that is depends on their names alone, so that no other one
        brings lists along: they are by far the largest part of what vLLM returns. -> (vLLM's outputs, the rollouts)"""
        began = time.perf_counter()
        names = [f"{name}/{self._process}/{place}" for place in range(len(prompts))]
        ids = [tuple(each["prompt_token_ids"]) for each in prompts]
        chosen = self._chosen(ids, names, dense) if self._measures and not self.checks_drafts else set()
        top_k = [self.rescorer.settings.top_k if place in chosen else 0 for place in range(len(prompts))]
        parameters = [self._parameters(theirs, *each) for each in zip(top_k, dense, strict=True)]
        asked = [
            {**prompt, "cache_salt": CACHE_SALT} if flag else prompt
            for prompt, flag in zip(prompts, dense, strict=True)
        ]
        sampling_began = time.perf_counter()
        ended = requests.run(self._llm, asked, parameters, self._take_checked, None)
        sampling_seconds = time.perf_counter() - sampling_began
        finished = [output for output, _, _ in ended]
        rollouts = [
            self._rollout(output, length, flag, said)
            for (output, _, said), length, flag in zip(ended, top_k, dense, strict=True)
        ]
        if self._measures:
            self._measure(rollouts, names, dense)
        self._spent.measure += time.perf_counter() - began - sampling_seconds
        return finished, rollouts

    def _chosen(self, ids: Sequence[Any], names: Sequence[str], dense: Sequence[bool]) -> set[int]:
        """Places of the rollouts to re-score: of the sparse ones, and of the control group."""
        found: set[int] = set()
        for kind, rescorer in ((False, self.rescorer), (True, self._control)):
            places = [place for place, flag in enumerate(dense) if flag == kind]
            found |= {
                places[each]
                for each in rescoring.probe([(ids[place], names[place]) for place in places], rescorer.settings)
            }
        return found

    def _measure(self, rollouts: Sequence[Rollout], names: Sequence[str], dense: Sequence[bool]) -> None:
        """Checks of dense drafts say nothing of a sparse policy, and their acceptance is exact, so that it shows no
        ceiling."""
        rows = list(zip(rollouts, names, dense, strict=True))
        self._hold([rollout for rollout, _, flag in rows if not flag], [name for _, name, flag in rows if not flag])
        rescoring.measure(self.rescorer, self)
        of_control = [(rollout, name) for rollout, name, flag in rows if flag]
        if of_control and not self.checks_drafts:
            for rollout, name in of_control:
                self._control.hold(rollout, name, tuple(rollout.prompt_ids), self._control.in_force)
            rescoring.measure(self._control, self)

    def _parameters(self, theirs: Any, top_k: int, dense: bool) -> Any:
        """TRL's sampling parameters for one request, with lists and a seed of its own: a resumed run draws the same."""
        ours = theirs.clone()
        ours.logprobs, ours.flat_logprobs = top_k, True
        ours.detokenize = bool(ours.stop)
        if dense:
            ours.extra_args = {**(ours.extra_args or {}), DENSE_REQUEST: True}
        text = f"{self._seed}/{self._round}/{self._process}/{self._requests}"
        ours.seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        self._requests += 1
        return ours

    def _rollout(self, output: Any, top_k: int, dense: bool, said: dict[str, Any] | None) -> Rollout:
        """The rollout of a finished request, whose lists are taken out of TRL's view."""
        (sampled,) = output.outputs
        tokens, prompt_ids = list(sampled.token_ids), list(output.prompt_token_ids)
        logp_T, lists = outputs.log_probs(sampled.logprobs, tokens, top_k)
        sampled.logprobs = outputs.SampledOnly(tokens, logp_T.tolist())
        rollout = Rollout(prompt_ids, tokens, logp_T, sampled.finish_reason, top_k=lists)
        if said is None or self.schedule is None:
            return rollout
        rollout = replace(rollout, **outputs.checked(said, len(tokens)))
        if dense:
            self._checked.count_windows(rollout)
        else:
            self._checked.count(rollout)
        return rollout

    def _hold(self, rollouts: list[Rollout], names: list[str]) -> None:
        for rollout, name in zip(rollouts, names, strict=True):
            self.rescorer.hold(rollout, name, tuple(rollout.prompt_ids), self.rescorer.in_force)

    # -- what is measured ------------------------------------------------------------------------------------------------

    def dense_scores(self, rollouts: Sequence[Rollout], *, temperature: float, top_k: int) -> list[TokenScores]:
        """What the dense policy says of each response token, from a dense prefill in this engine (see rescoring.py)."""
        if self.checks_drafts:
            return rescoring.already_scored(rollouts)
        rescoring.check_sampling(temperature, 1.0, top_k, self.vocabulary)
        asked = [rescoring.request_of(each, top_k, self.context_limit) for each in rollouts]
        prompts, parameters = [requests.tokens_prompt(ids) for ids, _ in asked], [each for _, each in asked]
        finished = requests.run(self._llm, prompts, parameters, self._take_checked, None)
        return [
            rescoring.scores_of(
                output.prompt_logprobs,
                rollout,
                len(ids),
                temperature=temperature,
                top_k=top_k,
                vocabulary=self.vocabulary,
            )
            for rollout, (ids, _), (output, _, _) in zip(rollouts, asked, finished, strict=True)
        ]

    # -- the schedule ------------------------------------------------------------------------------------------------------

    @property
    def checks_drafts(self) -> bool:
        """Whether the engine was started with a schedule that checks its drafts. It then runs no unchecked ones."""
        return self._capacity.check is not None

    def _set_schedule(self, schedule: Schedule | None) -> None:
        if schedule is not None:
            check_fits_engine(schedule, self._capacity)
        super()._set_schedule(schedule)

    def _follow(self, schedule: Schedule | None) -> None:
        if self.checks_drafts:
            scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
            scheduler.window_tokens = schedule.check.window_tokens if schedule and schedule.check else None
        # The call must not be inside an assertion, which `python -O` drops.
        emptied = self._llm.reset_prefix_cache()
        assert emptied, "vLLM kept its prefix cache: requests are still running"

    def _ask(self, method: str, *arguments: Any) -> Any:
        # TRL has made the worker without our extension.
        return self._llm.collective_rpc(getattr(WorkerExtension, method), args=arguments)[0]

    def _take_checked(self) -> dict[str, dict[str, Any]]:
        """What the checks said of the requests that ended, by vLLM's names for them."""
        if not self.checks_drafts:
            return {}
        said: dict[str, dict[str, Any]] = self._ask("sparroll_take_checked")
        return said

    def load_weights(self, named: Iterable[tuple[str, Any]]) -> None:
        """Copy the trainer's weights in on a CPU, where vLLM packs those of its layers, so that TRL's own way fails. Both
        are in this process."""
        self._ask("sparroll_load_weights", named)
        emptied = self._llm.reset_prefix_cache()
        assert emptied, "vLLM kept its prefix cache: requests are still running"
