"""Each paged kernel against the time that its bytes take at the bandwidth of a large copy, on a CUDA GPU.

    python benchmarks/decode_kernels.py --out benchmarks/results/kernels-h200.json
    python benchmarks/decode_kernels.py --out runs/kernels-sweep.json --contexts 30000 --sweep  # other tiles, warps, splits

A sparse layer is also timed with attention that begins while lists of units are still made, and after the choice.
Before a kernel is timed its result is compared with the paged reference on the same data. `graph_us` is the median over
replays of a CUDA graph that holds the kernel several times, an L2 flush before each, less the same graph with the
flushes alone: no launch cost is in it. `event_us` is one call between two events after a flush, launch included. The
floor counts each byte once that the operation must read or write. Blocks lie in random order. Contexts are of equal
length, or, with --mixed N, those of N requests somewhere in their responses (log-normal lengths as in rollout.py), each
with the budget that --schedule gives it.
`--check-only` compares and times nothing; with TRITON_INTERPRET=1 and --dtype float32 that runs without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from kernel_cases import Case, Choice, attention_begins, check_case, check_choice
from kernel_clock import MICRO, Clock
from torch import Tensor

from sparroll import records
from sparroll.attention.decode.choice import triton_top_k
from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout
from sparroll.attention.decode.workspace import StepWorkspace, Tile
from sparroll.schedule import Schedule


def measured(clock: Clock, bandwidth: float, call: Callable[[], Any], moved: int, **about: Any) -> dict[str, Any]:
    graph_us, floor_us = clock.graph_us(call), MICRO * moved / bandwidth
    row = {
        **about,
        "graph_us": graph_us,
        "event_us": clock.event_us(call),
        "bytes": moved,
        "floor_us": floor_us,
        "floor_share": floor_us / graph_us,
    }
    text = " ".join(f"{value!s:>6}" for value in about.values())
    print(
        f"{text:32} {graph_us:8.1f} us  floor {floor_us:7.1f}  {row['floor_share']:5.0%}  event {row['event_us']:8.1f}"
    )
    return row


def case_rows(clock: Clock, bandwidth: float, case: Case) -> list[dict[str, Any]]:
    requests, heads, _, dim = case.query_RHGD.shape
    unit = case.selector.unit_tokens
    element, index_bytes = case.keys_PBHD.element_size(), case.selector.index_row_bytes(dim)
    row_bytes = heads * (dim * unit * element + index_bytes)
    every = torch.arange(8192, device="cuda").clamp_max(case.keys_PBHD.shape[0] * case.keys_PBHD.shape[1] - 1)
    ends = case.slots_T[torch.randperm(len(case.slots_T), device="cuda")[:requests]]
    scored = int(-(-case.contexts // unit).sum()) * (heads * (index_bytes + 4) + 4)
    rows = [
        ("index, decode", lambda: case.index(ends), requests * row_bytes),
        ("index, 8192 tokens", lambda: case.index(every), 8192 // unit * row_bytes),
        ("scores", case.score, scored),
    ]
    return [
        measured(clock, bandwidth, call, moved, kernel=name, context_tokens=case.name) for name, call, moved in rows
    ]


def choice_rows(clock: Clock, bandwidth: float, choice: Choice) -> list[dict[str, Any]]:
    case = choice.case
    _, heads, _, dim = case.query_RHGD.shape
    unit = case.selector.unit_tokens
    units, read = -(-case.contexts // unit), case.selector.read_tokens(case.contexts, choice.budgets)
    lists = heads * int((-(-read // unit)).sum()) * 4
    attended = heads * int(read.sum()) * 2 * dim * case.keys_PBHD.element_size() + 2 * lists
    # Within its budget a request is neither scored nor selected from.
    scores = heads * int(units[read < case.contexts].sum()) * 4
    scored = scores * (1 + case.selector.index_row_bytes(dim) // 4)
    rows: list[tuple[str, Callable[[], None], int]] = [
        ("choice", choice.choose, scores + 2 * lists),
        ("choice, 8 warps", lambda: choice.choose_as(ChoiceLayout()), scores + 2 * lists),
        ("torch.topk", choice.torch_top_k, heads * int(units.sum()) * 4 + 3 * lists),
        ("attention", choice.attend, attended),
        ("sparse layer", choice.layer, scored + attended),
    ]
    about = {"context_tokens": case.name, "kv_budget_tokens": choice.budget}
    found = [measured(clock, bandwidth, call, moved, kernel=name, **about) for name, call, moved in rows]
    for name, early in (("early", True), ("after the choice", False)):
        with attention_begins(early):
            name = f"sparse layer, attention {name}"
            found.append(measured(clock, bandwidth, choice.layer, scored + attended, kernel=name, **about))
    return found


def sweep(clock: Clock, choice: Choice) -> list[dict[str, Any]]:
    """Other layouts of each kernel's programs, each checked, then timed. Fastest first."""
    from triton.runtime.errors import OutOfResources

    from sparroll.attention.decode.scores import triton_score

    case = choice.case
    requests, _, group, dim = case.query_RHGD.shape
    rows: list[dict[str, Any]] = []

    def outputs() -> tuple[Tensor, ...]:
        return case.scores_RHU, choice.unit_ids_RHN, choice.pages_RHN, choice.out_RHGD

    expected = [tensor.clone() for tensor in outputs()]

    def add(call: Callable[[], Any], **about: Any) -> None:
        about |= {"context_tokens": case.name, "kv_budget_tokens": choice.budget}
        try:
            rows.append({**about, "graph_us": clock.graph_us(call)})
        except OutOfResources as error:
            rows.append({**about, "graph_us": None, "error": str(error).splitlines()[0]})
            return
        for found, before in zip(outputs(), expected, strict=True):
            torch.testing.assert_close(found, before, atol=2e-2, rtol=2e-2)

    for tile_units, programs in itertools.product((16, 32, 64), (1024, 2048, 4096)):
        workspace = dataclasses.replace(case.workspace, scored_tile_units=tile_units)
        dataclasses.replace(choice, case=dataclasses.replace(case, workspace=workspace)).plan()
        add(
            lambda programs=programs, workspace=workspace: triton_score.score_units(
                case.query_RHGD, case.index_PSHW, case.block_table_RM, case.context_tokens_R, case.selector,
                case.scores_RHU, choice.budgets_R, 1.0, workspace, True, programs,
            ),
            kernel="scores", tile_units=tile_units, programs=programs,
        )  # fmt: skip
    for warps in (4, 8, 16):
        layout = triton_top_k.ChoiceLayout(warps=warps)
        add(
            lambda layout=layout: triton_top_k.choose_units(
                case.scores_RHU, case.context_tokens_R, choice.budgets_R, case.selector, choice.unit_ids_RHN,
                choice.pages_RHN, case.block_table_RM, case.index_PSHW.shape[1], peaks_RHK=case.peaks_RHK, layout=layout,
            ),
            kernel="choice", warps=warps,
        )  # fmt: skip
    tiles = [(32, 4, 3, 4), (32, 4, 4, 3), (32, 4, 5, 2), (64, 4, 2, 3), (64, 4, 3, 2), (64, 8, 3, 2), (128, 8, 2, 1),
             (128, 8, 3, 1)]  # fmt: skip
    for values in tiles:
        tile = Tile(*values)
        workspace = StepWorkspace.allocate(
            requests, group, dim, case.keys_PBHD.dtype, case.selector, "cuda", case.query_RHGD.shape[1], tile
        )  # fmt: skip
        other = dataclasses.replace(choice, case=dataclasses.replace(case, workspace=workspace))
        other.plan()
        add(other.attend, kernel="attention", **dataclasses.asdict(tile))
    rows.sort(key=lambda row: (row["kernel"], row["graph_us"] or float("inf")))
    for kernel, group_rows in itertools.groupby(rows, key=lambda row: row["kernel"]):
        for row in list(group_rows)[:5]:
            print(f"sweep {kernel}:", {name: value for name, value in row.items() if name != "kernel"})
    return rows


