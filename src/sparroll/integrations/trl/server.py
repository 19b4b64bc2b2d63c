"""Stands in front of TRL's client of a `vllm serve` (server mode), in the main process. TRL calls `generate`; what is
sampled is measured before it returns, by the same server. Everything else passes through.

The server is started with the arguments of `sparroll serve-args` and VLLM_SERVER_DEV_MODE=1 (docs/trl.md), so that it can
be asked to change its schedule and what it ran.
"""

# T response tokens, K top-k entries

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import requests
import torch

from sparroll.engines.report import EngineReport
from sparroll.engines.vllm import rescoring
from sparroll.engines.vllm.rescoring import Rescorer, RescoringSettings
from sparroll.errors import UserError
from sparroll.integrations.measured import CheckSums, EngineStep, SpentSeconds
from sparroll.integrations.tail import State
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TokenScores, TopK

RESCORED_AT_ONCE = 4
"""Rollouts in one request, since a server returns their lists as text."""


class SparseClient:
    """`vllm_generation.vllm_client = SparseClient(vllm_generation.vllm_client, ...)`; otherwise like SparseLLM."""

    weight_version = 0
    """Rollouts are measured inside `generate`, so the weights never change in between."""

    def __init__(self, client: Any, *, capacity: Schedule, settings: RescoringSettings):
        if capacity.check is not None:
            raise UserError(
                "a server does not say over HTTP what its checks of drafts saw, so verified rollouts cannot be measured",
                'vllm_mode="colocate", or a schedule without a check',
            )
        self._client = client
        self.schedule: Schedule | None = None
        """What the server samples under, from the first `generate` on."""
        self._begun = False
        # The probe is chosen here, and only it is held.
        self.rescorer = Rescorer(settings)
        self._round, self._measures, self._ceiling_prompts = "", True, 0
        self._wanted: Schedule | None = None
        self._ceiling: State | None = None
        self._spent = SpentSeconds()
        self._ask("sparroll_reset_report")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def begin(self, name: str, schedule: Schedule | None, *, measures: bool = True, ceiling_prompts: int = 0) -> None:
        """See SparseLLM.begin."""
        self._round, self._wanted, self._measures = name, schedule, measures
        self._ceiling_prompts = ceiling_prompts
        self._ask("sparroll_reset_report")

    def take(self) -> EngineStep:
        """What was measured and counted since `begin`."""
        estimator = self.rescorer.estimator
        state, counts = self.rescorer.take()
        ceiling, self._ceiling = self._ceiling, None
        spent, self._spent = self._spent, SpentSeconds()
        said = self._ask("sparroll_report")
        report = EngineReport.from_table(json.loads(said) if isinstance(said, str) else said)
        return EngineStep(state, counts, estimator, report, CheckSums(), ceiling, spent)

    def generate(self, prompts: Sequence[list[int]], features: Any = None, n: int = 1, **theirs: Any) -> dict[str, Any]:
        """`VLLMClient.generate` for prompts of token ids, with the sampled tokens' log-probabilities alone."""
        assert features is None, "models with images are refused at the start"
        if self._ceiling_prompts:
            self._measure_ceiling(prompts, theirs)
        self._set_schedule(self._wanted)
        return self._sample(prompts, n, theirs, self._round)

    def _sample(self, prompts: Sequence[list[int]], n: int, theirs: dict[str, Any], name: str) -> dict[str, Any]:
        """Sample, and measure the probe. Its samples are asked for at the same time, in requests of their own: a server
        returns lists as text, and so by far the most of what it returns."""
        began, settings = time.perf_counter(), self.rescorer.settings
        listed = listed_samples(len(prompts), n, settings, name) if self._measures else [0] * len(prompts)
        parts = sorted(
            {(count, top_k) for with_lists in listed for count, top_k in _parts(with_lists, n, settings.top_k)}
        )
        sampling_began = time.perf_counter()
        with ThreadPoolExecutor(max_workers=len(parts)) as threads:
            answers = {part: threads.submit(self._part, prompts, listed, n, part, theirs) for part in parts}
            found = {part: answer.result() for part, answer in answers.items()}
        sampling_seconds = time.perf_counter() - sampling_began
        rollouts: list[Rollout] = []
        for place, with_lists in enumerate(listed):
            of_prompt = [each for part in _parts(with_lists, n, settings.top_k) for each in found[part][place]]
            for sample, rollout in enumerate(of_prompt):
                if sample < with_lists:
                    self.rescorer.hold(rollout, f"{name}/{place}/{sample}", place, self.rescorer.in_force)
            rollouts += of_prompt
        if self._measures:
            left_out = len(rollouts) - sum(listed)
            self.rescorer.counts.held += left_out
            self.rescorer.counts.not_chosen += left_out
            rescoring.measure(self.rescorer, self)
        self._spent.measure += time.perf_counter() - began - sampling_seconds
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": [rollout.response_ids for rollout in rollouts],
            "logprobs": [[[value] for value in rollout.sparse_logp.tolist()] for rollout in rollouts],
            "logprob_token_ids": [[[token] for token in rollout.response_ids] for rollout in rollouts],
        }

    def _part(
        self, prompts: Sequence[list[int]], listed: list[int], n: int, part: tuple[int, int], theirs: dict[str, Any]
    ) -> dict[int, list[Rollout]]:
        """The samples of every prompt that needs `part`: (how many samples, length of their lists). -> by prompt"""
        count, top_k = part
        places = [
            place
            for place, with_lists in enumerate(listed)
            if part in _parts(with_lists, n, self.rescorer.settings.top_k)
        ]
        asked = theirs | {"logprobs": top_k}
        answer = self._client.generate(prompts=[prompts[place] for place in places], n=count, **asked)
        rows = zip(answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True)
        found: dict[int, list[Rollout]] = {place: [] for place in places}
        for number, (tokens, logp, ids) in enumerate(rows):
            place = places[number // count]
            found[place].append(_rollout(prompts[place], tokens, logp, ids, top_k))
        return found

    def dense_scores(self, rollouts: Sequence[Rollout], *, temperature: float, top_k: int) -> list[TokenScores]:
        """What the dense policy says of each response token, from a dense prefill in the server (see rescoring.py)."""
        said = self._client.get_sequence_logprobs(
            [[*each.prompt_ids, *each.response_ids] for each in rollouts],
            [len(each.prompt_ids) for each in rollouts],
            top_logprobs=top_k,
            temperature=temperature,
            chunk_size=RESCORED_AT_ONCE,
        )
        every = zip(said["actual_logprobs"], said["logprob_token_ids"], said["logprobs"], strict=True)
        return [
            TokenScores(torch.tensor(own)[:, 0], TopK(torch.tensor(ids, dtype=torch.int64), torch.tensor(logp)))
            for own, ids, logp in every
        ]

    def _measure_ceiling(self, prompts: Sequence[list[int]], theirs: dict[str, Any]) -> None:
        """The tail of a few dense rollouts. They are counted nowhere."""
        began, measure_seconds = time.perf_counter(), self._spent.measure
        chosen, self._ceiling_prompts = list(prompts)[: self._ceiling_prompts], 0
        kept, self.rescorer = self.rescorer, Rescorer(replace(self.rescorer.settings, probe_rollouts=None))
        try:
            self._set_schedule(None)
            self._sample(chosen, 1, theirs, f"{self._round}/dense")
            self._ceiling = self.rescorer.take()[0]
        finally:
            self.rescorer = kept
        self._ask("sparroll_reset_report")
        self._spent = SpentSeconds(measure_seconds, self._spent.ceiling + time.perf_counter() - began)

    def _set_schedule(self, schedule: Schedule | None) -> None:
        if schedule == self.schedule and self._begun:
            return
        table, name = (None, "dense") if schedule is None else (schedule.table(), schedule.name)
        self._ask("sparroll_set_schedule", table, name)
        # K and V of cached responses are those of the old schedule.
        self._client.reset_prefix_cache()
        self.schedule, self._begun = schedule, True

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of WorkerExtension on the server's workers. -> what the first one says"""
        url = f"{self._client.base_url}/collective_rpc"
        # Without the session's retries: a server that cannot answer today will not a minute later.
        asked = {"method": method, "args": list(arguments)}
        answer = requests.post(url, json=asked, headers=dict(self._client.session.headers), timeout=600)
        if answer.status_code != 200:
            raise UserError(
                f"the vLLM server at {self._client.base_url} does not answer to {method}: {answer.status_code} "
                f"{answer.text[:200]}",
                "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL $(sparroll serve-args --schedule ...) "
                "--max-logprobs -1 (docs/trl.md)",
            )
        said = answer.json() if answer.content else {}
        return (said.get("results") or [None])[0]


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


def _parts(with_lists: int, n: int, top_k: int) -> list[tuple[int, int]]:
    """(samples, length of their lists) of the requests for one prompt; those with lists come first."""
    return [part for part in ((with_lists, top_k), (n - with_lists, 0)) if part[0]]


def _rollout(prompt: list[int], tokens: list[int], logp: list[list[Any]], ids: list[list[int]], top_k: int) -> Rollout:
    """From rows of ids and log-probabilities, most likely first, with the sampled token somewhere among them."""
    own = [row[each.index(token)] for token, row, each in zip(tokens, logp, ids, strict=True)]
    lists = None
    if top_k:
        lists = TopK(
            torch.tensor([row[:top_k] for row in ids], dtype=torch.int64), torch.tensor([row[:top_k] for row in logp])
        )
    return Rollout(list(prompt), list(tokens), torch.tensor(own, dtype=torch.float32), "stop", top_k=lists)
