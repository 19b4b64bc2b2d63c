"""The requests of a `generate`: what vLLM is asked for, and how they run to their end. vLLM is imported only where its own
parameters are made."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT, DENSE_REQUEST, OWN_CACHE_SALT
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule

Finished = tuple[Any, float, dict[str, Any] | None]
"""vLLM's output of a request, seconds until it was complete, and what the worker said of it: the checks of its drafts, or
what it read in short steps."""


def tokens_prompt(ids: list[int], salt: str | None = None) -> dict[str, Any]:
    """vLLM's TokensPrompt. salt: its K and V are shared with those of requests with the same salt alone."""
    return {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})


def cache_salt(schedule: Schedule | None, engines: Schedule | None) -> str | None:
    """Of a request that reads by this schedule (None: everything), in an engine with the other one in force. Where drafts
    are checked, all K and V are dense, and none needs one."""
    if schedule == engines or (engines is not None and engines.check is not None):
        return None
    if schedule is None:
        return CACHE_SALT
    said = json.dumps([schedule.selector.table(), schedule.dense_layers, schedule.plain_budgets()])
    return OWN_CACHE_SALT.format(hashlib.sha256(said.encode()).hexdigest()[:16])


def own_schedules(
    read_by: Sequence[Schedule | None], engines: Schedule | None, names: Sequence[str]
) -> tuple[list[Schedule], dict[str, int]]:
    """The schedules of requests that differ from the engine's, and by vLLM's name of each of these requests the number of
    its own, from 1 on. read_by: one object for all that are equal; None: everything is read."""
    own = [each for each in {id(each): each for each in read_by}.values() if each is not None and each != engines]
    places = {id(each): number for number, each in enumerate(own, 1)}
    return own, {name: places[id(each)] for name, each in zip(names, read_by, strict=True) if id(each) in places}


def parameters(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    stops: Sequence[int],
    seeds: Sequence[int],
    top_k: int,
    dense: Sequence[bool],
) -> list[Any]:
    """vLLM's SamplingParams of each request."""
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_new_tokens,
            seed=seed,
            # The model's own end ids are among the stops, or meant to be ignored.
            ignore_eos=True,
            stop_token_ids=sorted(set(stops)),
            logprobs=top_k,
            flat_logprobs=True,
            detokenize=False,
            extra_args={DENSE_REQUEST: True} if flag else None,
        )
        for seed, flag in zip(seeds, dense, strict=True)
    ]


def run(
    llm: Any,
    asked: Sequence[dict[str, Any]],
    parameters: Sequence[Any],
    take_said: Callable[[], dict[str, dict[str, Any]]],
    on_progress: OnProgress | None,
    on_names: Callable[[list[str]], None] | None = None,
) -> list[Finished]:
    """Run all requests to their end on this `vllm.LLM`. After an exception none is left running.

    take_said: what the worker said of the requests that have ended, by vLLM's names for them.  on_names: is told these
    names, in the requests' order, before the first of them runs.
    """
    engine = llm.llm_engine
    began = time.perf_counter()
    names = llm.enqueue(list(asked), list(parameters), use_tqdm=False)
    # vLLM may append to a request's name; the number in front is its own counter.
    places = {_number(name): place for place, name in enumerate(names)}
    finished: dict[int, tuple[Any, float]] = {}
    told: dict[int, dict[str, Any]] = {}
    try:
        if on_names is not None:
            on_names(names)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    place = places[_number(output.request_id)]
                    finished[place] = (output, time.perf_counter() - began)
                    if on_progress:
                        on_progress(len(finished), len(asked))
    except BaseException:
        engine.abort_request([name for name in names if places[_number(name)] not in finished], internal=True)
        raise
    finally:
        told = {places.get(_number(name), -1): said for name, said in take_said().items()}
    return [(*finished[place], told.get(place)) for place in range(len(asked))]


def _number(request_id: str) -> int:
    return int(request_id.partition("-")[0])
