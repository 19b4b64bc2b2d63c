"""Figures in sentences about what a selector must read. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from claims_speed import Claims, Figures, down, up
from record_tables import RESULTS, results
from render_cells import MODELS

from sparroll import records
from sparroll.schedule import Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "code-lm"))

import scale_presets

LONG_TOKENS = 30_000
SEEDS = (0, 1)


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
    cells = [results(f"code-lm-seed-{seed}-h100", "code_lm_cells") for seed in SEEDS]
    return {
        "minutes": up(max(each["wall_seconds"] for each in found) / 60, 1),
        **{f"loss_{seed}": up(loss, 2) for seed, loss in zip(SEEDS, losses, strict=True)},
        "cells": down(min(len(each["cells"]) for each in cells)),
        "asked": down(max(each["cells_asked"] for each in cells)),
    }


PAGES: Mapping[str, Claims] = {
    "docs/selectors.md": {
        "For Qwen3-1.7B at .86 and long contexts that makes {of_4x4} tokens of {published} with 4 x 4, and {of_2x2} with "
        "2 x 2;": scaled_budgets,
        "were trained for {minutes} minutes on one H100 each (held-out losses of {loss_0} and {loss_1} nats)": training,
        "Their records hold the most telling {cells} of {asked} cells": training,
    },
}
