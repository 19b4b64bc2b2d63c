"""The options that `sparroll calibrate` alone has."""

from __future__ import annotations

from typing import Annotated

from sparroll.calibrate.defaults import (
    CHECKED_KL_AT_MOST,
    DEFAULT_TARGET,
    EVALUATION_PROBLEMS,
    EVALUATION_SAMPLES,
    MOST_BUDGETS,
)
from sparroll.cli.shared.options import MEASURING, OUTPUT, READING, option
from sparroll.draft_check import DraftCheck

Target = Annotated[
    float | None,
    option(
        MEASURING,
        "--target",
        min=0,
        max=1,
        help=f"The tail must be at least this at every length. Default: {DEFAULT_TARGET}; with checks of drafts none, the "
        "tail then decides nothing.",
    ),
]
Statistic = Annotated[
    str,
    option(
        MEASURING,
        "--statistic",
        help="What every length is to hold: acceptance (its tail is at least --target), or impossible_share (at most "
        "--at-most of the sampled tokens are more than --nats off).",
    ),
]
Nats = Annotated[
    int, option(MEASURING, "--nats", help="How far off a sampled token is impossible: 2, 5, 10 or 20 nats.")
]
AtMost = Annotated[
    float | None,
    option(
        MEASURING,
        "--at-most",
        min=0,
        max=1,
        help="The largest share of impossible tokens at any length, for --statistic impossible_share. It takes 5.5 / "
        "share tokens at each length.",
    ),
]
Budget = Annotated[
    list[int] | None,
    option(READING, "--budget", help="A budget of the grid, in tokens; repeatable. Default: the published grid."),
]
MostBudgets = Annotated[
    int | None,
    option(
        READING,
        "--most-budgets",
        min=1,
        help="Run at most so many budgets of the grid, in each sweep: first a few, then those between what misses and what "
        f"holds. Default: {MOST_BUDGETS} of the published grid, or every --budget.",
    ),
]
CheckWindows = Annotated[
    str | None,
    option(
        READING,
        "--check-windows",
        help="Verify rollouts, with windows of these many tokens, e.g. 32,64,128: window, floor and budgets are "
        f"chosen together. Default: no check, or {DraftCheck.window_tokens} with --check-floors.",
    ),
]
CheckFloors = Annotated[
    str | None,
    option(
        READING,
        "--check-floors",
        help=f"Floors to choose among, e.g. 0.01,0.1. Default: no check, or {DraftCheck.floor} with --check-windows.",
    ),
]
CheckOver2Nats = Annotated[
    float | None,
    option(
        MEASURING,
        "--check-over-2-nats",
        min=0,
        max=1,
        help="At most this share of the tokens of any length may be more than 2 nats off; needs a check. Default: not "
        "held.",
    ),
]
Objective = Annotated[
    str,
    option(
        MEASURING,
        "--objective",
        help="What is to be small: time (the cheapest budgets at the target), or as far as a step's time allows: kl, "
        "far_mass (probability of tokens far off) or tail (1 - tail).",
    ),
]
StepTimeShare = Annotated[
    float | None,
    option(
        MEASURING,
        "--step-time-share",
        min=0,
        max=1,
        help="A decode step may take this share of a dense one's time.",
    ),
]
AtTimeOf = Annotated[
    str | None,
    option(MEASURING, "--at-time-of", help="A decode step may take as long as under this preset or schedule file."),
]
KlAtMost = Annotated[
    float | None,
    option(
        MEASURING,
        "--kl-at-most",
        min=0,
        help="The mean KL at any length may be at most this; with a check, of what is kept. Default: not held; with checks "
        f"and without --target {CHECKED_KL_AT_MOST}.",
    ),
]
FarMassAtMost = Annotated[
    float | None,
    option(
        MEASURING,
        "--far-mass-at-most",
        min=0,
        max=1,
        help="At most this probability, added up over the top-k lists, may be on tokens far off at any length. Default: "
        "not held.",
    ),
]
FarMassNats = Annotated[
    int,
    option(MEASURING, "--far-mass-nats", help="How far off the tokens of --far-mass-at-most are: 2, 5, 10 or 20 nats."),
]
Gpu = Annotated[
    str,
    option(
        MEASURING,
        "--gpu",
        help="Where times are predicted, to compare checks, selectors and budgets: A100, H100, H200, B200, MI300X or a "
        "JSON profile.",
    ),
]
AlsoSelector = Annotated[
    list[str] | None,
    option(
        READING,
        "--also-selector",
        help="Sweep this selector, too, and take the best, e.g. quantized_mean,page_tokens=4,bits=2; repeatable.",
    ),
]
LayerGroups = Annotated[
    str | None,
    option(
        READING,
        "--layer-groups",
        help="Budgets of their own for groups of layers, e.g. 2-14/15-27; needs an objective other than time, or "
        "--group-times.",
    ),
]
GroupTimes = Annotated[
    str | None,
    option(
        READING,
        "--group-times",
        help="Keep the budgets of --layer-groups in this proportion, e.g. 4/1: the first group reads four times each "
        "budget. With checks, or for one selector.",
    ),
]
VerifyRounds = Annotated[
    int,
    option(MEASURING, "--verify-rounds", min=0, help="At most this many rounds check the fitted schedule; 0: none."),
]
VerifyBound = Annotated[
    str,
    option(
        MEASURING,
        "--verify-bound",
        help="What of a verified tail must meet the target: low, the lower end of its 95 % interval, or value, the tail "
        "itself.",
    ),
]
OneEvaluation = Annotated[
    str | None,
    option(
        MEASURING,
        "--evaluation",
        help="What the cost is compared with before anything runs: problems x samples, or problems x samples x tokens. "
        f"Default: {EVALUATION_PROBLEMS}x{EVALUATION_SAMPLES}, with responses of --max-new-tokens.",
    ),
]
Name = Annotated[str, option(OUTPUT, "--name", help="The schedule file is OUT/NAME.toml.")]
