"""What Sparse-RL (arXiv 2601.10079) says, and what our records say of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import published_corrections
from published_claims import STUDY, TINY, Part, PublishedClaim, study_command
from published_figures import change, difference, final_difference, mean_of, over, runs_of, share_of
from published_rules import Estimate, above, at_least, below, rejected
from record_tables import results
from render_study import STUDIES

from sparroll.rounding import rounded_down

S25 = STUDIES[25]
EVICTED = "mismatch-study-eviction-cpu"
MOST_SAVED = 0.53
"""Of the KV memory, as published."""
NAMES = {"r_kv": "R-KV", "snap_kv": "SnapKV"}
REJECTED = "correction/masked_sequence_share"
CORRECTED = {"R-KV, 3,584 tokens": "r_kv-3584", "SnapKV, 3,584": "snap_kv-3584", "R-KV, 1,024": "r_kv-1024"}


def collapses_without() -> Sequence[Part]:
    """Rows that save as much memory as published, or more."""
    rows = {name: f"{row}-none" for name, row in CORRECTED.items()} | {"SnapKV, 1,024": "snap_kv-1024-none"}
    saved = {name: statistics.mean(over(S25, row, "compression/kv_saved_share")) for name, row in rows.items()}
    return [
        Part(f"{name} ({rounded_down(saved[name], 2)[1:]} saved), change", change(S25, row), below(0), sign=True)
        for name, row in rows.items()
        if saved[name] >= published_corrections.LEAST_SAVED
    ]


def keeps_up_with_dense() -> Sequence[Part]:
    ended = {name: _ended(f"{row}-sparse_rl") for name, row in CORRECTED.items()}
    parts = [
        Part(f"{name}, runs that reached their end", Estimate.single(of), at_least(1), 2) for name, of in ended.items()
    ]
    kept = _share_kept("r_kv-3584-sparse_rl")
    return [*parts, Part("R-KV, 3,584 tokens, accuracy of dense's", kept, at_least(published_corrections.KEPT))]


def _ended(row: str) -> float:
    return len(runs_of(S25, row)) / len(runs_of(S25, row, whole=False))


def _share_kept(row: str) -> Estimate:
    """Final accuracy of a row's policies over that of dense rollouts' mean; the interval is the difference's."""
    behind, final = final_difference(S25, row, "dense")
    return Estimate(*(1 + of / final for of in (behind.value, behind.low, behind.high)))


def memory_saved() -> Sequence[Part]:
    """What the policy before any training solves where an eviction saves as much as published. No row of training did: they
    save less, or much more."""
    runs = results(EVICTED, "study-eviction")["runs"]
    (dense,) = [run["solved_share"] for run in runs if run["policy"] is None]
    parts = []
    for run in runs:
        if run["policy"] and published_corrections.LEAST_SAVED <= run["kv_saved_share"] <= MOST_SAVED:
            label = f"untrained, {NAMES[run['policy']['kind']]}, {rounded_down(run['kv_saved_share'], 2)[1:]} saved"
            label += f", share solved (dense: {rounded_down(dense, 2)[1:]})"
            solved = share_of(round(run["solved_share"] * run["problems"]), run["problems"])
            parts.append(Part(label, solved, above(round(published_corrections.KEPT * dense, 3)), 2))
    return parts


def rejection_tells() -> Sequence[Part]:
    rows = {"R-KV, 3,584 tokens": "r_kv-3584", "schedule of .86": "calibrated-0.86", "128 tokens": "fixed"}
    return [_judged_by_rejection(name, f"{row}-sparse_rl") for name, row in rows.items()]


def _judged_by_rejection(name: str, row: str) -> Part:
    behind = difference(S25, row, "dense")
    return Part(
        f"{name}, rejected", mean_of(over(S25, row, REJECTED)), rejected(behind, published_corrections.TOO_MANY), 2,
    )  # fmt: skip


