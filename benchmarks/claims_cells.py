"""Figures in sentences about what a selector must read. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, results
from render_cells import CUT_SHORT, MODELS, WIDE_MODELS
from render_fine import SIZES, fine_records

from sparroll import records
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
    return f"{_others_tokens(_schedule(names, rule, '1.7b')):,}"


def _schedule(names: list[str], rule: str, size: str) -> Schedule:
    paths = [RESULTS / f"{name}.json" for name in names]
    preset = Schedule.load(f"qwen3-{size}-0.86")
    return scale_presets.scaled(preset, *scale_presets.from_records(paths, rule))


def _others_tokens(schedule: Schedule) -> int:
    """What the layers without wide budgets read in long contexts."""
    budget = schedule.steps[-1].kv_budget_tokens
    return budget if isinstance(budget, int) else budget[-1]


def budgets_of_all_models() -> Figures:
    """By how much the budgets of rollouts with wide first layers grow, in %, once the model of code is counted that was
    measured after them; how much longer a decode step then takes by the plan, and how many goals would be left."""
    trained = [name for name in WIDE_MODELS if name != CUT_SHORT]
    said = {}
    for word, units in (("fours", "4x4"), ("pairs", "2x2")):
        rule, more, longer = f"quantized_mean-{units}-dense-none-first-two-4", {}, {}
        for size in SIZES:
            old, new = (_schedule(names, rule, size) for names in (ROLLOUT_MODELS, trained))
            more[size] = 100 * (_others_tokens(new) / _others_tokens(old) - 1)
            steps = [plan(f"Qwen3-{size.upper()}", each, hardware="H200").kernels for each in (old, new)]
            old_step, new_step = (each.sparse.seconds for each in steps if each is not None)
            longer[size] = new_step / old_step
        said |= {f"{word}_least": down(min(more.values())), f"{word}_most": up(max(more.values()))}
        said |= {f"{word}_longer_{end.__name__}": up(100 * (end(longer.values()) - 1)) for end in (min, max)}
        said[f"{word}_14b"] = up(more["14b"])
        kind = {"4x4": "wide", "2x2": "wide-2x2"}[units]
        goals = [
            found["speedup"] / longer[size] >= found["target_speedup"]
            for size, _, found in fine_records(kind, ["h200"])
            if found["target_speedup"] is not None
        ]
        said |= {f"{word}_left": str(sum(goals)), "goals": str(len(goals))}
    return said


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
    found = [results(f"code-lm-train-seed-{seed}-{gpu}", "code_lm_training") for seed, gpu in SEEDS.items()]
    cells = {seed: results(f"code-lm-seed-{seed}-{gpu}", "code_lm_cells") for seed, gpu in SEEDS.items()}
    minutes = [
        records.read(RESULTS / f"code-lm-train-seed-{seed}-{gpu}.json")["wall_seconds"] / 60
        for seed, gpu in SEEDS.items()
    ]
    return {
        "minutes": up(max(minutes), 1),
        **{f"loss_{seed}": up(each["held_out_loss"], 2) for seed, each in zip(SEEDS, found, strict=True)},
        **{f"cells_{seed}": down(len(each["cells"])) for seed, each in cells.items()},
        **{f"asked_{seed}": down(each["cells_asked"]) for seed, each in cells.items()},
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
        "A model of code that was measured later asks for up to {fours_most} % more tokens with four bits, and for "
        "{pairs_least} to {pairs_most} % more with two.": budgets_of_all_models,
    },
    "docs/results.md": {
        "By all three models 2 x 2 would read {pairs_least} to {pairs_most} % more than here, and a decode step with a full "
        "batch would take {pairs_longer_min} to {pairs_longer_max} % longer by the [plan](plan.md). With 4 x 4 it would be "
        "the same budgets for 1.7B and 8B, at most {fours_most} % more for 14B, and steps that take {fours_longer_min} to "
        "{fours_longer_max} % longer.": budgets_of_all_models,
        "By the budgets of all three models and the plan's steps, {pairs_left} of them would be left with 2 x 2, and "
        "{fours_left} with 4 x 4.": budgets_of_all_models,
    },
    "docs/small-pages.md": {
        "By the three models that were trained to the end, Qwen3-1.7B at .86 would read {wide} tokens in long contexts with "
        "two wide layers and 4 x 4, where it reads {dense} with two dense ones. With 2 x 2 and two wide layers it would "
        "read {wide_2x2}, because the model of code asks for that many; by the two others it would be "
        "{wide_2x2_of_two}.": wide_first_layers,
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
        "The records of seeds 0 and 1 hold {cells_0} of {asked_0} cells, that of seed 2 the first {cells_2} of {asked_2} on "
        "half as many sequences, and that of seed 4 {cells_4} of {asked_4}.": training,
        "(seed 2, where they save least: {without} times fewer than published without it, {with} with it)": (
            dense_layers_and_remainders
        ),
        "(4 x 4 at 1,024 tokens: a tail of {layer_0} and {both}), but without layer 0 the tail falls to {none}.": (
            dense_layers_and_remainders
        ),
    },
}
