"""Dense re-scoring in the engine: prompt and response once more through a dense prefill, which says how likely the dense
policy finds each response token. So a replica measures its own rollouts, without a trainer.

The life of a rollout here: `Rescorer.hold` keeps it when it ends, `due` drops what spans a change of weights or schedule
and chooses a probe, the engine reads the chosen ones (`measure` with VLLMEngine, `measure_async` with vLLM's AsyncLLM),
and `fold` adds their acceptance to TailStatistics. Only `take` leaves the replica. vLLM is imported only where a request
is made.

vLLM reads a prompt densely under every schedule, and passes over its prefix cache where prompt log-probabilities are
asked for. So a schedule need not be taken off, and no decode step is made. The logits of a chunk of a prompt exist at
one time; `max_num_batched_tokens` x vocabulary x 4 bytes must be free.
"""

# T response tokens, V vocabulary, K top-k entries

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from sparroll.engines import sampling
from sparroll.engines.generate_arguments import check_temperature
from sparroll.engines.vllm import outputs
from sparroll.errors import UserError, nearest
from sparroll.mismatch import ESTIMATORS, TailStatistics, acceptance_of
from sparroll.mismatch.of_rollouts import off_nats_of
from sparroll.types import Rollout, StepReport, TokenScores, TopK, check_seed, is_whole

Generate = Callable[..., AsyncIterator[Any]]
"""`AsyncLLM.generate`, or what wraps it."""


class ReadsDensely(Protocol):
    """What `measure` asks of an engine in this process. VLLMEngine does it."""

    weight_version: int

    def dense_scores(self, rollouts: Sequence[Rollout], *, temperature: float, top_k: int) -> list[TokenScores]:
        """What the dense policy says of each response token."""
        ...


@dataclass(frozen=True)
class RescoringSettings:
    """What is re-scored, and how. Statistics of two replicas can be merged only if these settings are the same."""

    top_k: int = 20
    """Length of the lists of both sides. The engine's max_logprobs must allow it."""
    probe_rollouts: int | None = None
    """How many rollouts are re-scored between two calls of `take`. None: all. A bin of context lengths needs 8 to say
    anything."""
    estimator: str = "top_k_lower"
    bin_tokens: int = 2000
    seed: int = 0
    """Chooses the probe."""
    temperature: float = 1.0
    """What the rollouts are sampled at. See `check_sampling`."""

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS or self.estimator == "exact":
            known = [name for name in ESTIMATORS if name != "exact"]
            raise UserError(
                f"re-scoring cannot estimate {self.estimator!r} from lists", nearest(str(self.estimator), known)
            )
        if not is_whole(self.top_k) or self.top_k < 1:
            raise UserError(f"top_k must be a whole number of 1 or more, got {self.top_k!r}", "the usual one is 20")
        if self.probe_rollouts is not None and (not is_whole(self.probe_rollouts) or self.probe_rollouts < 1):
            raise UserError(
                f"probe_rollouts must be 1 or more, got {self.probe_rollouts!r}", "leave it out to re-score all"
            )
        check_seed(self.seed)
        check_temperature(self.temperature)


@dataclass(frozen=True)
class InForce:
    """Which weights and which schedule an engine samples with. Both rise with every change.

    >>> InForce(weight_version=4, schedule_version=2)
    """

    weight_version: int = 0
    schedule_version: int = 0


@dataclass(frozen=True)
class HeldRollout:
    """A finished rollout that waits to be measured."""

    rollout: Rollout
    rollout_id: str
    """Differs from every other rollout's, of any step and replica."""
    prompt_id: Hashable
    """The same for all samples of one prompt."""
    began: InForce


