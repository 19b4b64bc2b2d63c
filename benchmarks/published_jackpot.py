"""What Jackpot (arXiv 2602.06107) says, what others say of further kinds of mismatch, and what our records say of it."""

from __future__ import annotations

from collections.abc import Sequence

import published_corrections
from published_claims import STUDY, TINY, Part, PublishedClaim, study_command
from published_figures import change, difference, mean_of, over
from published_rules import Estimate, above, as_good, at_least, below, inside
from record_tables import results
from render_study import STUDIES

S25, S60 = STUDIES[25], STUDIES[60]
BUDGETS = {"128 tokens": "fixed-jackpot", "schedule of .86": "calibrated-0.86-jackpot"}
TIS = {"128 tokens": "fixed-tis", "schedule of .86": "calibrated-0.86"}


def comes_closer() -> Sequence[Part]:
    """Of all pairs at a noise and every scale; the least share over scales and over both divergences."""
    rows = results("rejection-sampling", "rejection-sampling")
    least: dict[float, float] = {}
    for row in rows:
        share = min(row["kl_not_larger_share"], row["distance_not_larger_share"])
        least[row["noise"]] = min(share, least.get(row["noise"], 1.0))
    return [Part(f"noise {noise:g}, pairs", Estimate.single(of), at_least(1)) for noise, of in least.items()]


def more_stable_than_tis() -> Sequence[Part]:
    return [
        Part(f"{name}, beyond TIS", difference(S25, row, TIS[name]), above(0), sign=True)
        for name, row in BUDGETS.items()
    ]


def as_good_as_on_policy() -> Sequence[Part]:
    return [
        Part(f"{name}, beyond dense", difference(S25, row, "dense"), as_good(), sign=True)
        for name, row in BUDGETS.items()
    ]


def baselines_collapse() -> Sequence[Part]:
    return [
        Part("TIS, 25 steps", change(S25, "fixed-tis"), below(0), sign=True),
        Part("IcePop, 25 steps", change(S25, "fixed-icepop"), below(0), sign=True),
        Part("TIS, 60 steps", change(S60, "fixed-tis"), below(0), sign=True),
    ]


def lists_suffice() -> Sequence[Part]:
    factors = {name: mean_of(over(S25, row, "correction/accepted_mass_calibration")) for name, row in BUDGETS.items()}
    return [Part(f"{name}, batch-level factor", of, inside(0.95, 1.05)) for name, of in factors.items()]


ROWS = ("dense", "fixed-tis", "fixed-icepop", *BUDGETS.values(), "calibrated-0.86")

CLAIMS = (
    PublishedClaim(
        name="rejection-comes-closer",
        title="budgeted rejection brings the sampler closer to the policy",
        says="Whatever the budget, what OBRS keeps is no further from the policy than what was sampled (proved)",
        model="random distributions, summed exactly",
        records=("rejection-sampling",),
        parts=comes_closer,
        command="python benchmarks/rejection_sampling.py --out benchmarks/results/rejection-sampling.json",
    ),
    PublishedClaim(
        name="jackpot-beats-tis",
        title="Jackpot trains more stably than TIS",
        says="Under extreme mismatch Jackpot trains for 300 steps where TIS does not",
        model=STUDY,
        records=(S25,),
        parts=more_stable_than_tis,
        command=study_command(25, *ROWS),
        experiment="jackpot-union",
        settled=published_corrections.better_than_tis,
    ),
    PublishedClaim(
        name="jackpot-like-on-policy",
        title="Jackpot trains like on-policy RL",
        says="Accuracy comparable to on-policy RL for up to 300 steps (Qwen3-8B-Base)",
        model=STUDY,
        records=(S25,),
        parts=as_good_as_on_policy,
        command=study_command(25, *ROWS),
    ),
    PublishedClaim(
        name="tis-and-icepop-collapse",
        title="TIS and IcePop collapse under extreme mismatch",
        says="Weights alone (TIS, IcePop) collapse where the mismatch is extreme",
        model=STUDY,
        records=(S25, S60),
        parts=baselines_collapse,
        command=study_command(25, *ROWS),
    ),
    PublishedClaim(
        name="top-20-suffices",
        title="lists of 20 tokens are enough for Z",
        says="Z from both sides' 20 most likely tokens, times one factor a batch, is enough",
        model=f"{STUDY}, 838 tokens in the vocabulary",
        records=(S25,),
        parts=lists_suffice,
        command=study_command(25, *BUDGETS.values()),
        experiment="jackpot-union",
        settled=published_corrections.lists_suffice,
    ),
    PublishedClaim(
        name="z-matters",
        title="the weight with Z trains better than the ratio alone",
        says="Kept tokens are to be reweighted by Z, summed over the union of both lists",
        model=f"{STUDY}; {TINY}",
        experiment="jackpot-union",
        settled=published_corrections.z_matters,
    ),
    PublishedClaim(
        name="another-model-samples",
        title="another, smaller model can sample",
        says="Rollouts of Qwen3-1.7B-Base train Qwen3-8B-Base for 300 steps",
        model="Qwen3 1.7B and 8B",
        untestable="needs two trained models with one vocabulary, and an update of both; sparroll samples from one model",
        command="sparroll train --config recipes/polaris-grpo-qwen3-8b/train.toml --out runs/polaris-8b",
    ),
)

OTHERS = (
    PublishedClaim(
        name="staleness-adds",
        title="staleness and sparsity are two mismatches",
        says="The weight now/sparse factors into now/dense (staleness) and dense/sparse, to be corrected apart (Sparse-RL)",
        model=f"{STUDY}; {TINY}",
        experiment="staleness",
        settled=published_corrections.staleness_adds,
    ),
    PublishedClaim(
        name="quantised-sampler",
        title="TIS repairs a quantised sampler",
        says="Rollouts with int8 or fp8 weights train like those of full precision with TIS at a bound of 2 to 8 (FlashRL)",
        model=f"{STUDY}; {TINY}",
        experiment="quantised-sampler",
        settled=published_corrections.eight_bits_train_as_well,
    ),
)
