"""Published schedules for another selector: their budgets divided by the smallest measured ratio at their place.

    python recipes/code-lm/scale_presets.py --records runs/code-lm/seed-*/cells/cells.json runs/code-lm/study/cells.json \\
        --rule quantized_mean-4x4 --presets qwen3-1.7b-0.86 --out runs/code-lm/presets

A ratio depends on how much of a context is read. It is measured in a bin of lengths up to an octave in which both rules
have one budget, and a step of a published schedule is such a bin; a longer one is cut into octaves. Its budget is divided
by the smallest ratio of all models and statistics at the share that it is of the mean context. So the tail is meant to be
that of the published rule over each step, not at each of its lengths. Budgets never fall with the context. At larger shares
than a model was measured at its ratio lies on a line to 1 at the whole context, which may promise too much: the file says
how many models were measured up to which share.

The ratios come from small models, not from those that the presets are for. So each file says that it is scaled and to be
calibrated on the real model, where `sparroll schedule show` and `sparroll plan` repeat it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from budget_ratio import STATISTICS, Ratio, SmallestRatio, in_words, smallest  # noqa: E402
from cells import EVEN, shaped  # noqa: E402

from sparroll import records  # noqa: E402
from sparroll.attention.selectors import Selector, make_selector  # noqa: E402
from sparroll.errors import UserError, nearest  # noqa: E402
from sparroll.presets import presets  # noqa: E402
from sparroll.schedule import Schedule, Step  # noqa: E402

KIND = "code_lm_cells"
CAVEAT = "scaled, to be calibrated on the real model"
LONGEST_PUBLISHED = 32_768
"""Where the last step of a published schedule ends, unless it begins behind this: the longest responses of
benchmarks/request_sets.py."""


def smallest_of_models(
    results: dict[str, dict[str, Any]], rule: str, statistics: tuple[str, ...] = STATISTICS
) -> dict[str, Ratio]:
    """Of each record (by its name), the row with the rule's smallest ratio. Raises UserError where one has none."""
    found = {}
    for name, result in results.items():
        rows = [Ratio(**row) for row in result["ratios"] if row["statistic"] in statistics]
        if rule not in {row.rule for row in rows}:
            raise UserError(f"{name} has no ratio of {rule!r}", nearest(rule, sorted({row.rule for row in rows})))
        least = smallest(rows, rule)
        if least is None:
            raise UserError(
                f"{name} bounds the ratios of {rule!r} from below only: its smallest budget is better than all published "
                "ones they are taken at",
                "measure longer contexts",
            )
        found[name] = least
    return found


