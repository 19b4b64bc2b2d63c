"""Figures in the docs' sentences about rollouts under scaled schedules of small units: their speed, goals, profiles and
budgets."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from claim_words import Claims, Figures, bare, down, up
from published_figures import less
from record_tables import results
from render_fine import BLOCKS_OF_16, BUSY_HOST, BY_ALL_MODELS, HALF_THE_LANES, SIX_MODELS, fine_records, reached_goals
from render_speed import rollout_records

MORE = {
    "halves": (BY_ALL_MODELS, "h200"),
    "h100_wide": ("wide", "h100"),
    "h100_dense": ("fine", "h100"),
}
"""Rollouts under small units by what a sentence calls them: kind and GPU of their records."""


def small_units() -> Figures:
    """By how many % rollouts under scaled schedules of small units are faster than under the published schedules."""
    said: dict[str, str] = {}
    for name, (kind, device) in MORE.items():
        more = [100 * (found["over_published"] - 1) for *_, found in fine_records(kind, [device])]
        said |= {f"{name}_least": down(min(more)), f"{name}_most": down(max(more))}
    return said


def small_units_over_dense() -> Figures:
    """The range of speed-ups over dense rollouts, of small units and of the published schedules in the same calls. Without
    the long set, which the published schedules were not measured on before."""
    found = [each for _, name, each in fine_records(BY_ALL_MODELS, ["h200"]) if name != "long"]
    ours = [each["speedup"] for each in found]
    published = [each["published"]["speedup"] for each in found]
    return {
        "slowest": down(min(ours), 2),
        "fastest": down(max(ours), 2),
        "published_slowest": down(min(published), 2),
        "published_fastest": down(max(published), 2),
    }


def faster_pages() -> Figures:
    """By how many % rollouts under small units are faster than under the published schedules with a faster kernel for these,
    and by how many dense steps of all sizes but 14B took longer in that call."""
    alone, busy = (
        {(size, name): found for size, name, found in fine_records(kind, ["h200"])}
        for kind in (BY_ALL_MODELS, BUSY_HOST)
    )
    assert alone.keys() == busy.keys()
    more = [100 * (found["over_published"] - 1) for found in busy.values()]
    rate = "dense_tokens_per_second"
    longer = [100 * (alone[of][rate] / found[rate] - 1) for of, found in busy.items() if of[0] != "14b"]
    return {
        "least": down(min(more)),
        "most": down(max(more)),
        "longer_least": down(min(longer), 1),
        "longer_most": up(max(longer), 1),
    }


def small_units_goals() -> Figures:
    """Which goals are reached under budgets by all models, and how far the others are away."""
    records = {(size, name): found for size, name, found in fine_records(BY_ALL_MODELS, ["h200"])}
    beyond = {of: 100 * (found["speedup"] / found["target_speedup"] - 1) for of, found in records.items()}
    missed = [percent for (size, name), percent in beyond.items() if name == "steady" and size != "14b"]
    large = [records["14b", name] for name in ("drained", "steady")]
    assert (
        max(missed)
        < 0
        <= min(percent for (size, name), percent in beyond.items() if name != "steady" and size != "14b")
    )
    assert all(found["attainable_speedup"] < found["target_speedup"] for found in large)
    goals = reached_goals([BY_ALL_MODELS])
    return {
        "reached": str(sum(goals.values())),
        "goals": str(len(goals)),
        "least": down(-max(missed), 1),
        "most": up(-min(missed), 1),
        **{f"{name}_14b": up(-beyond["14b", name], 1) for name in ("steady", "drained")},
        "ratio_14b": down(large[0]["budget_ratio"], 2),
    }


def blocks() -> Figures:
    """Speed-ups of the published schedules in blocks of 16 and of 64 tokens, the us of their attention, and dense steps in
    both."""
    published = {
        kind: {(size, name): each["published"]["speedup"] for size, name, each in fine_records(kind, ["h200"])}
        for kind in (HALF_THE_LANES, BLOCKS_OF_16)
    }
    lost = [
        100 * (1 - published[BLOCKS_OF_16][of] / now)
        for of, now in published[HALF_THE_LANES].items()
        if of[1] == "steady"
    ]
    us = {
        block: {row["kernel"]: row["graph_us"] for row in rows if "mixed" in row["context_tokens"]}
        for block in ("16", "64")
        for rows in (results(f"kernels-89-requests-blocks-of-{block}-h200", "kernels")["rows"],)
    }
    dense = [
        100 * (1 - ratio) for ratio in results("dense-blocks-qwen3-1.7b-h200", "dense-blocks")["larger_over_smaller"]
    ]
    return {
        "now": down(published[HALF_THE_LANES]["1.7b", "steady"], 2),
        "before": down(published[BLOCKS_OF_16]["1.7b", "steady"], 2),
        "lost_least": down(min(lost)),
        "lost_most": up(max(lost)),
        "us_16": up(us["16"]["attention"]),
        "us_64": up(us["64"]["attention"]),
        "dense_least": down(min(dense), 1),
        "dense_most": up(max(dense), 1),
    }


def one_token() -> Figures:
    """By how many ms the steps of one token differ whose median counts in the rows of 1.7B with 2 x 2."""
    took = results("rollout-qwen3-1.7b-steady-wide-2x2-h200", "rollout")["one_token_seconds"]
    return {"apart": down(1000 * (median(took) - min(took)), 2)}


def profiles() -> Figures:
    """Shares of attention and choice in the profiled steps, and of their bytes in their times, in %."""
    shares: dict[str, list[float]] = {}
    for *_, found in fine_records(BY_ALL_MODELS, ["h200"]):
        if found["profile"]:
            took, floors = found["profile"]["groups_ms"], found["profile"]["floors_ms"]
            for kernels in ("gather", "choice"):
                shares.setdefault(kernels, []).append(100 * took[kernels] / sum(took.values()))
                shares.setdefault(f"{kernels}_bytes", []).append(100 * floors[kernels] / took[kernels])
    return {
        **{f"{name}_least": down(min(values)) for name, values in shares.items()},
        **{f"{name}_most": up(max(values)) for name, values in shares.items()},
    }


def small_units_of_two_models() -> Figures:
    """2 x 2 with budgets by two models."""
    goals = reached_goals(["wide-2x2"])
    large = {name: found["speedup"] for size, name, found in fine_records("wide-2x2", ["h200"]) if size == "14b"}
    return {
        "reached": str(sum(goals.values())),
        "goals": str(len(goals)),
        **{name: down(speedup, 2) for name, speedup in large.items()},
    }


def published_between_calls() -> Figures:
    """By how much a published schedule's speed-up differs at most between its own records and those of small units."""
    own = {(size, name): found["speedup"] for size, name, found in rollout_records()}
    beside = {
        (size, name): found["published"]["speedup"] for size, name, found in fine_records(BY_ALL_MODELS, ["h200"])
    }
    return {"apart": up(max(abs(own[of] - beside[of]) for of in own.keys() & beside.keys()), 2)}


