"""The tables of what a selector must read, from the records of recipes/code-lm. Measures nothing; render.py writes them.

A ratio has its interval in brackets, unless fewer than eight sequences reach the contexts that it is of.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import record_tables
from record_tables import results, table

from sparroll.rounding import rounded_down, rounded_up, with_interval

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "code-lm"))

from cell_files import LEAST_SEQUENCES
from cells import FEW_BUDGETS, HALF_THE_BYTES, Rule, summed

KIND = "code_lm_cells"
HEAD_DIM, ELEMENT_BYTES = 128, 2
"""Of a cache of K and V, for the share that an index has of it."""
CODE_WITH_WIDE = {f"code-lm-seed-{seed}-h200": f"code, 88M, seed {seed}" for seed in (4, 5, 6, 7)}
"""Records of models of code that were trained to the end, with wide first layers and with half the bits."""
MODELS = {
    "code-lm-seed-0-h100": "code, 88M, seed 0",
    "code-lm-seed-1-h100": "code, 88M, seed 1",
    "code-lm-seed-2-h100": "code, 88M, seed 2",
    "code-lm-seed-3-h100": "code, 88M, seed 3, cut short",
    **CODE_WITH_WIDE,
    "code-lm-study-cpu": "study, 30.8M",
    "code-lm-study-h100": "study, 30.8M, H100",
    "code-lm-tiny-reasoner-cpu": "tiny-reasoner",
}
"""Records by name, and the model that each is of."""
CUT_SHORT = "code-lm-seed-3-h100"
"""Of a model whose training had hardly begun to pay. Published budgets are scaled without it, and the docs say what they
would be with it."""
WIDE_MODELS = {
    CUT_SHORT: "code, 88M, seed 3, cut short",
    **CODE_WITH_WIDE,
    "code-lm-study-wide-h100": "study, 30.8M, H100",
    "code-lm-tiny-reasoner-h100": "tiny-reasoner, H100",
}
"""Records that have wide budgets of the first layers in the place of dense ones."""
FIRST_LAYERS = {
    "": "both dense",
    "-dense-0-first-4": "0 dense, 1 reads four times as much",
    "-dense-none-first-two-4": "both read four times as much",
    "-dense-none-first-8-4": "0 reads eight times, 1 four times as much",
    "-dense-none": "both read as little as the others",
}
"""Layers 0 and 1, by how a rule's name ends."""
RULES = {
    "page_mean-16": "16 tokens (published)",
    "quantized_mean-8x8": "8 tokens, 8 bits",
    "quantized_mean-4x4": "4 tokens, 4 bits",
    "quantized_mean-2x2": "2 tokens, 2 bits",
    "quantized_mean-1x1": "1 token, 1 bit",
    "quantized_mean-1x2": "1 token, 2 bits",
}
"""The first ones have an index of the same bytes; the last one has twice as many."""
LOW_BITS = {
    **CODE_WITH_WIDE,
    "code-lm-study-low-bits-cpu": "study, 30.8M",
    "code-lm-tiny-reasoner-low-bits-cpu": "tiny-reasoner",
}
"""Records of units whose index has about half the bytes, beside the usual ones, with wide first layers."""
LARGE_BUDGETS = {f"code-lm-seed-{seed}-h200": f"code, 88M, seed {seed}" for seed in (8, 10, 11, 12)}
"""Records of models of code that were measured with wide first layers, also with 4 x 2, up to a third of long contexts."""
SCALED_BY = {**LOW_BITS, **LARGE_BUDGETS}
"""Records by whose smallest ratios published budgets are scaled for 4 x 2."""
WIDE_REMAINDERS = {
    "code, 88M, seed 7": ("code-lm-seed-7-h200", "code-lm-seed-7-h200"),
    "study, 30.8M": ("code-lm-study-low-bits-cpu", "code-lm-study-remainder-cpu"),
    "tiny-reasoner": ("code-lm-tiny-reasoner-low-bits-cpu", "code-lm-tiny-reasoner-remainder-cpu"),
}
"""By model, records of wide first layers without and with a remainder."""
REMAINDERS = {"16": "-remainder-16-fp8", "64": "-remainder-64-fp8"}
"""Tokens of a group, and how a rule's name ends."""
BUDGETS = (128, 256, 512)


