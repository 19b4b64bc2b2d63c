"""Attention and scores of small units by the engines' kernels in other layouts, and by other kernels
(attention_kernels.py, score_kernels.py), on a CUDA GPU: checked, then timed.

    python benchmarks/attention_sweep.py --out runs/attention-sweep.json
    python benchmarks/attention_sweep.py --dry     # no GPU: tiny sizes in triton's interpreter, nothing is timed

Every kernel is first compiled, and compared with the reference on few tokens, in a process of its own, all at a time.
Then it is compared on the data that is timed: scores to the last bit, attention over outputs that hold NaN. One that
fails is told and left out. `us` is as in decode_kernels.py (L2 flushed before each call), `x floor` this over the time
of the bytes at the speed of a large copy. `nothing` is a launch that finds nothing to read. A layer is scores, choice
and attention; its last rows take the fastest kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

if "--dry" in sys.argv:
    # Read when triton is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

import attention_kernels
import decode_kernels
import fine_kernels
import numpy as np
import score_kernels
import torch
from attention_kernels import Places, Variant
from decode_kernels import Choice
from kernel_tasks import failures
from score_kernels import BitLayout

from sparroll.attention.decode import paged, triton_score_codes
from sparroll.attention.decode.paged import Tile
from sparroll.attention.decode.triton_score_codes import ScoreLayout

CHECK_SECONDS = 80
"""Longest that all checks on few tokens, compiling included, may take; they run at the same time."""
SMALL_CONTEXTS = {"equal": 1200, "mixed": 1188}
"""The longest of 32 mixed contexts is then 1184. Numbers of units are multiples of 16 where those that are timed are, so
that both run the same code."""


@dataclass(frozen=True)
class Layout:
    """Of the engines' kernel for scores; None: as engines have it."""

    tile_units: int | None = None
    warps: int = ScoreLayout.warps
    programs_per_multiprocessor: int = ScoreLayout.programs_per_multiprocessor


Attention = Tile | Variant
Scores = Layout | BitLayout
ENGINE_TILE = Tile(64, 4, 3, 2)
DEEP = Tile(64, 4, 4, 2)
ATTENTION: dict[str, tuple[Attention, ...]] = {
    "4x4": (
        ENGINE_TILE, DEEP, Tile(64, 8, 4, 2), Tile(32, 4, 3, 4), Tile(32, 4, 5, 3), Variant(ENGINE_TILE), Variant(DEEP),
        Variant(DEEP, placed=False), Variant(DEEP, ascending=False), Variant(DEEP, fused=False),
        Variant(DEEP, placed=False, ascending=False, fused=False), Variant(Tile(64, 4, 3, 3)), Variant(Tile(64, 8, 4, 2)),
        Variant(Tile(32, 4, 5, 3)), Variant(Tile(32, 4, 4, 4)),
    ),
    **dict.fromkeys(
        ("2x2", "1x1"),
        (ENGINE_TILE, Variant(ENGINE_TILE), Variant(DEEP), Variant(Tile(64, 4, 3, 3))),
    ),
}  # fmt: skip
SCORES: dict[str, tuple[Scores, ...]] = {
    "4x4": (Layout(),),
    "2x2": (Layout(), Layout(128, 2, 12), Layout(128, 2, 16)),
    "1x1": (
        Layout(), Layout(128, 2, 16), Layout(256, 2, 12), Layout(256, 4, 8), BitLayout(128, 2, 16),
        BitLayout(256, 4, 8), BitLayout(128, 2, 16, 3), BitLayout(256, 4, 8, 3), BitLayout(128, 2, 12, 4),
    ),
}  # fmt: skip
SMALL = Tile(16, 4, 2, 1)
DRY_ATTENTION: tuple[Attention, ...] = (
    SMALL,
    Variant(SMALL),
    Variant(SMALL, placed=False, ascending=False, fused=False),
)
DRY_SCORES: dict[str, tuple[Scores, ...]] = {
    **dict.fromkeys(("4x4", "2x2"), (Layout(),)), "1x1": (Layout(64, 4, 8), BitLayout(128, 2, 1)),
}  # fmt: skip
DRY = {
    "requests": 2,
    "context": 150,
    "heads": 1,
    "contexts": ["mixed"],
    "budgets": [64],
    "dtype": "float32",
    "repeats": 1,
}


