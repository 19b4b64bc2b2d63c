"""The interval of the share of rare events among tokens that come in rollouts. Arithmetic on sums; nothing here sees a
token.

Events of one rollout depend on each other: a rollout that went astray has several. The design effect says how many times
larger that makes the variance of the share, estimated between rollouts (ratio estimator: Kish, Survey Sampling, 1965).
The tokens divided by it are as many independent ones, and for these the exact binomial interval is taken (Clopper and
Pearson 1934, with this effective sample size and Student's correction for few rollouts: Korn and Graubard 1998). Unlike an
interval from a variance, it has an upper end above 0 where no event was seen: 3.7 / tokens at 95 %, two-sided, for
independent ones. tests/unit/mismatch/test_rare_share.py shows by simulation how often it holds the truth.
"""

from __future__ import annotations

from sparroll.mismatch.bootstrap import ONE_ROLLOUT


def design_effect(
    events: int,
    tokens: int,
    events_squared: int,
    events_times_tokens: int,
    tokens_squared: int,
    effective_rollouts: float,
) -> float:
    """Variance of the share over that of independent tokens; at least 1, and 1 where it cannot be seen.

    events_squared, events_times_tokens, tokens_squared: sums over rollouts of k * k, k * n and n * n, where k is a
    rollout's events and n its tokens.  effective_rollouts: tokens ** 2 / tokens_squared.
    """
    if not 0 < events < tokens or effective_rollouts < ONE_ROLLOUT:
        return 1.0
    share = events / tokens
    spread = events_squared - 2 * share * events_times_tokens + share * share * tokens_squared
    between = spread * effective_rollouts / (effective_rollouts - 1)
    return max(1.0, between / (tokens * share * (1 - share)))


def rare_interval(
    events: int, tokens: int, effective_rollouts: float, design: float, confidence: float
) -> tuple[float, float]:
    """Two-sided interval (low, high) of the share of events. The truth lies beyond each end with probability
    (1 - confidence) / 2 at most. (0, 1) with fewer than 1.5 effective rollouts."""
    from scipy import special

    if effective_rollouts < ONE_ROLLOUT:
        return 0.0, 1.0
    upper = (1 + confidence) / 2
    few = float(special.ndtri(upper) / special.stdtrit(effective_rollouts - 1, upper)) ** 2
    worth = tokens / design * few
    seen = worth * events / tokens
    low = float(special.betaincinv(seen, worth - seen + 1, 1 - upper)) if events else 0.0
    high = float(special.betaincinv(seen + 1, worth - seen, upper)) if events < tokens else 1.0
    return low, high
