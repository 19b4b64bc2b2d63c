"""The largest tolerated share of impossible tokens, and the test that it is surely exceeded. The guard's other statistic
beside the tail; the direction is the opposite one, more is worse.

Impossible tokens are rare: at a limit of 1e-4, a bin of 10,000 tokens has one. So bins are merged with their neighbours
until a test would see EXPECTED of them at the limit; where even all bins have too few for that, all are tested together,
because a share far over the limit shows in few tokens. As for the tail, bins that all hold the limit hold it together.

A test is as strict as one of the tail: all tests of a step together raise a false alarm with probability FALSE_ALARM_AT
where every share is exactly at the limit, and with FALSE_ALARM_ABOVE where every share is the limit / MARGIN_FACTOR.
benchmarks/impossible_simulation.py simulates how many runs have one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparroll.control.tail_window import TailWindow
from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics
from sparroll.mismatch.impossible import ImpossibleShare, check_nats
from sparroll.mismatch.table import enough

STATISTIC = "impossible_share"
"""Its name in the target of a schedule."""
EXPECTED = 3
MARGIN_FACTOR = 2.0


@dataclass(frozen=True)
class ImpossibleLimit:
    """The share of sampled tokens that are more than `nats` off is to be at most `at_most`.

    >>> ImpossibleLimit(nats=10, at_most=1e-4)
    """

    nats: int
    at_most: float

    def __post_init__(self) -> None:
        check_nats(self.nats)
        if not 0 < self.at_most < 1:
            raise UserError(f"the largest share of impossible tokens must be above 0 and below 1, got {self.at_most}")

    def table(self) -> dict[str, Any]:
        """The target of a schedule that holds it."""
        return {"statistic": STATISTIC, "nats": self.nats, "at_most": self.at_most}

    @staticmethod
    def of_target(target: dict[str, Any] | None) -> ImpossibleLimit | None:
        """The limit that a schedule's target names; None where it names none, or another statistic."""
        if target is None or target.get("statistic") != STATISTIC:
            return None
        return ImpossibleLimit(target["nats"], float(target["at_most"]))

    def check_counted(self, tail: TailStatistics, who: str) -> None:
        """Raise UserError where rollouts were measured without the log-probabilities that the share is counted from. They
        would look like rollouts without an impossible token."""
        if tail.impossible.tokens < tail.tokens:
            raise UserError(
                f"{who} is to hold a share of impossible tokens, and this step's statistics counted them among "
                f"{tail.impossible.tokens} of {tail.tokens} tokens",
                "give TailStatistics.add the off_nats_T of each rollout (mismatch.of_rollouts.off_nats_of)",
            )

    def groups(self, window: TailWindow, least_tokens: int) -> list[list[int]]:
        """The starts of the bins that are tested together; empty where all of them have too few tokens or rollouts."""
        groups = window.groups(max(least_tokens, math.ceil(EXPECTED / self.at_most)))
        if not groups and enough(*window.amount(window.starts), least_tokens):
            groups = [window.starts]
        return groups

    def surely_exceeded(
        self, window: TailWindow, starts: Sequence[int], confidence: float, stricter: float
    ) -> ImpossibleShare | None:
        """The share of these bins together with its lower bound, if that is surely over the limit; otherwise None.
        confidence: of the interval at the limit; stricter: of the one at a share MARGIN_FACTOR smaller."""
        counted = window.impossible(starts)
        share = counted.share(self.nats, confidence)
        if share is None or share.low <= self.at_most:
            return None
        sure = counted.share(self.nats, stricter)
        return share if sure is not None and sure.low > self.at_most / MARGIN_FACTOR else None
