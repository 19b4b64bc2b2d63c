"""Figures in sentences about what a selector must read. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from claims_speed import Claims, Figures, bare, down, up
from record_tables import RESULTS, results
from render_cells import MODELS

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
    paths = [path for name in MODELS if (path := RESULTS / f"{name}.json").exists()]
    for rule in ("4x4", "2x2"):
        made = scale_presets.scaled(preset, *scale_presets.from_records(paths, f"quantized_mean-{rule}"))
        said[f"of_{rule}"] = f"{made.kv_budget_tokens(LONG_TOKENS):,}"
    return said


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
