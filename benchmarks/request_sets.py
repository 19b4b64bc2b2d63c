"""The request sets of the rollout benchmarks: how long responses are, at which moments of a run steps are measured, and what
those moments say about the whole run. Arithmetic alone; nothing here runs a model.

Prompts have 150 tokens. Response lengths are log-normal with median 18,000 and sigma 0.6, capped at 32,768, and drawn from
fixed seeds.

drained  60 requests start together and run to the last one, as in a synchronous RL step. Where the KV cache would not hold
         them all at some step, only so many run at a time as it always holds, and whoever ends is followed by the next.
steady   as many requests as fill 95 % of the KV cache on average; whoever ends is replaced by a fresh one, as in
         asynchronous RL. Moments at which the requests would not fit in the cache are passed over, since vLLM would not let
         them run together.
long     as many requests as fill 95 % of the KV cache, each of them 28K to 32K tokens into its response and evenly spread
         over that range: where long thinkers spend their last steps.
"""

# B requests in a batch, Q of a run

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

PROMPT_TOKENS = 150
LONGEST = 32_768
LONG_FROM = 28_672
DRAINED_REQUESTS = 60
SETS = ("drained", "steady", "long")
Windows = list[dict[str, Any]]
"""Moments of a run: the `step` at which each is, and the `contexts` of the requests then."""


def response_tokens(count: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(18_000), 0.6, count)
    return np.maximum(scale * np.minimum(drawn, LONGEST), 1).astype(int)


def slack_tokens(steps: int, repeats: int) -> int:
    """Room that each request of a moment needs beyond its context: what it decodes while it is measured, and the rest of
    its block."""
    return steps * repeats + 32 + 16


def drained_windows(
    windows: int,
    capacity_tokens: int | None = None,
    most_requests: int = DRAINED_REQUESTS,
    slack_tokens: int = 0,
    scale: float = 1.0,
) -> Windows:
    """Evenly spaced moments of the drained run, the first and the last among them. capacity_tokens: of a cache that must
    hold the requests of every step with `slack_tokens` more each; None for one that holds all."""
    length_Q = response_tokens(DRAINED_REQUESTS, scale=scale)
    begin_Q = _begin_steps(length_Q, _at_once(length_Q, capacity_tokens, most_requests, PROMPT_TOKENS + slack_tokens))
    end_Q = begin_Q + length_Q
    at = np.linspace(0, end_Q.max() - 1, windows).astype(int)
    return [
        {"step": int(t), "contexts": (PROMPT_TOKENS + t - begin_Q[(begin_Q <= t) & (t < end_Q)]).tolist()} for t in at
    ]


def _at_once(length_Q: np.ndarray, capacity_tokens: int | None, most_requests: int, beside_tokens: int) -> int:
    """How many requests run at a time, so that they fit at every step with `beside_tokens` each beside what they have
    decoded."""
    most = min(len(length_Q), most_requests)
    if capacity_tokens is None:
        return most
    for at_once in range(most, 0, -1):
        begin_Q = _begin_steps(length_Q, at_once)
        end_Q = begin_Q + length_Q
        # What is held grows from one end to the next.
        held = [(last + 1 - begin_Q + beside_tokens)[(begin_Q <= last) & (last < end_Q)].sum() for last in end_Q - 1]
        if max(held) <= capacity_tokens:
            return at_once
    raise SystemExit(f"a cache of {capacity_tokens} tokens does not hold the longest request of the drained set")


def _begin_steps(length_Q: np.ndarray, at_once: int) -> np.ndarray:
    """[Q] at which step each request begins if so many run at a time, in their order."""
    free_at = [0] * at_once

    def begin(length: int) -> int:
        step = heapq.heappop(free_at)
        heapq.heappush(free_at, step + length)
        return step

    return np.array([begin(int(length)) for length in length_Q])