def cases(options: argparse.Namespace) -> Iterator[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
    """Name, contexts, and under the name of each budget what every request may read."""
    for context in options.contexts:
        contexts = np.full(options.batch, context)
        yield str(context), contexts, {str(budget): np.full(options.batch, budget) for budget in options.budgets}
    schedule = Schedule.load(options.schedule)
    for requests in options.mixed:
        random = np.random.default_rng(options.seed)
        lengths = np.minimum(random.lognormal(np.log(18_000), 0.6, 100_000), 32_768)
        # Whoever is seen at work is more likely a long one.
        lengths = random.choice(lengths, requests, p=lengths / lengths.sum())
        contexts = 150 + (lengths * random.random(requests)).astype(int)
        yield f"{requests} mixed", contexts, {schedule.name: schedule.kv_budget_tokens(contexts)}


def write_record(options: argparse.Namespace, kind: str, results: dict[str, Any], started: float) -> None:
    """The record of what was timed so far; nothing without --out. Called after each case, so that a call that is cut
    leaves one."""
    if options.out is None:
        return
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "check_only", "task")}
    if "schedule" in settings:
        # Budgets rather than a path of this machine.
        settings["schedule"] = Schedule.load(settings["schedule"]).inline()
    wall = time.perf_counter() - started
    records.write(options.out, kind, results, config=settings, seed=getattr(options, "seed", 0), wall_seconds=wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --check-only")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 30000])
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--mixed", type=int, nargs="*", default=[93], help="requests in each batch of mixed lengths")
    parser.add_argument("--schedule", default="qwen3-1.7b-0.86", help="budgets of the mixed batches")
    parser.add_argument("--room", type=int, default=0, help="tokens that there is room for, as in an engine")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=2, help="query heads per KV head")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--unit", type=int, default=16)
    parser.add_argument("--bits", type=int, choices=[8, 4, 2, 1], help="quantized_mean instead of page_mean")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--calls", type=int, default=10, help="calls in each graph")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles, warps and splits (minutes)")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not options.check_only and (options.device == "cpu" or options.out is None):
        parser.error("timing needs a CUDA GPU and --out; --check-only needs neither")
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("no CUDA GPU: set TRITON_INTERPRET=1 to check in triton's interpreter")
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    clock = None if options.check_only else Clock(options.repeats, options.calls)
    bandwidth = 0.0 if clock is None else clock.copy_bytes_per_second()
    print(f"copy bandwidth: {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    swept: list[dict[str, Any]] = []
    for name, contexts, budgets in cases(options):
        case = Case.build(options, name, contexts, room=options.room)
        check_case(case)
        if clock is not None:
            rows += case_rows(clock, bandwidth, case)
        for budget, of_each in budgets.items():
            choice = Choice.build(case, budget, of_each)
            check_choice(choice)
            print(f"context {name}, budget {budget}: kernels equal the reference")
            if clock is None:
                continue
            rows += choice_rows(clock, bandwidth, choice)
            if options.sweep:
                swept += sweep(clock, choice)
            # Timed runs wrote the same outputs many times over.
            check_choice(choice)
            results = {"copy_bytes_per_second": bandwidth, "rows": rows, "sweep": swept}
            write_record(options, "kernels", results, started)
    if clock is not None:
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