def scaled(
    preset: Schedule,
    selector: Selector,
    dense_layers: tuple[int, ...],
    ratio: SmallestRatio | float,
    source: str,
    shape: str = EVEN,
) -> Schedule:
    """The preset with another selector and its budgets divided by the ratio, one for all or by context and budget, rounded
    up to whole units. Of steps with one budget, the first stays. shape: of cells.py, how the budgets are shared among the
    layers: the ratio is that of the cell's budget, of which wide layers read several times as much. Shapes other than the
    even one need a preset that knows how many layers its model has."""
    if preset.layer_groups:
        raise UserError(
            f"{preset.name} has budgets by groups of layers, and the ratios do not", "take a preset without them"
        )
    unit, steps = selector.unit_tokens, [Step(0, selector.least_budget_tokens)]
    ends = [*(step.from_context_tokens for step in preset.steps[1:]), LONGEST_PUBLISHED]
    for step, end in zip(preset.steps, ends, strict=True):
        published = int(step.kv_budget_tokens)
        for first, mean_context in _octaves(step.from_context_tokens, end, published):
            its = ratio.at(mean_context, published) if isinstance(ratio, SmallestRatio) else ratio
            budget = max(int(steps[-1].kv_budget_tokens), -int(-published / its // unit) * unit)
            if steps[-1].from_context_tokens == first:
                steps[-1] = Step(first, budget)
            elif budget != steps[-1].kv_budget_tokens:
                steps.append(Step(first, budget))
    whole = int(preset.steps[-1].kv_budget_tokens) / int(steps[-1].kv_budget_tokens)
    if whole <= 1:
        raise UserError(f"the smallest ratio is {whole:g}: nothing is gained by this rule", "take another --rule")
    told = "their ratio by the share of the context" if isinstance(ratio, SmallestRatio) else f"{ratio:.4g}"
    those_of = "" if shape == EVEN else f", and shared among the layers as {shape!r}"
    made_by = {
        "source": f"budgets of {preset.name} divided by {told}, {source}{those_of}",
        "budget_ratio": round(whole, 4) if isinstance(ratio, SmallestRatio) else float(ratio),
        "caveat": CAVEAT,
    }
    made = dataclasses.replace(
        preset,
        steps=tuple(steps),
        selector=selector,
        dense_layers=dense_layers,
        made_by=made_by,
        name=f"{preset.name}-scaled",
    )
    layers = preset.fingerprint and preset.fingerprint.layers
    if shape != EVEN and not layers:
        raise UserError(
            f"{preset.name} does not say how many layers its model has, and the rule has budgets by layer",
            "take a preset with a fingerprint, or a rule without them",
        )
    return shaped(made, shape, layers or 0)


def _octaves(begin: int, end: int, published: int) -> list[tuple[int, int]]:
    """(where it begins, its mean context) of the parts of a step, cut by halves from its end on down. Contexts within the
    published budget are read whole, so they do not count."""
    ends = [max(begin, end)]
    while ends[0] // 2 > max(begin, published):
        ends.insert(0, ends[0] // 2)
    bounds = [max(begin, min(published, ends[0])), *ends]
    means = [(first + last) // 2 for first, last in pairwise(bounds)]
    return list(zip([begin, *ends[:-1]], means, strict=True))


def from_records(
    paths: list[Path], rule: str, statistics: tuple[str, ...] = STATISTICS
) -> tuple[Selector, tuple[int, ...], SmallestRatio, str, str]:
    """`from_results` of the records of all models."""
    return from_results(_results(paths), rule, statistics)


def _results(paths: list[Path]) -> dict[str, dict[str, Any]]:
    return {str(path): records.read(path, KIND)["results"] for path in paths}


def from_results(
    results: dict[str, dict[str, Any]], rule: str, statistics: tuple[str, ...]
) -> tuple[Selector, tuple[int, ...], SmallestRatio, str, str]:
    """What `scaled` takes, from the results of all models: the rule's selector and dense layers, its smallest ratios, where
    they come from, and how its budgets are shared among the layers."""
    smallest_of_models(results, rule, statistics)
    cell = next(cell for cell in next(iter(results.values()))["cells"] if cell["rule"] == rule)
    source = f"the smallest of {rule} at equal {' and '.join(statistics)}, models: {len(results)}"
    rows = [
        ([Ratio(**row) for row in result["ratios"] if row["statistic"] in statistics], result["bins"])
        for result in results.values()
    ]
    selector, dense_layers = make_selector(cell["selector"]), tuple(cell["dense_layers"])
    ratio = SmallestRatio.of(rows, rule)
    reached = Counter(f"{share:.0%}" for share in sorted(ratio.measured_up_to, reverse=True))
    told = ", ".join(f"{share} ({models})" for share, models in reached.items())
    source += f", measured up to these shares of their longest contexts: {told}"
    return selector, dense_layers, ratio, source, cell["layer_budgets"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="cells.json of each model")
    parser.add_argument("--rule", required=True, help="for example quantized_mean-4x4")
    parser.add_argument("--presets", nargs="+", default=[name for name in presets() if name.endswith("-0.86")])
    parser.add_argument("--statistics", nargs="+", choices=STATISTICS, default=list(STATISTICS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        statistics, results = tuple(args.statistics), _results(args.records)
        of_rule = from_results(results, args.rule, statistics)
        for name, row in smallest_of_models(results, args.rule, statistics).items():
            print(
                f"{name}: at least {in_words(row)}, {row.statistic} at {row.published_budget:,} tokens from "
                f"{row.from_context_tokens:,} on"
            )
        for name in args.presets:
            made = scaled(Schedule.load(name), *of_rule)
            print(f"wrote {made.save(args.out / f'{made.name}.toml')}: {CAVEAT}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