def _models(*left_out: str) -> list[tuple[str, dict[str, Any]]]:
    there = [name for name in MODELS if name not in left_out and (record_tables.RESULTS / f"{name}.json").exists()]
    return [(MODELS[name], results(name, KIND)) for name in there]


def remainders() -> str:
    """Tail and KL in the longest contexts without and with a remainder, by pages and budget."""
    rows = []
    for model, found in _models():
        cells = {cell["name"]: cell["bins"][-1] for cell in found["cells"]}
        for rule, told in RULES.items():
            for (group, suffix), budget in itertools.product(REMAINDERS.items(), BUDGETS):
                pair = [cells.get(f"{name}-{budget}") for name in (rule, rule + suffix)]
                if None not in pair:
                    rows.append([model, told, group, str(budget), *(_told(cell) for cell in pair if cell is not None)])
    return table(["model", "pages", "groups of", "budget", "without", "with a remainder"], rows)


def wide_remainders() -> str:
    """Tail and KL in the longest contexts with wide first layers, without and with a remainder in all layers."""
    rows = []
    for model, names in WIDE_REMAINDERS.items():
        found = [{cell["name"]: cell["bins"][-1] for cell in results(name, KIND)["cells"]} for name in names]
        for (tokens, bits), budget in itertools.product(((4, 4), (2, 2), *HALF_THE_BYTES), BUDGETS):
            without = Rule("quantized_mean", tokens, bits, (), "first-two-4")
            of = (
                cells.get(f"{rule.name}-{budget}")
                for cells, rule in zip(found, (without, summed(without)), strict=True)
            )
            pair = [_told(cell) for cell in of if cell is not None]
            if len(pair) == len(found):
                rows.append([model, f"{tokens} x {bits}", str(budget), *pair])
    return table(["model", "pages", "budget", "without", "with a remainder"], rows)


def _told(cell: dict[str, Any]) -> str:
    return f"{rounded_down(cell['q05'])} ({rounded_up(cell['kl_sparse_to_dense'], 4)})"


def ratios() -> str:
    """How many times fewer tokens than page means a rule reads for the same statistic, where it saves least."""
    rows = []
    for model, found in _models():
        for rule, told in RULES.items():
            summed = [(rule + suffix, f"groups of {group}") for group, suffix in REMAINDERS.items()]
            for name, kept in ((rule, "no"), *summed):
                of_rule = [row for row in found["ratios"] if row["rule"] == name]
                if of_rule:
                    least = [_least(found, of_rule, statistic) for statistic in ("q05", "kl_sparse_to_dense")]
                    rows.append([model, told, kept, *least])
    return table(["model", "pages", "remainder", "at the same tail", "at the same KL"], rows)


def _least(found: dict[str, Any], rows: list[dict[str, Any]], statistic: str) -> str:
    of_statistic = [row for row in rows if row["statistic"] == statistic]
    sure = [row for row in of_statistic if row["bound"] != "at least"]
    if sure:
        return ratio_of(found, min(sure, key=lambda row: float(row["ratio"])))
    return f"over {rounded_down(min(row['ratio'] for row in of_statistic), 2)}" if of_statistic else ""


def ratio_of(found: dict[str, Any], row: dict[str, Any]) -> str:
    """A row's ratio with its interval; alone where too few sequences reach its contexts, also in records that have
    interval ends for it."""
    if row["low"] is None or _sequences(found, row["from_context_tokens"]) < LEAST_SEQUENCES:
        return rounded_down(row["ratio"])
    return with_interval(row["ratio"], row["low"], row["high"])


def _sequences(found: dict[str, Any], from_context_tokens: int) -> int:
    """How many sequences of a record reach a bin of context lengths. Those that end before it have no values there."""
    (values,) = (
        of["sequences"]["acceptance"]
        for of in found["cells"][0]["bins"]
        if of["from_context_tokens"] == from_context_tokens
    )
    return sum(value is not None for value in values)


