"""How many tokens are drafted for each that stands, from how often a check rejects a drafted token. Arithmetic, and what
was measured on one model; a measurement of your own model replaces it.

Each drafted token that a check looks at is rejected with the same probability h, independently of the others. A window of
w tokens, which drafts w - 1, is then cut with probability 1 - (1 - h)^(w - 1). The token in place of the first rejected
one stands, and a window that stands whole gives one token more, so a window leaves 1 + (1 - h) + ... + (1 - h)^(w - 1) =
(1 - (1 - h)^w) / h tokens.
Real rejections come in clusters, which cut fewer windows and take back more in each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError

MEASURED_REJECTED_SHARE = {0.001: 0.0036, 0.01: 0.0037, 0.1: 0.0037, 1.0: 0.0326}
"""By floor: the share of drafted tokens that a check rejects, of those it looks at. Of the study's model alone, under 128
tokens at every length, which is the harshest budget that its study trains with (`mismatch-study-checks-h200.json`, windows
of 64). In the 60 steps of docs/study.md, at
floor .01, 15 % of windows of 64 tokens were cut, which is .0026."""


ROUNDING = 0.005
"""A figure that was rounded may lie this far below the least that there is."""
LEAST_DRAFTS = 0.5
"""Per token that stands: a window of two tokens drafts one of them."""


@dataclass(frozen=True)
class CheckRate:
    """How many tokens are drafted for each that stands, and where the number comes from.

    >>> CheckRate.of_cut_share(0.75, window_tokens=3).drafted_per_kept  # h = .5: 2 drafts leave 1.75 tokens
    1.1428571428571428
    """

    drafted_per_kept: float
    source: str

    def __post_init__(self) -> None:
        if not LEAST_DRAFTS <= self.drafted_per_kept < math.inf:
            raise UserError(
                f"drafted_per_kept must be {LEAST_DRAFTS} or more, got {self.drafted_per_kept}",
                "it is the number of drafted tokens for each that stands, as `sparroll rollout` prints it",
            )

    @staticmethod
    def given(drafted_per_kept: float) -> CheckRate:
        """As measured or assumed by the user."""
        return CheckRate(drafted_per_kept, "as given")

    @staticmethod
    def of_cut_share(cut_share: float, window_tokens: int) -> CheckRate:
        """From the share of windows of this length that a check cuts."""
        if not 0 <= cut_share < 1:
            raise UserError(
                f"cut_share must be at least 0 and below 1, got {cut_share}",
                "it is the share of windows in which a token was taken back",
            )
        rejected_share = -math.expm1(math.log1p(-cut_share) / (window_tokens - 1))
        return CheckRate(drafts_per_token(rejected_share, window_tokens), f"from {cut_share:.0%} of windows cut")

    @staticmethod
    def of_study(check: DraftCheck) -> CheckRate:
        """From the rejections that were measured on the study's model, at the nearest floor that was measured."""
        floor = min(MEASURED_REJECTED_SHARE, key=lambda known: abs(math.log(known / check.floor)))
        rejected_share = MEASURED_REJECTED_SHARE[floor]
        return CheckRate(
            drafts_per_token(rejected_share, check.window_tokens),
            f"of the study's model at 128 tokens and floor {floor:g}, not of this one",
        )


def drafts_per_token(rejected_share: float, window_tokens: float) -> float:
    """Drafted tokens per token that stands, where each looked-at draft is rejected with probability `rejected_share`.

    >>> drafts_per_token(0.0, 64), drafts_per_token(1.0, 64)
    (0.984375, 63.0)
    """
    drafts = window_tokens - 1
    if rejected_share == 0:
        return drafts / window_tokens
    if rejected_share == 1:
        return float(drafts)
    return drafts * rejected_share / -math.expm1(window_tokens * math.log1p(-rejected_share))


def rate_for(check: DraftCheck, cut_share: float | None = None, drafted_per_kept: float | None = None) -> CheckRate:
    """The rate that the user gives in one of two forms, or else that of the study's model."""
    if cut_share is not None and drafted_per_kept is not None:
        raise UserError("cut_share and drafted_per_kept say the same thing", "give one of them")
    if drafted_per_kept is not None:
        least = check.drafts / check.window_tokens
        if drafted_per_kept < least - ROUNDING:
            raise UserError(
                f"drafted_per_kept is {least:.4g} where every window of {check.window_tokens} tokens stands, and you gave "
                f"{drafted_per_kept:g}",
                "give the windows that it was measured with: --check-window",
            )
        return CheckRate.given(max(drafted_per_kept, least))
    return CheckRate.of_study(check) if cut_share is None else CheckRate.of_cut_share(cut_share, check.window_tokens)
