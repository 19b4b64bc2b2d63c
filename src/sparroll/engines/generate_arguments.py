"""Checks the arguments of `generate` and of scores before anything runs, so that a mistake is the same error in every
engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sparroll.engines import sampling
from sparroll.engines.base import Engine, samples_densely
from sparroll.engines.prompt_encoder import text_ids
from sparroll.errors import UserError
from sparroll.schedule import MOST_TOKENS, Schedule, check_is_schedule
from sparroll.types import LEAST_TEMPERATURE, MOST_SAMPLES, is_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = Sequence[str] | Sequence[Sequence[int]]


MOST_REQUESTS = 1 << 22
"""Responses that one call may ask for. All of them are in memory before the first one is sampled."""


def check_counts(n: int, max_new_tokens: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
    """Raise UserError for numbers that are out of range, and for what is no number."""
    for name, value in (("n", n), ("max_new_tokens", max_new_tokens)):
        if not is_whole(value):
            raise UserError(f"{name} must be a whole number, got {value!r}")
    check_distribution(temperature, top_k, top_p)
    if n > MOST_SAMPLES:
        raise UserError(f"at most {MOST_SAMPLES:,} responses per prompt are possible, got {n:,}")
    if max_new_tokens > MOST_TOKENS:
        raise UserError(f"max_new_tokens must be at most {MOST_TOKENS:,}, got {max_new_tokens:,}")
    if n < 1 or max_new_tokens < 1:
        raise UserError(f"n and max_new_tokens must be at least 1; got n={n}, max_new_tokens={max_new_tokens}")


def check_distribution(temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
    """Raise UserError for what no distribution can be, and for a list of most likely tokens that cannot be made."""
    if not is_whole(top_k):
        raise UserError(f"top_k must be a whole number, got {top_k!r}")
    if top_k < 0:
        raise UserError(f"top_k must not be negative, got {top_k}", "0 lists no tokens")
    for name, real in (("temperature", temperature), ("top_p", top_p)):
        if not _is_number(real):
            raise UserError(f"{name} must be a number, got {real!r}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {top_p}", "1 draws from the whole distribution")
    check_temperature(temperature)
    if top_p < 1 and temperature == 0:
        raise UserError(
            f"top_p = {top_p} does nothing at temperature 0, which takes the most likely token", "leave top_p out"
        )


def check_temperature(temperature: float) -> None:
    """Raise UserError for temperatures that cannot be sampled at."""
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < math.inf:
        raise UserError(
            f"the temperature must be 0 or from {LEAST_TEMPERATURE:g} up, and finite, got {temperature}",
            "1 samples from the model as it is, 0 is greedy",
        )


def _is_number(value: object) -> bool:
    return type(value) is not bool and isinstance(value, Real)


def prompt_ids(engine: Engine, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
    """Token ids of each prompt. Raises UserError for empty prompts, for unknown token ids, and for prompts that leave
    no room for `max_new_tokens`."""
    vocabulary, context_limit = engine.vocabulary, engine.context_limit
    if isinstance(prompts, (str, bytes)):
        raise UserError("prompts must be a list", "pass [prompt] for a single one")
    if not hasattr(prompts, "__len__"):
        raise UserError(f"prompts must be a list, got {type(prompts).__name__}", "pass list(prompts)")
    if not len(prompts):
        raise UserError("there are no prompts", "give at least one")
    all_ids: list[list[int]] = []
    given: Sequence[str | Sequence[int]] = prompts
    for number, prompt in enumerate(given):
        if isinstance(prompt, str):
            if engine.tokenizer is None:
                raise UserError("string prompts need a tokenizer", "pass tokenizer=, or prompts as token ids")
            ids = text_ids(engine.tokenizer, prompt, f"prompt {number}")
        elif isinstance(prompt, bytes):
            # Python takes them for numbers.
            raise UserError(
                f"prompt {number} must be a text or token ids, got {prompt!r}"[:200], "decode() it to a text"
            )
        else:
            ids = whole_numbers(prompt, f"prompt {number}", "give a text, or token ids")
        if not ids:
            raise UserError(f"prompt {number} is empty")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise UserError(f"prompt {number} has token ids outside 0..{vocabulary - 1}")
        if context_limit and len(ids) >= context_limit:
            raise UserError(f"prompt {number} has {len(ids)} tokens, the model's context holds {context_limit}")
        if context_limit and len(ids) + max_new_tokens > context_limit:
            raise UserError(
                f"prompt {number} ({len(ids)} tokens) + {max_new_tokens} new ones exceed the context of {context_limit}",
                f"set max_new_tokens to at most {context_limit - len(ids)}",
            )
        all_ids.append(ids)
    return all_ids


def seeds(seed: int | Sequence[int], prompts: int, n: int) -> list[int]:
    """One seed per request, prompt by prompt. From a single `seed`, each request's seed is derived. Raises UserError
    for more requests than memory could hold."""
    if prompts * n > MOST_REQUESTS:
        raise UserError(
            f"{prompts:,} prompts with {n:,} responses each are more than {MOST_REQUESTS:,} responses",
            "ask for fewer at a time",
        )
    if is_whole(seed):
        one = index(cast("int", seed))
        return [sampling.request_seed(one, prompt, sample) for prompt in range(prompts) for sample in range(n)]
    given = cast("Sequence[int]", seed)
    if type(seed) in (str, bool, float) or not hasattr(seed, "__len__") or getattr(seed, "ndim", 1) == 0:
        raise UserError(f"seed must be a whole number or a list of them, got {seed!r}")
    if len(given) != prompts * n:
        raise UserError(f"a list of seeds needs one per request, {prompts * n} in all, got {len(given)}")
    whole = whole_numbers(given, "seed", "give one whole number, or one for each request")
    for each in whole:
        if not 0 <= each < 2**63:
            raise UserError(f"the seed of a request must be from 0 to 2^63 - 1, got {each}")
    return whole


def dense_flags(engine: Engine, dense: Sequence[bool] | None, requests: int) -> list[bool]:
    """Which requests the engine decodes densely although it has a schedule or a compression, prompt by prompt. Without
    either none is apart from the others, so all flags are False then. Raises UserError for anything but one truth value
    for each request."""
    if dense is None:
        return [False] * requests
    if isinstance(dense, (str, bytes)) or not hasattr(dense, "__len__"):
        raise UserError(f"dense must be a list of True and False, got {dense!r}", "leave it out for none")
    if len(dense) != requests:
        raise UserError(
            f"dense needs one flag per request, {requests} in all, got {len(dense)}",
            "n flags for each prompt, prompt by prompt, as in a list of seeds",
        )
    for flag in dense:
        if not isinstance(flag, (bool, np.bool_)):
            raise UserError(f"dense must hold True and False, got {flag!r}")
    return [False] * requests if samples_densely(engine) else [bool(flag) for flag in dense]


def schedules_read(
    engine: Engine, schedules: Sequence[Schedule] | None, flags: Sequence[bool]
) -> list[Schedule | None]:
    """The schedule that each request reads by, prompt by prompt, one object for all that are equal; None for those that
    read everything. flags: which are dense. Raises UserError for anything but one schedule for each request that fits the
    engine's."""
    if schedules is None:
        return [None if flag else engine.schedule for flag in flags]
    if not isinstance(schedules, (list, tuple)):
        raise UserError(
            f"schedules must be a list of schedules, got {schedules!r}", "leave it out for the engine's own"
        )
    if len(schedules) != len(flags):
        raise UserError(
            f"schedules needs one per request, {len(flags)} in all, got {len(schedules)}",
            "n schedules for each prompt, prompt by prompt, as in a list of seeds",
        )
    if engine.schedule is None:
        raise UserError(
            "requests have schedules of their own only beside one of the engine", "set_schedule one of them first"
        )
    distinct: list[Schedule] = []
    alike: dict[int, Schedule] = {}
    for each in {id(each): each for each in schedules}.values():
        check_is_schedule(each)
        alike[id(each)] = next((known for known in distinct if known == each), each)
        if alike[id(each)] is each:
            distinct.append(each)
    if 1 < engine.most_schedules < len(distinct):
        raise UserError(
            f"requests of one call have at most {engine.most_schedules} schedules of their own, got {len(distinct)}",
            "ask for the others in a generate of their own",
        )
    for each in distinct:
        if each.kind != engine.schedule.kind:
            raise UserError(
                f"the schedule {each.name!r} of a request has another selector, other dense layers or another check than "
                f"the engine's, {engine.schedule.name!r}",
                "set_schedule one of the same kind first, and ask for the others in a generate of their own",
            )
        engine.check_schedule(each)
    return [None if flag else alike[id(own)] for flag, own in zip(flags, schedules, strict=True)]


