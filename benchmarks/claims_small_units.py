"""Figures in the docs' sentences about rollouts under scaled schedules of small units: their speed, goals, profiles and
budgets."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from claim_words import Claims, Figures, bare, down, up
from published_figures import less
from record_tables import results
from render_fine import (
    AGAIN,
    BLOCKS_OF_16,
    BY_ALL_MODELS,
    BY_BOUNDS,
    BY_BOUNDS_AGAIN,
    HALF_THE_LANES,
    STORED_APART,
    fine_records,
    reached_goals,
)

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
    the long set, which the published schedules were not measured on before. Of two calls the slower one counts."""
    found = [
        each for kind in (BY_ALL_MODELS, AGAIN) for _, name, each in fine_records(kind, ["h200"]) if name != "long"
    ]
    slowest: dict[tuple[str, str], float] = {}
    for each in found:
        of = each["model"], each["request_set"]
        slowest[of] = min(each["speedup"], slowest.get(of, each["speedup"]))
    ours = slowest.values()
    published = [each["published"]["speedup"] for each in found]
    return {
        "slowest": down(min(ours), 2),
        "fastest": down(max(ours), 2),
        "published_slowest": up(min(published), 2),
        "published_fastest": up(max(published), 2),
    }


def small_units_goals() -> Figures:
    """Which goals are reached under budgets by all models, how far the others are away, and what other calls say."""
    goals, here = reached_goals([BY_ALL_MODELS]), _beyond_goals(BY_ALL_MODELS)
    missed = {of for of, percent in here.items() if percent < 0}
    assert missed == {("14b", "drained"), ("14b", "steady")}, "other goals are missed"
    earlier = [*_beyond_goals(BY_BOUNDS).items(), *_beyond_goals(BY_BOUNDS_AGAIN).items()]
    # The long set lies far above its goal.
    now, before = (
        [percent for of, percent in found if of not in missed and of[1] != "long"] for found in (here.items(), earlier)
    )
    again, large = _beyond_goals(AGAIN), results(f"rollout-qwen3-14b-drained-{BY_ALL_MODELS}-h200", "rollout")
    return {
        "reached": str(sum(goals.values())),
        "goals": str(len(goals)),
        "least": down(min(now), 1),
        "most": down(max(now), 1),
        "least_before": down(min(before), 1),
        "most_before": down(max(before), 1),
        **{f"{name}_{size}": up(-min(here[size, name], again[size, name]), 1) for size, name in missed},
        "ratio_14b": down(large["budget_ratio"], 2),
    }


def _beyond_goals(kind: str) -> dict[tuple[str, str], float]:
    """How far the speed-ups of such records on an H200 lie above their goals, in %, by size and set."""
    return {
        (size, name): 100 * (found["speedup"] / found["target_speedup"] - 1)
        for size, name, found in fine_records(kind, ["h200"])
    }


def _shorter(now: dict[str, Any], before: dict[str, Any], engine: str) -> list[float]:
    """How much shorter the steps of an engine ("fine" or "dense") are than in an earlier call, in %, by moments."""
    assert now["windows"] == before["windows"], "other moments"
    assert now["schedule_table"]["steps"] == before["schedule_table"]["steps"], "other budgets"
    repeats = (found["repeats"][f"{engine}_seconds"] for found in (now, before))
    return [100 * (1 - median(new) / median(old)) for new, old in zip(*repeats, strict=True)]


def _layer_us(found: dict[str, Any]) -> dict[str, float]:
    """What a kernel takes at a time in the profiled step."""
    return {each["kernel"]: 1e3 * each["ms"] / each["calls"] for each in found["profile"]["kernels"]}