def drained_steps(at_once: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """[T] requests and [T] tokens of their contexts together, at each step of the drained run."""
    length_Q = response_tokens(DRAINED_REQUESTS, scale=scale)
    begin_Q = _begin_steps(length_Q, at_once)
    requests_T, tokens_T = np.zeros((2, (begin_Q + length_Q).max()))
    for begin, length in zip(begin_Q, length_Q, strict=True):
        requests_T[begin : begin + length] += 1
        tokens_T[begin : begin + length] += PROMPT_TOKENS + np.arange(length)
    return requests_T, tokens_T


def steady_windows(
    windows: int, capacity_tokens: int, most_requests: int, slack_tokens: int = 0, scale: float = 1.0
) -> Windows:
    """Evenly spaced moments of a long run at constant concurrency, after everybody was replaced at least once, as far as
    the requests fit with `slack_tokens` more each."""
    drawn = iter(response_tokens(400_000, seed=1, scale=scale).tolist())
    lengths = response_tokens(100_000, seed=2, scale=scale).astype(float)
    in_progress = PROMPT_TOKENS + (lengths**2).mean() / (2 * lengths.mean())
    concurrent = min(int(0.95 * capacity_tokens / (in_progress + slack_tokens)), most_requests)
    length_B = np.array([next(drawn) for _ in range(concurrent)])
    age_B = np.zeros(concurrent, dtype=int)
    moments: Windows = []
    first, gap = int(2 * scale * LONGEST), max(int(5_003 * scale), 1)
    for step in range(first + 20 * gap * windows):
        if concurrent and step >= first and (step - first) % gap == 0:
            if (PROMPT_TOKENS + slack_tokens) * concurrent + age_B.sum() <= capacity_tokens:
                moments.append({"step": step, "contexts": (PROMPT_TOKENS + age_B).tolist()})
            if len(moments) == windows:
                return moments
        age_B += 1
        for ended in np.flatnonzero(age_B >= length_B):
            length_B[ended], age_B[ended] = next(drawn), 0
    raise SystemExit(f"a cache of {capacity_tokens} tokens holds {len(moments)} of {windows} steady moments")


def long_windows(
    windows: int, capacity_tokens: int, most_requests: int, slack_tokens: int = 0, scale: float = 1.0
) -> Windows:
    """Moments of the long set: from one to the next, the even spread over the range moves on by a share of its gap."""
    low, span = scale * LONG_FROM, scale * (LONGEST - LONG_FROM)
    mean = PROMPT_TOKENS + low + span / 2
    count = min(int(0.95 * capacity_tokens / (mean + slack_tokens)), most_requests)
    if not count:
        raise SystemExit(f"a cache of {capacity_tokens} tokens holds no request of the long set")
    return [
        {
            "step": number,
            "contexts": [
                PROMPT_TOKENS + int(low + span * (place + number / windows) / count) for place in range(count)
            ],
        }
        for number in range(windows)
    ]


def windows_of_sets(
    sets: list[str],
    windows: int,
    capacity_tokens: int,
    most_requests: int,
    slack_tokens: int,
    scale: float = 1.0,
) -> dict[str, Windows]:
    """So many moments of the drained set, and half as many (at least 4) of each other one, in so much cache."""
    fewer = max(4, windows // 2)
    filling = {"steady": steady_windows, "long": long_windows}
    return {
        name: drained_windows(windows, capacity_tokens, most_requests, slack_tokens, scale)
        if name == "drained"
        else filling[name](fewer, capacity_tokens, most_requests, slack_tokens, scale)
        for name in sets
    }


def coarse_first(count: int) -> list[int]:
    """The places 0..count - 1 in an order whose every beginning is spread over all of them: both ends, then the middles of
    the gaps.

    >>> coarse_first(5)
    [0, 4, 2, 1, 3]
    """
    order = list(dict.fromkeys((0, count - 1)))[:count]
    gaps = [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def measuring_order(windows: dict[str, Windows]) -> list[tuple[str, int]]:
    """(set, place) of all moments, the sets in turn and each one's coarsely first, so that what a cut run measured says
    something about every set."""
    orders = {name: coarse_first(len(rows)) for name, rows in windows.items()}
    longest = max(map(len, orders.values()), default=0)
    return [(name, order[turn]) for turn in range(longest) for name, order in orders.items() if turn < len(order)]


def run_seconds(
    windows: Windows, step_seconds: list[float], request_set: str, scale: float = 1.0
) -> tuple[float, float]:
    """(seconds, tokens) that the windows stand for: of the drained run, or of one step of another set.

    The drained run is interpolated linearly between its moments, the first and the last among them. Where requests follow
    each other, a line between two moments misses what begins and ends there. So four moments or more also say how a step's
    time grows with requests and tokens, by least squares, and what the line has of these beyond the run is taken off."""
    if request_set != "drained":
        return float(np.mean(step_seconds)), float(np.mean([len(w["contexts"]) for w in windows]))
    steps = [w["step"] for w in windows]
    every = np.arange(steps[-1] + 1)
    seconds = np.interp(every, steps, step_seconds).sum()
    if len(windows) > 3:
        at_moments = [[len(w["contexts"]) for w in windows], [sum(w["contexts"]) for w in windows]]
        grows = np.linalg.lstsq(np.stack([np.ones(len(windows)), *at_moments]).T, step_seconds, rcond=None)[0][1:]
        run = drained_steps(len(windows[0]["contexts"]), scale)
        for grown, exact_T, at in zip(grows, run, at_moments, strict=True):
            seconds += grown * (exact_T.sum() - np.interp(every, steps, at).sum())
    return float(seconds), float(response_tokens(DRAINED_REQUESTS, scale=scale).sum())
