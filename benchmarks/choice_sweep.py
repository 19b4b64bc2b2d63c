"""The choice of units by the engines' kernel, in its layout and in another one, on a CUDA GPU: checked, then timed.

    python benchmarks/choice_sweep.py --out runs/choice-sweep.json
    python benchmarks/choice_sweep.py --dry     # no GPU: tiny sizes in triton's interpreter, nothing is timed

Every layout is first compiled and compared with the reference in a process of its own, all at a time: on normal,
heavy-tailed and tied scores, with equal and with mixed contexts, over outputs that hold rubbish. One that fails is told
and left out. `us` is as in decode_kernels.py (L2 flushed before each call), `warm_us` one of several calls in a row,
whose scores are in L2, as after the kernel that made them. The engines' layout is timed with lists as long as the
budget, with lists of all units, as engines have them, and with the peaks of scores, as engines have them for units of
few bits. Of the scores, the first and the last ones are +inf, as those of units that are always read.
"""

from __future__ import annotations

import argparse
import dataclasses
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

import decode_kernels
import torch
from kernel_clock import Clock
from kernel_tasks import failures
from torch import Tensor

from sparroll.attention.decode import paged
from sparroll.attention.decode.choice import triton_top_k
from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout
from sparroll.attention.decode.paged_reference import peaks_of
from sparroll.attention.decode.workspace import PEAKED_UNITS
from sparroll.attention.selectors import PageMean

SCORES = ("normal", "heavy tails", "ties")
CHECK_SECONDS = 90
"""Longest that all checks, compiling included, may take; they run at the same time."""
CALLS = 20


@dataclass(frozen=True)
class Size:
    """Units of so many tokens: how many there are, and how many are wanted."""

    units: int
    wanted: int
    unit_tokens: int

    @property
    def name(self) -> str:
        return f"{self.units} -> {self.wanted}"


ENGINE = ChoiceLayout()
SIZES = (Size(7500, 256, 4), Size(15_000, 512, 2), Size(30_000, 1024, 1), Size(1875, 64, 16), Size(2500, 256, 16))
LARGE = (Size(7500, 1024, 4), Size(15_000, 2048, 2), Size(30_000, 4096, 1), Size(30_000, 16_384, 1))
"""Budgets of 4,096 tokens, and one of more than half of all units."""
LAYOUTS: dict[Size, tuple[ChoiceLayout, ...]] = {
    **dict.fromkeys((*SIZES, *LARGE), (ENGINE,)),
    SIZES[1]: (ENGINE, ChoiceLayout(rows=16)),
}
DRY_SIZES = (Size(700, 24, 4), Size(120, 20, 4), Size(1500, 300, 4))
DRY_LAYOUT = ChoiceLayout(1, 128, 8)


