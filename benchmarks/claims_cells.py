"""Figures in sentences about what a selector must read. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, results
from render_cells import CUT_SHORT, MODELS, WIDE_MODELS

from sparroll import records
from sparroll.schedule import Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "code-lm"))

import scale_presets

LONG_TOKENS = 30_000
SEEDS = (0, 1, 2)
LONGEST_BIN = -1


def scaled_budgets() -> Figures:
    preset = Schedule.load("qwen3-1.7b-0.86")
    said = {"published": f"{preset.kv_budget_tokens(LONG_TOKENS):,}"}
    trained = [name for name in MODELS if name != CUT_SHORT]
    for rule in ("4x4", "2x2"):
        said[f"of_{rule}"] = _scaled(trained, f"quantized_mean-{rule}")
        said[f"with_it_{rule}"] = _scaled([*trained, CUT_SHORT], f"quantized_mean-{rule}")
    return said


def _scaled(names: list[str], rule: str) -> str:
    """Tokens of the other layers in long contexts under a rule that is scaled by these records."""
    paths = [RESULTS / f"{name}.json" for name in names]
    made = scale_presets.scaled(Schedule.load("qwen3-1.7b-0.86"), *scale_presets.from_records(paths, rule))
    budget = made.steps[-1].kv_budget_tokens
    return f"{budget if isinstance(budget, int) else budget[-1]:,}"


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
        "wide_of_all": _scaled(list(WIDE_MODELS), rule),
        "published": f"{Schedule.load('qwen3-1.7b-0.86').kv_budget_tokens(LONG_TOKENS):,}",
        "times": down(timed["speedup"], 2),
        "published_times": down(timed["published"]["speedup"], 2),
        **{f"{name}_times": down(found["speedup"], 2) for name, found in drained.items()},
        **{f"{name}_more": down(found["over_published"], 2) for name, found in drained.items()},
        "of_4x4": scaled_budgets()["of_4x4"],
    }


def training() -> Figures:
    found = [records.read(RESULTS / f"code-lm-train-seed-{seed}-h100.json", "code_lm_training") for seed in SEEDS]
    losses = [each["results"]["held_out_loss"] for each in found]
    cells = [results(f"code-lm-seed-{seed}-h100", "code_lm_cells") for seed in SEEDS[:2]]
    last = results(f"code-lm-seed-{SEEDS[2]}-h100", "code_lm_cells")
    return {
        "minutes": up(max(each["wall_seconds"] for each in found) / 60, 1),
        **{f"loss_{seed}": up(loss, 2) for seed, loss in zip(SEEDS, losses, strict=True)},
        "cells": down(min(len(each["cells"]) for each in cells)),
        "asked": down(max(each["cells_asked"] for each in cells)),
        "cells_2": down(len(last["cells"])),
        "asked_2": down(last["cells_asked"]),
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
    found = results(f"code-lm-seed-{SEEDS[2]}-h100", "code_lm_cells")
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
    "docs/selectors.md": {
        "By the two models that were trained to the end, Qwen3-1.7B at .86 would read {wide} tokens in long contexts with "
        "two wide layers, where it reads {dense} with two dense ones, and {wide_2x2} with two wide layers and 2 x "
        "2.": wide_first_layers,
        "By the ratios of all three models the budget is {wide_of_all} tokens of {published}, and rollouts are {times} "
        "times as fast as dense ones on an H100, where the published schedule makes them {published_times} times as "
        "fast": wide_first_layers,
        "With the budget of {wide} tokens they are [{wide_times} times as fast](results.md#small-units), {wide_more} times "
        "as fast as the published schedule in the same record. Two dense layers and {of_4x4} tokens, the budget by four "
        "models, made it {dense_times} and {dense_more} in an earlier record.": wide_first_layers,
        "The training of seed 3 was cut after {steps} of {of} steps (held-out loss {loss} nats), and there 4 x 4 saves "
        "{ratio} times at the same tail.": cut_short,
        "with it they would be {with_it_4x4} tokens with 4 x 4 and {with_it_2x2} with 2 x 2.": scaled_budgets,
        "For Qwen3-1.7B at .86 and long contexts that makes {of_4x4} tokens of {published} with 4 x 4, and {of_2x2} with "
        "2 x 2;": scaled_budgets,
        "were trained for {minutes} minutes or less on one H100 each (held-out losses of {loss_0}, {loss_1} and {loss_2} "
        "nats)": training,
        "The records of seeds 0 and 1 hold {cells} of {asked} cells, that of seed 2 the first {cells_2} of {asked_2} on "
        "half as many sequences.": training,
        "(seed 2, where they save least: {without} times fewer than published without it, {with} with it)": (
            dense_layers_and_remainders
        ),
        "(4 x 4 at 1,024 tokens: a tail of {layer_0} and {both}), but without layer 0 the tail falls to {none}.": (
            dense_layers_and_remainders
        ),
    },
}
