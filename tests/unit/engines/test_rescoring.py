"""Which rollouts are re-scored, which are dropped and counted, and what vLLM's lists say. Needs no vLLM."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparroll.engines.vllm import rescoring
from sparroll.engines.vllm.rescoring import (
    InForce,
    Rescorer,
    RescoringCounts,
    RescoringSettings,
    already_scored,
    check_sampling,
    measure,
    measure_async,
    probe,
    scores_of,
)
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics
from sparroll.types import Rollout, TokenScores, TopK

VOCABULARY = 7


def rollout(prompt_tokens: int = 3, tokens: int = 4, seed: int = 0, **changes: Any) -> Rollout:
    """A random response with the whole distribution at each token."""
    generator = torch.Generator().manual_seed(seed)
    logp_TV = torch.randn(tokens, VOCABULARY, generator=generator).log_softmax(-1)
    ids = torch.randint(VOCABULARY, (prompt_tokens + tokens,), generator=generator).tolist()
    best = logp_TV.topk(VOCABULARY)
    made = Rollout(
        prompt_ids=ids[:prompt_tokens],
        response_ids=ids[prompt_tokens:],
        sparse_logp=logp_TV.gather(-1, torch.tensor(ids[prompt_tokens:])[:, None])[:, 0],
        finish_reason="length",
        top_k=TopK(best.indices, best.values),
    )
    return replace(made, **changes)


def flat(logp_NV: torch.Tensor, ids: list[int], top_k: int) -> SimpleNamespace:
    """vLLM's flat lists of a prompt: for each token but the first, the token itself and then the most likely ones."""
    best = logp_NV.topk(top_k)
    tokens = torch.tensor(ids[1:])[:, None]
    return SimpleNamespace(
        token_ids=torch.cat([tokens, best.indices], 1).flatten().tolist(),
        logprobs=torch.cat([logp_NV.gather(-1, tokens), best.values], 1).flatten().tolist(),
    )


def test_the_probe_takes_one_sample_of_each_prompt_before_a_second_one() -> None:
    names = [(prompt, f"3/{prompt}#{sample}") for prompt in range(6) for sample in range(4)]
    chosen = probe(names, RescoringSettings(probe_rollouts=9))
    each = Counter(names[place][0] for place in chosen)
    assert len(chosen) == 9 and sorted(each.values()) == [1, 1, 1, 2, 2, 2]
    assert chosen == sorted(set(chosen))


def test_the_probe_depends_on_ids_and_seed_and_not_on_the_order_of_arrival() -> None:
    names = [(prompt, f"3/{prompt}#{sample}") for prompt in range(8) for sample in range(4)]
    settings = RescoringSettings(probe_rollouts=5)
    turned = names[::-1]
    assert {names[place] for place in probe(names, settings)} == {turned[place] for place in probe(turned, settings)}
    assert probe(names, settings) != probe(names, replace(settings, seed=1))
    later = [(prompt, name.replace("3/", "4/")) for prompt, name in names]
    assert probe(names, settings) != probe(later, settings)
    assert probe(names, RescoringSettings()) == probe(names, replace(settings, probe_rollouts=99)) == list(range(32))


def test_a_step_that_is_measured_in_parts_has_one_probe() -> None:
    names = [(prompt, f"3/{prompt}#0") for prompt in range(10)]
    settings = RescoringSettings(probe_rollouts=4)
    assert [len(probe(names, settings, before)) for before in (0, 3, 4, 9)] == [4, 1, 0, 0]


def test_every_rollout_is_drawn_about_equally_often() -> None:
    counts = Counter(
        place
        for step in range(600)
        for place in probe(
            [(p, f"{step}/{p}#{s}") for p in range(4) for s in range(3)], RescoringSettings(probe_rollouts=2)
        )
    )
    # 100 on average, with a standard deviation of 9.
    assert len(counts) == 12 and min(counts.values()) > 60 and max(counts.values()) < 140


def test_what_spans_a_change_is_dropped_and_counted() -> None:
    rescorer = Rescorer(RescoringSettings(), InForce(1, 1))
    one, dense = rollout(), TokenScores(rollout().sparse_logp, rollout().top_k)
    rescorer.hold(one, "older weights", 0, InForce(0, 1))
    rescorer.hold(one, "older schedule", 0, InForce(1, 0))
    rescorer.count_aborted()
    rescorer.hold(one, "changes while it waits", 0, InForce(1, 1))
    rescorer.in_force = InForce(1, 2)
    assert rescorer.due() == []
    rescorer.hold(one, "changes while it is read", 0, InForce(1, 2))
    (held,) = rescorer.due()
    rescorer.in_force = InForce(2, 2)
    rescorer.fold(held, dense)
    rescorer.hold(one, "stays", 0, InForce(2, 2))
    (held,) = rescorer.due()
    rescorer.fold(held, dense)
    state, counts = rescorer.take()
    assert (counts.held, counts.measured, counts.measured_tokens) == (6, 1, 4)
    assert (counts.weights_changed, counts.schedule_changed, counts.aborted) == (2, 2, 1)
    assert TailStatistics.from_state(state).tokens == 4
    assert rescorer.take()[1] == RescoringCounts()


