"""What does the page size buy? Tail, impossible tokens, effective FLOPs and seconds by page and budget, and of small units
in few bits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from claim_cells import Cell, Done, Place, Table
from claim_runs import opened, sampled, scorer_of, tokens_of
from claim_tasks import DENSE, ClaimTask, Reading, budget, schedule_of
from claim_tokens import intervals

from sparroll.attention.selectors import make_selector
from sparroll.plan import cost
from sparroll.plan.model_shape import ModelShape, model_shape
from sparroll.types import Rollout

NAME = "page-size"
BF16_BYTES = 2
ABOUT = "Which page gives the best tail for the same effective FLOPs, and for the same seconds?"


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    """A cell per task and selector, and one of dense rollouts. The interval is a bootstrap over prompts, so one seed of
    rollouts is enough, the same whatever seeds are asked for."""
    made = []
    for task in tasks[:1] if tasks[0].toy else tasks:
        made.append(Cell(f"{task.name}-dense", {"task": task.name, "selector": None}))
        for selector in selectors(task):
            bits = f"-{selector['bits']}-bits" if "bits" in selector else ""
            name = f"{task.name}-{selector['kind']}-{selector['page_tokens']}{bits}"
            made.append(Cell(name, {"task": task.name, "selector": selector}))
    return made


def selectors(task: ClaimTask) -> list[Table]:
    """Published pages of all sizes, and small units whose index is as large as that of larger pages."""
    pages = [{"kind": "page_mean", **task.ends(page)} for page in task.page_sizes]
    units = [{"kind": "quantized_mean", **task.ends(4), "bits": bits} for bits in (8, 4)]
    return pages + (units[1:] if task.toy else units)


def run(cell: Cell, place: Place) -> Table:
    task, selector = place.task, cell.config["selector"]
    readings: list[Reading] = [DENSE]
    if selector is not None:
        made = make_selector(selector)
        wanted = [each for each in task.budgets if each >= made.least_budget_tokens and each % made.unit_tokens == 0]
        readings = [budget(each, made) for each in (wanted[:2] if task.toy else wanted)]
    scorer, rows = scorer_of(task, task.model), []
    with opened(task, task.model, readings) as engine:
        for reading in readings:

            def measured(reading: Reading = reading) -> Table:
                if task.device == "cuda":
                    # What is compiled for a schedule is no part of its speed.
                    sampled(engine, task, reading, cell.seed)
                began = time.perf_counter()
                rollouts = sampled(engine, task, reading, cell.seed)
                seconds = time.perf_counter() - began
                found = {"budget": reading.get("kv_budget_tokens"), "decode_seconds": seconds, "engine": engine.kind}
                found |= {"kv_read_share": engine.report().kv_read_share, "statistics": {}}
                tokens = tokens_of(scorer, task, rollouts)
                found["statistics"] = intervals(tokens)
                found["bins"] = {start: intervals(each)["q05"] for start, each in tokens.bins(task.bin_tokens).items()}
                found["eflops"] = eflops(model_shape(scorer.model.config), rollouts, task, reading)
                found["response_tokens"] = sum(len(each.response_ids) for each in rollouts)
                return found

            rows.append(place.part(f"budget-{reading.get('kv_budget_tokens', 'dense')}", measured))
    return {"rows": rows}


def eflops(shape: ModelShape, rollouts: Sequence[Rollout], task: ClaimTask, reading: Reading) -> float:
    """Mean over rollouts of the effective FLOPs of a response, by the corrected formula. It charges an index row of bf16 for
    each unit, so narrower rows count as rows of larger units."""
    schedule, total = schedule_of(task, reading), 0.0
    unit = None
    if schedule is not None:
        selector, dim = schedule.selector, shape.head_dim
        unit = max(1, round(selector.unit_tokens * BF16_BYTES * dim / selector.index_row_bytes(dim)))
    for rollout in rollouts:
        about = {
            "parameters": shape.parameters,
            "prompt_tokens": len(rollout.prompt_ids),
            "response_tokens": len(rollout.response_ids),
            "kv_width": shape.kv_width,
            "gqa_ratio": shape.gqa_ratio,
        }
        total += (
            cost.dense(**about)
            if schedule is None
            else cost.sparse(**about, kv_budget_tokens=schedule, unit_tokens=unit)
        )
    return total / len(rollouts)


def results(done: Sequence[Done]) -> Table:
    """All rows in one list, and for each task the frontier: rows that no cheaper row has a better tail than. Seconds are
    compared within the engine that decoded most rows."""
    lines = [
        {"task": each["task"], "selector": each["selector"], **row} for each in done for row in each.result["rows"]
    ]
    frontier = {}
    for task in dict.fromkeys(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == task]
        engine, _ = Counter(line["engine"] for line in own).most_common(1)[0]
        frontier[f"{task} by eflops"] = _frontier(own, "eflops")
        frontier[f"{task} by decode_seconds"] = _frontier(
            [line for line in own if line["engine"] == engine], "decode_seconds"
        )
    return {"lines": lines, "frontier": frontier}


def _frontier(lines: list[Table], price: str) -> list[Table]:
    best, kept = -1.0, []
    for line in sorted((line for line in lines if line["selector"]), key=lambda line: line[price]):
        tail = line["statistics"]["q05"]
        if tail[0] > best:
            best = tail[0]
            page = line["selector"]["page_tokens"]
            about = {"kind": line["selector"]["kind"], "page_tokens": page, "bits": line["selector"].get("bits")}
            kept.append(about | {"budget": line["budget"], price: line[price], "q05": tail})
    return kept
