"""The kernel times that a plan uses, from what kernels took on a GPU: writes src/sparroll/plan/kernel_times.json, and prints
how far the sum of a layer's kernels is from the layer that was timed as a whole. Reads records and measures nothing.
Rows with a remainder are passed over: plans take them by the roofline.

    python benchmarks/kernel_times.py

A record of fine_kernels.py has scores, choice and attention of each kind of unit at several budgets, with equal contexts
and with mixed ones. Scores and attention become a line through these, fitted to relative errors; a further record adds
the kinds of unit that those before it lack. A choice is kept as it was timed in the first record, where all contexts are
equal; what it takes where nothing is to be chosen is from choice_sweep.py. What dense layers read at is the slope of
decode_step.py's dense steps over their bytes. The kernels are those of the records: where an engine has newer ones, make a
new record of fine_kernels.py and call this again.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import fine_schedule
import numpy as np
from scipy.optimize import nnls

from sparroll import files, records
from sparroll.attention.selectors import PageMean, Selector
from sparroll.plan import kernel_times
from sparroll.plan.kernel_times import KernelTimes, LayerLoad, timed_as
from sparroll.plan.length_mix import LengthMix
from sparroll.plan.model_shape import ModelShape, model_shape
from sparroll.plan.step_reads import StepReads
from sparroll.schedule import Schedule

RESULTS = Path(__file__).parent / "results"
Timed = dict[tuple[str, int], dict[str, float]]
"""Seconds of each kernel, by (units, budget)."""
OUT = Path(kernel_times.__file__).with_name(kernel_times.FILE)
GPUS = (
    {
        "gpu": "H200",
        "names": ["H200", "NVIDIA H200"],
        "kernels": ["fine-kernels-engines-h200", "fine-kernels-low-bits-h200"],
        "choices": "choice-sweep-engines-h200",
        "steps": "decode-step-qwen3-1.7b-h200",
    },
)
ELEMENT_BYTES = 2
FULL_BATCH = 32


def selector_of(units: str) -> Selector:
    """The selector of a row: "4x4 equal" is of 4 tokens and 4 bits."""
    kind = units.split()[0]
    return PageMean() if kind == "page_mean" else fine_schedule.units(kind)


def contexts_of(units: str, config: dict[str, Any]) -> np.ndarray:
    """The contexts of the record's requests, which it draws by its seed."""
    if units.endswith(" equal"):
        return np.full(config["requests"], config["context"])
    random = np.random.default_rng(config["seed"])
    return (config["context"] * random.uniform(0.05, 1.0, config["requests"])).astype(np.int64)


def load_of(row: dict[str, Any], config: dict[str, Any]) -> LayerLoad:
    """What a row's layer had to do, counted as a plan counts it."""
    contexts = contexts_of(row["units"], config)
    shape = ModelShape("layer", 0, 1, config["heads"] * config["group"], config["heads"], config["dim"], 0)
    schedule = Schedule.fixed(row["kv_budget_tokens"], selector_of(row["units"]), dense_layers=())
    reads = StepReads(shape, schedule, ELEMENT_BYTES)
    return reads.load(schedule, LengthMix.parse(contexts.tolist()), config["requests"])


def rows_of(record: dict[str, Any]) -> Timed:
    """Seconds of each kernel, by (units, budget)."""
    found: Timed = defaultdict(dict)
    for row in record["results"]["rows"]:
        if "+" in row["units"]:
            continue
        found[row["units"], row["kv_budget_tokens"]][row["kernel"]] = row["graph_us"] * 1e-6
    return found


def line(moved_bytes: list[float], seconds: list[float]) -> dict[str, float]:
    """The line with the least relative errors, neither part of it negative."""
    y = np.array(seconds)
    x = np.array(moved_bytes)
    (fixed, per_byte), _ = nnls(np.stack([1 / y, x / y], 1), np.ones(len(y)))
    return {"fixed_seconds": float(f"{fixed:.4g}"), "bytes_per_second": float(f"{1 / per_byte:.4g}")}


def dense_rate(record: dict[str, Any]) -> float:
    """Bytes of K and V a second of dense decode steps, of the batches that fill the device."""
    shape = model_shape(record["config"]["model"])
    steps = [row for row in record["results"] if "seconds" in row]
    cells = [row for row in steps if row["engine"] == "dense" and row["batch"] >= FULL_BATCH]
    assert len({row["context_tokens"] for row in cells}) > 2, "a slope needs several lengths"
    read = [row["batch"] * row["context_tokens"] * 2 * shape.kv_width * ELEMENT_BYTES for row in cells]
    return line(read, [float(np.median(row["seconds"])) for row in cells])["bytes_per_second"]