def named(kernel: Attention | Scores) -> str:
    """Short, for a column."""
    if isinstance(kernel, Tile):
        return "engine " + ",".join(str(value) for value in asdict(kernel).values())
    if isinstance(kernel, Variant):
        left = [name for name in ("placed", "ascending", "fused") if not getattr(kernel, name)]
        bound = [f"{kernel.most_registers} registers"] if kernel.most_registers else []
        tile = ",".join(str(value) for value in asdict(kernel.tile).values())
        return " ".join(["variant", tile, *bound, *(f"-{name}" for name in left)])
    who = "engine" if isinstance(kernel, Layout) else "bits"
    return f"{who} " + ",".join("" if value is None else str(value) for value in asdict(kernel).values())


def attending(choice: Choice, kernel: Attention) -> Callable[[], None]:
    """Attention by a kernel, planned."""
    case = choice.case
    requests, heads, group, dim = case.query_RHGD.shape
    workspace = paged.StepWorkspace.allocate(
        requests, group, dim, case.keys_PBHD.dtype, case.selector, case.query_RHGD.device,
        kernel if isinstance(kernel, Tile) else kernel.tile,
    )  # fmt: skip
    workspace.mixed_XGD.fill_(torch.nan), workspace.log_sum_XG.fill_(torch.nan)
    its = dataclasses.replace(choice, case=dataclasses.replace(case, workspace=workspace))
    its.plan()
    if isinstance(kernel, Tile):
        return its.attend
    places = Places.allocate(workspace)
    places.write(case.context_tokens_R, choice.budgets_R, heads, choice.unit_ids_RHN.shape[2], case.selector, workspace)
    return lambda: attention_kernels.attend(
        case.query_RHGD, case.keys_PBHD, case.values_PBHD, choice.unit_ids_RHN, choice.pages_RHN, case.context_tokens_R,
        choice.budgets_R, case.selector, dim**-0.5, choice.out_RHGD, workspace, places, kernel,
    )  # fmt: skip


def scoring(choice: Choice, kernel: Scores) -> Callable[[], None]:
    """Scores by a kernel, planned."""
    case = choice.case
    tile = kernel.tile_units or case.workspace.scored_tile_units
    plans = {"read_before_R": case.workspace.read_before_R.clone()}
    plans["scored_before_R"] = case.workspace.scored_before_R.clone()
    workspace = dataclasses.replace(case.workspace, scored_tile_units=tile, **plans)
    dataclasses.replace(choice, case=dataclasses.replace(case, workspace=workspace)).plan()
    given = (
        case.query_RHGD, case.index_PSHW, case.block_table_RM, case.context_tokens_R, case.selector, case.scores_RHU,
        workspace,
    )  # fmt: skip
    if isinstance(kernel, BitLayout):
        return lambda: score_kernels.score_units(*given, kernel)
    layout = ScoreLayout(kernel.warps, kernel.programs_per_multiprocessor)
    return lambda: triton_score_codes.score_units(*given, layout)


