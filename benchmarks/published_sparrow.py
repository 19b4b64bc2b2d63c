"""What Sparrow (arXiv 2606.08446) says of mismatch and training, and what our records say of it. published_sparrow_speed.py
has its adapter, its pages and its speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import published_experiments
from published_claims import STUDY, TINY, Part, PublishedClaim, study_command
from published_figures import change, difference, less, mean_of, over, shift, worst_bin_of
from published_rules import Estimate, above, as_good, below, inside, uncorrelated
from published_sparrow_speed import SPEED_AND_ADAPTER
from record_tables import results
from render_study import STUDIES

from sparroll.rounding import rounded_down

S25, S60 = STUDIES[25], STUDIES[60]
TAIL = "mismatch/acceptance_q05"
FIXED = ("fixed-tis", "fixed-icepop", "fixed-sparse_rl", "fixed-jackpot")
CODE = tuple(f"code-lm-seed-{seed}-h100" for seed in range(4))
CALIBRATED = {target: f"calibrated-{target}" for target in ("0.75", "0.80", "0.86", "0.92")}


def correlations() -> dict[str, dict[str, Any]]:
    """Of predictors.json: whole runs without eviction, by steps."""
    return {each["selection"]: each["run_mean"] for each in results("predictors", "predictors")}


def _estimate(of: dict[str, float]) -> Estimate:
    return Estimate(of["value"], of["low"], of["high"])


COMPARED = ("25 steps", "25 steps, no eviction", "60 steps", "60 steps, with small units")
"""The selections of predictors.json that verdicts rest on: those without checks of drafts, of which the statistics of the
drafts say little, and without a choice of rows by their tails or budgets, which narrows what is to be correlated."""


def tail_predicts() -> Sequence[Part]:
    found = correlations()
    of = "5th percentile of acceptance"
    return [Part(name, _estimate(found[name][of]), above(0), 2, sign=True) for name in COMPARED]


def mean_does_not() -> Sequence[Part]:
    found = correlations()
    of = "mean acceptance"
    return [Part(name, _estimate(found[name][of]), uncorrelated(), 2, sign=True) for name in COMPARED]


def tail_is_better() -> Sequence[Part]:
    """How much weaker the mean's correlation is, which is the negative of what the record has."""
    gained = {name: _estimate(correlations()[name]["mean acceptance"]["gained"]) for name in COMPARED}
    return [Part(name, -of, above(0), sign=True) for name, of in gained.items()]


def averages_look_fine() -> Sequence[Part]:
    mean = mean_of(over(S60, "fixed-tis", "mismatch/acceptance_mean"))
    return [
        Part("mean acceptance with 128 tokens", mean, above(0.95)),
        Part("what it gained beyond dense rollouts", difference(S60, "fixed-tis", "dense"), below(0), sign=True),
    ]


def trains_like_dense() -> Sequence[Part]:
    """Of the schedules of .86 and .92: the rows whose tail lay above .86 where it is lowest. That of .86 had .853 there over
    60 steps."""
    parts = [
        Part(f"study, {_with_worst_bin(steps, target)}", difference(record, row, "dense"), as_good(), sign=True)
        for target, row in CALIBRATED.items()
        for steps, record in STUDIES.items()
        if target in ("0.86", "0.92") and statistics.mean(worst_bin_of(record, row)) >= published_experiments.ENOUGH
    ]
    return [*parts, Part("tiny-reasoner, 14 steps", _tiny("calibrated"), as_good(), sign=True)]


def _with_worst_bin(steps: int, target: str) -> str:
    """What a row of the study was to hold, and the tail that it had where it is lowest."""
    tail = statistics.mean(worst_bin_of(STUDIES[steps], CALIBRATED[target]))
    return f"schedule of {target[1:]} (worst bin {rounded_down(tail)[1:]}), {steps} steps"


def _tiny(schedule: str) -> Estimate:
    runs = results("rl-grid-tiny", "rl-grid")

    def gained(of: str) -> list[float]:
        return [run["dense_accuracy"][-1] - run["dense_accuracy"][0] for run in runs if run["schedule"] == of]

    return less(gained(schedule), gained("dense"))


def too_low_collapses() -> Sequence[Part]:
    """By the tails that rows had, not by those that they were to have: the schedule of .75 held .79 and more in every bin,
    and 128 tokens had about .73 over all lengths."""
    parts = [
        Part(f"{_with_worst_bin(steps, '0.75')}, beyond dense", difference(record, row, "dense"), below(0), sign=True)
        for row in (CALIBRATED["0.75"],)
        for steps, record in STUDIES.items()
    ]
    for steps, record in STUDIES.items():
        tail = rounded_down(statistics.mean(over(record, "fixed-tis", TAIL)))[1:]
        parts.append(
            Part(f"128 tokens (tail {tail}), {steps} steps, change", change(record, "fixed-tis"), below(0), sign=True)
        )
    return parts


