"""What a calibration takes at most, in tokens, before it begins; the evaluation that this is compared with; and what it
took. Arithmetic; measures nothing.

A set is one rollout for each prompt and sample. Sampled are the dense rollouts, one set for each budget of each sweep, and
one for each round of the verification; a replay samples dense rollouts and rounds alone. Each set is scored once, by the
dense policy or, in a replay, by each budget's attention. Where drafts are checked, a set counts as often as the study's
model drafted a token for each that stands, or once where it drafted fewer, because the token behind each whole window is no
draft. That is a guess about this model, so the sum is no upper bound then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparroll.calibrate.defaults import (
    EVALUATION_PROBLEMS,
    EVALUATION_SAMPLES,
    MOST_OF_AN_EVALUATION,
    SCORED_SHARE,
)
from sparroll.calibrate.measure import Measurement, MeasureSettings
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.plan.check_rate import CheckRate
from sparroll.rounding import percent_up


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the model, without a tail.

    >>> Evaluation(60, 16, 16_384).tokens
    15728640
    """

    problems: int
    samples: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """That it samples at most."""
        return self.problems * self.samples * self.response_tokens

    @staticmethod
    def parse(text: str | None, response_tokens: int) -> Evaluation:
        """From "60x16", with responses of the given length, or from "60x16x16384". None: the usual one."""
        if text is None:
            return Evaluation(EVALUATION_PROBLEMS, EVALUATION_SAMPLES, response_tokens)
        parts = text.lower().split("x")
        if len(parts) not in (2, 3) or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise UserError(
                f"--evaluation takes problems x samples, or problems x samples x tokens, got {text!r}",
                f"for example {EVALUATION_PROBLEMS}x{EVALUATION_SAMPLES}, or 60x16x16384",
            )
        problems, samples, *longest = map(int, parts)
        return Evaluation(problems, samples, longest[0] if longest else response_tokens)

    def __str__(self) -> str:
        return f"{self.problems} problems x {self.samples} samples x {self.response_tokens:,} tokens"


@dataclass(frozen=True)
class CostAhead:
    """The most that a calibration takes, or with checks about the most."""

    rollouts: int
    """Of a set."""
    response_tokens: int
    sampled_sets: float
    """Drafts count, so it need not be a whole number."""
    scored_sets: float
    evaluation: Evaluation
    checked: bool = False
    """Whether it rests on how many drafts checks take back."""

    @property
    def sampled_tokens(self) -> int:
        return round(self.sampled_sets * self.rollouts * self.response_tokens)

    @property
    def scored_tokens(self) -> int:
        return round(self.scored_sets * self.rollouts * self.response_tokens)

    @property
    def share(self) -> float:
        """Of an evaluation, where a scored token counts as SCORED_SHARE of a sampled one."""
        return (self.sampled_tokens + SCORED_SHARE * self.scored_tokens) / self.evaluation.tokens

    @property
    def is_dear(self) -> bool:
        return self.share > MOST_OF_AN_EVALUATION

    def __str__(self) -> str:
        about = "about" if self.checked else "at most"
        return (
            f"this samples {about} {self.sampled_tokens:,} tokens and scores {self.scored_tokens:,}: "
            f"{percent_up(self.share)} of an evaluation ({self.evaluation}, {self.evaluation.tokens:,} tokens; a scored one "
            f"counts {SCORED_SHARE:g})"
        )

    @property
    def warning(self) -> str:
        """What would make it cheaper, for where it is dear."""
        # A replay drafts nothing, so there is nothing that checks could take back.
        more = "fewer --check-windows and --check-floors" if self.checked else "--mode replay"
        return (
            "warning: that is more than a third of an evaluation; a smaller --most-budgets, --count, --samples or "
            f"--verify-rounds make it cheaper, and so {'do' if self.checked else 'does'} {more}"
        )

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "sampled_tokens": self.sampled_tokens,
            "scored_tokens": self.scored_tokens,
            "evaluation": [self.evaluation.problems, self.evaluation.samples, self.evaluation.response_tokens],
            "share_of_evaluation": round(self.share, 6),
        }


@dataclass(frozen=True)
class Spent:
    """What a calibration took, in tokens."""

    sampled_tokens: int = 0
    """Of responses; drafts taken back are not among them."""
    taken_back_tokens: int = 0
    scored_tokens: int = 0
    """By the dense policy, or in a replay by a budget's attention. With checks: all drafts."""

    @staticmethod
    def of(measurement: Measurement) -> Spent:
        tokens = measurement.statistics.tokens
        if measurement.mode == "dense":
            return Spent()
        if measurement.mode == "replay":
            return Spent(0, 0, tokens)
        if measurement.checked is None:
            return Spent(tokens, 0, tokens)
        checks = measurement.checked.checks
        return Spent(tokens, checks.taken_back_tokens, checks.drafted_tokens + checks.behind_stop_tokens)

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.sampled_tokens + other.sampled_tokens,
            self.taken_back_tokens + other.taken_back_tokens,
            self.scored_tokens + other.scored_tokens,
        )

    def __str__(self) -> str:
        drafts = f", {self.taken_back_tokens:,} drafts were taken back" if self.taken_back_tokens else ""
        return f"{self.sampled_tokens:,} tokens were generated for this{drafts}, and {self.scored_tokens:,} scored"


def cost_ahead(
    settings: MeasureSettings,
    prompts: int,
    evaluation: Evaluation,
    *,
    budgets: int,
    verify_rounds: int,
    selectors: int = 1,
    checks: Sequence[DraftCheck] = (),
    layer_groups: int = 0,
    largest_is_run: bool = True,
) -> CostAhead:
    """budgets: how many are measured at most, without those that hold every context, which are not run; largest_is_run:
    whether the largest budget of the grid is none of these."""
    drafts = [max(1.0, CheckRate.of_study(check).drafted_per_kept) for check in checks]
    swept = budgets * selectors * (sum(drafts) if checks else 1)
    if layer_groups:
        # The largest budget once, for all groups, and each other one in each group.
        alone = max(0, budgets - largest_is_run)
        swept = selectors * (layer_groups * alone + largest_is_run)
    verified = verify_rounds * max(drafts, default=1.0)
    replays = settings.mode == "replay"
    return CostAhead(
        rollouts=prompts * settings.samples,
        response_tokens=settings.max_new_tokens,
        sampled_sets=1 + verified + (0 if replays else swept),
        scored_sets=1 + verified + swept,
        evaluation=evaluation,
        checked=bool(checks),
    )