def small_units_whole() -> Figures:
    """The whole drained run of 1.7B under 2 x 2 beside its moments."""
    run = results("whole-run-qwen3-1.7b-wide-2x2-h200", "whole-run")
    moments = results("rollout-qwen3-1.7b-drained-wide-2x2-h200", "rollout")
    estimated = run["tokens"] / moments["sparse_tokens_per_second"]
    return {
        "seconds": up(run["seconds"], 1),
        "estimated": up(estimated, 1),
        "moments": str(len(moments["windows"])),
        "of": str(len(moments["windows"]) + len(moments["windows_missing"])),
        "error": up(100 * (1 - estimated / run["seconds"]), 1),
    }


def published_by_moments() -> Figures:
    """How fast the published schedule of 1.7B is on the drained set, in two records with different numbers of moments."""
    said: dict[str, str] = {}
    for word, kind in (("first", BY_ALL_MODELS), ("second", SIX_MODELS)):
        found = results(f"rollout-qwen3-1.7b-drained-{kind}-h200", "rollout")
        said |= {word: down(found["published"]["speedup"], 2), f"{word}_moments": str(len(found["windows"]))}
    return said


def small_units_budgets() -> Figures:
    """By how much the budgets of 1.7B are smaller than the published ones."""
    return {"ratio": down(results(f"rollout-qwen3-1.7b-steady-{BY_ALL_MODELS}-h200", "rollout")["budget_ratio"], 2)}


