"""Figures in sentences about the decode kernels, alone and as a plan has them. Measures nothing; claims.py puts them on the
pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import kernel_times
from claim_words import Claims, Figures, bare, down, up
from record_tables import results
from render_fine import BY_ALL_MODELS, fine_records
from render_speed import rollout_records

from sparroll.plan.kernel_times import kernel_times_of
from sparroll.plan.speedup import plan
from sparroll.schedule import Schedule


def blocks_of_64() -> Figures:
    """In blocks of 64: how many times as long as their bytes attention at 512 tokens and scores of 4 x 2 take, and the us of
    a choice among 15,000 units."""
    rows = results("fine-kernels-blocks-of-64-h200", "fine-kernels")["rows"]

    def most(what: str, units: str, kernel: str, budget: int | None = None) -> float:
        return max(
            float(row[what])
            for row in rows
            if (row["units"], row["kernel"]) == (units, kernel) and budget in (None, row["kv_budget_tokens"])
        )

    kinds = [f"{units} {lengths}" for units in ("4x4", "2x2", "4x2") for lengths in ("equal", "mixed")]
    alone, in_a_layer = (
        [most("times_floor", kind, kernel, 512) for kind in kinds] for kernel in ("attention", "attention in a layer")
    )
    return {
        "least": up(min(alone), 2),
        "most": up(max(alone), 2),
        "least_layer": up(min(in_a_layer), 2),
        "most_layer": up(max(in_a_layer), 2),
        "scores": up(most("times_floor", "4x2 equal", "scores"), 2),
        "scores_mixed": up(most("times_floor", "4x2 mixed", "scores"), 2),
        "choice": up(most("graph_us", "2x2 equal", "choice", 1024)),
        "choice_mixed": up(most("graph_us", "2x2 mixed", "choice", 1024)),
        "choice_large": up(most("graph_us", "2x2 equal", "choice", 4096)),
    }


def plan_and_rollouts() -> Figures:
    """What a plan says of the published schedule of 1.7B with timed kernels, and what rollouts were measured at."""
    planned = plan("Qwen3-1.7B", "qwen3-1.7b-0.86", lengths="0-32768")
    assert planned.kernels is not None, "the kernels were timed"
    measured = [found["speedup"] for size, _, found in rollout_records() if size == "1.7b"]
    return {
        "planned": down(planned.kernels.speedup, 2),
        "least": down(min(measured), 2),
        "most": down(max(measured), 2),
    }


def with_a_remainder() -> Figures:
    """The us of a layer with and without a remainder by groups of 64, and which share of the tokens a remainder must spare
    to take no longer at a budget of 1,024, in %: what a layer without one reads in the same time lies on the line through
    its times at 1,024 and 4,096 tokens."""
    us = {
        (row["units"], row["kv_budget_tokens"]): float(row["graph_us"])
        for row in results("fine-kernels-blocks-of-64-h200", "fine-kernels")["rows"]
        if row["kernel"] == "sparse layer"
    }
    made, spared = {}, []
    for units in ("4x2", "2x2"):
        for budget in (1024, 4096):
            made[f"{units}_{budget}"] = up(us[f"{units} equal", budget])
            made[f"{units}_with_{budget}"] = up(us[f"{units}+64 equal", budget])
        for lengths in ("equal", "mixed"):
            of_1024, of_4096 = (us[f"{units} {lengths}", budget] for budget in (1024, 4096))
            with_it = us[f"{units}+64 {lengths}", 1024]
            assert of_1024 < with_it < of_4096, "beyond what was timed"
            spared.append(100 * (1 - 1024 / (1024 + 3072 * (with_it - of_1024) / (of_4096 - of_1024))))
    return made | {"least": down(min(spared)), "most": up(max(spared))}


def reading_plans() -> Figures:
    """Attention of many requests with budgets of their own, and the time of its bytes, in us."""
    found = results("reading-plans-h200", "reading-plans")["rows"]
    rows = {row["requests"]: row for row in found if row["contexts"] == "mixed"}
    return {
        "mean": f"{round(rows[40]['mean_budget_tokens']):,}",
        **{f"took_{requests}": up(rows[requests]["attention_us"]["planned"]) for requests in (40, 64)},
        **{f"bytes_{requests}": down(rows[requests]["floor_us"]) for requests in (40, 64)},
    }


def peaks() -> Figures:
    """What peaks of scores change for 2 x 2 on an H200, in us."""
    about = kernel_times.GPUS[0]
    took = {kind: kernel_times.timed_layers(about, kind)[1] for kind in ("rows", "without_peaks")}

    def us(kind: str, kernel: str, budget: int) -> float:
        return 1e6 * took[kind]["2x2 equal", budget][kernel]

    budgets = (512, 1024)
    return {
        **{f"choice_{budget}": up(us("rows", "choice", budget)) for budget in budgets},
        **{f"choice_{budget}_bare": down(us("without_peaks", "choice", budget)) for budget in budgets},
        **{f"layer_{budget}": up(us("rows", "sparse layer", budget)) for budget in budgets},
        **{f"layer_{budget}_bare": down(us("without_peaks", "sparse layer", budget)) for budget in budgets},
        "scores": up(max(us("rows", "scores", budget) - us("without_peaks", "scores", budget) for budget in budgets)),
    }


def kernel_layers() -> Figures:
    """The sums of a layer's kernels, as a plan has them, beside the layers that were timed as a whole."""
    found = []
    for about in kernel_times.GPUS:
        times = kernel_times_of(about["gpu"])
        assert times is not None, "a plan has the GPU"
        errors = kernel_times.layer_errors(times, *kernel_times.timed_layers(about))
        found += [abs(error) for error in errors.values()]
    return {"worst": up(100 * max(found), 1), "half": up(100 * statistics.median(found))}