def test_a_rollout_that_ends_after_the_measurement_counts_with_what_is_taken_next() -> None:
    rescorer = Rescorer(RescoringSettings())
    one, dense = rollout(), TokenScores(rollout().sparse_logp, rollout().top_k)
    rescorer.hold(one, "in time", 0, InForce())
    (held,) = rescorer.due()
    rescorer.fold(held, dense)
    rescorer.hold(one, "late", 0, InForce())
    first = rescorer.take()[1]
    assert (first.held, first.measured) == (1, 1)
    (held,) = rescorer.due()
    rescorer.fold(held, dense)
    second = rescorer.take()[1]
    assert (second.held, second.measured) == (1, 1)


def test_checked_rollouts_are_measured_at_once_and_never_read_again() -> None:
    rescorer = Rescorer(RescoringSettings(probe_rollouts=1))
    checked = replace(rollout(), top_k=None, acceptance=torch.tensor([1.0, 0.5, 0.75, 0.75]))
    for number in range(3):
        rescorer.hold(checked, str(number), number, InForce())
    assert rescorer.due() == []
    counts = rescorer.counts
    assert (counts.measured, counts.checked, counts.read_tokens, counts.not_chosen) == (3, 3, 0, 0)
    assert rescorer.statistics.table(rescorer.estimator).overall.mean == pytest.approx(0.75)
    assert rescorer.estimator == "exact"


@pytest.mark.parametrize("kinds", ["cu", "uc", "c u", "u c"])
def test_checked_and_unchecked_rollouts_make_no_common_tail_until_a_change_of_schedule_drops_them(kinds: str) -> None:
    """A space is a measurement in between."""
    one, dense = rollout(), TokenScores(rollout().sparse_logp, rollout().top_k)
    rescorer = Rescorer(RescoringSettings())
    for number, kind in enumerate(kinds):
        if kind == " ":
            for held in rescorer.due():
                rescorer.fold(held, dense)
        else:
            acceptance = torch.ones(4) if kind == "c" else None
            rescorer.hold(replace(one, acceptance=acceptance), str(number), number, rescorer.in_force)
    for _ in range(2):
        with pytest.raises(UserError, match=r"(?s)make no common tail.*change_schedule\(\)"):
            rescorer.due()
    rescorer.change_schedule()
    assert rescorer.due() == []
    rescorer.hold(one, "after", 9, rescorer.in_force)
    (held,) = rescorer.due()
    rescorer.fold(held, dense)
    counts = rescorer.take()[1]
    assert (counts.held, counts.schedule_changed, counts.measured, counts.checked) == (3, 2, 1, 0)


def test_rollouts_stay_held_where_they_cannot_be_read_again() -> None:
    rescorer = Rescorer(RescoringSettings(temperature=0.5))
    rescorer.hold(rollout(), "0", 0, InForce())
    for _ in range(2):
        with pytest.raises(UserError, match="temperature"):
            asyncio.run(measure_async(rescorer, None, 10**6, 100))  # type: ignore[arg-type]
    assert len(rescorer.due()) == 1


def test_an_engine_with_checks_returns_their_scores_and_refuses_rollouts_without() -> None:
    checked = replace(rollout(), dense=TokenScores(rollout().sparse_logp))
    assert already_scored([checked]) == [checked.dense]
    with pytest.raises(UserError, match="1 of 2 rollouts were sampled without checks"):
        already_scored([checked, rollout()])


def test_lists_lose_the_prompt_and_the_token_that_they_hold_twice() -> None:
    one = rollout(prompt_tokens=3, tokens=4)
    ids = [*one.prompt_ids, *one.response_ids]
    logp_NV = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    scores = scores_of(flat(logp_NV, ids, 5), one, 7, top_k=5, vocabulary=VOCABULARY)
    expected = logp_NV[2:].topk(5)
    assert scores.top_k is not None
    assert torch.equal(scores.top_k.ids, expected.indices)
    torch.testing.assert_close(scores.top_k.logp, expected.values)
    torch.testing.assert_close(scores.logp, logp_NV[2:].gather(-1, torch.tensor(one.response_ids)[:, None])[:, 0])
    cut = scores_of(flat(logp_NV[:5], ids[:6], 5), one, 6, top_k=5, vocabulary=VOCABULARY)
    torch.testing.assert_close(cut.logp, scores.logp[:3])


