"""Rules by which docs/claims.md judges what a paper says: from figures with intervals to a verdict. Pure functions; nothing
here reads a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["reproduced", "refuted", "partly", "undecided", "not testable here", "not run yet"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "refuted", "undecided", "not run yet", "not testable here")
"""In the order in which pages have them."""
NEAR = 0.9
"""Least part of a published speed-up that counts as the same."""
AS_GOOD = 0.03
"""Accuracy by which a run may end lower and still train as well."""
NO_CORRELATION = 0.3


@dataclass(frozen=True)
class Estimate:
    """A figure with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __neg__(self) -> Estimate:
        return Estimate(-self.value, -self.high, -self.low)

    @staticmethod
    def single(value: float) -> Estimate:
        """Of a measurement that nothing but a clock or a count goes into: it is taken as it is."""
        return Estimate(value, value, value)

    @staticmethod
    def unrepeated(value: float) -> Estimate:
        """Of a figure that varies from seed to seed, and has too few of them for an interval: nothing is sure."""
        return Estimate(value, -math.inf, math.inf)


@dataclass(frozen=True)
class Rule:
    """Words that the page shows, and what they mean."""

    text: str
    judge: Callable[[Estimate], Verdict]
    low_is_good: bool = False
    """For the claim: its figures are then rounded up."""


def _decided(reproduced: bool, refuted: bool) -> Verdict:
    return "reproduced" if reproduced else "refuted" if refuted else "undecided"


def above(threshold: float) -> Rule:
    text = f"reproduced if the whole interval lies above {threshold:g}, refuted if below"
    return Rule(text, lambda of: _decided(of.low > threshold, of.high < threshold))


def below(threshold: float) -> Rule:
    text = f"reproduced if the whole interval lies below {threshold:g}, refuted if above"
    return Rule(text, lambda of: _decided(of.high < threshold, of.low > threshold), low_is_good=True)


def inside(low: float, high: float) -> Rule:
    text = f"reproduced if the whole interval lies in {low:g} to {high:g}, refuted if outside"
    return Rule(text, lambda of: _decided(low <= of.low and of.high <= high, of.high < low or of.low > high))


def as_good() -> Rule:
    """For how much more than another row one gained."""
    text = f"reproduced if the whole interval lies above -{AS_GOOD:g}, refuted if below 0"
    return Rule(text, lambda of: _decided(of.low > -AS_GOOD, of.high < 0))


def at_least(share: float) -> Rule:
    text = f"reproduced if at least {share:g}, refuted if less"
    return Rule(text, lambda of: _decided(of.low >= share, of.high < share))


def uncorrelated() -> Rule:
    text = f"reproduced if the whole interval lies below {NO_CORRELATION:g}, refuted if above 0"
    return Rule(text, lambda of: _decided(of.high < NO_CORRELATION, of.low > 0))


def at_most(bound: float) -> Rule:
    text = f"reproduced if at most {bound:g}, refuted if more"
    return Rule(text, lambda of: _decided(of.high <= bound, of.low > bound), low_is_good=True)


def rejected(behind: Estimate, too_many: float) -> Rule:
    """For the share of sequences that a veto rejects. behind: what the run gained beyond dense rollouts; one that trains
    worse should be rejected often, and any other seldom."""
    worse, as_well = behind.high < 0, behind.low > -AS_GOOD

    def judge(share: Estimate) -> Verdict:
        if not (worse or as_well):
            return "undecided"
        return (above if worse else below)(too_many).judge(share)

    return Rule(
        f"reproduced if the interval of the rejected share lies above {too_many:g} where a row surely trains worse than "
        f"dense, or below it where one surely trains no more than .03 worse; refuted if on the other side; undecided "
        f"where neither is sure",
        judge,
        low_is_good=True,
    )


def as_fast(published: float) -> Rule:
    text = f"reproduced from {NEAR:g} times the published figure on, refuted at 1 or less, partly between"

    def judge(of: Estimate) -> Verdict:
        if of.low >= NEAR * published:
            return "reproduced"
        if of.high <= 1:
            return "refuted"
        return "partly" if of.low > 1 and of.high < NEAR * published else "undecided"

    return Rule(text, judge)


def as_cheap(published: float) -> Rule:
    text = f"reproduced up to the published figure / {NEAR:g}, refuted above"
    return Rule(text, lambda of: _decided(of.high <= published / NEAR, of.low > published / NEAR), low_is_good=True)


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim's parts. All of them have to hold, so one that does keeps a claim from being refuted, and one that does
    not keeps it from being reproduced.

    >>> combined(["reproduced", "refuted"]), combined(["refuted", "undecided"]), combined(["undecided"])
    ('partly', 'refuted', 'undecided')
    """
    if not verdicts:
        raise ValueError("a claim needs at least one part")
    if len(set(verdicts)) == 1:
        return verdicts[0]
    if "reproduced" in verdicts or "partly" in verdicts:
        return "partly"
    return "refuted"


COMBINED = (
    "A claim of several parts is reproduced if all of them are, and partly if only some are. If none is, it is refuted "
    "where at least one part is, and undecided otherwise. A part without an interval, and one that a run that was cut did "
    "not come to, is undecided. By chance an interval lies wholly on the wrong side in up to one case of forty, so a claim "
    "of eleven parts that holds has a refuted part in up to a quarter of all cases: look how far its interval is from the "
    "border."
)