def fixed_budget_collapses() -> Sequence[Part]:
    return [
        Part("128 tokens with four corrections, 25 steps", change(S25, *FIXED), below(0), sign=True),
        Part("with TIS, 60 steps", change(S60, "fixed-tis"), below(0), sign=True),
        Part("without correction, 60 steps", change(S60, "fixed-none"), below(0), sign=True),
    ]


def corrections_do_not_repair() -> Sequence[Part]:
    names = ("TIS", "IcePop", "Sparse-RL", "Jackpot")
    return [
        Part(f"{name} beyond dense", difference(S25, row, "dense"), below(0), sign=True)
        for name, row in zip(names, FIXED, strict=True)
    ]


def falls_with_length() -> Sequence[Part]:
    """Between neighbouring bins of the study, whose first one has the first tokens of every response alone, and from octave
    to octave of four models of code."""
    bins = ("3840-4096", "4096-4352", "4352-4608")
    first, second, third = (over(S60, "fixed-tis", f"{TAIL}/{bin_}") for bin_ in bins)
    parts = [
        Part(
            f"study, 128 tokens, contexts from {to:,} on against {to - 256:,}", _fell(short, long), below(0), sign=True
        )
        for to, short, long in ((4096, first, second), (4352, second, third))
    ]
    octaves = list(zip(*(_tails_by_length(name) for name in CODE), strict=True))
    starts = (4096, 8192)
    return parts + [
        Part(f"code, 512 tokens, contexts from {start:,} on against half", _fell(short, long), below(0), sign=True)
        for start, short, long in zip(starts, octaves[:-1], octaves[1:], strict=True)
    ]


def _fell(before: Sequence[float], after: Sequence[float]) -> Estimate:
    return mean_of([late - early for early, late in zip(before, after, strict=True)])


def _tails_by_length(record: str) -> list[float]:
    """Of pages of 16 tokens with 512 of them, from 2,048 tokens of context on."""
    (cell,) = [cell for cell in results(record, "code_lm_cells")["cells"] if cell["name"] == "page_mean-16-512"]
    return [of["q05"] for of in cell["bins"]]


def same_at_every_iteration() -> Sequence[Part]:
    rows = {"128 tokens": "fixed-tis"} | {f"schedule of {t[1:]}": CALIBRATED[t] for t in ("0.75", "0.86", "0.92")}
    return [
        Part(name, shift(S60, row, TAIL), inside(-published_experiments.SAME, published_experiments.SAME), sign=True)
        for name, row in rows.items()
    ]


def schedules_hold() -> Sequence[Part]:
    parts = []
    for target, row in CALIBRATED.items():
        record = S60 if target != "0.80" else S25
        missed = mean_of([tail - float(target) for tail in worst_bin_of(record, row)])
        parts.append(Part(f"target {target[1:]}", missed, above(-0.01), sign=True))
    return parts


def dense_ceiling() -> Sequence[Part]:
    ceiling = mean_of(over(S60, "dense", "mismatch/dense_ceiling_q05"))
    return [Part("below 1", ceiling, below(1)), Part("as high as theirs", ceiling, inside(0.93, 0.96))]


PREDICTORS = "python benchmarks/predictors.py --out benchmarks/results/predictors.json"
SIXTY = study_command(60, "dense", "fixed-none", "fixed-tis", "calibrated-0.75", "calibrated-0.86", "calibrated-0.92")
SHORT = study_command(25, "dense", *FIXED, "calibrated-0.75", "calibrated-0.80", "calibrated-0.86", "calibrated-0.92")

