"""The tables of small units, from their records: rollouts under their schedules, and what a layer takes. Measures nothing;
render.py writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import kernel_times
import record_tables
from record_tables import results, table, times
from render_speed import WholeRun
from request_sets import DRAINED_REQUESTS, SETS

from sparroll.attention.selectors import QuantizedMean
from sparroll.rounding import percent_down, rounded_down, rounded_up
from sparroll.schedule import Schedule

DEVICES = ("h200", "h100")
SIZES = ("1.7b", "4b", "8b", "14b")
BY_ALL_MODELS = "all-models-4x2"
SIX_MODELS = f"{BY_ALL_MODELS}-six-models"
BLOCKS_OF_16, HALF_THE_LANES = f"{BY_ALL_MODELS}-blocks-of-16", f"{BY_ALL_MODELS}-half-the-lanes"
"""Earlier calls, with budgets by six of the models; by five, in vLLM's blocks of 16 tokens; and by five, in blocks of 64
with a layout of the choice that is slow for large budgets."""
BUSY_HOST = f"{BY_ALL_MODELS}-busy-host"
"""A later call, with a faster kernel for scores of pages, while another GPU of the host was at work."""
KINDS = (BY_ALL_MODELS, "wide-2x2", "wide", "fine")
"""Words in the names of records. The budgets of the first are by all models that were trained to the end and measured with
wide first layers, and those of the others by fewer."""
SHOWN_GROUPS = 6
"""Kinds of kernels of a profile, those that take longest."""
NOT_YET = "Not run yet."


def fine_records(kind: str, devices: Sequence[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """(size, request set, results) of what was measured. Without records of few moments."""
    names = [
        (size, name, f"rollout-qwen3-{size}-{name}-{kind}-{device}")
        for device in devices
        for size in SIZES
        for name in SETS
    ]
    found = [(size, name, results(file, "rollout")) for size, name, file in names if _exists(file)]
    return [each for each in found if _half_measured(each[2])]


def _half_measured(found: dict[str, Any]) -> bool:
    """Whether at least half of the set's moments were measured; fewer say too little of what lies between them."""
    return len(found["windows"]) >= len(found["windows_missing"])


def _at_a_time(request_set: str, found: dict[str, Any]) -> str:
    """How many requests of the drained set a cache held that does not hold all of them."""
    begun = found["windows"][0]["batch"]
    return f", {begun} at a time" if request_set == "drained" and begun < DRAINED_REQUESTS else ""


def _units(found: dict[str, Any]) -> str:
    """Tokens of a unit x bits of a channel of its index."""
    selector = Schedule.load(found["schedule_table"]).selector
    bits = selector.bits if isinstance(selector, QuantizedMean) else "16"
    summed = "" if selector.remainder is None else f" + remainder of {selector.remainder.group_tokens}"
    return f"{selector.unit_tokens} x {bits}{summed}"


def _first_layers(found: dict[str, Any]) -> str:
    """What layers 0 and 1 do."""
    schedule = Schedule.load(found["schedule_table"])
    if schedule.dense_layers:
        return "dense" if schedule.dense_layers == (0, 1) else f"{', '.join(map(str, schedule.dense_layers))} dense"
    if not schedule.layer_groups:
        return "as the others"
    first, others = schedule.steps[-1].budgets
    return f"read {first / others:.0f} times as much"


def _models(found: dict[str, Any]) -> str:
    """By how many models the budgets were scaled; nothing if their ratio is of no model."""
    counted = re.search(r"models: (\d+)", found["budget_ratio_source"])
    return f" ({counted[1]} models)" if counted else ""


def _device(found: dict[str, Any]) -> str:
    """The second word of "NVIDIA H200"."""
    return str(found["gpu"] or "unknown").split()[:2][-1]


def _exists(name: str) -> bool:
    return (record_tables.RESULTS / f"{name}.json").exists()


def all_records() -> list[tuple[str, str, str, dict[str, Any]]]:
    """(kind, size, request set, results), those on an H200 first."""
    return [(kind, *each) for device in DEVICES for kind in KINDS for each in fine_records(kind, [device])]


def fine_rollouts() -> str:
    """Speed-ups of the published schedule and of small units over the same dense steps, and what they read."""
    rows = []
    any_target = any(found["target_speedup"] is not None for *_, found in all_records())
    for _, size, request_set, found in all_records():
        target, measured = found["target_speedup"], len(found["windows"])
        reached = "" if target is None else "yes" if found["speedup"] >= target else "no"
        reached += ", by these moments" if reached and found["windows_missing"] else ""
        ratio = found["budget_ratio"]
        rows.append(
            [
                _device(found),
                f"Qwen3-{size.upper()}",
                request_set + _at_a_time(request_set, found),
                _units(found),
                _first_layers(found),
                f"{math.ceil(found['dense_tokens_per_second']):,}",
                times(found["published"]["speedup"]),
                times(found["speedup"]),
                *(["" if target is None else times(target), reached] if any_target else []),
                rounded_up(found["attainable_speedup"], 2) + "x",
                percent_down(found["attainable_share"]),
                "" if ratio is None else f"1/{ratio:.3g}{_models(found)}",
                f"1/{rounded_down(1 / found['index_share_of_cache'], 1)}",
                f"{measured} of {measured + len(found['windows_missing'])}",
            ]
        )
    if not rows:
        return NOT_YET
    head = ["GPU", "model", "requests", "units", "layers 0 and 1", "dense, tokens/s", "published", "small units"]
    head += ["target", "reached"] if any_target else []
    made = table([*head, "attainable", "share of it", "budgets / published", "index / cache", "moments"], rows)
    return "\n".join([made, *_caveats(), *(part for part in (fine_whole_runs(), fine_profiles()) if part)])