def half_the_bytes() -> str:
    """Tail and KL in the longest contexts by units and budget; four times as much is read in the first two layers."""
    rows = []
    for name, model in LOW_BITS.items():
        cells = {cell["name"]: cell["bins"][-1] for cell in results(name, KIND)["cells"]}
        for tokens, bits in ((4, 4), (2, 2), *HALF_THE_BYTES):
            rule = Rule("quantized_mean", tokens, bits, (), "first-two-4")
            of_index = rule.selector().index_bytes_per_token(HEAD_DIM)
            share = f"1/{math.floor(2 * ELEMENT_BYTES * HEAD_DIM / of_index)}"
            told = [_told(cells[f"{rule.name}-{budget}"]) for budget in FEW_BUDGETS]
            rows.append([model, f"{tokens} x {bits}", share, *told])
    return table(["model", "units", "index / K and V", *(f"{budget:,} tokens" for budget in FEW_BUDGETS)], rows)


LONG_BUDGETS = (512, 1024, 2048, 4096)


def _by_published_budget(found: dict[str, Any], rule: str, statistic: str) -> dict[int, dict[str, Any]]:
    """A rule's ratios in the longest contexts."""
    begin = max(row["from_context_tokens"] for row in found["ratios"])
    of = rule, statistic, begin
    return {
        row["published_budget"]: row
        for row in found["ratios"]
        if (row["rule"], row["statistic"], row["from_context_tokens"]) == of
    }


def shares() -> str:
    """Ratios in the longest contexts of models that have them, by what the published rule reads there. Without the model
    whose training was cut short."""
    rows = []
    for model, found in _models(CUT_SHORT):
        for rule, told in RULES.items():
            for statistic, said in (("q05", "tail"), ("kl_sparse_to_dense", "KL")):
                its = _by_published_budget(found, rule, statistic)
                if set(LONG_BUDGETS) <= its.keys():
                    of = [its[budget] for budget in LONG_BUDGETS]
                    rows.append([model, told, said, *(ratio_of(found, row) for row in of)])
    return table(["model", "pages", "same", *(f"{budget:,}" for budget in LONG_BUDGETS)], rows)


def wide_shares() -> str:
    """Ratios at the same tail in the longest contexts with wide first layers, by what the published rule reads there."""
    rules = {
        (units, "four times"): Rule("quantized_mean", *units, (), "first-two-4") for units in ((4, 4), (2, 2), (4, 2))
    }
    rules[(4, 2), "twice"] = Rule("quantized_mean", 4, 2, (), "first-two-2")
    rows = []
    for name, model in LARGE_BUDGETS.items():
        found = results(name, KIND)
        loss = results(name.replace("code-lm-", "code-lm-train-"), "code_lm_training")["held_out_loss"]
        for ((tokens, bits), times), rule in rules.items():
            its = _by_published_budget(found, rule.name, "q05")
            told = ["-" if its[budget]["bound"] else ratio_of(found, its[budget]) for budget in LONG_BUDGETS[1:]]
            rows.append([model, rounded_up(loss, 2), f"{tokens} x {bits}", times, *told])
    heads = ["model", "held-out loss", "units", "layers 0 and 1 read", *(f"{budget:,}" for budget in LONG_BUDGETS[1:])]
    return table(heads, rows)


def first_layers() -> str:
    """Ratios of 4 x 4 by what layers 0 and 1 read. Those of the published rule have two dense layers."""
    rows = []
    for record, model in WIDE_MODELS.items():
        found = results(record, KIND)
        for suffix, told in FIRST_LAYERS.items():
            of_rule = [row for row in found["ratios"] if row["rule"] == f"quantized_mean-4x4{suffix}"]
            if of_rule:
                least = [_least(found, of_rule, statistic) for statistic in ("q05", "kl_sparse_to_dense")]
                rows.append([model, told, *least])
    return table(["model", "layers 0 and 1", "at the same tail", "at the same KL"], rows)


TABLES = {
    "cells-first-layers": first_layers,
    "cells-half-the-bytes": half_the_bytes,
    "cells-remainders": remainders,
    "cells-ratios": ratios,
    "cells-shares": shares,
    "cells-wide-remainders": wide_remainders,
    "cells-wide-shares": wide_shares,
}
