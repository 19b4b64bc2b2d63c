"""Routes of `vllm serve` for a trainer that compares lists of log-probabilities: sample with lists, and read rollouts again
with the lists of the dense policy. Token ids go in, and numbers come out as bytes. A third one says how many engines there
are.

vLLM's own answers are text: an object, a decoded token and 70 characters for every entry of every list, made by a server's
only Python thread and read by another one. Here the numbers stay in flat lists, and an entry takes 8 bytes.

`sparroll serve-args` names `ListsRoutes` as a middleware, so that it is in the server's process and sees its engine. Like
vLLM's own routes for trainers, these are there in development mode alone (VLLM_SERVER_DEV_MODE=1).
"""

# T response tokens, K top-k entries

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from sparroll.engines.vllm import outputs, rescoring
from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT, DENSE_REQUEST
from sparroll.types import Rollout, TokenScores, TopK

MIDDLEWARE = "sparroll.engines.vllm.lists_route.ListsRoutes"
SCORES_PATH = "/sparroll/dense_scores"
SAMPLES_PATH = "/sparroll/samples"
ENGINES_PATH = "/sparroll/engines"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Prompts = Sequence[list[int]]

_PromptIds = Annotated[list[int], Field(min_length=1)]
_TopK = Annotated[int, Field(ge=1)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _ScoresAsked(_Asked):
    """What `scores_request` makes."""

    rollouts: list[tuple[_PromptIds, list[int]]]
    temperature: float
    top_k: _TopK


class _SamplesAsked(_Asked):
    """What `samples_request` makes."""

    prompts: list[_PromptIds]
    n: int
    top_k: _TopK
    dense: bool
    sampling: dict[str, Any]


class ListsRoutes:
    """ASGI middleware: answers these paths, and hands everything else on."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: dict[str, tuple[type[_Asked], Callable[..., Awaitable[bytes]]]] = {
            SCORES_PATH: (_ScoresAsked, _read),
            SAMPLES_PATH: (_SamplesAsked, _sampled),
            ENGINES_PATH: (_Asked, _engines),
        }
        if scope["type"] != "http" or scope["path"] not in answers or not _in_development_mode():
            await self._app(scope, receive, send)
            return
        kind, answer = answers[scope["path"]]
        try:
            asked = _parsed(kind, await _body(receive))
            body = await answer(scope["app"].state.engine_client, **dict(asked))
        except ValueError as error:
            # Of vLLM, too, for example where its max_logprobs is smaller than the lists. Where it raises an error of its
            # own instead, its server answers.
            await _answer(send, 400, str(error).encode())
            return
        await _answer(send, 200, body)


async def _engines(engine: Any) -> bytes:
    """How many engines share the server's requests. Workers do not know: those of a dense model believe to be alone."""
    return str(engine.vllm_config.parallel_config.data_parallel_size).encode()


# -- reading again -------------------------------------------------------------------------------------------------------


def scores_request(rollouts: Sequence[Rollout], *, temperature: float, top_k: int) -> dict[str, Any]:
    """What SCORES_PATH is asked, as plain data. Of a rollout that fills the server's context the last token gets no
    score."""
    ids = [[each.prompt_ids, each.response_ids] for each in rollouts]
    return {"rollouts": ids, "temperature": temperature, "top_k": top_k}


async def _read(engine: Any, rollouts: Sequence[Prompts], temperature: float, top_k: int) -> bytes:
    vocabulary, limit = engine.model_config.get_vocab_size(), engine.model_config.max_model_len
    rescoring.check_sampling(temperature, 1.0, top_k, vocabulary)

    async def one(prompt_ids: list[int], response_ids: list[int]) -> TokenScores:
        rollout = Rollout(prompt_ids, response_ids, torch.zeros(len(response_ids)), "stop")
        ids, parameters = rescoring.request_of(rollout, top_k, limit)
        said = (await _finished(engine, {"prompt_token_ids": ids}, parameters)).prompt_logprobs
        return rescoring.scores_of(said, rollout, len(ids), temperature=temperature, top_k=top_k, vocabulary=vocabulary)

    return packed_scores(await asyncio.gather(*(one(*each) for each in rollouts)))


def packed_scores(scores: Sequence[TokenScores]) -> bytes:
    """A safetensors file."""
    return _packed([_lists(each.logp, each.top_k) for each in scores])


def scores_of(answer: bytes) -> list[TokenScores]:
    return [TokenScores(*_unlisted(row)) for row in _unpacked(answer)]


# -- sampling ------------------------------------------------------------------------------------------------------------


def samples_request(
    prompts: Prompts, n: int, *, top_k: int, dense: bool, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """What SAMPLES_PATH is asked, as plain data. dense: decode densely under the schedule.  sampling: fields of vLLM's
    SamplingParams."""
    return {"prompts": list(prompts), "n": n, "top_k": top_k, "dense": dense, "sampling": dict(sampling)}


async def _sampled(engine: Any, prompts: Prompts, n: int, top_k: int, dense: bool, sampling: dict[str, Any]) -> bytes:
    parameters = _sampling_parameters(n, top_k, dense, sampling)
    salt = {"cache_salt": CACHE_SALT} if dense else {}
    finished = await asyncio.gather(
        *(_finished(engine, {"prompt_token_ids": ids} | salt, parameters.clone()) for ids in prompts)
    )
    rows = []
    for sample in (each for output in finished for each in output.outputs):
        tokens = list(sample.token_ids)
        lists = _lists(*outputs.log_probs(sample.logprobs, tokens, top_k))
        rows.append(lists | {"tokens": torch.tensor(tokens, dtype=torch.int32)})
    return _packed(rows)


def _sampling_parameters(n: int, top_k: int, dense: bool, sampling: dict[str, Any]) -> Any:
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    try:
        return SamplingParams(
            **sampling,
            n=n,
            logprobs=top_k,
            flat_logprobs=True,
            detokenize=bool(sampling.get("stop")),
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={DENSE_REQUEST: True} if dense else None,
        )
    except TypeError as error:
        # A field that it does not have, that is set here, or whose value is of another kind.
        raise ValueError(f"sampling: {error}") from None


def samples_of(answer: bytes, prompts: Prompts, n: int) -> list[Rollout]:
    """The n samples of each prompt, prompt by prompt. Why a response ended is not said."""
    rows = _unpacked(answer)
    assert len(rows) == n * len(prompts), f"{len(rows)} samples of {len(prompts)} prompts, {n} of each"
    found = []
    for number, row in enumerate(rows):
        logp_T, lists = _unlisted(row)
        found.append(Rollout(list(prompts[number // n]), row["tokens"].tolist(), logp_T, "stop", top_k=lists))
    return found


# -- both ----------------------------------------------------------------------------------------------------------------


def _parsed(kind: type[_Asked], body: bytes) -> _Asked:
    """The request in a body. Raises ValueError for anything else, with the first thing that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise ValueError(f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


async def _finished(engine: Any, prompt: dict[str, Any], parameters: Any) -> Any:
    """The last output of a request to vLLM's AsyncLLM."""
    last = None
    async for output in engine.generate(
        prompt=prompt, sampling_params=parameters, request_id=f"sparroll-{uuid.uuid4().hex}"
    ):
        last = output
    if last is None or any(each.finish_reason == "abort" for each in last.outputs):
        raise ValueError("the request was aborted")
    return last


def _lists(logp_T: Tensor, top_k: TopK | None) -> dict[str, Tensor]:
    assert top_k is not None, "log-probabilities without lists"
    # A token's id needs 4 bytes.
    return {"logp": logp_T, "ids": top_k.ids.int(), "top_logp": top_k.logp}


def _unlisted(row: Mapping[str, Tensor]) -> tuple[Tensor, TopK]:
    return row["logp"], TopK(row["ids"].long(), row["top_logp"])


def _packed(rows: Sequence[Mapping[str, Tensor]]) -> bytes:
    tensors = {f"{number}/{name}": part.contiguous() for number, row in enumerate(rows) for name, part in row.items()}
    return bytes(save(tensors))


def _unpacked(data: bytes) -> list[dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}
    for place, tensor in load(data).items():
        number, _, name = place.partition("/")
        found.setdefault(int(number), {})[name] = tensor
    return [found[number] for number in sorted(found)]


def _in_development_mode() -> bool:
    from vllm import envs

    return bool(envs.VLLM_SERVER_DEV_MODE)


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _answer(send: Send, status: int, body: bytes) -> None:
    kind = b"application/octet-stream" if status == 200 else b"text/plain; charset=utf-8"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