def kernel_steps() -> Figures:
    """What planned decode steps lack of those that were timed in vLLM, in ms."""
    left: dict[str, list[float]] = {"kernels": [], "roofline": []}
    for row in results("decode-step-qwen3-1.7b-h200", "decode-step"):
        if row.get("engine") == "triton" and "seconds" in row:
            about = {"hardware": "H200", "lengths": row["context_tokens"], "batch": row["batch"]}
            planned, took = plan("Qwen3-1.7B", "qwen3-1.7b-0.86", **about), statistics.median(row["seconds"])
            assert planned.kernels is not None, "the kernels were timed"
            left["kernels"].append(1e3 * (took - planned.kernels.sparse.seconds))
            left["roofline"].append(1e3 * (took - planned.sparse.seconds))
    return {
        "least": bare(down(min(left["kernels"]), 1)),
        "most": up(max(left["kernels"]), 1),
        "least_roofline": down(min(left["roofline"]), 1),
        "most_roofline": up(max(left["roofline"]), 1),
    }


def kernels_of_rollouts() -> Figures:
    """Kernels of profiled rollout steps under small units, beside the lines that a plan has for their bytes."""
    times = kernel_times_of("H200")
    assert times is not None, "a plan has the GPU"
    batches, off = [], {"scores": [], "gather": []}
    for *_, found in fine_records(BY_ALL_MODELS, ["h200"]):
        if not found["profile"]:
            continue
        schedule, profile = Schedule.load(found["schedule_table"]), found["profile"]
        known = times.of(schedule.selector, times.gqa_ratio)
        assert known is not None, "a plan has these units"
        layers = found["schedule_table"]["fingerprint"]["layers"]
        batches.append(profile["batch"])
        for kernel, lines in (("scores", known.scores), ("gather", known.attention)):
            moved = 1e-3 * profile["floors_ms"][kernel] * found["copy_bytes_per_second"]
            off[kernel].append(1e-3 * profile["groups_ms"][kernel] / (layers * lines.seconds(moved / layers)))
    figures = {"fewest": str(min(batches)), "most": str(max(batches))}
    for kernel, ratios in off.items():
        figures |= {f"{kernel}_least": bare(down(min(ratios), 2)), f"{kernel}_most": bare(up(max(ratios), 2))}
    return figures


PAGES: Mapping[str, Claims] = {
    "docs/own-model.md": {
        "under the published schedule of Qwen3-1.7B `kernels` says {planned} times for contexts up to 32,768 tokens, and "
        "[measured rollouts](results.md#rollouts-in-vllm) are {least} to {most} times as fast as dense ones.": (
            plan_and_rollouts
        ),
    },
    "docs/selectors.md": {
        "a layer of 4 x 2 with a remainder takes {4x2_with_1024} us at a budget of 1,024 tokens, where one without takes "
        "{4x2_1024} us, and one of 2 x 2 takes {2x2_with_1024} us instead of {2x2_1024} (": with_a_remainder,
        "At 4,096 tokens these take {4x2_4096} and {2x2_4096} us without a remainder and {4x2_with_4096} and "
        "{2x2_with_4096} with one. So at a budget of 1,024 a remainder would have to spare {least} to {most} % of the "
        "tokens of such a layer before it pays": with_a_remainder,
    },
    "docs/small-pages.md": {
        "With 40 requests somewhere in their responses, whose budgets are {mean} tokens on average, attention takes "
        "{took_40} us on an H200 where its bytes take {bytes_40} at copy speed, and with 64 requests {took_64} where they "
        "take {bytes_64}": reading_plans,
        "attention takes {least} to {most} times as long as its bytes at 512 tokens with 4 x 4, 2 x 2 and 4 x 2, and "
        "{least_layer} to {most_layer} times in a layer. Scores of 4 x 2 take {scores} times as long as theirs, with mixed "
        "lengths {scores_mixed} times. The choice among 15,000 pages takes {choice} us at a budget of 1,024, and "
        "{choice_mixed} us with mixed lengths, where many requests choose by a sample; at 4,096 tokens it takes "
        "{choice_large} us": blocks_of_64,
        "it takes {choice_512} us at a budget of 512 and {choice_1024} us at 1,024, where it takes {choice_512_bare} and "
        "{choice_1024_bare} us without peaks in the same call. Peaks cost the scores {scores} us, so a layer takes "
        "{layer_512} and {layer_1024} us with them, and {layer_512_bare} and {layer_1024_bare} us without.": peaks,
    },
    "docs/plan.md": {
        "The sums are at most {worst} % off the layers that were timed as a whole, and {half} % or less for half of "
        "them.": kernel_layers,
        "such a step is {least} to {most} ms too short everywhere, by what it leaves out: launches, norms and the host. So "
        "add about a millisecond to it. A step of the roofline is {least_roofline} to {most_roofline} ms too short": (
            kernel_steps
        ),
        "In profiled steps of [rollouts](results.md#small-units) under 4 x 2, with {fewest} to {most} requests of mixed "
        "lengths, the scores took {scores_least} to {scores_most} times as long as the lines say, and the attention "
        "{gather_least} to {gather_most} times.": kernels_of_rollouts,
    },
}