def trained_under_pairs() -> Figures:
    """Runs of tiny-reasoner under units of 2 tokens beside runs on dense rollouts: what they gained, with the interval of
    the difference over seeds."""
    lines = results("training-units-2x2-tiny-reasoner-cpu", "claims-predicts-training")["rows"]
    rows = {line["row"]: line for line in lines}
    dense, pairs_of = (rows[row]["accuracy_change"]["seeds"] for row in ("dense", "pairs-192"))
    beyond = less(pairs_of, dense)
    return {
        "tail": down(rows["pairs-192"]["worst_bin_q05"]["mean"], 3),
        "less": up(-beyond.value, 3),
        "low": bare(down(beyond.low, 3)),
        "high": bare(up(beyond.high, 3)),
    }


PAGES: Mapping[str, Claims] = {
    "docs/what-to-use.md": {
        "even the published schedules differ by up to {apart} between calls": published_between_calls,
    },
    "README.md": {
        "With units of four tokens in two bits, rollouts of 1.7B to 14B are {slowest} to {fastest} times as "
        "fast as dense ones, where the published schedules make them {published_slowest} to {published_fastest} "
        "times as fast in the same calls.": small_units_over_dense,
    },
    "docs/results.md": {
        "units of 4 tokens in 2 bits make rollouts of 1.7B to 14B {halves_least} to {halves_most} % faster than the "
        "published schedules in the same records.": small_units,
        "In a later call with a better one, 4 x 2 made rollouts {least} to {most} % faster than the published schedules. "
        "Another GPU of that host was busy meanwhile, and dense steps of 1.7B, 4B and 8B took {longer_least} to "
        "{longer_most} % longer": faster_pages,
        "**{reached} of {goals} goals are reached.**": small_units_goals,
        "The steady sets of these three lie {least} to {most} % below theirs.": small_units_goals,
        "The sets of 14B lie {drained_14b} % (drained) and {steady_14b} % (steady) below theirs, which no kernel could "
        "reach with these budgets: *attainable* is less. Its published budgets are the largest, and the scaled ones are "
        "only {ratio_14b} times smaller.": small_units_goals,
        "the published schedules were {lost_least} to {lost_most} % slower beside dense attention in the steady sets than "
        "in blocks of 64: 1.7B {before} instead of {now} times.": blocks,
        "takes {us_16} us for 89 requests in blocks of 16, and {us_64} us in blocks of 64": blocks,
        "Dense steps take {dense_least} to {dense_most} % less in blocks of 64": blocks,
        "Attention (*gather*) takes {gather_least} to {gather_most} % of a step, and its bytes {gather_bytes_least} to "
        "{gather_bytes_most} % of that": profiles,
        "The choice takes another {choice_least} to {choice_most} %, and its bytes {choice_bytes_least} to "
        "{choice_bytes_most} % of that.": profiles,
        "In the rows of 1.7B with 2 x 2 that is {apart} ms more than the fastest": one_token,
        "the published schedule of 1.7B is {first} times as fast as dense on the drained set by {first_moments} moments, in "
        "the first row, and {second} times by {second_moments} moments": published_by_moments,
        "With 2 x 2 they reached {reached} of the {goals} goals, and rollouts of 14B were {drained} (drained) and {steady} "
        "(steady) times as fast as dense ones.": small_units_of_two_models,
        "It took {seconds} s, where {moments} of {of} moments say {estimated}, {error} % less": small_units_whole,
        "For 1.7B that is {ratio} times.": small_units_budgets,
        "had a tail of {tail} in the worst length bin and gained {less} less than on dense rollouts, with an interval of "
        "the difference from {low} to {high}": trained_under_pairs,
        "On an H100, 4 x 4 made rollouts {h100_dense_least} to {h100_dense_most} % faster than the published schedules with "
        "layers 0 and 1 dense, and {h100_wide_least} to {h100_wide_most} % faster with these two reading four times as "
        "much.": small_units,
    },
}