def stored_while_scoring() -> Figures:
    """How much shorter steps of the steady sets are than in a call before new keys and values were stored by the kernel that
    scores, in %, by moments and models, in two calls; how much shorter dense steps are there; and the speed-ups over dense
    rollouts in the second call."""
    shorter: dict[str, list[float]] = {}
    first, second = (
        {(size, name): found for size, name, found in fine_records(kind, ["h200"])}
        for kind in (BY_BOUNDS, BY_BOUNDS_AGAIN)
    )
    for about, call in (("", first), ("_again", second)):
        for (size, name), now in call.items():
            before = results(f"rollout-qwen3-{size}-{name}-{STORED_APART}-h200", "rollout")
            if name == "steady":
                assert now["schedule_table"] == before["schedule_table"], f"{size}: another schedule"
                for engine in ("fine", "dense"):
                    shorter.setdefault(engine + about, []).extend(_shorter(now, before, engine))
    again = {of: found["speedup"] for of, found in second.items()}
    return {
        "least_again": down(min(shorter["fine_again"]), 1),
        "most_again": up(max(shorter["fine_again"]), 1),
        "dense_least_again": up(-min(shorter["dense_again"]), 1),
        "dense_most_again": up(max(shorter["dense_again"]), 1),
        "longer": up(-min(shorter["fine"]), 1),
        "shorter": up(max(shorter["fine"]), 1),
        "dense_longer_least": down(-max(shorter["dense"]), 1),
        "dense_longer_most": up(-min(shorter["dense"]), 1),
        "steady_1_7b": down(again["1.7b", "steady"], 2),
        "drained_1_7b": down(again["1.7b", "drained"], 2),
        "steady_8b": down(again["8b", "steady"], 2),
    }


def large_budgets() -> Figures:
    """The us that the choice takes in a layer of 14B's drained set, by a sample and between two bounds before, and how much
    shorter its steps are, in %."""
    now, before = (results(f"rollout-qwen3-14b-drained-{kind}-h200", "rollout") for kind in (AGAIN, BY_BOUNDS))
    assert now["schedule_table"] == before["schedule_table"], "another schedule"
    assert now["profile"]["step"] == before["profile"]["step"] == now["windows"][3]["step"], "profiles of other moments"
    us, us_before = (_layer_us(found)["_choose"] for found in (now, before))
    shorter, dense = (_shorter(now, before, engine) for engine in ("fine", "dense"))
    assert [each["batch"] for each in now["windows"][3:]] == [25, 16, 1]
    return {
        "speedup": down(now["speedup"], 2),
        "speedup_before": up(before["speedup"], 2),
        "us": up(us),
        "us_before": down(us_before),
        "least": down(min(shorter[3:]), 1),
        "most": up(max(shorter[3:]), 1),
        "longer": up(-min(shorter[:3]), 1),
        "shorter": up(max(shorter[:3]), 1),
        "dense_longer": up(-min(dense), 1),
        "dense_shorter": up(max(dense), 1),
    }


def begins_together() -> Figures:
    """The us of a layer of 32 requests with attention that begins early, and after the choice."""
    us = {
        (row["kernel"].rpartition(", ")[2], row.get("kv_budget_tokens")): row["graph_us"]
        for row in results("kernels-32-requests-4x2-h200", "kernels")["rows"]
    }
    assert abs(us["attention after the choice", "1024"] / us["attention early", "1024"] - 1) < 0.01, "not the same"
    return {"after": up(us["attention after the choice", "4096"]), "early": down(us["attention early", "4096"])}


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


def many_requests() -> Figures:
    """How much shorter steps under small units are than before many requests chose by a sample and attention began early,
    in %, and the us of a layer's kernels in a profile beside those of an earlier one of the same step, in blocks of 16."""
    ends, us, dense = {}, {}, []
    for size in ("1.7b", "4b", "8b"):
        now, before, profiled = (
            results(f"rollout-qwen3-{size}-steady-{kind}-h200", "rollout")
            for kind in (STORED_APART, HALF_THE_LANES, BLOCKS_OF_16)
        )
        assert profiled["schedule_table"]["steps"] == now["schedule_table"]["steps"], "other budgets"
        shorter, dense_shorter = (_shorter(now, before, engine) for engine in ("fine", "dense"))
        dense += dense_shorter
        name = size.replace(".", "_")
        ends |= {f"least_{name}": down(min(shorter)), f"most_{name}": up(max(shorter))}
        assert now["profile"]["step"] == profiled["profile"]["step"], "profiles of other moments"
        for about, found in (("", now), ("_before", profiled)):
            took = _layer_us(found)
            us |= {f"{kernel}_{name}{about}": up(took[kernel]) for kernel in ("_score_codes", "_choose", "_gather")}
    return ends | us | {"least_dense": down(min(dense)), "most_dense": up(max(dense))}