def _caveats() -> list[str]:
    """What the schedules say of themselves, once for all models."""
    said = {
        f"The schedules are {found['caveat']}: "
        + re.sub(r"qwen3-[\d.]+b-[\d.]+\d", "the published ones", found["budget_ratio_source"])
        + "."
        for *_, found in all_records()
        if found["caveat"]
    }
    return ["", *sorted(said)] if said else []


def fine_whole_runs() -> str:
    """Runs of the drained set from the first token to the last, beside what their moments say and beside the whole dense
    run."""
    rows = []
    for kind, size, request_set, found in all_records():
        name = f"whole-run-qwen3-{size}-{kind}-h200"
        if (_device(found), request_set) == ("H200", "drained") and _exists(name):
            run = results(name, "whole-run")
            whole = WholeRun(
                size, kind, 1.0, run["tokens"], run["seconds"], run["tokens"] / found["sparse_tokens_per_second"]
            )
            dense = results(f"whole-run-qwen3-{size}-dense-h200", "whole-run")["seconds"]
            seconds = [rounded_up(each, 1) for each in (whole.seconds, whole.estimated_seconds)]
            about = [f"Qwen3-{size.upper()}", _units(found), f"{whole.tokens:,}", *seconds, whole.error_percent + "%"]
            rows.append([*about, rounded_up(dense, 1), times(dense / whole.seconds)])
    head = ["model", "units", "tokens", "whole run, s", "its moments say, s", "error", "whole dense run, s", "speed-up"]
    return "\n" + table(head, rows) if rows else ""


def reached_goals(kinds: Collection[str]) -> dict[tuple[str, str], bool]:
    """By (size, request set): whether a record of these kinds that has all moments reaches the target."""
    reached: dict[tuple[str, str], bool] = {}
    for kind, size, request_set, found in all_records():
        if kind in kinds and found["target_speedup"] is not None:
            here = found["speedup"] >= found["target_speedup"] and not found["windows_missing"]
            reached[size, request_set] = reached.get((size, request_set), False) or here
    return reached


def fine_profiles() -> str:
    """Kernels of the steps whose target was missed under budgets by all models: ms, beside what their bytes take."""
    rows = []
    for size, request_set, found in fine_records(BY_ALL_MODELS, ["h200"]):
        missed = found["target_speedup"] is not None and found["speedup"] < found["target_speedup"]
        profile = found["profile"] if missed else None
        groups = sorted((profile or {}).get("groups_ms", {}).items(), key=lambda item: -item[1])
        for group, ms in groups[:SHOWN_GROUPS]:
            floor = profile["floors_ms"].get(group)
            of = f"Qwen3-{size.upper()}, {request_set}, {_units(found)}: {profile['batch']} requests"
            rows.append([of, group, rounded_up(ms, 2), "" if floor is None else rounded_down(floor, 2)])
    return "\n" + table(["step", "kernels", "ms", "of its bytes, ms"], rows) if rows else ""


LAYER_BUDGETS = (512, 1024, 4096)
LENGTHS = ("equal", "mixed")


def layer_times() -> str:
    """What a layer takes on an H200, in us, by units, budget and whether all contexts are equally long."""
    took: dict[str, dict[tuple[str, int], float]] = {}
    _, timed = kernel_times.timed_layers(kernel_times.GPUS[0])
    for (name, budget), seconds in timed.items():
        units, lengths = name.split()
        took.setdefault(units, {})[lengths, budget] = 1e6 * seconds["sparse layer"]
    rows = [
        [
            "`page_mean`, 16 tokens" if units == "page_mean" else _spelled(units),
            *(rounded_up(us[lengths, budget], 0) for lengths in LENGTHS for budget in LAYER_BUDGETS),
        ]
        for units, us in sorted(took.items(), key=lambda each: each[1]["mixed", LAYER_BUDGETS[0]])
    ]
    heads = [f"{budget:,}{'' if lengths == 'equal' else ', mixed'}" for lengths in LENGTHS for budget in LAYER_BUDGETS]
    return table(["pages", *heads], rows)


def _spelled(units: str) -> str:
    """
    >>> _spelled("4x2+64")
    '4 x 2, remainder of 64'
    """
    pages, _, group = units.replace("x", " x ").partition("+")
    return f"{pages}, remainder of {group}" if group else pages


TABLES = {"fine-rollouts": fine_rollouts, "layer-times": layer_times}
