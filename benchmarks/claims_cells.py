"""Figures in sentences about what a selector must read. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, record, results
from render_cells import CUT_SHORT, MODELS, WIDE_MODELS
from render_fine import SIZES, fine_records, reached_goals
from request_sets import LONGEST

from sparroll.plan.model_shape import model_shape
from sparroll.plan.speedup import plan
from sparroll.schedule import Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "code-lm"))

import scale_presets

LONG_TOKENS = 30_000
SEEDS = {0: "h100", 1: "h100", 2: "h100", 4: "h200"}
"""Models of code that were trained to the end, and the GPU of their records."""
LONGEST_BIN = -1
ROLLOUT_MODELS = ["code-lm-study-wide-h100", "code-lm-tiny-reasoner-h100"]
"""Records by which the budgets of the rollouts with wide first layers were scaled."""


def scaled_budgets() -> Figures:
    preset = Schedule.load("qwen3-1.7b-0.86")
    said = {"published": f"{preset.kv_budget_tokens(LONG_TOKENS):,}"}
    trained = [name for name in MODELS if name != CUT_SHORT]
    for rule in ("4x4", "2x2"):
        said[f"of_{rule}"] = _scaled(trained, f"quantized_mean-{rule}")
        said[f"with_it_{rule}"] = _scaled([*trained, CUT_SHORT], f"quantized_mean-{rule}")
    return said


def _scaled(names: list[str], rule: str) -> str:
    """Tokens of the other layers of Qwen3-1.7B in long contexts under a rule that is scaled by these records."""
    return f"{_schedule(names, rule, '1.7b').step_at(LONG_TOKENS).budgets[-1]:,}"


def _schedule(names: list[str], rule: str, size: str) -> Schedule:
    paths = [RESULTS / f"{name}.json" for name in names]
    preset = Schedule.load(f"qwen3-{size}-0.86")
    return scale_presets.scaled(preset, *scale_presets.from_records(paths, rule))


def budgets_of_all_models() -> Figures:
    """What changes for rollouts with wide first layers once the model of code is counted that was measured after them: how
    many tokens more a response of LONGEST tokens reads, in %, how much longer a step of a full batch takes by the plan, and
    which goals its speed-up would still reach, if every set's steps took longer by as much."""
    trained = [name for name in WIDE_MODELS if name != CUT_SHORT]
    reached = {word: reached_goals([kind]) for word, kind in (("fours", "wide"), ("pairs", "wide-2x2"))}
    said, speeds = {}, dict[str, dict[tuple[str, str], float]]()
    for word, units, kind in (("fours", "4x4", "wide"), ("pairs", "2x2", "wide-2x2")):
        rule, more, longer = f"quantized_mean-{units}-dense-none-first-two-4", [], {}
        for size in SIZES:
            shape = model_shape(f"Qwen3-{size.upper()}")
            old, new = (_schedule(names, rule, size) for names in (ROLLOUT_MODELS, trained))
            more.append(100 * (_read_tokens(new, shape.layers) / _read_tokens(old, shape.layers) - 1))
            steps = [plan(shape, each, hardware="H200", force_schedule=True).kernels for each in (old, new)]
            old_step, new_step = (each.sparse.seconds for each in steps if each is not None)
            longer[size] = new_step / old_step
        found = {(size, name): each for size, name, each in fine_records(kind, ["h200"])}
        speeds[word] = {key: each["speedup"] / longer[key[0]] for key, each in found.items()}
        left = [
            key for key in reached[word] if reached[word][key] and speeds[word][key] >= found[key]["target_speedup"]
        ]
        said |= {f"{word}_least": down(min(more)), f"{word}_most": up(max(more)), f"{word}_left": str(len(left))}
        said |= {f"{word}_longer_{end.__name__}": up(100 * (end(longer.values()) - 1), 1) for end in (min, max)}
    slower = [key for key, times in speeds["pairs"].items() if times < speeds["fours"][key]]
    return said | {"slower": str(len(slower)), "goals": str(len(speeds["pairs"]))}


def _read_tokens(schedule: Schedule, layers: int) -> int:
    """What all layers read for a response of LONGEST tokens."""
    contexts = np.arange(1, LONGEST + 1)
    return int((layers * contexts - schedule.unread_tokens(contexts, layers)).sum())


def wide_first_layers() -> Figures:
    trained = [name for name in WIDE_MODELS if name != CUT_SHORT]
    records_of = {"wide": "wide", "dense": "fine"}
    drained = {said: results(f"rollout-qwen3-1.7b-drained-{word}-h100", "rollout") for said, word in records_of.items()}
    rule, timed = (
        "quantized_mean-4x4-dense-none-first-two-4",
        results("rollout-qwen3-1.7b-drained-wide-with-cut-h100", "rollout"),
    )
    return {
        "dense": _scaled(trained, "quantized_mean-4x4"),
        "wide": _scaled(trained, rule),
        "wide_2x2": _scaled(trained, rule.replace("4x4", "2x2")),
        "wide_2x2_of_two": _scaled(ROLLOUT_MODELS, rule.replace("4x4", "2x2")),
        "wide_of_all": _scaled(list(WIDE_MODELS), rule),
        "published": f"{Schedule.load('qwen3-1.7b-0.86').kv_budget_tokens(LONG_TOKENS):,}",
        "times": down(timed["speedup"], 2),
        "published_times": down(timed["published"]["speedup"], 2),
        **{f"{name}_times": down(found["speedup"], 2) for name, found in drained.items()},
        **{f"{name}_more": down(found["over_published"], 2) for name, found in drained.items()},
        "of_4x4": scaled_budgets()["of_4x4"],
    }


