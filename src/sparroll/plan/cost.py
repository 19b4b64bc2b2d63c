"""What decoding costs in effective FLOPs (eFLOPs; Kinetics, Sparrow): arithmetic plus cache reads times `intensity`.

Only formulas, in the symbols of the papers. speedup.py predicts seconds on a real device.

    P parameters    N samples    Lin prompt_tokens    Lout response_tokens    D kv_width    r gqa_ratio
    I intensity     B kv_budget_tokens                s unit_tokens

Lengths are treated as continuous, as the papers do: a sum over the response's positions becomes an integral from Lin to
Lin + Lout. Dense attention is the integral of `2 r N D x + 2 I D (shared prompt + N own tokens)`.
"""

from __future__ import annotations

import math
from typing import Literal

from sparroll.errors import UserError, nearest
from sparroll.schedule import Schedule
from sparroll.types import is_real

KINETICS_INTENSITY = 562.5
"""FLOPs that a B200 can do while it reads one element of the cache: 2.25e15 FLOP/s * 2 bytes / 8e12 bytes/s."""

Scoring = Literal["corrected", "published", "none"]
SCORINGS = ["corrected", "published", "none"]


def dense(
    *,
    parameters: float,
    prompt_tokens: float,
    response_tokens: float,
    kv_width: float,
    gqa_ratio: float,
    samples: float = 1,
    intensity: float = KINETICS_INTENSITY,
) -> float:
    """eFLOPs of `samples` responses to one prompt that read the whole cache at every step.

    kv_width: numbers per token in K (or in V), all layers together: layers * kv_heads * head_dim.
    gqa_ratio: query heads per KV head. All samples share one read of the prompt's cache.
    """
    _check(parameters, prompt_tokens, response_tokens, kv_width, gqa_ratio, samples, intensity)
    N, Lin, Lout, D = samples, prompt_tokens, response_tokens, kv_width
    arithmetic = _dense_arithmetic(parameters, prompt_tokens, response_tokens, kv_width, gqa_ratio, samples)
    return arithmetic + intensity * (2 * Lin * Lout * D + N * Lout**2 * D)


def sparse(
    *,
    parameters: float,
    prompt_tokens: float,
    response_tokens: float,
    kv_width: float,
    gqa_ratio: float,
    kv_budget_tokens: int | Schedule,
    samples: float = 1,
    unit_tokens: int | None = None,
    intensity: float = KINETICS_INTENSITY,
    scoring: Scoring = "corrected",
) -> float:
    """eFLOPs of the same responses when a step reads `kv_budget_tokens` of the cache, scoring included.

    kv_budget_tokens: an int takes the published closed form, which charges the budget at every position, even if the
    context is shorter. A Schedule is integrated exactly over the positions and never reads more than the context.
    unit_tokens: tokens per scored unit; by default those of the schedule's selector, or 16 for an int.
    scoring: "corrected" divides the prompt's terms by unit_tokens, too; "published" does not, as printed in the paper;
    "none" leaves scoring out. This model knows neither dense layers nor the width of the selector's index. Of layer
    groups with budgets of their own it takes the mean over layers.
    """
    _check(parameters, prompt_tokens, response_tokens, kv_width, gqa_ratio, samples, intensity)
    P, N, Lin, Lout, D, r = parameters, samples, prompt_tokens, response_tokens, kv_width, gqa_ratio
    if isinstance(kv_budget_tokens, Schedule):
        unit_tokens = kv_budget_tokens.selector.unit_tokens if unit_tokens is None else unit_tokens
        tokens_read = integrated_budget(kv_budget_tokens, Lin, Lin + Lout)
    else:
        if not is_real(kv_budget_tokens):
            raise UserError(
                f"kv_budget_tokens is a number of tokens or a Schedule, got {kv_budget_tokens!r}",
                "load a preset or a file: Schedule.load(...)",
            )
        if not kv_budget_tokens > 0:
            raise UserError(f"kv_budget_tokens must be positive, got {kv_budget_tokens}")
        unit_tokens = 16 if unit_tokens is None else unit_tokens
        tokens_read = kv_budget_tokens * Lout
    attention = 2 * (r + intensity) * N * D * tokens_read
    return 2 * N * P * Lout + attention + _scoring(N, Lin, Lout, D, r, intensity, unit_tokens, scoring)