def correction_helps() -> Sequence[Part]:
    """Rows that evict and gained nothing without a correction: do their runs with it reach their end? What else has both
    kinds of run: does the correction gain anything?"""
    failed = {name: row for name, row in CORRECTED.items() if change(S25, f"{row}-none").low <= 0}
    parts = [
        Part(
            f"{name}, corrected runs that reached their end",
            Estimate.single(_ended(f"{row}-sparse_rl")),
            at_least(1),
            2,
        )
        for name, row in failed.items()
    ]
    rows = {name: row for name, row in CORRECTED.items() if name not in failed}
    rows |= {"pages, 128 tokens": "fixed", "pages, schedule of .86": "calibrated-0.86"}
    return parts + [
        Part(f"{name}, beyond no correction", difference(S25, f"{row}-sparse_rl", f"{row}-none"), above(0), sign=True)
        for name, row in rows.items()
    ]


EVICTION = partial(study_command, 25, "dense")
NONE = tuple(f"{row}-none" for row in (*CORRECTED.values(), "snap_kv-1024"))
WITH = tuple(f"{row}-sparse_rl" for row in CORRECTED.values())

CLAIMS = (
    PublishedClaim(
        name="eviction-collapses",
        title="evicting without a correction collapses",
        says="Training-free KV compression during rollouts, uncorrected, collapses the training",
        model=STUDY,
        records=(S25,),
        parts=collapses_without,
        command=EVICTION(*NONE),
        experiment="sparse-rl",
        settled=published_corrections.eviction_collapses,
    ),
    PublishedClaim(
        name="eviction-with-correction-trains",
        title="with the correction, evicting trains like dense rollouts",
        says="With rejection and reweighting, rollouts of 512 tokens keep about 97 % of dense training's accuracy",
        model=STUDY,
        records=(S25,),
        parts=keeps_up_with_dense,
        command=EVICTION(*WITH),
        experiment="sparse-rl",
        settled=published_corrections.keeps_up_with_dense,
    ),
    PublishedClaim(
        name="memory-saved",
        title="35 to 53 % of the KV memory is saved",
        says="35 to 53 % of the KV storage is saved",
        model=STUDY,
        records=(EVICTED,),
        parts=memory_saved,
        command="python recipes/mismatch-study/eviction.py --model runs/study-model/folder "
        "--out runs/study-model/eviction.json",
        experiment="sparse-rl",
        settled=published_corrections.memory_saved,
    ),
    PublishedClaim(
        name="correction-helps",
        title="the correction is what keeps such rollouts trainable",
        says="Rejection and reweighting turn a run that collapses into one that trains",
        model=STUDY,
        records=(S25,),
        parts=correction_helps,
        command=EVICTION(
            "fixed-none", "fixed-sparse_rl", "calibrated-0.86-none", "calibrated-0.86-sparse_rl", *NONE, *WITH
        ),
        experiment="sparse-rl",
        settled=published_corrections.correction_helps,
    ),
    PublishedClaim(
        name="rejection-tells-the-budget",
        title="the share of rejected sequences says whether the budget suffices",
        says="A healthy share of rejected sequences is about .07; above .15 the budget is too small",
        model=STUDY,
        records=(S25,),
        parts=rejection_tells,
        command=EVICTION("fixed-sparse_rl", "calibrated-0.86-sparse_rl", "r_kv-3584-sparse_rl"),
        experiment="sparse-rl",
        settled=published_corrections.rejection_tells,
    ),
    PublishedClaim(
        name="budget-of-512",
        title="512 tokens suffice, fewer do not",
        says="Of budgets of 128 to 1,024 tokens, 512 trains stably",
        model=f"{STUDY}; {TINY}",
        experiment="sparse-rl",
        settled=published_corrections.middle_budget_suffices,
    ),
    PublishedClaim(
        name="epsilon",
        title="the threshold of the veto does not matter much",
        says="The veto's threshold of 1e-4 may be 1e-5 to 1e-3",
        model=f"{STUDY}; {TINY}",
        experiment="sparse-rl",
        settled=published_corrections.threshold_matters_little,
    ),
    PublishedClaim(
        name="robust-to-sparsity",
        title="a policy trained on sparse rollouts is more robust under sparse inference",
        says="Policies trained on compressed rollouts lose less when they are decoded with compression",
        model=f"{STUDY}; {TINY}",
        experiment="sparse-rl",
        settled=published_corrections.robust_to_sparsity,
    ),
)
