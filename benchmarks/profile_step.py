"""Where the time of a decode step goes: the kernels of dense and sparse steps at one moment of a request set, by group.

    python benchmarks/profile_step.py --model qwen3-1.7b --set steady --out-folder benchmarks/results
    python benchmarks/profile_step.py --equal 64 194 --schedule FILE --separate --out-folder benchmarks/results

The moment is one of request_sets.py's windows (--moment, default the middle one), or so many requests of so many tokens
each (--equal), for one request alone and for contexts within their budget. Each engine first runs steps without a
profiler, for the wall time, then a few under torch.profiler. A kernel counts from where the one before it ended: kernels
that start early and wait for their predecessor would otherwise count twice. `idle, host` = wall time less all kernels.

`floor` of our kernels: the bytes that they must read and write at the bandwidth of a large copy in the same process; for
dense attention K and V of the whole context. The kernel that scores also stores new keys and values, and index rows are
written beside the last layer's choice and attention: the first are in no floor, and of the second little time is left.
"""

# B requests in a batch

from __future__ import annotations

import argparse
import importlib
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import step_bytes
import vllm_engines
from request_sets import SETS, slack_tokens, windows_of_sets
from vllm_engines import ELEMENT_BYTES, HEAD_DIM, KV_HEADS, WARM_STEPS, Engine

from sparroll import records
from sparroll.schedule import Schedule

OURS = {
    "attention.decode.scores.triton_score": "scores",
    "attention.decode.choice.triton_top_k": "choice",
    "attention.decode.scores.triton_score_codes": "scores",
    "attention.decode.triton_attend": "gather",
    "attention.decode.remainder.triton_remainder": "remainder",
    "attention.decode.remainder.triton_unread": "remainder",
    "attention.decode.triton_groups": "index update",
    "attention.decode.triton_index": "index update",
    "attention.decode.triton_budgets": "budgets",
    "engines.vllm.windows.triton_draws": "draws",
    "engines.vllm.windows.triton_masses": "the rule",
}
"""Our modules below `sparroll`, and what their kernels do."""
GROUPS = {
    "cache write": ("reshape_and_cache",),
    "attention, FA3": ("flash", "prepare_varlen"),
    "step inputs": ("block_table", "slot_mapping", "_prepare_", "_post_update", "_combine_sampled", "_get_num_sampled"),
    "sampling": (
        "gumbel",
        "_scores_of_",
        "sampl",
        "softmax",
        "argmax",
        "topk",
        "multinomial",
        "exponential",
        "distribution",
    ),
    "GEMM": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "gemv", "matmul", "xmma", "_mm"),
    "norms, rope, activation": (
        "norm",
        "rotary",
        "rope",
        "silu",
        "act_and_mul",
        "triton_poi",
        "triton_red",
        "triton_per",
    ),
    "copies": ("memcpy", "memset", "copy", "fill"),
}
"""vLLM's, by a part of the name in lower case; the first group that fits."""
OUR_GROUPS = tuple(dict.fromkeys(OURS.values()))
ORDER = (*GROUPS, *OUR_GROUPS, "other")


Kernel = tuple[str, float, float]
"""Name, and when it began and ended, in microseconds."""


@cache
def our_kernels() -> dict[str, str]:
    """Name of each Triton kernel of ours -> its group."""
    found = {}
    for module_name, group in OURS.items():
        module = importlib.import_module(f"sparroll.{module_name}")
        for held in vars(module).values():
            written = getattr(held, "fn", None)
            if getattr(written, "__module__", None) == module.__name__:
                found[written.__name__] = group
    return found


def group_of(kernel: str) -> str:
    ours = our_kernels()
    if kernel in ours:
        return ours[kernel]
    name = kernel.lower()
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), "other")


def own_times(kernels: list[Kernel]) -> list[tuple[str, float]]:
    """In the order in which they began: name, and microseconds in which no kernel before it was running."""
    found, reached = [], 0.0
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1:]):
        found.append((name, max(0.0, end - max(start, reached))))
        reached = max(reached, end)
    return found