def training() -> Figures:
    found = {
        seed: record(RESULTS / f"code-lm-train-seed-{seed}-{gpu}.json", "code_lm_training")
        for seed, gpu in SEEDS.items()
    }
    return {
        "minutes": up(max(each["wall_seconds"] for each in found.values()) / 60, 1),
        **{f"loss_{seed}": up(each["results"]["held_out_loss"], 2) for seed, each in found.items()},
    }


def cut_short() -> Figures:
    train, cells = results("code-lm-train-seed-3-h100", "code_lm_training"), results(CUT_SHORT, "code_lm_cells")
    longest = results("code-lm-train-seed-0-h100", "code_lm_training")
    least = {rule: row["ratio"] for rule, row in cells["smallest"].items() if row is not None}
    return {
        "steps": down(train["steps"]),
        "of": down(longest["steps"]),
        "loss": up(train["held_out_loss"], 2),
        "ratio": down(least["quantized_mean-4x4"], 2),
    }


def dense_layers_and_remainders() -> Figures:
    """Of the third model: ratios with and without a remainder, and tails with fewer dense layers."""
    found = results("code-lm-seed-2-h100", "code_lm_cells")
    ratio = {rule: row["ratio"] for rule, row in found["smallest"].items() if row is not None}
    tail = {cell["name"]: cell["bins"][LONGEST_BIN]["q05"] for cell in found["cells"]}
    rule = "quantized_mean-4x4"
    return {
        "without": up(ratio["quantized_mean-2x2"], 2),
        "with": down(ratio["quantized_mean-2x2-remainder-16-fp8"], 2),
        "layer_0": bare(down(tail[f"{rule}-dense-0-1024"], 3)),
        "both": bare(down(tail[f"{rule}-1024"], 3)),
        "none": bare(down(tail[f"{rule}-dense-none-1024"], 3)),
    }


PAGES: Mapping[str, Claims] = {
    "README.md": {
        "A model of code that was measured later asks for {pairs_least} to {pairs_most} % more tokens with two bits, and "
        "for {fours_least} to {fours_most} % more with four.": budgets_of_all_models,
    },
    "docs/results.md": {
        "By all three models a response of 32,768 tokens would read {pairs_least} to {pairs_most} % more under 2 x 2, and a "
        "decode step of a full batch would take {pairs_longer_min} to {pairs_longer_max} % longer by the [plan](plan.md). "
        "Under 4 x 4 it would read {fours_least} to {fours_most} % more, and a step would take {fours_longer_min} to "
        "{fours_longer_max} % longer.": budgets_of_all_models,
        "If all steps took longer by as much, 2 x 2 would reach {pairs_left} of the goals, and 4 x 4 the {fours_left} that "
        "it reaches here; and 2 x 2 would be slower than 4 x 4 in {slower} of the {goals} sets": budgets_of_all_models,
    },
    "docs/small-pages.md": {
        "Qwen3-1.7B at .86 would read {wide} tokens in long contexts with two wide layers and 4 x 4, where these three give "
        "{dense} with two dense ones (all models of the first table give {of_4x4}). With 2 x 2 and two wide layers it would "
        "read {wide_2x2}, because the model of code asks for that many; by the study's model and tiny-reasoner alone it "
        "would be {wide_2x2_of_two}.": wide_first_layers,
        "By the ratios of the model that was cut short as well, the budget with 4 x 4 is {wide_of_all} tokens of "
        "{published}, and rollouts are {times} "
        "times as fast as dense ones on an H100, where the published schedule makes them {published_times} times as "
        "fast": wide_first_layers,
        "With the budget of {wide} tokens they are [{wide_times} times as fast](results.md#small-units), {wide_more} times "
        "as fast as the published schedule in the same record. Two dense layers and {of_4x4} tokens made it {dense_times} "
        "and {dense_more} in an earlier record.": wide_first_layers,
        "The training of seed 3 was cut after {steps} of {of} steps (held-out loss {loss} nats), and there 4 x 4 saves "
        "{ratio} times at the same tail.": cut_short,
        "with it they would be {with_it_4x4} tokens with 4 x 4 and {with_it_2x2} with 2 x 2.": scaled_budgets,
        "For Qwen3-1.7B at .86 and long contexts that makes {of_4x4} tokens of {published} with 4 x 4, and {of_2x2} with "
        "2 x 2;": scaled_budgets,
        "were trained for {minutes} minutes or less on one GPU each (held-out losses of {loss_0}, {loss_1}, {loss_2} and "
        "{loss_4} nats with seeds 0, 1, 2 and 4)": training,
        "(seed 2, where they save least: {without} times fewer than published without it, {with} with it)": (
            dense_layers_and_remainders
        ),
        "(4 x 4 at 1,024 tokens: a tail of {layer_0} and {both}), but without layer 0 the tail falls to {none}.": (
            dense_layers_and_remainders
        ),
    },
}
