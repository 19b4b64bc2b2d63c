"""How programs share what a step reads: attention under each way to cut the work, over batch sizes. One CUDA GPU.

    python benchmarks/reading_plans.py --schedule fine.toml --out benchmarks/results/reading-plans-h200.json
    python benchmarks/reading_plans.py --dry    # no GPU: tiny sizes in triton's interpreter, nothing is timed

One call runs the kernels' own tests, compiled, compares index, scores, choice and attention with the paged reference on
the data that is timed, and then times attention under three plans (see triton_work_split.py): equal stretches for as
many programs as run at the same time, equal stretches for half as many again, and stretches of a single (request, head)
each. For these as many programs are launched as run at the same time, or one for each (request, head) where that is
more. `planned` is the one that `plan_step` takes, for equal budgets in an engine that checks drafts; with it the whole
layer is timed, too.
Requests are somewhere in their responses ("mixed"), each with the budget that --schedule gives it, or all have
--context tokens and an equal budget. `us` is as in decode_kernels.py, `floor` what the bytes take at the bandwidth of a
large copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

if "--dry" in sys.argv:
    # Read when triton is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

import decode_kernels
import fine_kernels
import numpy as np
import torch
from kernel_cases import Case, Choice, check_case, check_choice, check_output
from kernel_clock import AnyClock

from sparroll.attention.decode.workspace import StepWorkspace
from sparroll.schedule import Schedule

TESTS = ("test_triton_kernels.py", "test_remainder_kernels.py")
DRY = {
    "requests": [1, 3], "equal": [2], "budgets": [96], "context": 150, "heads": 2, "dim": 32, "dtype": "float32",
    "repeats": 1,
}  # fmt: skip
PLANS = ("planned", "running", "programs", "own")


def cases(options: argparse.Namespace) -> Iterator[tuple[Case, str, np.ndarray]]:
    """A batch, what its budgets are called, and the budgets."""
    for kind, sizes in (("mixed", options.requests), ("equal", options.equal)):
        for requests in sizes:
            sized = argparse.Namespace(**vars(options) | {"requests": requests, "units": [options.unit]})
            case = next(fine_kernels.cases(sized, (kind,)))
            check_case(case)
            if kind == "mixed":
                yield case, "schedule", np.asarray(options.schedule.kv_budget_tokens(case.contexts))
            else:
                # As in an engine that checks drafts.
                case = dataclasses.replace(case, workspace=dataclasses.replace(case.workspace, short_lists=True))
                for budget in options.budgets:
                    yield case, str(budget), np.full(requests, budget)


def tiles_of(choice: Choice) -> np.ndarray:
    """[R] tiles that each request reads in one head."""
    case, unit = choice.case, choice.case.selector.unit_tokens
    units = np.where(choice.budgets >= case.contexts, -(-case.contexts // unit), choice.budgets // unit)
    return -(-np.minimum(units, choice.unit_ids_RHN.shape[2]) * unit // case.workspace.tile.tokens)


@dataclasses.dataclass(frozen=True)
class Launched(StepWorkspace):
    """The same workspace with another number of programs that read."""

    launched: int = 0

    def programs(self, requests: int) -> int:
        return self.launched


def launched(plan: str, workspace: StepWorkspace, requests: int) -> Launched:
    programs = {
        "running": workspace.running,
        "programs": len(workspace.arrivals_X),
        "own": max(workspace.running, requests * workspace.kv_heads),
    }
    return Launched(**vars(workspace), launched=programs[plan])


def share_of(plan: str, tiles: np.ndarray, workspace: Launched) -> int:
    """Tiles in a stretch."""
    if plan != "own":
        return max(1, -(-int(tiles.sum()) * workspace.kv_heads // workspace.launched))
    return next(share for share in itertools.count(1) if stretches(tiles, share, workspace) <= workspace.launched)


def stretches(tiles: np.ndarray, share: int, workspace: StepWorkspace) -> int:
    return int((-(-tiles // share)).sum()) * workspace.kv_heads


def write_plan(workspace: StepWorkspace, plan: str, tiles: np.ndarray, share: int) -> None:
    """In the place of plan_step's."""
    rows = -(-tiles // share) * share if plan == "own" else tiles
    written = torch.tensor([0, *np.cumsum(rows).tolist(), share], dtype=torch.int32)
    workspace.read_before_R[: len(written)] = written.to(workspace.read_before_R.device)
    workspace.arrivals_X.zero_()


def row_of(clock: AnyClock, bandwidth: float, choice: Choice, budgets: str) -> dict[str, Any]:
    """Attention of one batch under each plan."""
    case, tiles = choice.case, tiles_of(choice)
    workspace, read = case.workspace, case.selector.read_tokens(case.contexts, choice.budgets)
    check_choice(choice)
    planned = workspace.read_before_R[len(tiles) + 1].item()
    moved = workspace.kv_heads * int(read.sum()) * 2 * case.query_RHGD.shape[-1] * case.keys_PBHD.element_size()
    row: dict[str, Any] = {
        "requests": len(tiles), "contexts": case.name.split()[1], "budgets": budgets,
        "mean_budget_tokens": float(choice.budgets.mean()), "mean_read_tokens": float(read.mean()),
        "floor_us": 1e6 * moved / bandwidth,
        "layer_us": clock.graph_us(choice.layer), "tiles_in_a_stretch": {"planned": planned},
        "attention_us": {"planned": clock.graph_us(choice.attend)},
    }  # fmt: skip
    for plan in PLANS[1:]:
        programs = launched(plan, workspace, len(tiles))
        share = share_of(plan, tiles, programs)
        write_plan(workspace, plan, tiles, share)
        other = dataclasses.replace(choice, case=dataclasses.replace(case, workspace=programs))
        other.out_RHGD.fill_(torch.nan)
        other.attend()
        check_output(other)
        row["tiles_in_a_stretch"][plan], row["attention_us"][plan] = share, clock.graph_us(other.attend)
    return row


def show(row: dict[str, Any]) -> None:
    about = f"{row['requests']:>4} {row['contexts']:>6} {row['budgets']:>9} {row['mean_budget_tokens']:>6.0f}"
    cells = [f"{row['attention_us'][plan]:>9.1f}" for plan in PLANS]
    print(f"{about} {row['floor_us']:>7.1f} {row['layer_us']:>7.1f} {' '.join(cells)}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --dry")
    parser.add_argument("--schedule", help="budgets of mixed batches: preset or file; not needed with --dry")
    parser.add_argument("--unit", default="4x4", choices=fine_kernels.UNITS, help="tokens x bits")
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[1, 4, 8, 16, 24, 32, 40, 48, 64, 80],
        help="mixed ones",
    )
    parser.add_argument(
        "--equal",
        type=int,
        nargs="+",
        default=[16, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128],
        help="requests of equal length",
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024], help="of these")
    fine_kernels.add_shape(parser)
    options = parser.parse_args()
    if options.dry:
        vars(options).update(DRY)
        options.schedule = Schedule.fixed(96, selector=fine_kernels.selector_of(options.unit))
    elif not torch.cuda.is_available() or options.out is None or options.schedule is None:
        parser.error("timing needs a CUDA GPU, --schedule and --out; --dry needs none of them")
    else:
        options.schedule = Schedule.load(options.schedule)
    options.device = "cpu" if options.dry else "cuda"
    return options


def main() -> None:
    options = parsed()
    started = time.perf_counter()
    tests, clock = fine_kernels.tested(options, TESTS)
    bandwidth = clock.copy_bytes_per_second()
    print(f"copy bandwidth: {bandwidth / 1e12:.2f} TB/s; us of the floor, the layer, and attention by each plan")
    print(f"requests, contexts, budgets, their mean{'':>18}{' '.join(f'{plan:>9}' for plan in PLANS)}")
    rows: list[dict[str, Any]] = []
    told = argparse.Namespace(**vars(options) | {"schedule": options.schedule.inline()})
    for case, name, budgets in cases(options):
        rows.append(row_of(clock, bandwidth, Choice.build(case, name, budgets), name))
        show(rows[-1])
        # None where nothing was timed.
        results = {"tests": tests, "copy_bytes_per_second": bandwidth, "rows": rows}
        decode_kernels.write_record(told, "reading-plans", results, started)
    print(f"wrote {options.out}" if options.out else "no record without --out")


if __name__ == "__main__":
    main()