class Expected:
    """What the reference makes of a case under a budget, from scores that it agrees with."""

    def __init__(self, choice: Choice):
        self.choice, case = choice, choice.case
        # Within its budget a request is not scored, and units past a context may be left as they are.
        place = np.arange(case.scores_RHU.shape[2])
        scored_RU = (choice.budgets < case.contexts)[:, None]
        scored_RU = scored_RU & (place < -(-case.contexts // case.selector.unit_tokens)[:, None])
        self.scored_R1U = torch.from_numpy(scored_RU).to(case.scores_RHU.device)[:, None]
        self.scores_RHU = case.scores_RHU.clone()
        choice.choose("reference")
        self.exact_RHGD = torch.empty_like(choice.out_RHGD, dtype=torch.float32)
        dataclasses.replace(choice, out_RHGD=self.exact_RHGD).attend("reference")

    def check_attention(self, attend: Callable[[], None]) -> None:
        out = self.choice.out_RHGD
        # Twice: what a kernel leaves behind must not change the next call.
        for _ in range(2):
            out.fill_(torch.nan)
            attend()
            error = float((out.float() - self.exact_RHGD).norm() / self.exact_RHGD.norm())
            # NaN is not below either.
            assert error < (1e-2 if out.dtype != torch.float32 else 1e-4), f"attention is off by {error:.1e}"

    def check_scores(self, score: Callable[[], None]) -> None:
        scores = self.choice.case.scores_RHU
        scores.fill_(torch.nan)
        score()
        found = scores.clone()
        scores.copy_(self.scores_RHU)
        wrong = (found != self.scores_RHU) & self.scored_R1U
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} scores differ"


def small_choices(units: str, options: argparse.Namespace) -> Iterator[Choice]:
    """Few tokens, with equal and with mixed contexts, and budgets that cut pairs; scores are those of the reference."""
    for name, context in SMALL_CONTEXTS.items():
        small = argparse.Namespace(**vars(options) | {"context": context, "units": [units]})
        (case,) = fine_kernels.cases(small, (name,))
        decode_kernels.check_case(case)
        budgets = np.full(small.requests, 512)
        budgets[::3] += 16 * (np.arange(len(budgets[::3])) % 5)
        yield Choice.build(case, "small", budgets)


def check_small(units: str, kernel: Attention | Scores, options: argparse.Namespace) -> None:
    """Raises where a kernel differs from the reference on few tokens."""
    for choice in small_choices(units, options):
        expected = Expected(choice)
        if isinstance(kernel, Tile | Variant):
            expected.check_attention(attending(choice, kernel))
        else:
            expected.check_scores(scoring(choice, kernel))


def tasks(options: argparse.Namespace) -> list[tuple[str, Attention | Scores]]:
    """What is checked in processes of their own."""
    attention = dict.fromkeys(ATTENTION, DRY_ATTENTION) if options.dry else ATTENTION
    scores = DRY_SCORES if options.dry else SCORES
    return [
        (units, kernel) for units in options.units for kernel in (*scores.get(units, ()), *attention.get(units, ()))
    ]


def timed(
    clock: fine_kernels.Clock, check: Callable[[Callable[[], None]], None], call: Callable[[], None], **about: Any
) -> dict[str, Any]:
    """Checked before and after, because timed runs write the same outputs many times over."""
    row = {**about, "us": math.nan}
    try:
        check(call)
        us = clock.graph_us(call)
        check(call)
        row["us"] = us
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"failed: {row}", flush=True)
    return row


def fastest(rows: list[dict[str, Any]], kernel: str) -> str:
    its = [row for row in rows if row["kernel"] == kernel and not math.isnan(row["us"])]
    return min(its, key=lambda row: row["us"])["layout"] if its else ""