def whole_numbers(values: Iterable[Any], what: str, hint: str) -> list[int]:
    """The values as integers. Raises UserError for anything else, such as a float, which int() would cut."""
    try:
        return [index(value) for value in values]
    except TypeError:
        raise UserError(f"{what} must hold whole numbers, got {values!r}"[:200], hint) from None


def stop_ids(engine: Engine, given: Sequence[int]) -> list[int]:
    """The ids that end a response. Raises UserError for what is no token of the model."""
    whole = whole_numbers(given, "stop_ids", "give token ids")
    for each in whole:
        if not 0 <= each < engine.vocabulary:
            raise UserError(
                f"stop_ids must be from 0 to {engine.vocabulary - 1}, the model's last token id, got {each}",
                "leave it out: no response could end with it",
            )
    return whole


def end_ids(generation_config: Any, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> list[int]:
    """The model's end-of-sequence ids; the tokenizer's where the model names none. Those outside the vocabulary are left
    out, which generation_config.json has where it was made for a larger one. Raises UserError where none is left, because
    then no response would end."""
    stops = getattr(generation_config, "eos_token_id", None)
    if stops is None and tokenizer is not None:
        stops = tokenizer.eos_token_id
    if stops is None:
        return []
    ids = [stops] if isinstance(stops, int) else list(stops)
    whole = whole_numbers(ids, "eos_token_id", "mend generation_config.json in the model's folder")
    known = [each for each in whole if 0 <= each < vocabulary]
    if whole and not known:
        raise UserError(
            f"no response could end: the model's eos_token_id is {', '.join(map(str, whole))}, and its vocabulary has "
            f"{vocabulary:,} tokens",
            "mend generation_config.json in the model's folder",
        )
    return known
