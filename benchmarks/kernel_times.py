"""The kernel times that a plan uses, from what kernels took on a GPU: writes src/sparroll/plan/kernel_times.json, and prints
how far the sum of a layer's kernels is from the layer that was timed as a whole. Reads records and measures nothing.

    python benchmarks/kernel_times.py

A record of fine_kernels.py has scores, choice and attention of each kind of unit at several budgets, with equal contexts
and with mixed ones. Scores and attention become a line through these, fitted to relative errors; attention with a remainder
also grows with the K and V that are left out. A choice is kept as it was timed where all contexts are equal; what it takes
where nothing is to be chosen is from choice_sweep.py. What dense layers read at is the slope of decode_step.py's dense
steps over their bytes. The kernels are those of the records: where an engine has newer ones, make a new record of
fine_kernels.py and call this again.
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
        "kernels": "fine-kernels-blocks-of-64-h200",
        "choices": "choice-sweep-engines-h200",
        "steps": "decode-step-qwen3-1.7b-h200",
    },
)
ELEMENT_BYTES = 2
FULL_BATCH = 32


def selector_of(units: str) -> Selector:
    """The selector of a row: "4x4 equal" is of 4 tokens and 4 bits."""
    kind = kind_of(units)
    return PageMean() if kind == "page_mean" else fine_schedule.units(kind)


def contexts_of(units: str, config: dict[str, Any]) -> np.ndarray:
    """The contexts of the record's requests, which it draws by its seed."""
    if units.endswith(" equal"):
        return np.full(config["requests"], config["context"])
    random = np.random.default_rng(config["seed"])
    return (config["context"] * random.uniform(0.05, 1.0, config["requests"])).astype(np.int64)


def load_of(units: str, budget: int, config: dict[str, Any]) -> LayerLoad:
    """What a row's layer had to do, counted as a plan counts it."""
    contexts = contexts_of(units, config)
    shape = ModelShape("layer", 0, 1, config["heads"] * config["group"], config["heads"], config["dim"], 0)
    schedule = Schedule.fixed(budget, selector_of(units), dense_layers=())
    reads = StepReads(shape, schedule, ELEMENT_BYTES)
    return reads.load(schedule, LengthMix.parse(contexts.tolist()), config["requests"])


def timed_layers(about: dict[str, Any], rows: str = "rows") -> tuple[dict[str, Any], Timed]:
    """A GPU's record of kernels, and its rows.  rows: "without_peaks" are those whose scores leave no peaks."""
    record, timed = records.read(RESULTS / f"{about['kernels']}.json", "fine-kernels"), Timed()
    for row in record["results"][rows]:
        timed.setdefault((row["units"], row["kv_budget_tokens"]), {})[row["kernel"]] = row["graph_us"] * 1e-6
    return record, timed


def kind_of(units: str) -> str:
    """4x4 of "4x4 equal"."""
    return units.split()[0]


def line(moved_bytes: list[float], seconds: list[float]) -> dict[str, float]:
    """The line with the least relative errors, neither part of it negative."""
    fixed, rate = fitted(seconds, moved_bytes)
    return {"fixed_seconds": fixed, "bytes_per_second": rate}


def fitted(seconds: list[float], *moved_bytes: list[float]) -> tuple[float, ...]:
    """Fixed seconds and a rate for each kind of bytes, with the least relative errors and nothing negative."""
    y = np.array(seconds)
    (fixed, *per_byte), _ = nnls(np.stack([1 / y, *(np.array(each) / y for each in moved_bytes)], 1), np.ones(len(y)))
    return float(f"{fixed:.4g}"), *(float(f"{1 / each:.4g}") for each in per_byte)


def dense_rate(record: dict[str, Any]) -> float:
    """Bytes of K and V a second of dense decode steps, of the batches that fill the device."""
    shape = model_shape(record["config"]["model"])
    steps = [row for row in record["results"] if "seconds" in row]
    cells = [row for row in steps if row["engine"] == "dense" and row["batch"] >= FULL_BATCH]
    assert len({row["context_tokens"] for row in cells}) > 2, "a slope needs several lengths"
    read = [row["batch"] * row["context_tokens"] * 2 * shape.kv_width * ELEMENT_BYTES for row in cells]
    return line(read, [float(np.median(row["seconds"])) for row in cells])["bytes_per_second"]