def one_token() -> Figures:
    """By how many ms the steps of one token differ whose median counts in the rows of 1.7B with 2 x 2."""
    took = results("rollout-qwen3-1.7b-steady-wide-2x2-h200", "rollout")["one_token_seconds"]
    return {"apart": down(1000 * (median(took) - min(took)), 2)}


def disturbed_token() -> Figures:
    """The ms of the fastest step of one token in the rows of 1.7B and in calls before, and the shares of the attainable in
    these, in %."""

    def fastest(kind: str) -> float:
        return 1000 * min(results(f"rollout-qwen3-1.7b-steady-{kind}-h200", "rollout")["one_token_seconds"])

    before = BY_BOUNDS, BY_BOUNDS_AGAIN
    shares = [
        100 * found["attainable_share"]
        for kind in before
        for size, _, found in fine_records(kind, ["h200"])
        if size == "1.7b"
    ]
    return {
        "took": down(fastest(BY_ALL_MODELS), 2),
        "least": down(min(map(fastest, before)), 2),
        "most": up(max(map(fastest, before)), 2),
        "least_share": down(min(shares)),
        "most_share": up(max(shares)),
    }


def steady_profiles() -> Figures:
    """Shares of attention and choice in the profiled steps of steady sets, without 14B's, and of its bytes in attention's
    time, in %."""
    gather, of_bytes, choice = [], [], []
    for size, name, found in fine_records(STORED_APART, ["h200"]):
        if name == "steady" and size != "14b":
            took, floors = found["profile"]["groups_ms"], found["profile"]["floors_ms"]
            gather.append(100 * took["gather"] / sum(took.values()))
            of_bytes.append(100 * floors["gather"] / took["gather"])
            choice.append(100 * took["choice"] / sum(took.values()))
    shares = {"gather": gather, "choice": choice}
    return {
        "bytes_least": down(min(of_bytes)),
        "bytes_most": down(max(of_bytes)),
        **{f"{name}_least": down(min(values)) for name, values in shares.items()},
        **{f"{name}_most": up(max(values)) for name, values in shares.items()},
    }