def verified(
    *,
    parameters: float,
    prompt_tokens: float,
    response_tokens: float,
    kv_width: float,
    gqa_ratio: float,
    kv_budget_tokens: int | Schedule,
    window_tokens: float,
    drafted_per_kept: float | None = None,
    samples: float = 1,
    unit_tokens: int | None = None,
    intensity: float = KINETICS_INTENSITY,
    scoring: Scoring = "corrected",
) -> float:
    """eFLOPs of the same responses when the dense policy checks windows of `window_tokens` tokens.

    Each of the d = drafted_per_kept drafts behind a token costs a sparse step. A check does the arithmetic of dense
    attention for each of its window's w tokens, of which w - 1 are drafted, and reads the cache once for all of them:

        d * (sparse + (dense arithmetic * w + dense reads) / (w - 1))

    drafted_per_kept: default (w - 1) / w, which is when nothing is taken back. With windows of two this is then
    sparse / 2 + dense arithmetic + dense reads / 2. The larger the window, the nearer it is to sparse + `scoring_pass`
    without its prompt, and that pass is what a trainer leaves out.
    """
    if not window_tokens >= 2:
        raise UserError(f"window_tokens must be at least 2, got {window_tokens}")
    drafts_in_window = window_tokens - 1
    least = drafts_in_window / window_tokens
    if drafted_per_kept is None:
        drafted_per_kept = least
    if not drafted_per_kept >= least:
        raise UserError(
            f"drafted_per_kept must be at least {least:g} with windows of {window_tokens:g}, got {drafted_per_kept}"
        )
    about: dict[str, float] = {
        "parameters": parameters,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "kv_width": kv_width,
        "gqa_ratio": gqa_ratio,
        "samples": samples,
    }
    drafts = sparse(
        **about, kv_budget_tokens=kv_budget_tokens, unit_tokens=unit_tokens, intensity=intensity, scoring=scoring
    )
    arithmetic = _dense_arithmetic(**about)
    reads = dense(**about, intensity=intensity) - arithmetic
    return drafted_per_kept * (drafts + arithmetic / least + reads / drafts_in_window)


def scoring_pass(
    *,
    parameters: float,
    prompt_tokens: float,
    response_tokens: float,
    kv_width: float,
    gqa_ratio: float,
    samples: float = 1,
) -> float:
    """eFLOPs of the pass in which a trainer scores these responses densely: the arithmetic of each one's prompt and
    response. There is no cache to read. Where drafts are checked, the checks have scored them, and a trainer leaves the
    pass out."""
    about = {"parameters": parameters, "kv_width": kv_width, "gqa_ratio": gqa_ratio, "samples": samples}
    return _dense_arithmetic(prompt_tokens=0, response_tokens=prompt_tokens + response_tokens, **about)


def _dense_arithmetic(
    parameters: float,
    prompt_tokens: float,
    response_tokens: float,
    kv_width: float,
    gqa_ratio: float,
    samples: float,
) -> float:
    """2 P a token, and 2 r D for each token that it attends to."""
    attended = (2 * prompt_tokens + response_tokens) * response_tokens
    return 2 * parameters * samples * response_tokens + gqa_ratio * attended * samples * kv_width


def integrated_budget(schedule: Schedule, from_context_tokens: float, to_context_tokens: float) -> float:
    """Integral of min(budget(x), x) over context lengths x: the tokens read by a response that spans them, in a sparse
    layer; where groups of layers have budgets of their own, the mean over these layers.

    The sum of `Schedule.read_tokens` over whole lengths is smaller, by up to half a unit per step: here lengths are
    continuous, and the last unit is never incomplete.
    """
    if to_context_tokens < from_context_tokens:
        raise UserError(f"the span must not end before it starts, got {from_context_tokens} to {to_context_tokens}")
    if len(schedule.groups) > 1:
        sizes = [len(group) for group in schedule.layer_groups]
        each = [integrated_budget(group, from_context_tokens, to_context_tokens) for group in schedule.groups]
        return sum(size * read for size, read in zip(sizes, each, strict=True)) / sum(sizes)
    starts = [step.from_context_tokens for step in schedule.steps]
    total = 0.0
    for step, end in zip(schedule.steps, [*starts[1:], math.inf], strict=True):
        low = max(from_context_tokens, step.from_context_tokens)
        high = min(to_context_tokens, end)
        if low < high:
            total += _integral_of_minimum(step.budgets[0], low, high)
    return total


def _integral_of_minimum(budget: float, low: float, high: float) -> float:
    whole_until = min(max(budget, low), high)
    return (whole_until - low) * (whole_until + low) / 2 + budget * (high - whole_until)


def _scoring(
    N: float, Lin: float, Lout: float, D: float, r: float, intensity: float, s: int, scoring: Scoring
) -> float:
    if scoring not in SCORINGS:
        raise UserError(f"unknown scoring {scoring!r}", nearest(str(scoring), SCORINGS))
    if not s > 0:
        raise UserError(f"unit_tokens must be positive, got {s}")
    if scoring == "none":
        return 0.0
    prompt = 2 * N * Lin * D * Lout + 2 * intensity * Lin * D * Lout
    response = r * N * D * Lout**2 / (2 * s) + intensity * N * D * Lout**2 / (2 * s)
    return (prompt / s if scoring == "corrected" else prompt) + response


def _check(
    parameters: float,
    prompt_tokens: float,
    response_tokens: float,
    kv_width: float,
    gqa_ratio: float,
    samples: float,
    intensity: float,
) -> None:
    if not prompt_tokens >= 0 or not response_tokens >= 0:
        raise UserError(f"lengths must be 0 or more, got prompt {prompt_tokens} and response {response_tokens}")
    positive = {"parameters": parameters, "kv_width": kv_width, "gqa_ratio": gqa_ratio, "samples": samples}
    for name, value in {**positive, "intensity": intensity}.items():
        if not value > 0:
            raise UserError(f"{name} must be positive, got {value}")
