"""The table of docs/claims.md that says which page has the highest tail at equal effective FLOPs, and the figures of the
sentences beside it, from the records of `page-size` and `quantised-sampler`. Measures nothing.

Costs are shares of what a dense response takes, so that models and lengths can stand side by side. Between two budgets of
a selector its tail is interpolated; beyond its cheapest and its dearest budget there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, results, table

from sparroll import records
from sparroll.rounding import rounded_down

PAGES_RECORDS = {"table-sums": "claims-page-size-h100", "remarks": "claims-page-size-cpu"}
SHARES = {"table-sums": (0.14, 0.2, 0.3, 0.4), "remarks": (0.5, 0.65, 0.8)}
"""Of a dense response's eFLOPs. On remarks, whose contexts have a few hundred tokens, weights are most of them."""
PUBLISHED_SHARES = (0.14, 0.2, 0.3)
PUBLISHED_DENSE = 263.0
PUBLISHED = {
    16: ((9.98, 0.6), (13.52, 0.643), (16.98, 0.69), (23.83, 0.74), (30.84, 0.78), (37.75, 0.818), (44.74, 0.831),
         (51.72, 0.853), (58.61, 0.865), (72.49, 0.884), (86.34, 0.903)),
    32: ((12.7, 0.62), (16.23, 0.657), (23.15, 0.732), (30.1, 0.758), (37.0, 0.79), (44.0, 0.816), (50.89, 0.832),
         (57.87, 0.849), (71.76, 0.866), (85.61, 0.888)),
    64: ((15.83, 0.62), (22.82, 0.698), (36.68, 0.768), (43.58, 0.793), (50.56, 0.815), (57.46, 0.8245), (71.44, 0.847),
         (85.32, 0.861)),
    128: ((22.62, 0.665), (29.51, 0.716), (36.47, 0.745), (43.38, 0.775), (50.36, 0.797), (57.36, 0.81), (71.23, 0.836),
          (85.09, 0.854)),
}  # fmt: skip
"""(1e12 eFLOPs, tail) by page, read off Figure 4b of arXiv 2606.08446: Qwen3-1.7B, contexts of 20K to 22K tokens, where a
dense response takes PUBLISHED_DENSE."""
Unit = tuple[str, int, int | None]
UNITS: dict[Unit, str] = {
    **{("page_mean", page, None): f"pages of {page}" for page in (4, 8, 16, 32, 64, 128)},
    ("quantized_mean", 4, 8): "pages of 4 in 8 bits",
    ("quantized_mean", 4, 4): "pages of 4 in 4 bits",
}
"""Kind, tokens of a page, bits."""
Curve = Sequence[tuple[float, float]]


def by_page() -> str:
    """The tail of each selector by its share of a dense response's eFLOPs; the highest one in bold."""
    columns: list[dict[Unit, float | None]] = []
    heads = []
    for task, shares in SHARES.items():
        own = curves(task)
        heads += [f"{task}, {share:.0%}" for share in shares]
        columns += [{unit: at(own.get(unit, ()), share) for unit in UNITS} for share in shares]
    published = {("page_mean", page, None): _of_dense(curve) for page, curve in PUBLISHED.items()}
    heads += [f"published, {share:.0%}" for share in PUBLISHED_SHARES]
    columns += [{unit: at(published.get(unit, ()), share) for unit in UNITS} for share in PUBLISHED_SHARES]
    rows = [[told, *(_cell(column, unit) for column in columns)] for unit, told in UNITS.items()]
    return table(["selector", *heads], rows)


def _cell(column: Mapping[Unit, float | None], unit: Unit) -> str:
    value = column[unit]
    if value is None:
        return ""
    best = max(each for each in column.values() if each is not None)
    return f"**{rounded_down(value)}**" if value == best else rounded_down(value)


def lines_of(task: str) -> list[dict[str, Any]]:
    return [line for line in results(PAGES_RECORDS[task], "claims-page-size")["lines"] if line["task"] == task]


def curves(task: str) -> dict[Unit, Curve]:
    """(share of a dense response's eFLOPs, tail) of each selector, in rising order of costs."""
    (dense,) = [line["eflops"] for line in lines_of(task) if line["selector"] is None]
    found: dict[Unit, list[tuple[float, float]]] = {}
    for line in lines_of(task):
        if (of := line["selector"]) is not None:
            unit = (of["kind"], of["page_tokens"], of.get("bits"))
            found.setdefault(unit, []).append((line["eflops"] / dense, line["statistics"]["q05"][0]))
    return {unit: sorted(curve) for unit, curve in found.items()}