def kernel_records(about: dict[str, Any]) -> list[tuple[dict[str, Any], Timed]]:
    """Each record of kernels, and the seconds that count of it: those of units that no earlier one has."""
    found, seen = [], set()
    for name in about["kernels"]:
        record = records.read(RESULTS / f"{name}.json")
        timed = {key: each for key, each in rows_of(record).items() if key[0].split()[0] not in seen}
        seen |= {units.split()[0] for units, _ in timed}
        found.append((record, timed))
    return found


def made(about: dict[str, Any]) -> dict[str, Any]:
    """The entry of one GPU."""
    sweep, steps = (records.read(RESULTS / f"{about[name]}.json") for name in ("choices", "steps"))
    found = kernel_records(about)
    record, first_timed = found[0]
    config = record["config"]
    launch = [row["us"] for row in sweep["results"]["rows"] if row["kernel"] == "nothing wanted"]
    choices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for (units, budget), seconds in sorted(first_timed.items(), key=lambda each: each[0][1]):
        if units.endswith(" equal"):
            load = load_of({"units": units, "kv_budget_tokens": budget}, config)
            wanted = budget // selector_of(units).unit_tokens
            choices[round(load.longest_units)].append(
                {"wanted_units": wanted, "seconds": float(f"{seconds['choice']:.4g}")}
            )
    entry = {
        "gpu": about["gpu"],
        "names": about["names"],
        "records": [*about["kernels"], about["choices"], about["steps"]],
        "copy_bytes_per_second": float(f"{record['results']['copy_bytes_per_second']:.4g}"),
        "dense_bytes_per_second": dense_rate(steps),
        "choice": {
            "programs": config["requests"] * config["heads"],
            "launch_seconds": float(f"{1e-6 * float(np.mean(launch)):.4g}"),
            "timed": [{"units": count, "timed": choices[count]} for count in sorted(choices)],
        },
        "selectors": [lines_of(kind, its["config"], timed) for its, timed in found for kind in kinds_of(timed)],
    }
    errors = layer_errors(KernelTimes.from_table(entry), found)
    for each in entry["selectors"]:
        worst = max(abs(error) for key, error in errors.items() if timed_as(selector_of(key[0])) == each["selector"])
        each["worst_layer_error"] = float(f"{worst:.2g}")
    return entry


def kinds_of(timed: Timed) -> list[str]:
    return list(dict.fromkeys(units.split()[0] for units, _ in timed))


def lines_of(kind: str, config: dict[str, Any], timed: Timed) -> dict[str, Any]:
    """Of one kind of unit; how far the sums are off is still to be said."""
    loads = {
        key: load_of({"units": key[0], "kv_budget_tokens": key[1]}, config)
        for key in timed
        if key[0].split()[0] == kind
    }
    return {
        "selector": timed_as(selector_of(kind)),
        "scores": line([load.index_bytes for load in loads.values()], [timed[key]["scores"] for key in loads]),
        "attention": line([load.kv_bytes for load in loads.values()], [timed[key]["attention"] for key in loads]),
        "worst_layer_error": 0.0,
    }


def layer_errors(times: KernelTimes, found: list[tuple[dict[str, Any], Timed]]) -> dict[tuple[str, int], float]:
    """computed / timed - 1 of every layer that was timed as a whole, by (units, budget)."""
    errors = {}
    for record, timed in found:
        for key, seconds in timed.items():
            load = load_of({"units": key[0], "kv_budget_tokens": key[1]}, record["config"])
            parts = times.layer(selector_of(key[0]), load)
            assert parts is not None, "it was timed"
            errors[key] = sum(parts) / seconds["sparse layer"] - 1
    return errors


def main() -> None:
    table = {"made_by": "benchmarks/kernel_times.py", "gpus": [made(about) for about in GPUS]}
    files.write_json(OUT, table)
    for about, entry in zip(GPUS, table["gpus"], strict=True):
        found = kernel_records(about)
        timed = {key: seconds for _, each in found for key, seconds in each.items()}
        for key, error in layer_errors(KernelTimes.from_table(entry), found).items():
            print(f"{key[0]:>16} {key[1]:>6}: timed {1e6 * timed[key]['sparse layer']:6.1f} us, computed {error:+.1%}")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
