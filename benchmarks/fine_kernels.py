"""The kernels of a sparse layer with small units of few bits, beside copy speed, on a CUDA GPU: checked, then timed.

    python benchmarks/fine_kernels.py --block 64 --out runs/fine-kernels.json
    python benchmarks/fine_kernels.py --out runs/fine-sweep.json --budgets 1024 --sweep     # other layouts of each kernel
    python benchmarks/fine_kernels.py --dry     # no GPU: tiny sizes in triton's interpreter, nothing is timed

One call runs the kernels' own tests, compiled, and the record says how many passed. Then, for each kind of unit, it
compares index, scores, choice and attention with the paged reference on the data that is timed; then it times scores,
choice, attention and the three together, as they follow each other in a layer; where engines keep peaks of scores, also
without them. `attention in a layer` is what attention adds to scores and choice: it begins while the choice ends or
right after it, and finds the list of units in the L2 cache. `us` is as in decode_kernels.py (CUDA graph replay, the L2
cache flushed before each call, median of repeats), `floor` what the bytes take at the bandwidth of a large copy.
Contexts are all of --context tokens, and once mixed: as many requests, somewhere in their responses.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

if "--dry" in sys.argv:
    # Read when triton is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

import decode_kernels
import fine_schedule
import numpy as np
import torch
from kernel_cases import Case, Choice, check_case, check_choice
from kernel_clock import AnyClock, Clock, DryClock

from sparroll.attention.decode.workspace import StepWorkspace, Tile
from sparroll.attention.selectors import PageMean, QuantizedMean

UNITS = ("4x4", "2x2", "1x1", "page_mean", "4x4+64", "2x2+64")
"""Tokens x bits; page_mean has units of 16 tokens. With "+64", a remainder by groups of 64 tokens, values in fp8."""
OTHER_UNITS = ("4x2", "2x1", "4x2+64", "1x1+64")
"""Further kinds, timed only if --units names them."""
TESTS = (
    "test_index_types.py",
    "test_triton_kernels.py",
    "test_ties.py",
    "test_top_k.py",
    "test_remainder_kernels.py",
)
KERNELS = ("scores", "choice", "attention", "attention in a layer", "sparse layer")
GOALS = {
    ("scores", None): "1.4 x floor",
    ("choice", None): "16 us",
    ("attention", None): "1.35 x floor",
    ("sparse layer", 1024): "105 us",
}
"""What the kernels aim at, by kernel and budget, at 32 requests of 30,000 tokens."""
DRY = {"requests": 2, "context": 150, "heads": 1, "dim": 32, "budgets": [80], "dtype": "float32", "repeats": 1}


def run_tests(names: Sequence[str] = TESTS) -> dict[str, Any]:
    """The kernels' tests in processes of their own, compiled on the GPU: how many passed. Compiling is what takes the
    time. A test that fails is an error."""
    root = Path(__file__).parents[1]
    print("tests of the kernels:", flush=True)
    processes = str(min(8, max(1, (os.cpu_count() or 1) // 2)))
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "tests.xml"
        tests = [str(root / "tests" / "kernels" / name) for name in names]
        command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "--junitxml", str(told), *tests]
        subprocess.run(command, cwd=root, check=True)
        return tests_told(told, names)


def tests_told(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """What pytest's report says of the tests, none of which failed."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None, "a report without tests"
    ran, failed, skipped = (
        sum(int(suite.get(name, 0)) for name in names) for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    passed = ran - failed - skipped
    assert passed and not failed, f"{failed} tests failed, {passed} passed"
    return {"files": list(names), "passed": passed, "skipped": skipped, "compiled": torch.cuda.is_available()}


def cases(options: argparse.Namespace, names: Sequence[str] = ("equal", "mixed")) -> Iterator[Case]:
    """Every kind of unit with equal and with mixed contexts, over the same random numbers."""
    random = np.random.default_rng(options.seed)
    mixed = (options.context * random.uniform(0.05, 1.0, options.requests)).astype(np.int64)
    contexts_of = {"equal": np.full(options.requests, options.context), "mixed": mixed}
    for units, name in itertools.product(options.units, names):
        torch.manual_seed(options.seed)
        yield Case.build(options, f"{units} {name}", contexts_of[name], selector_of(units))


def selector_of(units: str) -> PageMean | QuantizedMean:
    """First and recent tokens are the same for all units; the recent ones cover a group."""
    return PageMean() if units == "page_mean" else fine_schedule.units(units)


def rows_of(clock: AnyClock, bandwidth: float, choice: Choice) -> list[dict[str, Any]]:
    """Each kernel of a layer by itself, then all of them."""
    case = choice.case
    _, heads, _, dim = case.query_RHGD.shape
    unit, element = case.selector.unit_tokens, case.keys_PBHD.element_size()
    units, read = -(-case.contexts // unit), case.selector.read_tokens(case.contexts, choice.budgets)
    lists = heads * int((-(-read // unit)).sum()) * 4
    # Within its budget a request is neither scored nor chosen from.
    scores = heads * int(units[read < case.contexts].sum()) * 4
    scored = scores + scores // 4 * case.selector.index_row_bytes(dim)
    attended = heads * int(read.sum()) * 2 * dim * element + 2 * lists
    if case.selector.remainder is not None:
        # What is not read is summed up from the rows of its groups, and from the index where scoring weighs no groups.
        kept = case.selector.index_read_bytes_per_token(dim) - case.selector.index_row_bytes(dim) / unit
        unread = heads * int((case.contexts - read)[read < case.contexts].sum())
        attended += int(unread * kept)
    choice.plan()
    selecting_us, layer_us = clock.graph_us(choice.select), clock.graph_us(choice.layer)
    timed = [
        (clock.graph_us(lambda: case.score(budgets_R=choice.budgets_R)), scored),
        (clock.graph_us(choice.choose), scores + 2 * lists),
        (clock.graph_us(choice.attend), attended),
        (layer_us - selecting_us, attended),
        (layer_us, scored + attended),
    ]
    rows = []
    for kernel, (graph_us, moved) in zip(KERNELS, timed, strict=True):
        floor_us = 1e6 * moved / bandwidth
        rows.append(
            {
                "units": case.name, "kv_budget_tokens": int(choice.budget), "kernel": kernel, "graph_us": graph_us,
                "bytes": moved, "floor_us": floor_us, "times_floor": graph_us / floor_us,
                "goal": GOALS.get((kernel, None), GOALS.get((kernel, int(choice.budget)), "")),
            }
        )  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], mark: str = "") -> None:
    """One line for a kind of unit and a budget: us and times floor of each kernel."""
    for about, its in itertools.groupby(rows, key=lambda row: (row["units"], row["kv_budget_tokens"])):
        cells = {row["kernel"]: f"{row['graph_us']:.1f} us {row['times_floor']:.2f} x" for row in its}
        print(f"{about[0]:>16} {about[1]:>6} " + " ".join(f"{cells[name]:>20}" for name in KERNELS), mark, flush=True)


def sweep(clock: AnyClock, choice: Choice, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Other layouts of each kernel's programs: each checked against the one that is used, then timed. Fastest first."""
    from triton.runtime.errors import OutOfResources

    from sparroll.attention.decode.choice import triton_top_k
    from sparroll.attention.decode.remainder import triton_unread
    from sparroll.attention.decode.scores import triton_score_codes

    case, rows = choice.case, []
    choice.plan(), choice.layer()
    expected = [each.clone() for each in (case.scores_RHU, choice.unit_ids_RHN, choice.pages_RHN, choice.out_RHGD)]

    def add(kernel: str, call: Callable[[], Any], **layout: Any) -> None:
        row = {"units": case.name, "kv_budget_tokens": int(choice.budget), "kernel": kernel, **layout}
        try:
            row["graph_us"] = clock.graph_us(call)
        except OutOfResources as error:
            row |= {"graph_us": math.nan, "error": str(error).splitlines()[0]}
        else:
            found = (case.scores_RHU, choice.unit_ids_RHN, choice.pages_RHN, choice.out_RHGD)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[:3], expected[:3], strict=True)), row
            torch.testing.assert_close(found[3], expected[3], atol=2e-2, rtol=2e-2)
        rows.append(row)

    def planned(workspace: StepWorkspace) -> Choice:
        other = dataclasses.replace(choice, case=dataclasses.replace(case, workspace=workspace))
        other.plan()
        return other

    if isinstance(case.selector, QuantizedMean):
        for tile, warps, programs in itertools.product((64, 128, 256, 512), (1, 2, 4, 8), (4, 6, 8, 12, 16, 20)):
            layout = triton_score_codes.ScoreLayout(warps, programs)
            if layout.most_registers < 32 or (options.dry and (tile, warps) != (64, 4)):
                continue
            other = planned(dataclasses.replace(case.workspace, scored_tile_units=tile)).case
            add(
                "scores",
                lambda other=other, layout=layout: triton_score_codes.score_units(
                    other.query_RHGD, other.index_PSHW, other.block_table_RM, other.context_tokens_R, other.selector,
                    other.scores_RHU, other.workspace, other.peaks_RHK, layout, groups_PSHV=other.groups_PSHV,
                    log_weights_RHGN=other.log_weights_RHGN, scale=other.query_RHGD.shape[-1] ** -0.5,
                ),
                tile_units=tile, warps=warps, programs_per_multiprocessor=programs,
            )  # fmt: skip
    choice.plan()
    if case.log_weights_RHGN is not None:
        for warps, groups, listed, programs in itertools.product((1, 2, 4), (16, 32), (16, 32), (4, 6, 8, 10, 12)):
            if options.dry and (warps, groups) != (1, 16):
                continue
            summing = triton_unread.UnreadLayout(warps, groups, listed, programs)
            add(
                "unread",
                lambda summing=summing: triton_unread.sum_unread(
                    case.query_RHGD, case.index_PSHW, case.groups_PSHV, case.log_weights_RHGN, case.block_table_RM,
                    choice.unit_ids_RHN, choice.pages_RHN, case.context_tokens_R, choice.budgets_R, case.selector,
                    case.query_RHGD.shape[-1] ** -0.5, case.workspace, summing,
                ),
                **dataclasses.asdict(summing),
            )  # fmt: skip
    layouts = [
        triton_top_k.ChoiceLayout(*values) for values in ((8, 2048, 16), (8, 1024, 8), (16, 2048, 4), (4, 2048, 16))
    ]
    for layout in layouts:
        add(
            "choice",
            lambda layout=layout: triton_top_k.choose_units(
                case.scores_RHU, case.context_tokens_R, choice.budgets_R, case.selector, choice.unit_ids_RHN,
                choice.pages_RHN, case.block_table_RM, case.index_PSHW.shape[1], peaks_RHK=case.peaks_RHK, layout=layout,
            ),
            **dataclasses.asdict(layout),
        )  # fmt: skip
    requests, _, group, dim = case.query_RHGD.shape
    tiles = ((64, 4, 3, 2), (64, 4, 2, 3), (64, 8, 3, 2), (32, 4, 4, 3), (32, 4, 3, 4), (32, 2, 4, 3), (128, 8, 2, 1))
    for values in tiles:
        tile_of = Tile(*values)
        workspace = StepWorkspace.allocate(
            requests,
            group,
            dim,
            case.keys_PBHD.dtype,
            case.selector,
            case.query_RHGD.device,
            case.query_RHGD.shape[1],
            tile_of,
        )
        add("attention", planned(workspace).attend, **dataclasses.asdict(tile_of))
    choice.plan()
    rows.sort(key=lambda row: (row["kernel"], math.isnan(row["graph_us"]), row["graph_us"]))
    for kernel, its in itertools.groupby(rows, key=lambda row: row["kernel"]):
        for row in list(its)[:4]:
            told = {name: value for name, value in row.items() if name not in ("kernel", "units", "kv_budget_tokens")}
            print(f"{case.name:>16} {choice.budget:>6} sweep of {kernel}: {told}", flush=True)
    return rows


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options of a benchmark whose cases are these: the shape of a layer, and how it is timed."""
    parser.add_argument("--context", type=int, default=30_000, help="tokens of the longest request")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=2, help="query heads per KV head")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--calls", type=int, default=10, help="calls in each graph")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in triton's interpreter; times nothing")
    parser.add_argument("--seed", type=int, default=0)


def tested(options: argparse.Namespace, names: Sequence[str]) -> tuple[dict[str, Any] | None, AnyClock]:
    """How many of these tests passed, compiled, and a clock; a dry run tests and times nothing."""
    if options.dry:
        return None, DryClock()
    return run_tests(names), Clock(options.repeats, options.calls)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --dry")
    parser.add_argument("--requests", type=int, default=32)
    add_shape(parser)
    parser.add_argument("--units", nargs="+", choices=(*UNITS, *OTHER_UNITS), default=list(UNITS))
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--sweep", action="store_true", help="also time other layouts of each kernel (minutes)")
    parser.add_argument(
        "--no-tests", action="store_true", help="leave out the kernels' own tests, as after another call"
    )
    options = parser.parse_args()
    if options.dry:
        vars(options).update(DRY, no_tests=True)
    elif not torch.cuda.is_available() or options.out is None:
        parser.error("timing needs a CUDA GPU and --out; --dry needs neither")
    options.device = "cpu" if options.dry else "cuda"
    return options


def main() -> None:
    options = parsed()
    started = time.perf_counter()
    tests = None if options.no_tests else run_tests()
    clock: AnyClock = DryClock() if options.dry else Clock(options.repeats, options.calls)
    bandwidth = clock.copy_bytes_per_second()
    print(f"copy bandwidth: {bandwidth / 1e12:.2f} TB/s")
    print(f"{'units':>16} {'budget':>6} " + " ".join(f"{name:>20}" for name in KERNELS))
    rows: list[dict[str, Any]] = []
    without_peaks: list[dict[str, Any]] = []
    swept: list[dict[str, Any]] = []
    for case in cases(options):
        check_case(case)
        for budget in options.budgets:
            choice = Choice.build(case, str(budget), np.full(options.requests, budget))
            check_choice(choice)
            its = rows_of(clock, bandwidth, choice)
            show(its)
            rows += its
            if (plain := case.without_peaks()) is not None:
                other = dataclasses.replace(choice, case=plain)
                check_choice(other)
                its = rows_of(clock, bandwidth, other)
                show(its, "without peaks")
                without_peaks += its
            if options.sweep:
                swept += sweep(clock, choice, options)
            # Timed runs wrote the same outputs many times over.
            check_choice(choice)
            # None where they were left out: the times stand for nothing by themselves then.
            results = {
                "tests": tests, "copy_bytes_per_second": bandwidth, "rows": rows, "without_peaks": without_peaks,
                "sweep": swept,
            }  # fmt: skip
            decode_kernels.write_record(options, "fine-kernels", results, started)
    print(f"wrote {options.out}" if options.out else "no record without --out")


if __name__ == "__main__":
    main()
