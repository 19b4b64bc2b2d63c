"""What the experiments of recipes/claims on corrections and other mismatches say of the papers' claims: from the results of
their records to parts with estimates and rules. Measures nothing; published_experiments.py has the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from published_claims import Part
from published_experiments import Gains, Results, estimate, gains, lines_of
from published_figures import mean_of
from published_rules import AS_GOOD, Estimate, above, as_good, at_least, below, inside, rejected

TOO_MANY = 0.15
"""Share of rejected sequences above which Sparse-RL calls a budget too small."""
LEAST_SAVED = 0.35
"""Of the KV memory, as published."""
KEPT = 0.97
"""Published share of dense training's accuracy."""
ADD = 0.1
"""Part of the sum of two mismatches by which both together may differ from it and still add."""
WITH, EPSILONS = 1e-4, (1e-5, 1e-3)
"""Published threshold of the veto, and the others that it may have."""


# -- sparse-rl -----------------------------------------------------------------------------------------------------------


def _evicting(found: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Of each task: the kinds of run that evict with the published correction, by what is left in the cache."""
    kinds: dict[str, dict[int, str]] = {line["task"]: {} for line in found["lines"]}
    for line in found["lines"]:
        if line["reading"]["kind"] == "compression" and line["epsilon"] == WITH:
            kinds[line["task"]][line["reading"]["budget_tokens"]] = line["kind"]
    return kinds


def _middle(found: Mapping[str, Any]) -> dict[str, str]:
    """Of each task: the kind of run that is also there with other thresholds and without a correction. It stands for the
    published 512 of 128 to 1,024 tokens. A task that nothing evicts in is left out."""
    kinds = {task: by_kept[sorted(by_kept)[len(by_kept) // 2]] for task, by_kept in _evicting(found).items() if by_kept}
    for line in found["lines"]:
        if line["reading"]["kind"] == "compression" and line["epsilon"] != WITH:
            kinds[line["task"]] = f"r_kv-{line['reading']['budget_tokens']}"
    return kinds


def eviction_collapses(found: Results) -> Sequence[Part]:
    """What the middle kind of run gained in itself without a correction."""
    return [
        Part(f"{_words(task, middle)}, uncorrected, change", of[task].of(f"{middle}-none"), below(0), sign=True)
        for each in found
        for of in (gains(each["lines"], "kind"),)
        for task, middle in _middle(each).items()
    ]


def correction_helps(found: Results) -> Sequence[Part]:
    return _compared(found, "", "-none", "beyond no correction", above(0))


def threshold_matters_little(found: Results) -> Sequence[Part]:
    same = inside(-AS_GOOD, AS_GOOD)
    return [part for eps in EPSILONS for part in _compared(found, f"-{eps:g}", "", f"{eps:g} beyond {WITH:g}", same)]


def _compared(found: Results, kind: str, other: str, words: str, rule: Any) -> list[Part]:
    """Of each task, the middle kind of run with this ending beyond the one with the other; "dense" is that itself."""
    parts = []
    for each in found:
        of = gains(each["lines"], "kind")
        for task, middle in _middle(each).items():
            than = other if other == "dense" else middle + other
            parts.append(
                Part(f"{_words(task, middle)}, {words}", of[task].beyond(middle + kind, than), rule, sign=True)
            )
    return parts


def _words(task: str, kind: str) -> str:
    """
    >>> _words("remarks", "r_kv-192")
    'remarks, R-KV, 192 tokens'
    """
    name, _, tokens = kind.partition("-")
    return f"{task}, {name.replace('r_kv', 'R-KV')}, {tokens} tokens"


def keeps_up_with_dense(found: Results) -> Sequence[Part]:
    """Final accuracy over that of the policy that was trained on dense rollouts; the interval is the difference's."""
    parts = []
    for each in found:
        accuracy = _decoded(each)
        for task, middle in _middle(each).items():
            final = Gains({kind: values["dense"] for kind, values in accuracy[task].items() if "dense" in values})
            dense, behind = final.of("dense"), final.beyond(middle, "dense")
            kept = None
            if dense is not None and behind is not None and dense.value > 0:
                kept = Estimate(*(1 + end / dense.value for end in (behind.value, behind.low, behind.high)))
            parts.append(Part(f"{_words(task, middle)}, accuracy of dense's", kept, at_least(KEPT)))
    return parts


def robust_to_sparsity(found: Results) -> Sequence[Part]:
    """How much less accuracy the policy that was trained on sparse rollouts loses when it is decoded like them, against
    the one that was trained on dense rollouts."""
    parts = []
    for each in found:
        middle = _middle(each)
        for task, accuracy in _decoded(each).items():
            pages = [kind for kind in accuracy if kind.startswith("pages-")]
            for kind in ([middle[task]] if task in middle else []) + pages:
                less = _changed(accuracy, kind).beyond(kind, "dense")
                parts.append(Part(f"{_words(task, kind)}, less lost when decoded so", less, above(0), sign=True))
    return parts


def _changed(accuracy: Mapping[str, Mapping[str, Sequence[float]]], decoded_with: str) -> Gains:
    """Accuracy when decoded so less that of dense decoding, by what a policy was trained on."""
    return Gains(
        {
            kind: [sparse - dense for sparse, dense in zip(values[decoded_with], values["dense"], strict=True)]
            for kind, values in accuracy.items()
            if decoded_with in values and "dense" in values
        }
    )


def _decoded(found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Accuracy of each seed: by task, what the policy was trained on, and how it is decoded."""
    by_task: dict[str, dict[str, dict[str, list[float]]]] = {line["task"]: {} for line in found["lines"]}
    for line in found["accuracy"]:
        values = line["accuracy"]["seeds"]
        by_task[line["task"]].setdefault(line["trained_on"], {})[line["decoded_with"]] = values
    return by_task


def memory_saved(found: Results) -> Sequence[Part]:
    """Of the runs that save the published share, the one that trains best, beyond dense. Where none saves so much, the
    most that is saved."""
    parts = []
    for each in found:
        of = gains(each["lines"], "kind")
        saved = {
            (line["task"], line["kind"]): line["kv_saved_share"]["mean"]
            for line in each["lines"]
            if line["epsilon"] == WITH and line.get("kv_saved_share")
        }
        for task, by_kept in _evicting(each).items():
            known = {kind: saved[task, kind] for kind in by_kept.values() if (task, kind) in saved}
            much = {kind: of[task].beyond(kind, "dense") for kind in known if known[kind] >= LEAST_SAVED}
            if known and not much:
                parts.append(
                    Part(f"{task}, most saved", Estimate.single(max(known.values())), at_least(LEAST_SAVED), 2)
                )
            elif known:
                best = max(much, key=lambda kind: much[kind].value if much[kind] else 0.0)
                label = f"{_words(task, best)}, {100 * known[best]:.0f} % saved, beyond dense"
                parts.append(Part(label, much[best], as_good(), sign=True))
    return parts


def rejection_tells(found: Results) -> Sequence[Part]:
    """Rejected share of every budget with the published correction, whatever the rollouts leave out."""
    parts = []
    for each in found:
        of = gains(each["lines"], "kind")
        for line in each["lines"]:
            if line["epsilon"] == WITH:
                behind, share = of[line["task"]].beyond(line["kind"], "dense"), estimate(line["vetoed_share"])
                label = f"{_words(line['task'], line['kind'])}, rejected"
                parts.append(Part(label, share, rejected(behind or Estimate.unrepeated(0), TOO_MANY), 2))
    return parts


def middle_budget_suffices(found: Results) -> Sequence[Part]:
    """The budget in the middle trains like dense rollouts, the least one does not."""
    parts = []
    for each in found:
        of, middle = gains(each["lines"], "kind"), _middle(each)
        for task, by_kept in _evicting(each).items():
            if task not in middle:
                continue
            enough = of[task].beyond(middle[task], "dense")
            parts.append(Part(f"{_words(task, middle[task])}, beyond dense", enough, as_good(), sign=True))
            least = by_kept[min(by_kept)] if by_kept else middle[task]
            if least != middle[task]:
                behind = of[task].beyond(least, "dense")
                parts.append(Part(f"{_words(task, least)}, beyond dense", behind, below(0), sign=True))
    return parts


# -- jackpot-union -------------------------------------------------------------------------------------------------------


def better_than_tis(found: Results) -> Sequence[Part]:
    return _beyond(found, "union", "tis", "Jackpot beyond TIS", above(0))


def z_matters(found: Results) -> Sequence[Part]:
    each = _beyond(found, "union", "same Z for all", "Z of each token beyond the same Z for all", above(0))
    return each + _beyond(found, "union", "engine's list", "whole union beyond the engine's list", above(0))


def _beyond(found: Results, kind: str, other: str, words: str, rule: Any) -> list[Part]:
    return [
        Part(f"{task}, {words}", of.beyond(kind, other), rule, sign=True)
        for each in found
        for task, of in gains(each["lines"], "kind").items()
    ]


def lists_suffice(found: Results) -> Sequence[Part]:
    """The factor that a batch needs beside the lists of 20 tokens."""
    return [
        Part(f"{line['task']}, batch-level factor", estimate(line["accepted_mass_calibration"]), inside(0.95, 1.05))
        for line in lines_of(found)
        if line["kind"] == "union"
    ]


# -- staleness, quantised-sampler ----------------------------------------------------------------------------------------


def staleness_adds(found: Results) -> Sequence[Part]:
    """Of the oldest sparse rollouts of each task: the acceptance that both mismatches lose together over the sum of what
    each loses alone, and what it gains to correct for sparsity alone and leave the age to the clipped ratio."""
    parts = []
    for each in found:
        of = gains(each["lines"], "rollouts", "rollouts_behind_steps", "dense_of")
        for task, mine in of.items():
            old = max((kind[1] for kind in mine.by_kind if kind[0] == "sparse"), default=0)
            if old:
                now, apart = (("sparse", old, dense_of) for dense_of in ("now", "sampler"))
                lost = _lost_together(each, task, old)
                label = f"{task}, sparse rollouts {old} steps old"
                of_sum = mean_of(lost) if lost else None
                parts.append(Part(f"{label}, lost together, of the sum", of_sum, inside(1 - ADD, 1 + ADD), 2))
                parts.append(Part(f"{label}, corrected apart", mine.beyond(apart, now), above(0), sign=True))
    return parts


def _lost_together(found: Mapping[str, Any], task: str, old: int) -> list[float]:
    """Lost by both, as a part of the sum of what sparsity and age lose alone, of each seed. Of one kind of run only: those
    of another correction have the same seeds."""
    asked = {"task": task, "rollouts": "sparse", "rollouts_behind_steps": old}
    lines = [line for line in found["lines"] if {name: line[name] for name in asked} == asked]
    line = max(lines, key=lambda line: line["dense_of"] == "now")
    pairs = [line.get(f"acceptance_mean_{pair}") for pair in ("sparse_to_dense", "dense_to_now", "sparse_to_now")]
    if not all(pairs):
        return []
    seeds = zip(*(pair["seeds"] for pair in pairs), strict=True)
    return [(1 - both) / (2 - sparse - stale) for sparse, stale, both in seeds if sparse + stale < 2]


def eight_bits_train_as_well(found: Results) -> Sequence[Part]:
    """Runs with full attention, which is what the claim is about."""
    parts = []
    for each in found:
        for task, of in gains(each["lines"], "attention", "form").items():
            ours = of.beyond(("dense", "int8"), ("dense", None))
            parts.append(Part(f"{task}, int8 weights beyond whole ones", ours, as_good(), sign=True))
    return parts
