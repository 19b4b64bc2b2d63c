"""The third engine of the rollout benchmarks: which schedule of small units it runs, by which ratio its budgets are smaller
than the published ones, and the speed-ups that are asked for. Measures nothing.

Such a schedule is a file (--fine), or the published one scaled (recipes/code-lm/scale_presets.py): by the smallest ratios
in records of models on which both were measured (--ratio-records), or by one that is given by hand (--budget-ratio). A
scaled one says "scaled, to be calibrated on the real model" until somebody calibrates it there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm_engines

from sparroll.attention.selectors import PageMean, QuantizedMean, Remainder
from sparroll.errors import UserError
from sparroll.schedule import Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "code-lm"))

import scale_presets

TARGETS: dict[str, dict[str, float]] = {
    "qwen3-1.7b": {"drained": 3.1, "steady": 4.2, "long": 4.0},
    "qwen3-4b": {"drained": 2.9, "steady": 3.7},
    "qwen3-8b": {"drained": 2.5, "steady": 3.3},
    "qwen3-14b": {"drained": 2.1, "steady": 2.35},
}
"""Speed-ups over dense attention on an H200 that are asked for. On other GPUs a step below them is profiled, too."""
BY_HAND = "a ratio that was given by hand and is in no record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fine", type=Path, help="the third engine's schedule: a file")
    which.add_argument("--budget-ratio", type=float, help="the third engine reads the published budgets / this")
    which.add_argument(
        "--ratio-records", type=Path, nargs="+", help="the same with the smallest ratios of these records"
    )
    parser.add_argument("--rule", default="quantized_mean-4x4", help="of --ratio-records: whose ratios")
    parser.add_argument(
        "--units",
        default="4x4",
        help="of --budget-ratio: tokens of a unit x bits of its index, 2x2+64 with a remainder by groups of 64",
    )
    parser.add_argument("--fine-dense-layers", type=int, nargs="*", default=[0], help="of --budget-ratio")


def target(model: str, request_set: str) -> float | None:
    """The speed-up that is asked for on this device; None where nobody asked for one."""
    return TARGETS.get(model, {}).get(request_set) if vllm_engines.device_name() == "h200" else None


def asked(options: argparse.Namespace) -> bool:
    return any(each is not None for each in (options.fine, options.budget_ratio, options.ratio_records))


def make(options: argparse.Namespace, published: Schedule) -> Schedule:
    """The schedule of the third engine. Refuses one that was made for another model, or names layers it has not."""
    if options.fine is not None:
        found = Schedule.load(options.fine)
    elif options.ratio_records is not None:
        found = scale_presets.scaled(published, *scale_presets.from_records(options.ratio_records, options.rule))
    else:
        selector, dense_layers = units(options.units), tuple(options.fine_dense_layers)
        found = scale_presets.scaled(published, selector, dense_layers, options.budget_ratio, BY_HAND)
    # Here and not in an engine, which is only there after minutes.
    _check_kernels(options.model, found)
    found.check_model(str(vllm_engines.model_folder(options.model, Path(options.folder))))
    found.check_layers(int(vllm_engines.QWEN3[options.model]["num_hidden_layers"]))
    return found


def _check_kernels(model: str, schedule: Schedule) -> None:
    selector = schedule.selector
    in_group = 1 if selector.remainder is None else selector.units_per_group
    known = type(selector) in (PageMean, QuantizedMean) and not in_group & (in_group - 1)
    if model != vllm_engines.TINY and not known:
        raise UserError(
            f"the schedule {schedule.name!r} has a selector without CUDA kernels: {selector}",
            "page_mean and quantized_mean have them, with remainders by groups of 1, 2, 4, ... units",
        )


def inline(options: argparse.Namespace) -> str:
    """The third engine's schedule itself, as JSON, which engines take in the place of a file. `options.schedule` is the
    published one."""
    return json.dumps(make(options, Schedule.load(options.schedule)).inline())


@contextmanager
def refusals_told() -> Iterator[None]:
    """What a schedule is refused for ends the call in two lines, without a traceback."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")


def units(name: str) -> QuantizedMean:
    """4x4 are units of 4 tokens with 4 bits a channel, 2x2+64 those of 2 with a remainder by groups of 64 tokens in fp8."""
    fine, plus, group = name.partition("+")
    tokens, _, bits = fine.partition("x")
    if not (tokens.isdigit() and bits.isdigit()) or (plus and not group.isdigit()):
        raise UserError(
            f"--units takes tokens x bits, and + tokens of a remainder's groups, got {name!r}", "4x4 or 2x2+64"
        )
    remainder = Remainder(int(group), "fp8") if plus else None
    recent = max(32, int(group or 0))
    return QuantizedMean(page_tokens=int(tokens), bits=int(bits), recent_tokens=recent, remainder=remainder)


def described(schedule: Schedule) -> dict[str, Any]:
    """What a record says of the schedule and of its budgets."""
    made_by = schedule.made_by or {}
    return {
        "schedule": schedule.name,
        "schedule_table": schedule.inline(),
        "caveat": schedule.caveat,
        "budget_ratio": made_by.get("budget_ratio"),
        "budget_ratio_source": made_by.get("source"),
    }