def at(curve: Curve, share: float) -> float | None:
    """The tail at that cost; None where no budget is as cheap, or none as dear.

    >>> at([(0.1, 0.6), (0.3, 0.8)], 0.2)
    0.7
    """
    costs = [cost for cost, _ in curve]
    if not costs or not costs[0] <= share <= costs[-1]:
        return None
    return float(np.interp(share, costs, [tail for _, tail in curve]))


def _of_dense(curve: Curve) -> Curve:
    return [(cost / PUBLISHED_DENSE, tail) for cost, tail in curve]


def seconds() -> Figures:
    """Of decoding in vLLM on table-sums, over all pages and budgets, and dense."""
    task = records.read(RESULTS / f"{PAGES_RECORDS['table-sums']}.json", "claims-page-size")["config"]["tasks"][
        "table-sums"
    ]
    in_vllm = [line for line in lines_of("table-sums") if line["engine"] == "vllm"]
    (dense,) = [line["decode_seconds"] for line in in_vllm if line["selector"] is None]
    sparse = [line["decode_seconds"] for line in in_vllm if line["selector"] is not None]
    return {
        "rollouts": str(task["measure_prompts"] * task["measure_samples"]),
        "least": down(min(sparse), 1),
        "most": up(max(sparse), 1),
        "dense": down(dense, 1),
    }


def leads() -> Figures:
    """How far pages of 16 and the units in 4 bits lie above others at equal cost on table-sums, over SHARES."""
    own, shares = curves("table-sums"), SHARES["table-sums"]
    base, unit = own["page_mean", 16, None], own["quantized_mean", 4, 4]
    apart = {page: [_above(base, own["page_mean", page, None], share) for share in shares] for page in (32, 64, 128)}
    theirs = {page: _of_dense(curve) for page, curve in PUBLISHED.items()}
    published = [_above(theirs[16], theirs[page], share) for page in (32, 64, 128) for share in PUBLISHED_SHARES]
    every = [each for of in apart.values() for each in of]
    units = [_above(unit, base, share) for share in shares]
    return {
        "least": bare(down(min(every), 2)),
        "most": bare(up(max(every), 2)),
        "published_least": bare(down(min(published), 2)),
        "published_most": bare(up(max(published), 2)),
        "unit_least": bare(down(min(units), 2)),
        "unit_most": bare(down(max(units), 2)),
    }


def _above(ours: Curve, theirs: Curve, share: float) -> float:
    found = at(ours, share), at(theirs, share)
    assert found[0] is not None and found[1] is not None, f"no tail at {share}"
    return found[0] - found[1]


def fewer_bits() -> Figures:
    """The tails of samplers with rounded weights on table-sums, alone and beside sparse attention."""
    found = results("claims-quantised-sampler-h100", "claims-quantised-sampler")
    tail = {(row["form"], row["budget"]): row["statistics"]["q05"][0] for row in found["measured"]}
    budget = max(budget for _, budget in tail if budget is not None)
    alone = {form: bare(down(tail[form, None], 3)) for form in (None, "int8", "fp8", "int4")}
    beside = {form: bare(down(tail[form, budget], 3)) for form in (None, "int8", "fp8", "int4")}
    return {
        **{form or "whole": value for form, value in alone.items()},
        **{f"{form or 'whole'}_beside": value for form, value in beside.items()},
        "budget": f"{budget:,}",
    }


PAGES: Mapping[str, Claims] = {
    "docs/claims.md": {
        "On table-sums pages of 16 tokens lie {least} to {most} above larger ones at equal cost; published are "
        "{published_least} to {published_most}.": leads,
        "They lie {unit_least} to {unit_most} above pages of 16 there.": leads,
        "{rollouts} rollouts took {least} to {most} s in vLLM under all of these pages and budgets, and {dense} s "
        "densely": seconds,
        "On table-sums the tail is {whole} with whole weights, {int8} with int8, {fp8} with fp8 and {int4} with int4; "
        "beside sparse attention of {budget} tokens it is {whole_beside}, {int8_beside}, {fp8_beside} and {int4_beside}.": (
            fewer_bits
        ),
    },
}
TABLES = {"claims-pages": by_page}