@dataclass
class Job:
    """Everything that a call of the choice needs."""

    size: Size
    scores_RHU: Tensor
    contexts_R: Tensor
    budgets_R: Tensor
    table_RM: Tensor
    ids_RHN: Tensor
    pages_RHN: Tensor
    selector: PageMean
    units_per_block: int
    peaks_RHK: Tensor | None = None

    @staticmethod
    def build(size: Size, device: str, kind: str = "normal", mixed: bool = False, requests: int = 32) -> Job:
        generator = torch.Generator().manual_seed(size.units)
        heads, tokens = 8 if device == "cuda" else 2, size.units * size.unit_tokens
        scores = torch.randn(requests, heads, size.units, generator=generator)
        if kind == "heavy tails":
            scores = scores / torch.rand(scores.shape, generator=generator).sqrt() - 1.0
        elif kind == "ties":
            scores = (scores * 20).round() / 20
        contexts = torch.full((requests,), tokens, dtype=torch.int32)
        if mixed:
            share = 0.05 + 0.95 * torch.rand(requests, generator=generator)
            contexts = (contexts * share).int()
            contexts[0] = size.wanted * size.unit_tokens // 2
        units = (contexts + size.unit_tokens - 1) // size.unit_tokens
        place = torch.arange(size.units)
        always = (place < 4) | (place >= units[:, None] - 8)
        # What lies past a context must not be looked at.
        scores = scores.masked_fill(always[:, None], math.inf).masked_fill((place >= units[:, None])[:, None], math.nan)
        units_per_block = max(16 // size.unit_tokens, 1)
        blocks = -(-size.units // units_per_block)
        table = torch.stack([torch.randperm(requests * blocks, generator=generator)[:blocks] for _ in range(requests)])
        # Rows of whole 16 bytes, as engines have them.
        padded = torch.full((requests, heads, -(-size.units // 4) * 4), math.nan, device=device)
        padded[..., : size.units] = scores.to(device)
        ids, pages = (
            torch.full((requests, heads, size.wanted), -2, dtype=torch.int32, device=device) for _ in range(2)
        )
        return Job(
            size, padded[..., : size.units], contexts.to(device),
            torch.full((requests,), size.wanted * size.unit_tokens, dtype=torch.int32, device=device),
            table.int().to(device), ids, pages,
            PageMean(size.unit_tokens, size.unit_tokens, 2 * size.unit_tokens), units_per_block,
        )  # fmt: skip

    def with_long_lists(self) -> Job:
        """With a place for each unit, as engines have them."""
        ids, pages = (self.ids_RHN.new_full(self.scores_RHU.shape, -2) for _ in range(2))
        return dataclasses.replace(self, ids_RHN=ids, pages_RHN=pages)

    def with_peaks(self) -> Job:
        """As the kernel leaves them that scores units of few bits."""
        exists = torch.arange(self.size.units, device=self.contexts_R.device) * self.size.unit_tokens
        exists = (exists < self.contexts_R[:, None])[:, None]
        return dataclasses.replace(self, peaks_RHK=peaks_of(self.scores_RHU.masked_fill(~exists, -math.inf)))

    def reference(self) -> None:
        paged.choose_units(
            self.scores_RHU, self.contexts_R, self.budgets_R, self.selector, self.ids_RHN, pages_RHN=self.pages_RHN,
            block_table_RM=self.table_RM, units_per_block=self.units_per_block, fill_rest=False,
        )  # fmt: skip

    def choose(self, layout: ChoiceLayout) -> None:
        triton_top_k.choose_units(
            self.scores_RHU, self.contexts_R, self.budgets_R, self.selector, self.ids_RHN, self.pages_RHN, self.table_RM,
            self.units_per_block, fill_rest=False, peaks_RHK=self.peaks_RHK,
            layout=ChoiceLayout.default(self.size.units) if layout == ENGINE else layout,
        )  # fmt: skip

    def chosen(self, choose: Callable[[], None]) -> tuple[Tensor, Tensor]:
        self.ids_RHN.fill_(-2), self.pages_RHN.fill_(-2)
        choose()
        return self.ids_RHN.clone(), self.pages_RHN.clone()


def check(size: Size, layout: ChoiceLayout, device: str, requests: int) -> None:
    """Raises where a layout chooses other units than the reference."""
    for kind in SCORES:
        for mixed in (False, True):
            job = Job.build(size, device, kind, mixed, requests)
            for its in (job, job.with_long_lists(), job.with_peaks()):
                expected = its.chosen(its.reference)
                found = its.chosen(lambda its=its: its.choose(layout))
                for ours, theirs, what in zip(found, expected, ("units", "pages"), strict=True):
                    rows = int((ours != theirs).any(-1).sum())
                    assert not rows, f"{what} differ in {rows} rows, {kind}, {'mixed' if mixed else 'equal'} contexts"


def tasks() -> list[tuple[Size, ChoiceLayout]]:
    """What is checked in processes of their own."""
    return [(size, layout) for size, its in LAYOUTS.items() for layout in its]


def run_task(number: int) -> None:
    size, layout = tasks()[number]
    check(size, layout, "cuda", requests=32)
    torch.cuda.synchronize()


def warm_us(call: Callable[[], Any], repeats: int) -> float:
    """One of several calls in a row, without flushes."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    taken = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return 1e3 * sorted(taken)[len(taken) // 2] / CALLS


def timed(clock: Clock, call: Callable[[], Any], **about: Any) -> dict[str, Any]:
    row = {**about, "us": math.nan, "warm_us": math.nan}
    try:
        row |= {"us": clock.graph_us(call), "warm_us": warm_us(call, clock.repeats)}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(
        " ".join(f"{name}={value:.2f}" if isinstance(value, float) else f"{value}" for name, value in row.items()),
        flush=True,
    )
    return row


def rows_of(clock: Clock, size: Size, ready: list[ChoiceLayout]) -> Iterator[dict[str, Any]]:
    """Each layout, and what a call takes where nothing is wanted."""
    job, mixed = Job.build(size, "cuda"), Job.build(size, "cuda", mixed=True)
    expected = job.chosen(job.reference)
    for layout in ready:
        what = {"size": size.name, "kernel": "engine", **asdict(layout)}
        yield timed(clock, lambda layout=layout: job.choose(layout), contexts="equal", **what)
        # Timed runs wrote the same outputs many times over.
        if not all(map(torch.equal, (job.ids_RHN, job.pages_RHN), expected)):
            yield {**what, "contexts": "equal", "error": "chooses other units than the reference"}
        yield timed(clock, lambda layout=layout: mixed.choose(layout), contexts="mixed", **what)
        if layout == ENGINE:
            for contexts, its in (("equal", job.with_long_lists()), ("mixed", mixed.with_long_lists())):
                yield timed(clock, lambda its=its: its.choose(ENGINE), contexts=contexts, lists="of all units", **what)
            for contexts, its in (("equal", job), ("mixed", mixed)) if size.units in PEAKED_UNITS else ():
                its = its.with_peaks()
                yield timed(clock, lambda its=its: its.choose(ENGINE), contexts=contexts, peaks=True, **what)
    nothing = Job.build(size, "cuda")
    nothing.budgets_R.zero_()
    yield timed(clock, lambda: nothing.choose(ENGINE), size=size.name, kernel="nothing wanted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --dry")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--task", type=int, help="check one layout, as the call does itself")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in triton's interpreter; times nothing")
    options = parser.parse_args()
    if options.dry:
        for size in DRY_SIZES:
            check(size, DRY_LAYOUT, "cpu", requests=3)
            print(f"{size.name} {DRY_LAYOUT}: equal")
        return
    if not torch.cuda.is_available() or (options.out is None and options.task is None):
        parser.error("timing needs a CUDA GPU and --out; --dry needs neither")
    if options.task is not None:
        run_task(options.task)
        return
    started = time.perf_counter()
    failed = failures([sys.executable, __file__, "--task"], len(tasks()), CHECK_SECONDS)
    rows: list[dict[str, Any]] = []
    ready: dict[Size, list[ChoiceLayout]] = {size: [] for size in LAYOUTS}
    for number, (size, layout) in enumerate(tasks()):
        if number in failed:
            rows.append({"size": size.name, **asdict(layout), "error": failed[number]})
            print(f"failed: {size.name} {layout}: {failed[number]}", flush=True)
        else:
            ready[size].append(layout)
    print(f"checked and compiled after {time.perf_counter() - started:.0f} s", flush=True)
    clock = Clock(options.repeats, 10)
    for size in LAYOUTS:
        rows += rows_of(clock, size, ready[size])
        decode_kernels.write_record(options, "choice-sweep", {"rows": rows}, started)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
