"""Figures in sentences about what a selector must read. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, record, results
from render_cells import CUT_SHORT, LARGE_BUDGETS, LOW_BITS, MODELS, SCALED_BY, WIDE_MODELS
from render_fine import SIZES
from request_sets import LONGEST

from sparroll.plan.model_shape import model_shape
from sparroll.schedule import Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "code-lm"))

import scale_presets
from cells import FEW_BUDGETS

LONG_TOKENS = 30_000
TRAINED = [name for name in MODELS if name != CUT_SHORT]
TRAINED_WIDE = [name for name in WIDE_MODELS if name != CUT_SHORT]
"""Records of models that were trained to the end; those that have wide first layers."""
WIDE_RULE = "quantized_mean-{}-dense-none-first-two-4"
LONGEST_BIN = -1
LONGEST_MEASURED = 8192, 16_384
"""Contexts of that bin in models of code."""
TWO_MODELS = ["code-lm-study-wide-h100", "code-lm-tiny-reasoner-h100"]
"""Records by which the budgets of the older rollouts with wide first layers were scaled."""
ALL_MODELS = {"4x2": list(SCALED_BY)} | {units: [*TRAINED_WIDE, *LARGE_BUDGETS] for units in ("4x4", "2x2")}
"""Records of all models, by units: for these two, tiny-reasoner was measured at more budgets in another record."""


def scaled_budgets() -> Figures:
    preset = Schedule.load("qwen3-1.7b-0.86")
    said = {"published": f"{preset.kv_budget_tokens(LONG_TOKENS):,}"}
    for rule in ("4x4", "2x2"):
        said[f"of_{rule}"] = _scaled(TRAINED, f"quantized_mean-{rule}")
        said[f"with_it_{rule}"] = _scaled([*TRAINED, CUT_SHORT], f"quantized_mean-{rule}")
    return said


def _scaled(names: list[str], rule: str) -> str:
    """Tokens of the other layers of Qwen3-1.7B in long contexts under a rule that is scaled by these records."""
    return f"{_schedule(names, rule, '1.7b').step_at(LONG_TOKENS).budgets[-1]:,}"


def _schedule(names: list[str], rule: str, size: str) -> Schedule:
    paths = [RESULTS / f"{name}.json" for name in names]
    preset = Schedule.load(f"qwen3-{size}-0.86")
    return scale_presets.scaled(preset, *scale_presets.from_records(paths, rule))


def budgets_of_ten_models() -> Figures:
    """The smallest factor of 4 x 2 at a sixth and a third of long contexts by all models; and how many tokens more, in %, a
    response of LONGEST tokens reads by them than by the models of earlier rollouts, with wide first layers."""
    rule, mean = WIDE_RULE.format("4x2"), sum(LONGEST_MEASURED) // 2
    ratio = scale_presets.from_records([RESULTS / f"{name}.json" for name in SCALED_BY], rule)[2]
    said = {"sixth": down(ratio.at(mean, round(mean / 6)), 2), "third": down(ratio.at(mean, round(mean / 3)), 2)}
    for word, share in (("sixth", 1 / 6), ("third", 0.33)):
        said[f"{word}_models"] = str(sum(reached >= share for reached in ratio.measured_up_to))
    for word, units in (("pairs", "2x2"), ("fours", "4x4")):
        more = _more_read(units, TWO_MODELS)
        said |= {f"{word}_least": down(min(more)), f"{word}_most": up(max(more))}
    return said


def _more_read(units: str, before: list[str]) -> list[float]:
    """How many % more a response of LONGEST tokens reads by all models than by those before, of each size."""
    rule, more = WIDE_RULE.format(units), []
    for size in SIZES:
        layers = model_shape(f"Qwen3-{size.upper()}").layers
        by_all, by_those = (_read_tokens(_schedule(names, rule, size), layers) for names in (ALL_MODELS[units], before))
        more.append(100 * (by_all / by_those - 1))
    return more


def _read_tokens(schedule: Schedule, layers: int) -> int:
    """What all layers read for a response of LONGEST tokens."""
    contexts = np.arange(1, LONGEST + 1)
    return int((layers * contexts - schedule.unread_tokens(contexts, layers)).sum())


def wide_first_layers() -> Figures:
    """What 1.7B would read in long contexts with wide first layers, by which models."""
    units = ("4x4", "4x2", "2x2")
    return {
        **{f"by_ten_{each}": _scaled(ALL_MODELS[each], WIDE_RULE.format(each)) for each in units},
        **{f"of_two_{each}": _scaled(TWO_MODELS, WIDE_RULE.format(each)) for each in ("4x4", "2x2")},
        "with_cut": _scaled(list(WIDE_MODELS), WIDE_RULE.format("4x4")),
        "published": f"{Schedule.load('qwen3-1.7b-0.86').kv_budget_tokens(LONG_TOKENS):,}",
    }


def training() -> Figures:
    """Of the models of code that were trained to the end: how long the longest training took, and each held-out loss."""
    of_code = filter(None, (re.fullmatch(r"code-lm-(seed-(\d+)-.*)", name) for name in TRAINED))
    found = {seed[2]: record(RESULTS / f"code-lm-train-{seed[1]}.json", "code_lm_training") for seed in of_code}
    return {
        "minutes": up(max(each["wall_seconds"] for each in found.values()) / 60, 1),
        **{f"loss_{seed}": up(each["results"]["held_out_loss"], 2) for seed, each in found.items()},
    }


def longer_training() -> Figures:
    seconds = {
        seed: record(RESULTS / f"code-lm-train-seed-{seed}-h200.json", "code_lm_training")["wall_seconds"]
        for seed in (8, 10, 11, 12)
    }
    return {"short": up(max(seconds[8], seconds[10]) / 60, 1), "long": up(max(seconds[11], seconds[12]) / 60, 1)}


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


def tails_of_half_the_bits() -> Figures:
    """How far the tails of units whose index has half the bytes lie from those of 4 x 4, with wide first layers."""
    apart: dict[tuple[str, str], dict[int, list[float]]] = {}
    for name, told in SCALED_BY.items():
        tail = {cell["name"]: cell["bins"][LONGEST_BIN]["q05"] for cell in results(name, "code_lm_cells")["cells"]}
        kinds = ("2x1", "4x2") if name in LOW_BITS else ("4x2",)
        for units, budget in itertools.product(kinds, FEW_BUDGETS):
            its, fours = (tail[f"{WIDE_RULE.format(each)}-{budget}"] for each in (units, "4x4"))
            apart.setdefault((told.partition(",")[0], units), {}).setdefault(budget, []).append(its - fours)
    every = {key: list(itertools.chain(*by_budget.values())) for key, by_budget in apart.items()}

    def lowest_from_512(model: str) -> float:
        return min(min(values) for budget, values in apart[model, "4x2"].items() if budget >= 512)

    return {
        "below": bare(up(-min(every["code", "2x1"]), 3)),
        "above": bare(down(max(every["code", "2x1"]), 3)),
        "least": bare(down(-max(every["code", "4x2"]), 3)),
        "most": bare(up(-min(every["code", "4x2"]), 3)),
        "tiny": bare(up(-min(every["tiny-reasoner", "4x2"]), 3)),
        "from_512": bare(up(-min(lowest_from_512(model) for model in ("code", "study")), 3)),
        "tiny_from_512": bare(up(-lowest_from_512("tiny-reasoner"), 3)),
    }


def more_at_the_same_kl() -> Figures:
    """How many % more tokens the other layers read with 4 x 4 for the same KL if layers 0 and 1 are wide instead of dense:
    where each saves least, and at most at one length and published budget."""
    wide, least, most = WIDE_RULE.format("4x4"), [], []
    for name in WIDE_MODELS:
        ratios: dict[str, dict[tuple[int, int], float]] = {"quantized_mean-4x4": {}, wide: {}}
        for row in results(name, "code_lm_cells")["ratios"]:
            if row["rule"] in ratios and row["statistic"] == "kl_sparse_to_dense" and row["bound"] != "at least":
                ratios[row["rule"]][row["from_context_tokens"], row["published_budget"]] = row["ratio"]
        dense_of, wide_of = ratios["quantized_mean-4x4"], ratios[wide]
        least.append(100 * (min(dense_of.values()) / min(wide_of.values()) - 1))
        most += [100 * (dense_of[place] / wide_of[place] - 1) for place in dense_of.keys() & wide_of.keys()]
    return {"least": down(min(least)), "most": up(max(least)), "single": up(max(most))}


PAGES: Mapping[str, Claims] = {
    "docs/results.md": {
        "By all ten, 4 x 2 needs {sixth} times fewer tokens than the published rule at the same tail where that rule reads "
        "a sixth of contexts from 8,192 to 16,384 tokens, and {third} times where it reads a third. Not all ten were "
        "measured so far: {sixth_models} of them up to a sixth or more, and {third_models} up to a third.": (
            budgets_of_ten_models
        ),
        "By all ten a response of 32,768 tokens reads {pairs_least} to {pairs_most} % more under 2 x 2 than in those "
        "rollouts, and {fours_least} to {fours_most} % more under 4 x 4.": budgets_of_ten_models,
    },
    "docs/small-pages.md": {
        "Qwen3-1.7B at .86 would read {by_ten_4x4} tokens in long contexts with 4 x 4, {by_ten_4x2} with 4 x 2 and "
        "{by_ten_2x2} with 2 x 2. By the study's model and tiny-reasoner alone it would be {of_two_4x4} with 4 x 4 and "
        "{of_two_2x2} with 2 x 2": wide_first_layers,
        "If the model that was cut short counted as well, the budget with 4 x 4 would be {with_cut} tokens of {published}": (
            wide_first_layers
        ),
        "From 512 tokens on the tail of 4 x 2 lies at most {from_512} below that of 4 x 4, and {tiny_from_512} "
        "below it in tiny-reasoner.": tails_of_half_the_bits,
        "where 4 x 4 saves least, {least} to {most} % more, and at single budgets up to {single} % "
        "more.": more_at_the_same_kl,
        "in the models of code its tail lies {below} below that of 4 x 4 to {above} above it. 4 x 2 is worse than 4 x 4: "
        "hardly on the study's model, by {least} to {most} of the tail in code (of all eight models that were measured with "
        "both), and by up to {tiny} on tiny-reasoner.": tails_of_half_the_bits,
        "The training of seed 3 was cut after {steps} of {of} steps (held-out loss {loss} nats), and there 4 x 4 saves "
        "{ratio} times at the same tail.": cut_short,
        "with it they would be {with_it_4x4} tokens with 4 x 4 and {with_it_2x2} with 2 x 2.": scaled_budgets,
        "For Qwen3-1.7B at .86 and long contexts that makes {of_4x4} tokens of {published} with 4 x 4, and {of_2x2} with "
        "2 x 2;": scaled_budgets,
        "Seeds 0 to 2 and 4 to 7 were trained for {minutes} minutes or less on one GPU each (held-out losses of {loss_0}, "
        "{loss_1}, {loss_2}, {loss_4}, {loss_5}, {loss_6} and {loss_7} nats with seeds 0, 1, 2, 4, 5, 6 and 7)": training,
        "Seeds 8 and 10 were trained for {short} minutes or less, and seeds 11 and 12 for {long} or less.": longer_training,
        "(seed 2, at the budget and length where they save least: {without} times fewer than published without it, {with} "
        "with it)": dense_layers_and_remainders,
        "(4 x 4 at 1,024 tokens: a tail of {layer_0} and {both}), but without layer 0 the tail falls to {none}.": (
            dense_layers_and_remainders
        ),
    },
}
