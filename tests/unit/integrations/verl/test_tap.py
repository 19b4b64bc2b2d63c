"""The tap keeps what training samples, gives verl back what it asked for, and drops what spans a change."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT, DENSE_REQUEST
from sparroll.engines.vllm.rescoring import InForce, RescoringSettings
from sparroll.engines.vllm.windows.packing import packed
from sparroll.integrations.verl.tap import VALIDATION, Tap
from sparroll.types import Checks

VOCABULARY = 4
LOGP = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]), 0)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of vLLM as is read by name."""
    vllm, logprobs = ModuleType("vllm"), ModuleType("vllm.logprobs")
    vllm.SamplingParams = lambda **named: SimpleNamespace(**{"stop": None, **named})  # type: ignore[attr-defined]
    logprobs.Logprob = lambda logprob, rank: SimpleNamespace(logprob=logprob)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.logprobs", logprobs)


def flat(tokens: list[int], top_k: int) -> Any:
    """Lists as vLLM gives them: the token, then the most likely ones; every position has the same distribution."""
    rows = [[token, *range(top_k)] for token in tokens]
    ids = [entry for row in rows for entry in row]
    return SimpleNamespace(token_ids=ids, logprobs=[float(LOGP[entry]) for entry in ids])


class Engine:
    """Answers each request with the same tokens, and reads prompts densely; the dense policy is the same."""

    def __init__(self, tokens: tuple[int, ...] = (0, 1, 2), finish: str = "length"):
        self.tokens, self.finish = list(tokens), finish
        self.asked: list[Any] = []
        self.prompts: list[Any] = []
        self.said: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(request_states={})

    async def generate(self, *, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        self.asked.append(sampling_params)
        self.prompts.append(prompt)
        again = getattr(sampling_params, "prompt_logprobs", None)
        again = None if again is None else min(again, VOCABULARY)
        if again is not None:
            ids = prompt["prompt_token_ids"]
            yield SimpleNamespace(
                finished=True, prompt_logprobs=flat(ids[1:], again), outputs=[SimpleNamespace(finish_reason="length")]
            )
            return
        sampled = SimpleNamespace(
            token_ids=self.tokens, logprobs=flat(self.tokens, sampling_params.logprobs), finish_reason=self.finish
        )
        yield SimpleNamespace(finished=True, outputs=[sampled])

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "sparroll_take_checked_packed"
        said, self.said = self.said, {}
        return [packed(said)]


def tap(engine: Engine, checks_drafts: bool = False) -> Tap:
    settings = RescoringSettings(top_k=20)
    return Tap(engine, settings, replica=0, vocabulary=VOCABULARY, context_limit=100, checks_drafts=checks_drafts)


def parameters(**named: Any) -> Any:
    plain = {"logprobs": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None}
    return SimpleNamespace(**{**plain, **named})


async def ask(tapped: Tap, prompt: list[int], name: str = "a", **named: Any) -> Any:
    request = tapped.generate({"prompt_token_ids": prompt}, parameters(**named), name)
    return [output async for output in request][-1]


def test_a_rollout_is_measured_and_verl_gets_the_log_probabilities_that_it_asked_for() -> None:
    tapped = tap(Engine())
    output = asyncio.run(ask(tapped, [3, 3]))
    (sampled,) = output.outputs
    assert [
        row[token].logprob for token, row in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ] == pytest.approx(LOGP[:3].tolist())
    asyncio.run(tapped.measure())
    state, counts, estimator, _ = tapped.take()
    assert (counts.held, counts.measured, counts.measured_tokens, estimator) == (1, 1, 3, "top_k_lower")
    assert state["overall"][0] == 1
    # The list is cut at the vocabulary.
    assert tapped._engine.asked[0].logprobs == VOCABULARY


def test_a_rollout_whose_context_holds_no_token_that_can_be_read_again_counts_without_one() -> None:
    tapped = tap(Engine(tokens=(0,)))
    asyncio.run(ask(tapped, [3] * 99))
    asyncio.run(tapped.measure())
    _, counts, *_ = tapped.take()
    assert (counts.held, counts.measured, counts.measured_tokens) == (1, 1, 0)


def test_validation_and_greedy_requests_pass_through_untouched() -> None:
    tapped = tap(Engine())
    asyncio.run(ask(tapped, [3], temperature=0.0))
    tapped.measures = False
    asyncio.run(ask(tapped, [3]))
    assert [asked.logprobs for asked in tapped._engine.asked] == [0, 0]
    assert tapped.take()[1].held == 0


@pytest.mark.parametrize("sampled", [{"top_p": 0.7}, {"top_k": 20}, {"extra_args": {VALIDATION: True}}])
def test_a_validation_beside_training_is_told_from_it(sampled: dict[str, Any]) -> None:
    tapped = tap(Engine())
    asyncio.run(ask(tapped, [3], **sampled))
    assert tapped._engine.asked[0].logprobs == 0 and tapped.take()[1].held == 0


def test_only_the_probe_and_some_to_spare_get_lists() -> None:
    tapped = tap(Engine())
    tapped.rescorer.settings = RescoringSettings(top_k=20, probe_rollouts=8)
    tapped.expected_rollouts = 200
    for place in range(200):
        output = asyncio.run(ask(tapped, [place >> shift & 3 for shift in (6, 4, 2, 0)]))
        assert output.outputs[0].logprobs[0][0].logprob == pytest.approx(float(LOGP[0]))
    listed = sum(asked.logprobs == VOCABULARY for asked in tapped._engine.asked)
    # 8 + 3 * 8 ** .5 + 3 = 19.5 are drawn on average, with a standard deviation of 4.2.
    assert 8 < listed < 36
    asyncio.run(tapped.measure())
    counts = tapped.take()[1]
    assert (counts.held, counts.measured, counts.not_chosen) == (200, 8, 192)


def test_a_step_that_is_measured_in_two_parts_has_one_probe() -> None:
    tapped = tap(Engine())
    tapped.rescorer.settings = RescoringSettings(top_k=20, probe_rollouts=3)
    for part in range(2):
        for place in range(2):
            asyncio.run(ask(tapped, [part, place]))
        asyncio.run(tapped.measure())
    counts = tapped.take()[1]
    assert (counts.held, counts.measured, counts.not_chosen) == (4, 3, 1)


def test_what_was_measured_under_another_schedule_is_not_shown_as_this_ones() -> None:
    tapped = tap(Engine())
    asyncio.run(ask(tapped, [3]))
    asyncio.run(ask(tapped, [2], **DENSE))
    asyncio.run(tapped.measure())
    tapped.change_schedule()
    asyncio.run(ask(tapped, [3, 3]))
    asyncio.run(tapped.measure())
    state, counts, *_ = tapped.take()
    assert (counts.held, counts.measured, counts.measured_tokens, counts.schedule_changed) == (2, 1, 3, 1)
    assert state["overall"][0] == 1 and tapped.take_control()[0] is None


def test_what_spans_a_change_is_dropped_and_counted() -> None:
    tapped = tap(Engine(tokens=(0, 1), finish="abort"))
    asyncio.run(ask(tapped, [3], "cut"))
    tapped._engine.finish = "length"
    asyncio.run(ask(tapped, [3, 3], "older weights"))
    tapped.rescorer.in_force = InForce(weight_version=1)
    asyncio.run(ask(tapped, [3, 1], "older schedule"))
    tapped.rescorer.in_force = InForce(weight_version=1, schedule_version=1)
    asyncio.run(ask(tapped, [3, 2], "newest"))
    asyncio.run(tapped.measure())
    counts = tapped.take()[1]
    assert (counts.held, counts.aborted, counts.weights_changed) == (4, 1, 1)
    assert (counts.schedule_changed, counts.measured) == (1, 1)


def test_what_is_sampled_after_an_abort_counts_by_itself_at_its_own_context() -> None:
    tapped = tap(Engine(tokens=(0, 1), finish="abort"))
    asyncio.run(ask(tapped, [3], "first part"))
    tapped.rescorer.in_force = InForce(weight_version=1)
    tapped._engine.finish = "stop"
    asyncio.run(ask(tapped, [3, 0, 1], "second part"))
    (held,) = tapped.rescorer.due()
    assert held.rollout.context_tokens.tolist() == [3, 4] and tapped.rescorer.counts.aborted == 1


def test_rollouts_that_go_on_after_an_abort_are_not_preferred_by_the_probe() -> None:
    """A probe takes one rollout of each prompt first, and what goes on has a longer prompt of its own."""
    tapped = tap(Engine(tokens=(0, 1)))
    for _ in range(2):
        asyncio.run(ask(tapped, [3]))
    assert len({held.prompt_id for held in tapped.rescorer.due()}) == 1
    tapped._engine.finish = "abort"
    asyncio.run(ask(tapped, [3], "cut"))
    tapped._engine.finish = "stop"
    tapped.rescorer.in_force = InForce(weight_version=1)
    for prompt in ([3], [3], [3, 0, 1]):
        asyncio.run(ask(tapped, prompt))
    now = [held.prompt_id for held in tapped.rescorer.due() if held.began.weight_version == 1]
    assert len(set(now)) == len(now) == 3


def test_samples_of_one_prompt_have_names_of_their_own_in_every_step() -> None:
    tapped = tap(Engine())
    names = []
    for version in (1, 2):
        tapped.rescorer.in_force = InForce(weight_version=version)
        for _ in range(2):
            asyncio.run(ask(tapped, [3]))
        names += [held.rollout_id for held in tapped.rescorer.due()]
        tapped.take()
    assert len(set(names)) == 4 and len({name.partition("#")[0] for name in names}) == 2


def test_checks_measure_at_a_temperature_at_which_nothing_could_be_read_again() -> None:
    engine, settings = Engine(), RescoringSettings(top_k=2, temperature=0.6)
    tapped = Tap(engine, settings, replica=0, vocabulary=VOCABULARY, context_limit=100, checks_drafts=True)
    asyncio.run(ask(tapped, [3], "a", temperature=0.6))
    engine.said = {"a-7f": said(3, 0.8)}
    asyncio.run(tapped.measure())
    assert tapped.take()[1].checked == 1


DENSE = {"extra_args": {DENSE_REQUEST: True}}


def test_a_dense_request_has_a_cache_of_its_own_and_shows_the_ceiling_and_not_the_tail() -> None:
    tapped = tap(Engine())
    asyncio.run(ask(tapped, [3, 3], "a", **DENSE))
    asyncio.run(ask(tapped, [3, 3], "b"))
    assert [prompt.get("cache_salt") for prompt in tapped._engine.prompts] == [CACHE_SALT, None]
    asyncio.run(tapped.measure())
    state, counts, *_ = tapped.take()
    assert (counts.held, counts.measured, state["overall"][0]) == (1, 1, 1)
    ceiling, spent = tapped.take_control()
    assert ceiling is not None and ceiling["overall"][0] == 1 and spent.read_tokens == 5
    counts.charge(spent)
    assert (counts.held, counts.measured, counts.read_tokens) == (1, 1, 10)
    assert tapped.take_control()[0] is None


def test_of_the_control_group_no_more_is_read_again_than_was_asked_for() -> None:
    tapped = tap(Engine())
    tapped.control.settings = RescoringSettings(top_k=20, probe_rollouts=2)
    for place in range(3):
        asyncio.run(ask(tapped, [3, place], **DENSE))
    asyncio.run(tapped.measure())
    assert tapped.take()[1].held == 0 and tapped.take_control()[1].measured == 2


def test_dense_drafts_are_trained_on_and_counted_but_are_no_sparse_tokens() -> None:
    engine = Engine()
    tapped = tap(engine, checks_drafts=True)
    tapped._keeps_dense_logp = True
    asyncio.run(ask(tapped, [3], "a", **DENSE))
    engine.said = {"a-7f": said(3, 1.0)}
    asyncio.run(tapped.measure())
    _, counts, _, checked = tapped.take()
    assert (counts.held, counts.measured, checked.tokens, checked.checks.windows) == (0, 0, 0, 1)
    assert len(tapped.take_responses()) == 1 and tapped.take_control()[0] is None


def test_what_the_checks_said_of_a_request_that_vllm_has_ended_waits_until_its_end_is_seen() -> None:
    engine = Engine()
    tapped = tap(engine, checks_drafts=True)

    async def asked_between() -> None:
        ended, seen = engine.generate, asyncio.Event()

        async def generate(**given: Any) -> AsyncIterator[Any]:
            async for output in ended(**given):
                # vLLM has forgotten the request, and whoever waits for it has not been woken up yet.
                await seen.wait()
                yield output

        engine.generate = generate  # type: ignore[method-assign]
        request = asyncio.create_task(ask(tapped, [3], "a"))
        await asyncio.sleep(0)
        engine.said = {"a-7f": said(3, 0.8), "b-7f": said(3, 0.8)}
        await tapped.measure()
        seen.set()
        await request
        await tapped.measure()

    asyncio.run(asked_between())
    counts = tapped.take()[1]
    assert (counts.held, counts.measured, counts.checked) == (1, 1, 1)
    # Nobody waits for the other one.
    assert not tapped._said and not tapped._unsaid


def said(tokens: int, acceptance: float) -> dict[str, Any]:
    return {
        "dense_logp": LOGP[:tokens].clone(),
        "draft_acceptance": torch.full((tokens,), acceptance - 0.1),
        "acceptance": torch.full((tokens,), acceptance),
        "dense_ids": None,
        "dense_top_logp": None,
        "dense_at_ids": None,
        "checks": Checks(windows=1),
        "check_read_tokens": 1,
        "draft_context_tokens": 1,
        "draft_unread_tokens": 1,
    }


def test_what_the_checks_said_in_several_parts_is_joined() -> None:
    engine = Engine()
    tapped = tap(engine, checks_drafts=True)
    engine.output_processor.request_states = {"a-7f": None}
    engine.said = {"a-7f": said(1, 0.8)}
    asyncio.run(tapped.measure())
    asyncio.run(ask(tapped, [3], "a"))
    assert engine.asked[0].logprobs == 0, "the checks need no lists"
    engine.output_processor.request_states = {}
    engine.said = {"a-7f": said(2, 0.8)}
    asyncio.run(tapped.measure())
    _, counts, estimator, checked = tapped.take()
    assert (counts.measured, counts.checked, counts.measured_tokens, estimator) == (1, 1, 3, "exact")
    assert (checked.tokens, checked.checks.windows) == (3, 2)
    assert checked.draft_acceptance == pytest.approx(3 * 0.7)
    assert len(engine.asked) == 1, "nothing was read again"