def made(about: dict[str, Any]) -> dict[str, Any]:
    """The entry of one GPU."""
    sweep, steps = (records.read(RESULTS / f"{about[name]}.json") for name in ("choices", "steps"))
    record, timed = timed_layers(about)
    config = record["config"]
    loads = {key: load_of(*key, config) for key in timed}
    launch = [row["us"] for row in sweep["results"]["rows"] if row["kernel"] == "nothing wanted"]
    choices: dict[int, dict[int, float]] = defaultdict(dict)
    for (units, budget), seconds in sorted(timed.items(), key=lambda each: each[0][1]):
        if units.endswith(" equal"):
            # Kinds with as many units of a context make the same choice; the first one counts.
            wanted = budget // selector_of(units).unit_tokens
            choices[round(loads[units, budget].longest_units)].setdefault(wanted, float(f"{seconds['choice']:.4g}"))
    entry = {
        "gpu": about["gpu"],
        "names": about["names"],
        "records": [about[name] for name in ("kernels", "choices", "steps")],
        "gqa_ratio": config["group"],
        "copy_bytes_per_second": float(f"{record['results']['copy_bytes_per_second']:.4g}"),
        "dense_bytes_per_second": dense_rate(steps),
        "choice": {
            "programs": config["requests"] * config["heads"],
            "launch_seconds": float(f"{1e-6 * float(np.mean(launch)):.4g}"),
            "timed": [
                {"units": count, "timed": [{"wanted_units": wanted, "seconds": took} for wanted, took in its.items()]}
                for count, its in sorted(choices.items())
            ],
        },
        "selectors": [],
    }
    for kind in dict.fromkeys(kind_of(units) for units, _ in timed):
        mine = [key for key in timed if kind_of(key[0]) == kind]
        about_it: dict[str, Any] = {"selector": timed_as(selector_of(kind))}
        about_it["scores"] = line([loads[key].index_bytes for key in mine], [timed[key]["scores"] for key in mine])
        moved = [[loads[key].kv_bytes for key in mine]]
        if selector_of(kind).remainder is not None:
            moved.append([loads[key].unread_bytes for key in mine])
        fixed, rate, *unread_rate = fitted([timed[key]["attention"] for key in mine], *moved)
        about_it["attention"] = {"fixed_seconds": fixed, "bytes_per_second": rate}
        if unread_rate:
            about_it["unread_bytes_per_second"] = unread_rate[0]
        about_it["worst_layer_error"] = 0.0
        entry["selectors"].append(about_it)
    errors = layer_errors(KernelTimes.from_table(entry), record, timed)
    for each in entry["selectors"]:
        worst = max(abs(error) for key, error in errors.items() if timed_as(selector_of(key[0])) == each["selector"])
        each["worst_layer_error"] = float(f"{worst:.2g}")
    return entry


def layer_errors(times: KernelTimes, record: dict[str, Any], timed: Timed) -> dict[tuple[str, int], float]:
    """computed / timed - 1 of every layer that was timed as a whole, by (units, budget)."""
    found = {}
    for key, seconds in timed.items():
        parts = times.layer(selector_of(key[0]), load_of(*key, record["config"]))
        assert parts is not None, "it was timed"
        found[key] = sum(parts) / seconds["sparse layer"] - 1
    return found


def main() -> None:
    table = {"made_by": "benchmarks/kernel_times.py", "gpus": [made(about) for about in GPUS]}
    files.write_json(OUT, table)
    for about, entry in zip(GPUS, table["gpus"], strict=True):
        record, timed = timed_layers(about)
        for key, error in layer_errors(KernelTimes.from_table(entry), record, timed).items():
            print(f"{key[0]:>16} {key[1]:>6}: timed {1e6 * timed[key]['sparse layer']:6.1f} us, computed {error:+.1%}")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
