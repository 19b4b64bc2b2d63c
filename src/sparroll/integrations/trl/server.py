"""Stands in front of TRL's client of a `vllm serve` (server mode), in the main process. TRL calls `generate`; what is
sampled is measured before it returns, by the same server. Everything else passes through.

The server is started with the arguments of `sparroll serve-args` and VLLM_SERVER_DEV_MODE=1 (docs/trl.md), so that it can
be asked to change its schedule and what it ran.
"""

# T response tokens, K top-k entries

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import requests
import torch

from sparroll.engines.vllm import lists_route, rescoring
from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT, DENSE_REQUEST
from sparroll.engines.vllm.rescoring import RescoringSettings
from sparroll.errors import UserError
from sparroll.integrations.trl.measured_rounds import MeasuredRounds
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TokenScores

RESCORED_AT_ONCE = 4
"""Rollouts in one request, and requests at the same time: the server reads some while the lists of others travel."""
SAMPLING_FIELDS = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
"""What TRL gives its client's `generate` that vLLM's SamplingParams has by the same name."""


class SampleKind(NamedTuple):
    """What is asked for a sample."""

    dense: bool
    """Whether it is of the control group."""
    top_k: int
    """Length of its lists; 0: it is not in the probe."""


class SparseClient(MeasuredRounds):
    """`vllm_generation.vllm_client = SparseClient(vllm_generation.vllm_client, ...)`; otherwise like SparseLLM."""

    def __init__(self, client: Any, *, capacity: Schedule, settings: RescoringSettings, of_control: RescoringSettings):
        if capacity.check is not None:
            raise UserError(
                "a server does not say over HTTP what its checks of drafts saw, so verified rollouts cannot be measured",
                'vllm_mode="colocate", or a schedule without a check',
            )
        self._client = client
        engines = int(self._route(lists_route.ENGINES_PATH, {}))
        if engines > 1:
            raise UserError(
                f"the vLLM server shares its requests among {engines} engines, and only the first one says what it ran",
                "start it without --data-parallel-size; --tensor-parallel-size takes several GPUs",
            )
        # The probe is chosen here, and only it is held.
        super().__init__(settings, of_control)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompts: Sequence[list[int]], features: Any = None, n: int = 1, **theirs: Any) -> dict[str, Any]:
        """`VLLMClient.generate` for prompts of token ids, with the sampled tokens' log-probabilities alone."""
        assert features is None, "models with images are refused at the start"
        if self._ceiling_prompts:
            chosen = list(prompts)[: self._ceiling_prompts]
            self._measure_ceiling(lambda name: self._sample(chosen, 1, theirs, name, [False] * len(chosen)))
        self._set_schedule(self._wanted)
        flags = self._dense or [False] * (len(prompts) * n)
        rollouts = self._sample(prompts, n, theirs, self._round, flags)
        self.rollouts = [replace(each, top_k=None) for each in rollouts] if self._dense else []
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": [rollout.response_ids for rollout in rollouts],
            "logprobs": [[[value] for value in rollout.sparse_logp.tolist()] for rollout in rollouts],
            "logprob_token_ids": [[[token] for token in rollout.response_ids] for rollout in rollouts],
        }

    def _sample(
        self, prompts: Sequence[list[int]], n: int, theirs: dict[str, Any], name: str, dense: Sequence[bool]
    ) -> list[Rollout]:
        """Sample, and measure the probe. Its samples are asked for at the same time, in requests of their own, whose lists
        come as bytes. Dense samples have requests of their own, too."""
        assert len(dense) == len(prompts) * n, f"{len(prompts)} prompts with {n} samples, and flags of {len(dense)}"
        began = time.perf_counter()
        kinds = self._kinds(len(prompts), n, name, dense)
        asked = [Counter(kinds[place * n : (place + 1) * n]) for place in range(len(prompts))]
        parts = sorted({part for of_prompt in asked for part in of_prompt.items()})
        sampling_began = time.perf_counter()
        with ThreadPoolExecutor(max_workers=len(parts)) as threads:
            answers = {part: threads.submit(self._part, prompts, asked, part, theirs) for part in parts}
            found = {part: answer.result() for part, answer in answers.items()}
        sampling_seconds = time.perf_counter() - sampling_began
        rollouts: list[Rollout] = []
        for place, of_prompt in enumerate(asked):
            waiting = {kind: iter(found[kind, count][place]) for kind, count in of_prompt.items()}
            rollouts += [next(waiting[kind]) for kind in kinds[place * n : (place + 1) * n]]
        if self._measures:
            self._measure(rollouts, kinds, n, name)
        self._spent.measure += time.perf_counter() - began - sampling_seconds
        return rollouts

    def _kinds(self, prompts: int, n: int, name: str, dense: Sequence[bool]) -> list[SampleKind]:
        """What is asked for each sample, prompt by prompt: whether it is dense, and the length of its lists."""
        settings, of_control = self.rescorer.settings, self._control.settings
        listed = listed_samples(prompts, n, settings, name) if self._measures else [0] * prompts
        group = [row for row, flag in enumerate(dense) if flag] if self._measures else []
        probed = {group[each] for each in rescoring.probe([(row // n, f"{name}/{row}") for row in group], of_control)}
        kinds = []
        for row, flag in enumerate(dense):
            sparse_before = sum(not each for each in dense[row - row % n : row])
            has_lists = row in probed if flag else sparse_before < listed[row // n]
            kinds.append(SampleKind(flag, settings.top_k if has_lists else 0))
        return kinds

    def _measure(self, rollouts: Sequence[Rollout], kinds: Sequence[SampleKind], n: int, name: str) -> None:
        for row, (rollout, kind) in enumerate(zip(rollouts, kinds, strict=True)):
            rescorer = self._control if kind.dense else self.rescorer
            if kind.top_k:
                rescorer.hold(rollout, f"{name}/{row // n}/{row % n}", row // n, rescorer.in_force)
            else:
                rescorer.counts.held += 1
                rescorer.counts.not_chosen += 1
        rescoring.measure(self.rescorer, self)
        rescoring.measure(self._control, self)

    def _part(
        self,
        prompts: Sequence[list[int]],
        asked: Sequence[Counter[SampleKind]],
        part: tuple[SampleKind, int],
        theirs: dict[str, Any],
    ) -> dict[int, list[Rollout]]:
        """The samples of every prompt that needs so many of this kind. -> by prompt"""
        kind, count = part
        places = [place for place, of_prompt in enumerate(asked) if of_prompt[kind] == count]
        chosen = [prompts[place] for place in places]
        sampled = self._sampled_with_lists if kind.top_k else self._sampled
        found: dict[int, list[Rollout]] = {place: [] for place in places}
        for number, rollout in enumerate(sampled(chosen, count, kind, theirs)):
            tokens = len(rollout.response_ids)
            cut = tokens >= theirs.get("max_tokens", tokens + 1)
            found[places[number // count]].append(replace(rollout, finish_reason="length") if cut else rollout)
        return found

    def _sampled(
        self, prompts: Sequence[list[int]], count: int, kind: SampleKind, theirs: dict[str, Any]
    ) -> list[Rollout]:
        """By TRL's own request."""
        wanted = theirs | {"logprobs": 0}
        if kind.dense:
            more = {"vllm_xargs": {DENSE_REQUEST: True}, "cache_salt": CACHE_SALT}
            wanted["generation_kwargs"] = {**(theirs.get("generation_kwargs") or {}), **more}
        answer = self._client.generate(prompts=list(prompts), n=count, **wanted)
        rows = zip(answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True)
        return [_rollout(prompts[number // count], *row) for number, row in enumerate(rows)]

    def _sampled_with_lists(
        self, prompts: Sequence[list[int]], count: int, kind: SampleKind, theirs: dict[str, Any]
    ) -> list[Rollout]:
        given = {name: value for name, value in theirs.items() if name in SAMPLING_FIELDS and value is not None}
        given |= theirs.get("generation_kwargs") or {}
        asked = lists_route.samples_request(prompts, count, top_k=kind.top_k, dense=kind.dense, sampling=given)
        return lists_route.samples_of(self._route(lists_route.SAMPLES_PATH, asked), prompts, count)

    def dense_scores(self, rollouts: Sequence[Rollout], *, temperature: float, top_k: int) -> list[TokenScores]:
        """What the dense policy says of each response token, from a dense prefill in the server (see rescoring.py)."""
        parts = [rollouts[start : start + RESCORED_AT_ONCE] for start in range(0, len(rollouts), RESCORED_AT_ONCE)]

        def read(part: Sequence[Rollout]) -> list[TokenScores]:
            asked = lists_route.scores_request(part, temperature=temperature, top_k=top_k)
            return lists_route.scores_of(self._route(lists_route.SCORES_PATH, asked))

        with ThreadPoolExecutor(max_workers=RESCORED_AT_ONCE) as threads:
            return [scores for part in threads.map(read, parts) for scores in part]

    def _follow(self, schedule: Schedule | None) -> None:
        self._client.reset_prefix_cache()

    def _ask(self, method: str, *arguments: Any) -> Any:
        # Without the session's retries: a server that cannot answer today will not a minute later.
        answer = requests.post(
            f"{self._client.base_url}/collective_rpc",
            json={"method": method, "args": list(arguments)},
            headers=dict(self._client.session.headers),
            timeout=600,
        )
        said = self._answered(answer, method).json() if answer.content else {}
        return (said.get("results") or [None])[0]

    def _route(self, path: str, asked: dict[str, Any]) -> bytes:
        """What a route of ours answers."""
        answer = self._client.session.post(f"{self._client.base_url}{path}", json=asked)
        return bytes(self._answered(answer, path).content)

    def _answered(self, answer: requests.Response, what: str) -> requests.Response:
        """Raises UserError where the server does not do what it was asked."""
        if answer.status_code != 200:
            # A request that it understood and refused needs another request, not another start.
            refused = answer.status_code == 400
            start = "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL $(sparroll serve-args ...) (docs/trl.md)"
            raise UserError(
                f"the vLLM server at {self._client.base_url} {'refused' if refused else 'does not answer to'} {what}: "
                f"{answer.status_code} {answer.text[:400]}",
                "the server's own output may say more" if refused else start,
            )
        return answer


def listed_samples(prompts: int, n: int, settings: RescoringSettings, name: str) -> list[int]:
    """How many of each prompt's n samples are in the probe: first one of each prompt, then a second one. Which prompts
    have one more is drawn from the seed and the round's name.

    >>> sum(listed_samples(8, 4, RescoringSettings(probe_rollouts=11), "train/7"))
    11
    """
    asked = prompts * n if settings.probe_rollouts is None else min(settings.probe_rollouts, prompts * n)
    draws = [hashlib.blake2b(f"{settings.seed}/{name}/{place}".encode()).digest() for place in range(prompts)]
    more = set(sorted(range(prompts), key=lambda place: draws[place])[: asked % prompts])
    return [asked // prompts + (place in more) for place in range(prompts)]


def _rollout(prompt: list[int], tokens: list[int], logp: list[list[Any]], ids: list[list[int]]) -> Rollout:
    """From rows of ids and log-probabilities with the sampled token somewhere among them."""
    own = [row[each.index(token)] for token, row, each in zip(tokens, logp, ids, strict=True)]
    return Rollout(list(prompt), list(tokens), torch.tensor(own, dtype=torch.float32), "stop")
