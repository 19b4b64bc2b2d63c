"""The routes of a server on which lists travel as bytes, without a server: what goes in and out, and whose a request is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparroll.engines.vllm import lists_route, rescoring
from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT
from sparroll.engines.vllm.lists_route import (
    ENGINES_PATH,
    SAMPLES_PATH,
    SCORES_PATH,
    ListsRoutes,
    packed_scores,
    samples_of,
    samples_request,
    scores_of,
    scores_request,
)
from sparroll.types import Rollout, TokenScores, TopK

VOCABULARY, LIMIT, TOP_K = 11, 8, 3


def logp_of(ids: list[int]) -> torch.Tensor:
    """[N - 1, V] of a policy that all of the tokens decide."""
    return torch.randn(len(ids) - 1, VOCABULARY, generator=torch.Generator().manual_seed(sum(ids))).log_softmax(-1)


def flat(logp_TV: torch.Tensor, tokens: list[int], top_k: int) -> SimpleNamespace:
    """vLLM's flat lists: of each token, the token itself and then the most likely ones."""
    own, best = torch.tensor(tokens)[:, None], logp_TV.topk(top_k)
    return SimpleNamespace(
        token_ids=torch.cat([own, best.indices], 1).flatten().tolist(),
        logprobs=torch.cat([logp_TV.gather(-1, own), best.values], 1).flatten().tolist(),
    )


class Parameters(SimpleNamespace):
    def clone(self) -> Parameters:
        return Parameters(**vars(self))


class Engine:
    """Reads and samples as vLLM's AsyncLLM does, with lists of up to TOP_K. Sample number s of a prompt is its first token
    s + 1 times."""

    model_config = SimpleNamespace(max_model_len=LIMIT, get_vocab_size=lambda: VOCABULARY)

    def __init__(self, finish_reason: str = "stop") -> None:
        self.asked: dict[str, tuple[dict[str, Any], Parameters]] = {}
        self._finish_reason = finish_reason

    async def generate(
        self, prompt: dict[str, Any], sampling_params: Parameters, request_id: str
    ) -> AsyncIterator[SimpleNamespace]:
        self.asked[request_id] = prompt, sampling_params
        top_k = sampling_params.top_k
        if top_k > TOP_K:
            raise ValueError(f"Requested prompt logprobs of {top_k}, which is greater than {TOP_K}")
        await asyncio.sleep(0)
        ids = prompt["prompt_token_ids"]
        samples = []
        for number in range(sampling_params.n):
            tokens = [ids[0]] * (number + 1)
            logp_TV = logp_of([number, *tokens])
            samples.append(
                SimpleNamespace(
                    token_ids=tokens, logprobs=flat(logp_TV, tokens, top_k), finish_reason=self._finish_reason
                )
            )
        yield SimpleNamespace(outputs=samples, prompt_logprobs=flat(logp_of(ids), ids[1:], top_k))


@pytest.fixture
def in_development_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_route, "_in_development_mode", lambda: True)

    def request_of(rollout: Rollout, top_k: int, limit: int) -> tuple[list[int], Parameters]:
        return [*rollout.prompt_ids, *rollout.response_ids][: limit - 1], Parameters(top_k=top_k, n=1)

    monkeypatch.setattr(rescoring, "request_of", request_of)
    monkeypatch.setattr(
        lists_route,
        "_sampling_parameters",
        lambda n, top_k, dense, sampling: Parameters(n=n, top_k=top_k, dense=dense, sampling=sampling),
    )


def answered(path: str, asked: dict[str, Any] | bytes, engine: Engine | None = None) -> tuple[int, bytes]:
    """(status, body) of a server whose other routes say 404. The request comes in two pieces."""
    sent: list[dict[str, Any]] = []
    body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    pieces = [{"body": body[:10], "more_body": True}, {"body": body[10:]}]

    async def theirs(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404})
        await send({"type": "http.response.body", "body": b"not found"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"} | pieces.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
    asyncio.run(ListsRoutes(theirs)(scope, receive, send))
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)


def rollouts(*lengths: tuple[int, int]) -> list[Rollout]:
    made = []
    for seed, (prompt, response) in enumerate(lengths):
        ids = torch.randint(VOCABULARY, (prompt + response,), generator=torch.Generator().manual_seed(seed)).tolist()
        made.append(Rollout(ids[:prompt], ids[prompt:], torch.zeros(response), "stop"))
    return made


def test_scores_go_through_bytes_to_the_last_bit() -> None:
    scores = [
        TokenScores(torch.tensor([-0.5, -torch.inf]), TopK(torch.tensor([[7, 151_935]] * 2), torch.randn(2, 2))),
        TokenScores(torch.empty(0), TopK(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))),
    ]
    for found, expected in zip(scores_of(packed_scores(scores)), scores, strict=True):
        assert torch.equal(found.logp, expected.logp) and found.top_k is not None and expected.top_k is not None
        assert torch.equal(found.top_k.ids, expected.top_k.ids) and found.top_k.ids.dtype == torch.int64
        assert torch.equal(found.top_k.logp, expected.top_k.logp)
    assert scores_of(packed_scores([])) == []


def test_twelve_rollouts_come_back_in_their_order() -> None:
    scores = [
        TokenScores(torch.tensor([-float(number)]), TopK(torch.zeros(1, 1).long(), torch.zeros(1, 1)))
        for number in range(12)
    ]
    assert [float(each.logp) for each in scores_of(packed_scores(scores))] == [-float(number) for number in range(12)]