MISMATCH_AND_TRAINING = (
    PublishedClaim(
        name="tail-predicts",
        title="the 5th percentile of the acceptance predicts how a run trains",
        says="The 5th percentile of the per-token acceptance tells runs that train from runs that collapse",
        model=STUDY,
        records=("predictors",),
        parts=tail_predicts,
        command=PREDICTORS,
        experiment="predicts-training",
        settled=published_experiments.tail_predicts,
    ),
    PublishedClaim(
        name="mean-does-not",
        title="the mean acceptance does not predict how a run trains",
        says="The mean acceptance does not: .977 is stable and .968 collapses",
        model=STUDY,
        records=("predictors",),
        parts=mean_does_not,
        command=PREDICTORS,
        experiment="predicts-training",
        settled=published_experiments.mean_does_not,
    ),
    PublishedClaim(
        name="tail-beats-mean",
        title="the 5th percentile predicts better than the mean",
        says="The tail is the statistic to hold, and not the mean",
        model=STUDY,
        records=("predictors",),
        parts=tail_is_better,
        command=PREDICTORS,
        experiment="predicts-training",
        settled=published_experiments.tail_is_better,
    ),
    PublishedClaim(
        name="averages-look-fine",
        title="averages look fine in runs that fail",
        says="Most tokens agree even in runs that collapse: their mean acceptance is .968",
        model=STUDY,
        records=(S60,),
        parts=averages_look_fine,
        command=SIXTY,
    ),
    PublishedClaim(
        name="two-humps",
        title="the acceptance is skewed: nearly 1, or a Beta",
        says="At a budget of 512 tokens a share of .547 of the tokens lies above .999, and the rest is Beta(2.209, .47), "
        "with a KS distance of .029",
        model=f"{STUDY}; {TINY}",
        experiment="predicts-training",
        settled=published_experiments.two_humps,
    ),
    PublishedClaim(
        name="0.86-suffices",
        title="a tail of .86 trains like dense rollouts",
        says="A 5th percentile above about .86 at every length trains stably and as well as dense rollouts",
        model=f"{STUDY}; {TINY}",
        records=(S25, S60, "rl-grid-tiny"),
        parts=trains_like_dense,
        command=SIXTY,
        experiment="threshold",
        settled=published_experiments.trains_like_dense,
    ),
    PublishedClaim(
        name="0.80-drifts",
        title=".80 drifts and .75 collapses",
        says="A tail of .80 drifts, and one of .75 collapses",
        model=STUDY,
        records=(S25, S60),
        parts=too_low_collapses,
        command=SHORT,
        experiment="threshold",
        settled=published_experiments.too_low_collapses,
    ),
    PublishedClaim(
        name="one-threshold-for-all",
        title="one threshold serves all sizes and code",
        says=".86 serves Qwen3 1.7B, 4B, 8B and 14B, for math and for code",
        model="Qwen3 1.7B to 14B",
        untestable="needs Qwen3's weights and weeks of training with responses of 37K tokens; the recipes are there to run",
        command="sparroll train --config recipes/polaris-grpo-qwen3-1.7b/train.toml --out runs/polaris",
    ),
    PublishedClaim(
        name="small-budget-collapses",
        title="a small fixed budget collapses",
        says="A fixed budget of 2,560 tokens at lengths of 37K collapses (4,096 is stable)",
        model=STUDY,
        records=(S25, S60),
        parts=fixed_budget_collapses,
        command=SHORT,
    ),
    PublishedClaim(
        name="corrections-do-not-repair",
        title="corrections alone do not repair a small budget",
        says="TIS and Jackpot, made for milder mismatch, converge poorly on sparse rollouts",
        model=STUDY,
        records=(S25,),
        parts=corrections_do_not_repair,
        command=SHORT,
    ),
    PublishedClaim(
        name="falls-with-length",
        title="at a fixed budget the tail falls with the context",
        says="With 512 tokens the tail falls from .868 (contexts to 2K) to .589 (18 to 20K)",
        model=f"{STUDY}; code, 88M",
        records=(S60, *CODE),
        parts=falls_with_length,
        command=SIXTY,
    ),
    PublishedClaim(
        name="same-at-every-iteration",
        title="the tail does not move while a run trains",
        says="The tail depends on model, budget and length and not on the iteration: 1 and 550 agree within .015",
        model=STUDY,
        records=(S60,),
        parts=same_at_every_iteration,
        command=SIXTY,
        experiment="over-iterations",
        settled=published_experiments.same_at_every_iteration,
    ),
    PublishedClaim(
        name="schedules-hold",
        title="a calibrated schedule holds its target while training",
        says="A schedule calibrated once holds its target in every length bin (.850 to .886 for .86)",
        model=STUDY,
        records=(S25, S60),
        parts=schedules_hold,
        command=SIXTY,
    ),
    PublishedClaim(
        name="dense-ceiling",
        title="dense decoding itself does not reach 1",
        says="Dense decoding reaches .94 to .95 at the 5th percentile of the top-20 estimate",
        model=STUDY,
        records=(S60,),
        parts=dense_ceiling,
        command=SIXTY,
    ),
)

CLAIMS = MISMATCH_AND_TRAINING + SPEED_AND_ADAPTER