def test_whole_lists_give_every_temperature_and_shorter_ones_are_refused() -> None:
    one = rollout()
    ids = [*one.prompt_ids, *one.response_ids]
    logits_NV = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    lists = flat(logits_NV.log_softmax(-1), ids, VOCABULARY)
    scores = scores_of(lists, one, 7, temperature=0.6, top_k=VOCABULARY, vocabulary=VOCABULARY)
    warm = (logits_NV[2:] / 0.6).log_softmax(-1)
    torch.testing.assert_close(scores.logp, warm.gather(-1, torch.tensor(one.response_ids)[:, None])[:, 0])
    check_sampling(0.6, 1.0, VOCABULARY, VOCABULARY)
    check_sampling(0.0, 1.0, 2, VOCABULARY)
    for temperature, top_p, what in ((0.6, 1.0, "temperature 0.6"), (1.0, 0.9, "top_p 0.9")):
        with pytest.raises(UserError, match=what):
            check_sampling(temperature, top_p, VOCABULARY - 1, VOCABULARY)


def test_an_aborted_reading_is_counted_and_what_fails_stays_held_once_the_others_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rescoring, "request_of", lambda rollout, top_k, limit: ([*rollout.prompt_ids, *rollout.response_ids], None)
    )
    rescorer = Rescorer(RescoringSettings(top_k=VOCABULARY))
    for name in ("aborted", "fails", "read"):
        rescorer.hold(rollout(), name, 0, InForce())
    dies = {"fails-dense"}

    async def generate(prompt: dict[str, Any], sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        if request_id in dies:
            raise RuntimeError("the engine is dead")
        await asyncio.sleep(0)
        ids = prompt["prompt_token_ids"]
        aborted = request_id == "aborted-dense"
        logp_NV = torch.zeros(len(ids) - 1, VOCABULARY).log_softmax(-1)
        completion = SimpleNamespace(finish_reason="abort" if aborted else "length")
        yield SimpleNamespace(outputs=[completion], prompt_logprobs=None if aborted else flat(logp_NV, ids, VOCABULARY))

    with pytest.raises(RuntimeError, match="the engine is dead"):
        asyncio.run(measure_async(rescorer, generate, VOCABULARY, 100))
    counts = rescorer.take()[1]
    assert (counts.held, counts.measured, counts.aborted, counts.read_tokens) == (2, 1, 1, 7)
    dies.clear()
    asyncio.run(measure_async(rescorer, generate, VOCABULARY, 100))
    counts = rescorer.take()[1]
    assert (counts.held, counts.measured, counts.aborted, counts.read_tokens) == (1, 1, 0, 7)


def test_rollouts_that_an_engine_refuses_to_read_stay_held() -> None:
    class Refuses:
        weight_version = 0

        def dense_scores(self, rollouts: Sequence[Rollout], *, temperature: float, top_k: int) -> list[TokenScores]:
            raise UserError("not at this temperature")

    class Reads(Refuses):
        def dense_scores(self, rollouts: Sequence[Rollout], *, temperature: float, top_k: int) -> list[TokenScores]:
            return [TokenScores(each.sparse_logp, each.top_k) for each in rollouts]

    rescorer = Rescorer(RescoringSettings(top_k=VOCABULARY))
    for name in ("one", "two"):
        rescorer.hold(rollout(), name, 0, InForce())
    with pytest.raises(UserError, match="not at this temperature"):
        measure(rescorer, Refuses())
    measure(rescorer, Reads())
    counts = rescorer.take()[1]
    assert (counts.held, counts.measured) == (2, 2)


def test_replicas_add_up_and_the_slowest_counts() -> None:
    total = RescoringCounts(held=4, measured=2, seconds=1.0)
    total.add(RescoringCounts(held=3, measured=3, aborted=1, seconds=3.0))
    assert total == RescoringCounts(held=7, measured=5, aborted=1, seconds=3.0)
    report = total.report(step_seconds=60.0)
    assert report["rescoring/share_of_step"] == pytest.approx(0.05) and report["rescoring/measured"] == 5.0
    assert "rescoring/share_of_step" not in total.report()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "exact"}, "cannot estimate 'exact'"),
        ({"top_k": 0}, "top_k must be a whole number"),
        ({"probe_rollouts": 0}, "probe_rollouts must be 1 or more"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RescoringSettings(**settings)