def rows_of(
    clock: fine_kernels.Clock, bandwidth: float, choice: Choice, attention: list[Attention], scores: list[Scores]
) -> list[dict[str, Any]]:
    """Every kernel by itself, then layers. The scores of the case are those of the reference."""
    case, expected = choice.case, Expected(choice)
    floors = {row["kernel"]: row["floor_us"] for row in fine_kernels.rows_of(clock, bandwidth, choice)}
    about = {"units": case.name, "kv_budget_tokens": int(choice.budget)}
    rows: list[dict[str, Any]] = []

    def add(kernel: str, layout: str, check: Callable[[Callable[[], None]], None], call: Callable[[], None]) -> None:
        row = timed(clock, check, call, **about, kernel=kernel, layout=layout)
        rows.append(row | {"times_floor": row["us"] / floors[kernel]})

    def never(call: Callable[[], None]) -> None:
        call()

    score = {named(each): scoring(choice, each) for each in scores}
    attend = {named(each): attending(choice, each) for each in attention}
    for name, call in score.items():
        add("scores", name, expected.check_scores, call)
    for name, call in attend.items():
        add("attention", name, expected.check_attention, call)
    empty = dataclasses.replace(
        choice, budgets_R=torch.zeros_like(choice.budgets_R), out_RHGD=torch.empty_like(choice.out_RHGD)
    )
    for each in attention[:1] + [each for each in attention if isinstance(each, Variant)][:1]:
        call = attending(empty, each)
        row = timed(clock, never, call, **about, kernel="nothing", layout=named(each))
        rows.append(row | {"times_floor": math.nan})
    # The engines' first, then the fastest of each.
    chosen = [(next(iter(score)), next(iter(attend)))]
    chosen += [
        (chosen[0][0], fastest(rows, "attention")),
        (fastest(rows, "scores"), fastest(rows, "attention")),
    ]
    for its_score, its_attend in dict.fromkeys(chosen):
        if its_score in score and its_attend in attend:
            steps = score[its_score], choice.choose, attend[its_attend]

            def layer(steps: tuple[Callable[[], None], ...] = steps) -> None:
                for step in steps:
                    step()

            add("sparse layer", f"{its_score} + {its_attend}", expected.check_attention, layer)
    add("choice", "engine", never, choice.choose)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """One line for a kernel and a layout: us and times floor for each budget."""
    budgets = sorted({row["kv_budget_tokens"] for row in rows})
    print(f"{'units':>10} {'kernel':>12} " + " ".join(f"{budget:>7} tokens" for budget in budgets) + "  layout")
    about = [(row["units"], row["kernel"], row["layout"]) for row in rows]
    for which in dict.fromkeys(about):
        cells = {row["kv_budget_tokens"]: row for row, its in zip(rows, about, strict=True) if its == which}
        text = [
            f"{its['us']:7.1f} {its['times_floor']:6.2f}" if (its := cells.get(each)) else " " * 14 for each in budgets
        ]
        print(f"{which[0]:>10} {which[1]:>12} " + " ".join(text) + f"  {which[2]}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --dry")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=30_000)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=2, help="query heads per KV head")
    parser.add_argument("--units", nargs="+", choices=list(ATTENTION), default=["4x4", "1x1", "2x2"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--contexts", nargs="+", choices=["equal", "mixed"], default=["equal", "mixed"])
    parser.add_argument("--seconds", type=float, default=95, help="no other case is begun after so long")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--task", type=int, help="compile and check one kernel, as the call does itself")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in triton's interpreter; times nothing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.dry:
        vars(options).update(DRY)
    elif not torch.cuda.is_available() or (options.out is None and options.task is None):
        parser.error("timing needs a CUDA GPU and --out; --dry needs neither")
    options.device = "cpu" if options.dry else "cuda"
    options.dim, options.block = 128, 16
    return options


def main() -> None:
    options = parsed()
    if options.task is not None:
        check_small(*tasks(options)[options.task], options)
        torch.cuda.synchronize()
        return
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    ready: dict[str, list[Attention | Scores]] = {units: [] for units in options.units}
    command = [sys.executable, __file__, "--units", *options.units, "--task"]
    failed = {} if options.dry else failures(command, len(tasks(options)), CHECK_SECONDS)
    for number, (units, kernel) in enumerate(tasks(options)):
        if number in failed:
            rows.append({"units": units, "layout": named(kernel), "error": failed[number]})
            print(f"failed: {units} {named(kernel)}: {failed[number]}", flush=True)
        else:
            ready[units].append(kernel)
    print(f"checked and compiled after {time.perf_counter() - started:.0f} s", flush=True)
    clock: fine_kernels.Clock = (
        fine_kernels.DryClock() if options.dry else decode_kernels.Clock(options.repeats, calls=10)
    )
    bandwidth = clock.copy_bytes_per_second()
    for contexts, units in itertools.product(options.contexts, options.units):
        if time.perf_counter() - started > options.seconds:
            print(f"not begun: {units} {contexts}", flush=True)
            continue
        one = argparse.Namespace(**vars(options) | {"units": [units]})
        (case,) = fine_kernels.cases(one, (contexts,))
        decode_kernels.check_case(case)
        its = ready[units]
        attention = [each for each in its if isinstance(each, Tile | Variant)]
        scores = [each for each in its if isinstance(each, Layout | BitLayout)]
        for budget, first in zip(options.budgets, itertools.chain([True], itertools.repeat(False)), strict=False):
            choice = Choice.build(case, str(budget), np.full(options.requests, budget))
            # Scores do not depend on the budget.
            rows += rows_of(clock, bandwidth, choice, attention, scores if first else scores[:1])
            results = {"copy_bytes_per_second": bandwidth, "rows": rows}
            decode_kernels.write_record(options, "attention-sweep", results, started)
    print(f"copy bandwidth: {bandwidth / 1e12:.2f} TB/s, after {time.perf_counter() - started:.0f} s")
    show([row for row in rows if "kernel" in row])
    print(f"wrote {options.out}" if options.out else "no record without --out")


if __name__ == "__main__":
    main()
