"""A mix of lengths says which context lengths the decode steps of a batch have, as weighted points. Parsing and
averaging."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.stats import norm

from sparroll.errors import CHECK_PATH, UserError
from sparroll.schedule import MOST_TOKENS

_POINTS = 4096
"""How many equally likely points stand for a continuous distribution."""
_MOST_SIGMA = 10
"""With it, one rollout of a thousand would be longer than the median times 10^13."""
_FORMS = (
    'write 12000, "0-32768", "lognormal:18000,0.6,max=32768" (median, sigma, cut-off), a list, or a JSON file of one'
)

LengthsAre = Literal["contexts", "rollouts"]


@dataclass(frozen=True, eq=False)
class LengthMix:
    """Lengths in tokens and how often each occurs.

    >>> LengthMix.parse("0-32768").mean_tokens
    16384.0
    """

    text: str
    tokens: np.ndarray
    """[points] float64, rising."""
    weights: np.ndarray
    """[points] float64, sum 1."""

    @property
    def mean_tokens(self) -> float:
        return float(self.tokens @ self.weights)

    @property
    def longest_tokens(self) -> float:
        return float(self.tokens[-1])

    def mean_of(self, function: Callable[[np.ndarray], np.ndarray]) -> float:
        """Expected value of a function of the length."""
        return float(function(self.tokens) @ self.weights)

    @staticmethod
    def parse(lengths: LengthMix | str | int | Path | Sequence[int]) -> LengthMix:
        """A mix from a number, a text form, a list of lengths, or a JSON file with a list. Raises UserError for
        anything else."""
        if isinstance(lengths, LengthMix):
            return lengths
        if isinstance(lengths, bool) or not isinstance(lengths, (str, int, Path, Sequence, np.ndarray)):
            raise UserError(f"cannot read lengths from {lengths!r}", _FORMS)
        if isinstance(lengths, int):
            return _from_list([lengths], str(lengths))
        if isinstance(lengths, (str, Path)):
            return _parse_text(str(lengths).strip())
        return _from_list(list(lengths), f"{len(lengths)} lengths")

    def decode_contexts(self, prompt_tokens: int) -> LengthMix:
        """The contexts of the decode steps of rollouts that end at these lengths, prompt included.

        A rollout takes one step at each length from its prompt to its end, so long rollouts take more of the steps.
        """
        if prompt_tokens < 0:
            raise UserError(f"prompt_tokens must not be negative, got {prompt_tokens}")
        if self.longest_tokens <= prompt_tokens:
            raise UserError(f"no rollout of the mix {self.text!r} is longer than its prompt of {prompt_tokens} tokens")
        contexts = prompt_tokens + _midpoints() * (self.longest_tokens - prompt_tokens)
        ended = np.searchsorted(self.tokens, contexts)
        alive = 1 - np.concatenate([[0.0], np.cumsum(self.weights)])[ended]
        return LengthMix(f"decode steps of {self.text} after {prompt_tokens}", contexts, alive / alive.sum())


def _parse_text(text: str) -> LengthMix:
    if text.lower().startswith("lognormal:"):
        return _lognormal(text)
    if text.endswith(".json"):
        return _from_file(Path(text))
    if text.startswith("["):
        return _from_list(_json_list(text, text), text)
    parts = text.replace("_", "").split(",")
    if len(parts) > 1:
        return _from_list([_number(part, text) for part in parts], text)
    low, dash, high = parts[0].partition("-")
    if dash and low:
        return _uniform(_number(low, text), _number(high, text), text)
    return _from_list([_number(parts[0], text)], text)


def _number(part: str, text: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise UserError(f"{part.strip()!r} in the lengths {text!r} is not a number", _FORMS) from None
    if not 0 <= value <= MOST_TOKENS:
        raise UserError(f"lengths must lie between 0 and {MOST_TOKENS:,}, got {part.strip()!r} in {text!r}", _FORMS)
    return value


def _uniform(low: float, high: float, text: str) -> LengthMix:
    if low >= high:
        raise UserError(f"the range {text!r} must end above its start", _FORMS)
    return _equally_likely(low + _midpoints() * (high - low), text)


def _lognormal(text: str) -> LengthMix:
    body, *options = [part.strip() for part in text.split(":", 1)[1].replace("_", "").split(",")]
    if not options or "=" in options[0]:
        raise UserError(f"{text!r} has no sigma", _FORMS)
    median, sigma = _number(body, text), _number(options.pop(0), text)
    if median <= 0 or not 0 < sigma <= _MOST_SIGMA:
        raise UserError(f"median must be positive, and sigma too, and at most {_MOST_SIGMA}, in {text!r}", _FORMS)
    cut = float(MOST_TOKENS)
    for option in options:
        key, _, value = option.partition("=")
        if key != "max":
            raise UserError(f"unknown option {option!r} in {text!r}", _FORMS)
        cut = _number(value, text)
        if cut == 0:
            raise UserError(f"max must be positive in {text!r}", _FORMS)
    tokens = median * np.exp(sigma * norm.ppf(_midpoints()))
    # Generation stops at the longest length, so longer draws are cut there. They are not drawn again.
    return _equally_likely(np.minimum(tokens, cut), text)


def _from_file(path: Path) -> LengthMix:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the lengths file {path}: {error.strerror}", CHECK_PATH) from None
    except UnicodeDecodeError as error:
        raise UserError(f"the lengths file {path} is not UTF-8: {error.reason}", _FORMS) from None
    return _from_list(_json_list(text, str(path)), path.name)


def _json_list(text: str, name: str) -> list[object]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"the lengths {name!r} are not valid JSON: {error}", _FORMS) from None
    if not isinstance(values, list):
        raise UserError(f"the lengths {name!r} must be a JSON list, got {type(values).__name__}", _FORMS)
    return values


def _from_list(values: Sequence[object], text: str) -> LengthMix:
    if not values:
        raise UserError("the list of lengths is empty", _FORMS)
    for value in values:
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not number or not 0 <= value <= MOST_TOKENS:  # type: ignore[operator]
            raise UserError(f"lengths must be numbers between 0 and {MOST_TOKENS:,}, got {value!r}", _FORMS)
    if not any(values):
        raise UserError(f"all lengths are 0 in {text!r}", _FORMS)
    return _equally_likely(np.sort(np.array(values, dtype=np.float64)), text)


def _equally_likely(tokens: np.ndarray, text: str) -> LengthMix:
    return LengthMix(text, tokens, np.full(len(tokens), 1 / len(tokens)))


def _midpoints() -> np.ndarray:
    return (np.arange(_POINTS) + 0.5) / _POINTS
