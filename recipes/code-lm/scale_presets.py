"""Published schedules for another selector: their budgets divided by the smallest measured ratio at their place.

    python recipes/code-lm/scale_presets.py --records runs/code-lm/seed-*/cells/cells.json runs/code-lm/study/cells.json \\
        --rule quantized_mean-4x4 --presets qwen3-1.7b-0.86 --out runs/code-lm/presets

A ratio depends on how much of a context is read, so each step is cut where the curves of the ratios bend, and its parts
are divided by the smallest ratio of all models and statistics there. Budgets never fall with the context.

The ratios come from small models, not from those that the presets are for. So each file says that it is scaled and to be
calibrated on the real model, where `sparroll schedule show` and `sparroll plan` repeat it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from budget_ratio import STATISTICS, Ratio, SmallestRatio, smallest  # noqa: E402

from sparroll import records  # noqa: E402
from sparroll.attention.selectors import Selector, make_selector  # noqa: E402
from sparroll.errors import UserError, nearest  # noqa: E402
from sparroll.presets import presets  # noqa: E402
from sparroll.schedule import Schedule, Step  # noqa: E402

KIND = "code_lm_cells"
CAVEAT = "scaled, to be calibrated on the real model"
FAR_TOKENS = 1 << 22
"""A context longer than any."""


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
    preset: Schedule, selector: Selector, dense_layers: tuple[int, ...], ratio: SmallestRatio | float, source: str
) -> Schedule:
    """The preset with another selector and its budgets divided by the ratio, one for all or by context and budget, rounded
    up to whole units. Of steps with one budget, the first stays."""
    if preset.layer_groups:
        raise UserError(
            f"{preset.name} has budgets by groups of layers, and the ratios do not", "take a preset without them"
        )
    unit, steps = selector.unit_tokens, [Step(0, selector.least_budget_tokens)]
    ends = [step.from_context_tokens for step in preset.steps[1:]]
    for step, end in zip(preset.steps, [*ends, None], strict=True):
        begin, published = step.from_context_tokens, int(step.kv_budget_tokens)
        places = ratio.places(begin, end, published) if isinstance(ratio, SmallestRatio) else [begin]
        for first, last in zip(places, [*places[1:], end], strict=True):
            its = _over(ratio, first, last, published) if isinstance(ratio, SmallestRatio) else ratio
            budget = max(int(steps[-1].kv_budget_tokens), -int(-published / its // unit) * unit)
            if steps[-1].from_context_tokens == first:
                steps[-1] = Step(first, budget)
            elif budget != steps[-1].kv_budget_tokens:
                steps.append(Step(first, budget))
    whole = int(preset.steps[-1].kv_budget_tokens) / int(steps[-1].kv_budget_tokens)
    if whole <= 1:
        raise UserError(f"the smallest ratio is {whole:g}: nothing is gained by this rule", "take another --rule")
    told = "their ratio by context and budget" if isinstance(ratio, SmallestRatio) else f"{ratio:.4g}"
    made_by = {
        "source": f"budgets of {preset.name} divided by {told}, {source}",
        "budget_ratio": round(whole, 4) if isinstance(ratio, SmallestRatio) else float(ratio),
        "caveat": CAVEAT,
    }
    return dataclasses.replace(
        preset,
        steps=tuple(steps),
        selector=selector,
        dense_layers=dense_layers,
        made_by=made_by,
        name=f"{preset.name}-scaled",
    )


def _over(ratio: SmallestRatio, first: int, last: int | None, published: int) -> float:
    """The smallest ratio over contexts between which no curve bends. last: None without an end."""
    return min(ratio.at(context, published) for context in (max(first, 1), FAR_TOKENS if last is None else last - 1))


def from_records(
    paths: list[Path], rule: str, statistics: tuple[str, ...] = STATISTICS
) -> tuple[Selector, tuple[int, ...], SmallestRatio, str]:
    """What `scaled` takes, from the records of all models: the rule's selector and dense layers, its smallest ratios, and
    where they come from."""
    results = {str(path): records.read(path, KIND)["results"] for path in paths}
    smallest_of_models(results, rule, statistics)
    cell = next(cell for cell in next(iter(results.values()))["cells"] if cell["rule"] == rule)
    if cell["layer_budgets"] != "even":
        raise UserError(f"{rule} has budgets by layer, which presets have not", "take a rule without them")
    source = f"the smallest of {rule} at equal {' and '.join(statistics)}, models: {len(results)}"
    rows = [
        ([Ratio(**row) for row in result["ratios"] if row["statistic"] in statistics], result["bins"])
        for result in results.values()
    ]
    return make_selector(cell["selector"]), tuple(cell["dense_layers"]), SmallestRatio.of(rows, rule), source


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="cells.json of each model")
    parser.add_argument("--rule", required=True, help="for example quantized_mean-4x4")
    parser.add_argument("--presets", nargs="+", default=[name for name in presets() if name.endswith("-0.86")])
    parser.add_argument("--statistics", nargs="+", choices=STATISTICS, default=list(STATISTICS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        statistics = tuple(args.statistics)
        of_rule = from_records(args.records, args.rule, statistics)
        results = {str(path): records.read(path, KIND)["results"] for path in args.records}
        for name, row in smallest_of_models(results, args.rule, statistics).items():
            print(
                f"{name}: at least {row.ratio:.2f} ({row.low:.2f} to {row.high:.2f}), {row.statistic} at "
                f"{row.published_budget:,} tokens from {row.from_context_tokens:,} on"
            )
        for name in args.presets:
            made = scaled(Schedule.load(name), *of_rule)
            print(f"wrote {made.save(args.out / f'{made.name}.toml')}: {CAVEAT}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