@pytest.mark.usefixtures("in_development_mode")
def test_each_rollout_is_read_whole_and_one_that_fills_the_context_without_its_last_token() -> None:
    engine, made = Engine(), rollouts((3, 2), (1, 4), (4, 4))
    status, body = answered(SCORES_PATH, scores_request(made, temperature=1.0, top_k=TOP_K), engine)
    assert status == 200 and len(engine.asked) == 3
    for one, scores, tokens in zip(made, scores_of(body), (2, 4, 3), strict=True):
        ids = [*one.prompt_ids, *one.response_ids][: LIMIT - 1]
        logp_TV = logp_of(ids)[len(one.prompt_ids) - 1 :]
        expected_T = logp_TV.gather(-1, torch.tensor(one.response_ids[:tokens])[:, None])[:, 0]
        torch.testing.assert_close(scores.logp, expected_T)
        assert scores.top_k is not None and torch.equal(scores.top_k.ids, logp_TV.topk(TOP_K).indices)


@pytest.mark.usefixtures("in_development_mode")
def test_a_server_says_how_many_engines_share_its_requests() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    assert answered(ENGINES_PATH, {}, SimpleNamespace(vllm_config=config)) == (200, b"2")  # type: ignore[arg-type]
    assert answered(ENGINES_PATH, {"more": 1})[0] == 400


@pytest.mark.usefixtures("in_development_mode")
@pytest.mark.parametrize("dense", [False, True])
def test_samples_come_prompt_by_prompt_with_their_lists(dense: bool) -> None:
    engine, prompts = Engine(), [[5, 6], [7]]
    asked = samples_request(prompts, 3, top_k=TOP_K, dense=dense, sampling={"max_tokens": 9})
    status, body = answered(SAMPLES_PATH, asked, engine)
    found = samples_of(body, prompts, 3)
    assert status == 200 and [each.prompt_ids for each in found] == [[5, 6]] * 3 + [[7]] * 3
    assert [each.response_ids for each in found] == [[5], [5] * 2, [5] * 3, [7], [7] * 2, [7] * 3]
    for number, one in enumerate(found):
        logp_TV = logp_of([number % 3, *one.response_ids])
        torch.testing.assert_close(one.sparse_logp, logp_TV[:, one.response_ids[0]])
        assert one.top_k is not None and torch.equal(one.top_k.logp, logp_TV.topk(TOP_K).values)
    for prompt, parameters in engine.asked.values():
        # Dense and sparse requests must not share K and V.
        assert prompt.get("cache_salt") == (CACHE_SALT if dense else None)
        assert parameters.dense == dense and parameters.sampling == {"max_tokens": 9}


@pytest.mark.usefixtures("in_development_mode")
def test_what_the_engine_refuses_is_answered_with_its_reason() -> None:
    made = rollouts((3, 2))
    long_lists = scores_request(made, temperature=1.0, top_k=TOP_K + 1)
    assert answered(SCORES_PATH, long_lists, Engine()) == (
        400,
        b"Requested prompt logprobs of 4, which is greater than 3",
    )
    status, said = answered(SCORES_PATH, scores_request(made, temperature=0.7, top_k=TOP_K), Engine())
    assert status == 400 and b"log-probabilities at temperature 1" in said
    aborted = answered(SCORES_PATH, scores_request(made, temperature=1.0, top_k=TOP_K), Engine("abort"))
    assert aborted == (400, b"the request was aborted")
    assert answered(SCORES_PATH, b"not a request", Engine())[0] == 400


SAMPLES = samples_request([[5]], 1, top_k=TOP_K, dense=False, sampling={})


@pytest.mark.usefixtures("in_development_mode")
@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        (SCORES_PATH, {}, b"rollouts: field required"),
        (SCORES_PATH, [], b"the request: input should be an object"),
        (SCORES_PATH, {"rollouts": [[[5]]], "temperature": 1, "top_k": 3}, b"rollouts.0.1: field required"),
        (
            SCORES_PATH,
            {"rollouts": [[[], [5]]], "temperature": 1, "top_k": 3},
            b"rollouts.0.0: list should have at least 1",
        ),
        (
            SCORES_PATH,
            {"rollouts": [[[5], ["a"]]], "temperature": 1, "top_k": 3},
            b"rollouts.0.1.0: input should be a valid",
        ),
        (
            SCORES_PATH,
            {"rollouts": [], "temperature": 1, "top_k": 0},
            b"top_k: input should be greater than or equal to 1",
        ),
        (SAMPLES_PATH, {}, b"prompts: field required"),
        (SAMPLES_PATH, [SAMPLES], b"the request: input should be an object"),
        (SAMPLES_PATH, SAMPLES | {"extra": 1}, b"extra: extra inputs are not permitted"),
        (SAMPLES_PATH, SAMPLES | {"dense": 1}, b"dense: input should be a valid boolean"),
        (SAMPLES_PATH, SAMPLES | {"sampling": 3}, b"sampling: input should be an object"),
    ],
)
def test_malformed_requests_are_answered_with_what_is_wrong(path: str, asked: Any, said: bytes) -> None:
    engine = Engine()
    status, body = answered(path, asked, engine)
    assert status == 400 and body.startswith(said) and not engine.asked


@pytest.mark.usefixtures("in_development_mode")
def test_other_paths_are_the_servers_own() -> None:
    assert answered("/v1/completions", {}) == (404, b"not found")


@pytest.mark.parametrize("path", [SCORES_PATH, SAMPLES_PATH])
def test_outside_of_development_mode_there_are_no_such_routes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_route, "_in_development_mode", lambda: False)
    assert answered(path, {}) == (404, b"not found")