@dataclass
class RescoringCounts:
    """What was measured and what was not.

    >>> RescoringCounts(held=64, measured=16, measured_tokens=181_204, not_chosen=47, aborted=1, seconds=2.8)
    """

    held: int = 0
    """Rollouts that ended. Each is one of those counted below."""
    measured: int = 0
    checked: int = 0
    """Of these, the ones whose drafts were checked: their acceptance is exact, and they were not read again."""
    not_chosen: int = 0
    """Whole rollouts that the probe left out."""
    aborted: int = 0
    weights_changed: int = 0
    """Dropped, because the weights changed between their first token and the end of the measurement."""
    schedule_changed: int = 0
    measured_tokens: int = 0
    read_tokens: int = 0
    """Tokens of prompts and responses that were read once more."""
    seconds: float = 0.0
    """Wall time of re-scoring, while nothing else ran."""
    host_seconds: float = 0.0
    """Of it, the time in which lists became acceptances."""

    def add(self, other: RescoringCounts) -> None:
        """Count those of another replica, too. Replicas work at the same time, so the longer time counts."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(mine, theirs) if each.name.endswith("seconds") else mine + theirs)

    def charge(self, other: RescoringCounts) -> None:
        """Count what another measurement cost that ran before or after this one, and nothing of what it measured."""
        for name in ("read_tokens", "seconds", "host_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def report(self, step_seconds: float | None = None) -> StepReport:
        """Metrics of a step. step_seconds: how long all of the step took; with it, the share of the re-scoring."""
        report: StepReport = {f"rescoring/{each.name}": float(getattr(self, each.name)) for each in fields(self)}
        if step_seconds:
            report["rescoring/share_of_step"] = self.seconds / step_seconds
        return report


class Rescorer:
    """Keeps the rollouts of one replica until they are measured, and their statistics until somebody takes them.

    >>> rescorer = Rescorer(RescoringSettings(probe_rollouts=16))
    >>> began = rescorer.in_force                        # when a request starts
    >>> rescorer.hold(rollout, "step 3/7#2", 7, began)   # when it ends
    >>> measure(rescorer, engine)                        # when the step's rollouts are done
    >>> state, counts = rescorer.take()                  # what leaves the replica
    """

    def __init__(self, settings: RescoringSettings, in_force: InForce = InForce()):
        self.settings = settings
        self.in_force = in_force
        """The owner sets it anew with every change of weights or schedule."""
        self._held: list[HeldRollout] = []
        self._clear()

    def _clear(self) -> None:
        self.counts = RescoringCounts()
        self._forget()

    def _forget(self) -> None:
        self.statistics = TailStatistics(bin_tokens=self.settings.bin_tokens)

    def change_schedule(self) -> None:
        """The schedule is another one from now on. What was measured under the one before and not taken yet is dropped
        and counted: a tail of both would be shown as that of the new one."""
        counts = self.counts
        counts.schedule_changed += counts.measured
        counts.measured = counts.checked = counts.measured_tokens = 0
        self._forget()
        self.in_force = replace(self.in_force, schedule_version=self.in_force.schedule_version + 1)

    def hold(self, rollout: Rollout, rollout_id: str, prompt_id: Hashable, began: InForce) -> None:
        """Keep a rollout that ended, with what was in force when it began."""
        self.counts.held += 1
        held = HeldRollout(rollout, rollout_id, prompt_id, began)
        if not self._drop(held):
            self._held.append(held)

    def pass_over(self) -> None:
        """Count a rollout that ended and was not to be measured from its start on."""
        self.counts.held += 1
        self.counts.not_chosen += 1

    def count_aborted(self) -> None:
        """Count a request that was aborted, so that it has no whole response."""
        self.counts.held += 1
        self.counts.aborted += 1

    @property
    def has_unread(self) -> bool:
        """Whether a rollout is held that nothing has compared with the dense policy yet."""
        return any(held.rollout.acceptance is None for held in self._held)

    def due(self) -> list[HeldRollout]:
        """The rollouts to read again now; from here on the caller has them. Those whose drafts were checked are measured
        at once, all of them: the checks have compared both whole distributions.

        Raises UserError where there are rollouts of both kinds, held or measured since the last `take`: their acceptances
        cannot be put into one tail. They stay held, and `change_schedule` drops them.
        """
        whole = self._held = [held for held in self._held if not self._drop(held)]
        waiting = [held for held in whole if held.rollout.acceptance is None]
        has_checked = len(waiting) < len(whole) or self.counts.checked > 0
        if has_checked and (waiting or self.counts.measured > self.counts.checked):
            raise UserError(
                "some rollouts were checked while they were sampled, and others were not: exact acceptances and those "
                f"by {self.settings.estimator} make no common tail",
                "call change_schedule() where the engine turns checks on or off: what is held or measured by then is "
                "dropped and counted; to keep it, measure and take() before",
            )
        for held in whole if has_checked else ():
            assert held.rollout.acceptance is not None, "looked at above"
            self._add(held.rollout, held.rollout_id, held.rollout.acceptance, held.rollout.dense)
            self.counts.checked += 1
        self._held = []
        chosen = set(probe([(h.prompt_id, h.rollout_id) for h in waiting], self.settings, self.counts.measured))
        self.counts.not_chosen += len(waiting) - len(chosen)
        return [held for place, held in enumerate(waiting) if place in chosen]

    def hold_again(self, due: list[HeldRollout]) -> None:
        """Take rollouts back that could not be read again."""
        self._held = [*due, *self._held]

    def fold(self, held: HeldRollout, dense: TokenScores) -> None:
        """Add what the dense policy said of a rollout. It is dropped where weights or schedule changed meanwhile."""
        if self._drop(held):
            return
        began = time.perf_counter()
        scored = _first(held.rollout, len(dense.logp))
        (acceptance_T,) = acceptance_of([scored], [dense], self.settings.estimator)
        self._add(scored, held.rollout_id, acceptance_T, dense)
        self.counts.read_tokens += len(scored.prompt_ids) + len(scored.response_ids)
        self.counts.host_seconds += time.perf_counter() - began

    def _add(self, rollout: Rollout, rollout_id: str, acceptance_T: Tensor, dense: TokenScores | None) -> None:
        off_T = None if dense is None else off_nats_of(rollout, dense)
        self.statistics.add(acceptance_T, rollout.context_tokens, rollout_id, off_T)
        self.counts.measured += 1
        self.counts.measured_tokens += len(acceptance_T)

    @property
    def estimator(self) -> str:
        """What the acceptances in the statistics are: "exact" where drafts were checked."""
        return "exact" if self.counts.checked else self.settings.estimator

    def take(self) -> tuple[dict[str, Tensor], RescoringCounts]:
        """(TailStatistics.packed_state(), what was counted) since the last call. Statistics without a token can be
        merged. A rollout that ended after the last measurement counts with what is taken next."""
        state, counts, waiting = self.statistics.packed_state(), self.counts, len(self._held)
        self._clear()
        counts.held -= waiting
        self.counts.held = waiting
        return state, counts

    def _drop(self, held: HeldRollout) -> bool:
        if held.began.weight_version != self.in_force.weight_version:
            self.counts.weights_changed += 1
        elif held.began.schedule_version != self.in_force.schedule_version:
            self.counts.schedule_changed += 1
        else:
            return False
        return True


def probe(rollouts: Sequence[tuple[Hashable, str]], settings: RescoringSettings, before: int = 0) -> list[int]:
    """Places of the rollouts to re-score, given each one's (prompt, rollout id), in rising order. before: how many of the
    step were re-scored already, where a step is measured in several parts.

    First one sample of each prompt, then a second one, and so on; which sample and which prompts come first is drawn
    from the seed and the rollout ids. The choice is the same in whatever order the rollouts ended, and depends neither
    on lengths nor on rewards. Ids must name the step, or every step has the same draw.
    """
    count = len(rollouts) if settings.probe_rollouts is None else max(settings.probe_rollouts - before, 0)
    if count >= len(rollouts):
        return list(range(len(rollouts)))
    drawn: dict[Hashable, list[tuple[bytes, int]]] = {}
    for place, (prompt, name) in enumerate(rollouts):
        draw = hashlib.blake2b(f"{settings.seed}/{name}".encode(), digest_size=16).digest()
        drawn.setdefault(prompt, []).append((draw, place))
    turns = [(turn, *entry) for samples in drawn.values() for turn, entry in enumerate(sorted(samples))]
    return sorted(place for _, _, place in sorted(turns)[:count])


def measure(rescorer: Rescorer, engine: ReadsDensely) -> None:
    """Re-score what is due in an engine of this process."""
    began = time.perf_counter()
    rescorer.in_force = replace(rescorer.in_force, weight_version=engine.weight_version)
    settings, due = rescorer.settings, rescorer.due()
    if due:
        try:
            scores = engine.dense_scores(
                [held.rollout for held in due], temperature=settings.temperature, top_k=settings.top_k
            )
        except BaseException:
            rescorer.hold_again(due)
            raise
        for held, dense in zip(due, scores, strict=True):
            rescorer.fold(held, dense)
    rescorer.counts.seconds += time.perf_counter() - began


async def measure_async(rescorer: Rescorer, generate: Generate, vocabulary: int, context_limit: int) -> None:
    """The same in a server. Call it while nothing is sampled and before weights, cache or schedule change: an abort or
    a sleep would end its requests, too. Those are counted as aborted."""
    began = time.perf_counter()
    settings = rescorer.settings
    if rescorer.has_unread:
        # First, so that an error leaves them held.
        check_sampling(settings.temperature, 1.0, settings.top_k, vocabulary)
    due = rescorer.due()

    async def read(held: HeldRollout) -> None:
        try:
            await read_again(held)
        except BaseException:
            rescorer.hold_again([held])
            raise

    async def read_again(held: HeldRollout) -> None:
        ids, parameters = request_of(held.rollout, settings.top_k, context_limit)
        finished = None
        async for output in generate(
            prompt={"prompt_token_ids": ids}, sampling_params=parameters, request_id=f"{held.rollout_id}-dense"
        ):
            finished = output
        if finished is None or finished.prompt_logprobs is None or finished.outputs[0].finish_reason == "abort":
            rescorer.counts.aborted += 1
            return
        started = time.perf_counter()
        dense = scores_of(
            finished.prompt_logprobs,
            held.rollout,
            len(ids),
            temperature=settings.temperature,
            top_k=settings.top_k,
            vocabulary=vocabulary,
        )
        rescorer.counts.host_seconds += time.perf_counter() - started
        rescorer.fold(held, dense)

    # All of them are waited for, so that none runs on behind an error.
    failures = await asyncio.gather(*(read(held) for held in due), return_exceptions=True)
    rescorer.counts.seconds += time.perf_counter() - began
    for failure in failures:
        if failure is not None:
            raise failure


def check_sampling(temperature: float, top_p: float, top_k: int, vocabulary: int) -> None:
    """Raise UserError where dense log-probabilities of the distribution that was sampled from cannot be had.

    vLLM gives prompt log-probabilities at temperature 1, and says so in no field. Others are computed from them where
    the lists hold the whole vocabulary. A shorter list does not say by how much the rest is to be scaled.
    """
    check_temperature(temperature)
    if (temperature in (0, 1) and top_p == 1) or top_k >= vocabulary:
        return
    what = f"temperature {temperature:g}" if temperature not in (0, 1) else f"top_p {top_p:g}"
    raise UserError(
        f"re-scoring in vLLM gives log-probabilities at temperature 1 without top_p, and the rollouts were sampled at "
        f"{what}",
        f"sample at temperature 1 without top_p; or score with the trainer's model; or, for a small vocabulary, take "
        f"whole lists: top_k={vocabulary:,} on both sides",
    )


def request_of(rollout: Rollout, top_k: int, context_limit: int) -> tuple[list[int], Any]:
    """(The tokens to read, vLLM's SamplingParams). vLLM always samples one more token, so of a rollout that fills the
    context the last one is not read."""
    from vllm import SamplingParams

    ids = [*rollout.prompt_ids, *rollout.response_ids][: context_limit - 1]
    return ids, SamplingParams(
        max_tokens=1, temperature=1.0, prompt_logprobs=top_k, flat_logprobs=True, detokenize=False, ignore_eos=True
    )


def scores_of(
    prompt_logprobs: Any,
    rollout: Rollout,
    read_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int,
    vocabulary: int,
) -> TokenScores:
    """The scores of the response tokens that were among the `read_tokens`, from vLLM's flat lists. Their rows begin with
    the token itself, which the most likely ones hold as well."""
    prompt_tokens = len(rollout.prompt_ids)
    tokens = rollout.response_ids[: read_tokens - prompt_tokens]
    top_k = min(top_k, vocabulary)
    # The first token has no row.
    start = (prompt_tokens - 1) * (top_k + 1)
    rows = SimpleNamespace(token_ids=prompt_logprobs.token_ids[start:], logprobs=prompt_logprobs.logprobs[start:])
    logp_T, lists = outputs.log_probs(rows, tokens, top_k)
    if temperature in (0, 1) and top_p == 1:
        return TokenScores(logp_T, lists)
    assert lists is not None and lists.k == vocabulary, "check_sampling lets only whole lists pass"
    logp_TV = torch.empty_like(lists.logp).scatter_(-1, lists.ids, lists.logp)
    asked_TV = sampling.log_probs(logp_TV, temperature, top_p)
    best = asked_TV.topk(top_k, dim=-1)
    sampled_T = asked_TV.gather(-1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0]
    return TokenScores(sampled_T, TopK(best.indices, best.values))


def already_scored(rollouts: Sequence[Rollout]) -> list[TokenScores]:
    """The scores that checks of drafts gave. Raises UserError where a rollout has none: an engine that checks drafts
    takes no requests for prompt log-probabilities."""
    scores = [rollout.dense for rollout in rollouts if rollout.dense is not None]
    if len(scores) < len(rollouts):
        raise UserError(
            f"{len(rollouts) - len(scores)} of {len(rollouts)} rollouts were sampled without checks, and an engine that "
            "checks its drafts cannot re-score them",
            "dense rollouts need no score; for others use an engine whose schedule has no check",
        )
    return scores


def _first(rollout: Rollout, tokens: int) -> Rollout:
    """The rollout with its first response tokens alone."""
    if tokens == len(rollout.response_ids):
        return rollout
    return replace(
        rollout,
        response_ids=rollout.response_ids[:tokens],
        sparse_logp=rollout.sparse_logp[:tokens],
        top_k=None if rollout.top_k is None else rollout.top_k[:tokens],
    )