def small_units_again() -> Figures:
    """The second call's speed-ups beside the first one's in blocks of 16, in %."""
    more, moments = {}, {}
    for size, name, found in fine_records(BLOCKS_OF_16, ["h200"]):
        again = results(f"rollout-qwen3-{size}-{name}-{BLOCKS_OF_16}-again-h200", "rollout")
        assert again["schedule_table"] == found["schedule_table"], f"{size}, {name}: another schedule"
        more[size, name] = 100 * (again["speedup"] / found["speedup"] - 1)
        moments[size, name] = [len(each["windows"]) for each in (found, again)]
    first, second = moments["1.7b", "drained"]
    elsewhere = [abs(percent) for key, percent in more.items() if key != ("1.7b", "drained")]
    return {
        "lower": up(-min(more.values()), 1),
        "higher": up(max(more.values()), 1),
        "first": str(first),
        "second": str(second),
        "elsewhere": up(max(elsewhere), 1),
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
    "README.md": {
        "With units of four tokens in two bits, rollouts of 1.7B to 14B are {slowest} to {fastest} times as "
        "fast as dense ones, where the published schedules make them {published_slowest} to {published_fastest} "
        "times as fast in the same calls.": small_units_over_dense,
    },
    "docs/results.md": {
        "units of 4 tokens in 2 bits make rollouts {halves_least} to {halves_most} % faster than the published schedules in "
        "the same records.": small_units,
        "With these budgets {reached} of the {goals} goals are reached, all but the two of 14B.": small_units_goals,
        "The drained and steady sets of 1.7B, 4B and 8B lie {least} to {most} % above theirs, and in two earlier calls on "
        "other hosts they lay {least_before} to {most_before} % above them.": small_units_goals,
        "14B lies {steady_14b} % (steady) and {drained_14b} % (drained) below in the slower of two calls.": (
            small_units_goals
        ),
        "In a second call with these changes, on another host, rollouts of 1.7B were {drained_1_7b} (drained) and "
        "{steady_1_7b} times (steady) as fast as dense ones, and those of 8B {steady_8b} times (steady).": (
            stored_while_scoring
        ),
        "There steps at the same moments of these two steady sets take {least_again} to {most_again} % less than in a call "
        "before these changes, while dense steps take between {dense_least_again} % more and {dense_most_again} % "
        "less.": stored_while_scoring,
        "On the host of the first call steps of all four steady sets take between {longer} % more and {shorter} % less than "
        "then, and dense steps {dense_longer_least} to {dense_longer_most} % more.": stored_while_scoring,
        "and the scaled ones are {ratio_14b} times smaller": small_units_goals,
        "the choice takes {us} us a layer, where it took {us_before} in an earlier call": large_budgets,
        "Its steps with 25 requests and fewer are {least} to {most} % shorter than in that call; the others are between "
        "{longer} % longer and {shorter} % shorter, and dense steps between {dense_longer} % longer and {dense_shorter} % "
        "shorter": large_budgets,
        "14B's drained rollouts were {speedup} times as fast as dense ones in that call, and {speedup_before} times "
        "before": large_budgets,
        "takes {after} us instead of {early} at a budget of 4,096 tokens, and as long as before at 1,024": begins_together,
        "the published schedules were {lost_least} to {lost_most} % slower beside dense attention in the steady sets than "
        "in blocks of 64: 1.7B {before} instead of {now} times.": blocks,
        "takes {us_16} us for 89 requests in blocks of 16, and {us_64} us in blocks of 64": blocks,
        "Dense steps take {dense_least} to {dense_most} % less in blocks of 64": blocks,
        "In profiles of the first call with both changes (`-stored-apart-`) scores, choice and attention take "
        "{_score_codes_1_7b}, {_choose_1_7b} and {_gather_1_7b} us a layer for 89 requests of 1.7B, where they took "
        "{_score_codes_1_7b_before}, {_choose_1_7b_before} and {_gather_1_7b_before} in a profile of the same step before, "
        "and {_score_codes_8b}, {_choose_8b} and {_gather_8b} instead of {_score_codes_8b_before}, {_choose_8b_before} and "
        "{_gather_8b_before} us for 62 of 8B": many_requests,
        "steps at the same moments of the steady sets are {least_1_7b} to {most_1_7b} % shorter for 1.7B, {least_4b} to "
        "{most_4b} % for 4B and {least_8b} to {most_8b} % for 8B": many_requests,
        "and dense steps are {least_dense} to {most_dense} % shorter in the later one, too": many_requests,
        "Attention (*gather*) takes {gather_least} to {gather_most} % of it, and its bytes {bytes_least} to "
        "{bytes_most} % of that": steady_profiles,
        "The choice takes another {choice_least} to {choice_most} %, and its bytes a tenth of that.": steady_profiles,
        "The second one's speed-ups are at most {lower} % lower and at most {higher} % higher": small_units_again,
        "of which the two measured {first} and {second} of 12 moments; elsewhere they differ by {elsewhere} % or "
        "less": small_units_again,
        "In the rows of 1.7B with 2 x 2 these differ by {apart} ms": one_token,
        "took {took} ms at best, where it took {least} to {most} ms in two calls before": disturbed_token,
        "the shares of 1.7B were {least_share} to {most_share} % then": disturbed_token,
        "With 2 x 2 they reached {reached} of the {goals} goals, and rollouts of 14B were {drained} (drained) and {steady} "
        "(steady) times as fast as dense ones.": small_units_of_two_models,
        "It took {seconds} s, where {moments} of {of} moments say {estimated}, {error} % less": small_units_whole,
        "For 1.7B that is {ratio} times.": small_units_budgets,
        "had a tail of {tail} in the worst length bin and gained {less} less than on dense rollouts, with an interval of "
        "the difference from {low} to {high}": trained_under_pairs,
        "On an H100, 4 x 4 made them {h100_dense_least} to {h100_dense_most} % faster with layers 0 and 1 dense, and "
        "{h100_wide_least} to {h100_wide_most} % with these two reading four times as much": small_units,
    },
}