def totals(own: list[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """Name: (microseconds, calls)."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for name, microseconds in own:
        taken, calls = found[name]
        found[name] = (taken + microseconds, calls + 1)
    return dict(found)


def profiled(run: Any, steps: int) -> list[Kernel]:
    """The kernels of so many steps."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    gpu = vllm_engines.on_gpu()
    if gpu:
        # One step is always under way; without this its kernels would be counted, too.
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        run(steps)
        if gpu:
            torch.cuda.synchronize()
    device = DeviceType.CUDA if gpu else DeviceType.CPU
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == device and not getattr(event, "is_user_annotation", False)
    ]


def measure(options: argparse.Namespace, attention: str | None, contexts: list[int] | None) -> dict[str, Any]:
    """One engine: wall time of a step without the profiler, and its kernels."""
    asked = None if attention is None else {"schedule": options.schedule, "attention": attention}
    engine = Engine(options.model, Path(options.folder), asked, max_num_seqs=options.max_seqs)
    with engine:
        window = {"step": None, "contexts": contexts} if contexts else moment(options, engine.capacity_tokens)
        wall, kernels = look(engine, window["contexts"], options)
        about = engine.settings()
    return {
        "window": window,
        "wall_seconds": wall,
        "engine": about,
        **summed(kernels, vllm_engines.median(wall), options.profile_steps),
    }


def look(
    engine: Engine, contexts: list[int], options: argparse.Namespace
) -> tuple[list[float], dict[str, tuple[float, int]]]:
    most = WARM_STEPS + options.steps * options.repeats + 2 * options.profile_steps
    with engine.decoding(contexts, most) as run:
        run(WARM_STEPS)
        wall = [run(options.steps) / options.steps for _ in range(options.repeats)]
        # The profiler's own start is slow once.
        profiled(run, options.profile_steps)
        return wall, totals(own_times(profiled(run, options.profile_steps)))


def moment(options: argparse.Namespace, dense_capacity_tokens: int) -> dict[str, Any]:
    """The window that --equal, or --set and --moment, name."""
    if options.equal:
        requests, context = options.equal
        return {"step": None, "contexts": [context] * requests}
    held = step_bytes.smaller_capacity(
        dense_capacity_tokens, [Schedule.load(options.schedule)], step_bytes.layers_of(options.model)
    )
    slack = slack_tokens(options.steps, options.repeats)
    rows = windows_of_sets([options.set], options.windows, held, options.max_seqs, slack, options.shrink)[options.set]
    return rows[len(rows) // 2 if options.moment is None else options.moment]


def summed(kernels: dict[str, tuple[float, int]], wall_seconds: float, steps: int) -> dict[str, Any]:
    """Milliseconds and calls per step by group, and the kernels themselves, longest first."""
    groups, rows = by_group(kernels, steps)
    busy = sum(groups.values())
    return {
        "wall_ms": 1e3 * wall_seconds,
        "kernel_ms": busy,
        "groups_ms": groups | {"idle, host": 1e3 * wall_seconds - busy},
        "kernels": rows[:60],
    }


def by_group(kernels: dict[str, tuple[float, int]], steps: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Milliseconds of a step by group, and a row for each kernel, longest first."""
    groups = dict.fromkeys(ORDER, 0.0)
    rows = []
    for name, (microseconds, calls) in kernels.items():
        ms = microseconds / 1e3 / steps
        groups[group_of(name)] += ms
        rows.append({"kernel": name[:160], "group": group_of(name), "ms": ms, "calls": calls / steps})
    rows.sort(key=lambda row: -row["ms"])
    return {group: ms for group, ms in groups.items() if ms}, rows


def summed_windows(of_windows: list[list[Kernel]], drafts: int, wall_seconds: float) -> dict[str, Any]:
    """The same of windows with so many drafts each, apart for what drafts and what checks. The drafts of a window end with
    the last of their draws. wall_seconds: of windows without the profiler beside them."""
    parts: dict[str, list[tuple[str, float]]] = {"drafts": [], "check": []}
    for kernels in of_windows:
        own = own_times(kernels)
        draws = [place for place, (name, _) in enumerate(own, 1) if name == "_draw_tokens"]
        if len(draws) < drafts:
            raise RuntimeError(f"a window of {drafts} drafts has {len(draws)} draws; the profile cannot be divided")
        parts["drafts"] += own[: draws[drafts - 1]]
        parts["check"] += own[draws[drafts - 1] :]
    found: dict[str, Any] = {"wall_ms": 1e3 * wall_seconds, "drafts_per_window": drafts}
    busy = 0.0
    for part, own in parts.items():
        groups, rows = by_group(totals(own), len(of_windows))
        busy += sum(groups.values())
        found[part] = {"kernel_ms": sum(groups.values()), "groups_ms": groups, "kernels": rows[:40]}
    return found | {"idle_ms": 1e3 * wall_seconds - busy}


def floors_ms(contexts: list[int], schedule: Schedule, layers: int, bandwidth: float) -> dict[str, dict[str, float]]:
    """Milliseconds per step that the bytes of each group take, dense and sparse. Within its budget a request is neither
    scored nor selected from, and a step in which all are has vLLM's own attention in every layer."""
    whole = step_bytes.kv_bytes() * float(sum(contexts))
    sparse: dict[str, float] = {"attention, FA3": len(schedule.dense_layers) * whole}
    context, parts = np.array(contexts), list(schedule.parts(layers))
    reads_all = all((part.read_tokens(context) == context).all() for _, part in parts)
    for own, part in parts:
        moved = _layer_bytes(context, part)
        if reads_all:
            moved = {"attention, FA3": whole, "index update": moved["index update"]}
        for name, of_layer in moved.items():
            sparse[name] = sparse.get(name, 0.0) + len(own) * of_layer
    of = {"dense": {"attention, FA3": layers * whole}, "sparse": sparse}
    return {engine: {name: 1e3 * moved / bandwidth for name, moved in groups.items()} for engine, groups in of.items()}


def _layer_bytes(context: np.ndarray, schedule: Schedule) -> dict[str, float]:
    """What a sparse layer with this schedule moves in a step, by the kernels' groups."""
    selector, read = schedule.selector, schedule.read_tokens(context)
    cut = read < context
    units = -(-context[cut] // selector.unit_tokens)
    scores = 4 * KV_HEADS * float(units.sum())
    index_row = KV_HEADS * selector.index_row_bytes(HEAD_DIM)
    lists = 4 * KV_HEADS * float((-(-read // selector.unit_tokens)).sum())
    # An index row is made of one unit's keys, once in as many steps as the unit has tokens.
    keys = KV_HEADS * HEAD_DIM * ELEMENT_BYTES
    made = len(context) * (keys + index_row / selector.unit_tokens)
    summed = {}
    if selector.remainder is not None:
        # What is not read is weighed from its index rows, and its values are those of its groups.
        of_token = KV_HEADS * selector.index_bytes_per_token(HEAD_DIM)
        summed = {"remainder": of_token * float((context - read)[cut].sum())}
    return summed | {
        "scores": index_row * float(units.sum()) + scores,
        "choice": scores + 2 * lists,
        "gather": step_bytes.kv_bytes() * float(read.sum()) + 2 * lists,
        "index update": made,
    }


def table(found: dict[str, Any]) -> None:
    """Milliseconds a step by group; for a sparse layer's kernels also microseconds a layer and their floor."""
    dense, sparse = found["dense"]["groups_ms"], found["sparse"]["groups_ms"]
    print(f"{'ms per step':28} {'dense':>8} {'floor':>8} {'sparse':>8} {'floor':>8}   us a layer, floor")
    layers = found["sparse_layers"]
    for group in (*ORDER, "idle, host"):
        if not dense.get(group) and not sparse.get(group):
            continue
        floors = [found["floors_ms"][engine].get(group) for engine in ("dense", "sparse")]
        cells = [dense.get(group, 0.0), floors[0], sparse.get(group, 0.0), floors[1]]
        line = " ".join(f"{ms:8.3f}" if ms is not None else " " * 8 for ms in cells)
        if group in OUR_GROUPS and layers:
            line += f"   {1e3 * sparse.get(group, 0.0) / layers:8.1f}"
            line += f" {1e3 * floors[1] / layers:8.1f}" if floors[1] is not None else ""
        print(f"{group:28} {line}")
    for engine in ("dense", "sparse"):
        of = found[engine]
        print(f"{engine}: wall {of['wall_ms']:.3f} ms, kernels {of['kernel_ms']:.3f} ms")
    for row in [row for row in found["sparse"]["kernels"] if row["group"] == "other"][:5]:
        print(f"  other: {row['ms']:.3f} ms {row['calls']:.1f}x {row['kernel'][:90]}")


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    schedule, layers = Schedule.load(options.schedule), step_bytes.layers_of(options.model)

    def ask(attention: str | None, contexts: list[int] | None) -> dict[str, Any]:
        if options.separate:
            return vllm_engines.own_process(measure, options, attention, contexts)
        return measure(options, attention, contexts)

    dense = ask(None, None)
    window = dense.pop("window")
    bandwidth = vllm_engines.copy_bandwidth()
    sparse = ask(options.sparse_engine, window["contexts"])
    del sparse["window"]
    name = f"{options.equal[0]}x{options.equal[1]}" if options.equal else options.set
    found = {
        "model": options.model,
        "schedule": Path(options.schedule).name,
        "request_set": name,
        "sparse_engine": options.sparse_engine,
        "step": window["step"],
        "batch": len(window["contexts"]),
        "context_tokens": sum(window["contexts"]),
        "layers": layers,
        "sparse_layers": layers - len(schedule.dense_layers),
        "copy_bytes_per_second": bandwidth,
        "floors_ms": floors_ms(window["contexts"], schedule, layers, bandwidth),
        "dense": dense,
        "sparse": sparse,
    }
    print(f"{options.model} {name}: {found['batch']} requests of {found['context_tokens']} tokens together")
    table(found)
    if options.out_folder:
        path = options.out_folder / f"profile-{options.model}-{name}-{vllm_engines.device_name()}.json"
        config = {"steps": options.steps, "repeats": options.repeats, "profile_steps": options.profile_steps}
        records.write(path, "profile-step", found, config=config, wall_seconds=time.perf_counter() - started)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-folder", type=Path)
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule", help="preset or file; default: the model's published 0.86 preset")
    parser.add_argument("--set", default="steady", choices=SETS)
    parser.add_argument(
        "--equal", type=int, nargs=2, metavar=("REQUESTS", "TOKENS"), help="equal contexts instead of a set's moment"
    )
    parser.add_argument("--moment", type=int, help="which of the windows; default: the middle one")
    parser.add_argument("--windows", type=int, default=10, help="as for rollout.py")
    parser.add_argument("--sparse-engine", default="triton", choices=["triton", "fa3_pages"])
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are timed as one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile-steps", type=int, default=4)
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--separate", action="store_true", help="each engine in a process of its own")
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    parser.add_argument("--shrink", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.equal and not (1 <= options.equal[0] <= options.max_seqs and options.equal[1] >= 1):
        parser.error(f"--equal takes 1 to {options.max_seqs} requests (--max-seqs) of 1 token or more")
    options.schedule = vllm_engines.schedule_of(options.model, options.schedule, Path(options.folder))
    return options


if __name__ == "__main__":
    main()
