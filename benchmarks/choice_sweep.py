"""The choice of units by the engines' kernel and by variants (choice_kernels.py), on a CUDA GPU: checked, then timed.

    python benchmarks/choice_sweep.py --out runs/choice-sweep.json
    python benchmarks/choice_sweep.py --dry     # no GPU: tiny sizes in triton's interpreter, nothing is timed

Every kernel is first compiled and compared with the reference in a process of its own, all at a time: on normal,
heavy-tailed and tied scores, with equal and with mixed contexts, over outputs that hold rubbish. One that fails is told
and left out. `us` is as in decode_kernels.py (L2 flushed before each call), `warm_us` one of several calls in a row,
whose scores are in L2, as after the kernel that made them. The engines' kernel is timed with lists as long as the
budget, and with lists of all units, as engines have them. Then variants are timed until the end of each of their
stages. Of the scores, the first and the last ones are +inf, as those of units that are always read.
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

import choice_kernels
import decode_kernels
import torch
from choice_kernels import STAGES, Variant
from kernel_tasks import failures
from torch import Tensor

from sparroll.attention.decode import paged
from sparroll.attention.decode.choice import triton_top_k
from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout
from sparroll.attention.selectors import PageMean

SCORES = ("normal", "heavy tails", "ties")
CHECK_SECONDS = 90
"""Longest that all checks, compiling included, may take; they run at the same time."""
CALLS = 20
Kernel = ChoiceLayout | Variant


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
AS_ENGINES = {"floats": False, "warps_own": False, "pairs": False}
"""A variant that works as the engines' kernel does, so that its stages can be timed."""
SIZES = (Size(7500, 256, 4), Size(15_000, 512, 2), Size(30_000, 1024, 1), Size(1875, 64, 16), Size(2500, 256, 16))
LARGE = (Size(7500, 1024, 4), Size(15_000, 2048, 2), Size(30_000, 4096, 1), Size(30_000, 16_384, 1))
"""Budgets of 4,096 tokens, and one of more than half of all units."""
KERNELS: dict[Size, tuple[Kernel, ...]] = {
    **dict.fromkeys((*SIZES, *LARGE), (ENGINE,)),
    SIZES[0]: (
        ENGINE, Variant(8, 1, 512, **AS_ENGINES), Variant(8, 1, 512, floats=False, pairs=False),
        Variant(8, 1, 512, pairs=False), Variant(8, 1, 512), Variant(8, 1, 1024),
    ),
    SIZES[1]: (
        ENGINE, ChoiceLayout(rows=16), Variant(16, 2, 1024, **AS_ENGINES),
        Variant(16, 2, 1024, floats=False, pairs=False), Variant(16, 2, 1024, warps_own=False, pairs=False),
        Variant(16, 2, 1024, pairs=False), Variant(16, 1, 1024, pairs=False), Variant(16, 2, 1024),
    ),
}  # fmt: skip
DRY_KERNELS: dict[Size, tuple[Kernel, ...]] = {
    Size(700, 24, 4): (ChoiceLayout(1, 128, 8), Variant(8, 1, 128, warps=1), Variant(8, 1, 64, **AS_ENGINES, warps=1)),
    Size(120, 20, 4): (ChoiceLayout(1, 128, 8),),
    Size(1500, 300, 4): (ChoiceLayout(1, 128, 8),),
}
STAGED = {
    SIZES[0]: (Variant(8, 1, 512, **AS_ENGINES), Variant(8, 1, 512, pairs=False)),
    SIZES[1]: (Variant(16, 2, 1024, **AS_ENGINES), Variant(16, 2, 1024, pairs=False)),
}
"""Whose stages are timed."""


def about(kernel: Kernel) -> dict[str, Any]:
    return {"kernel": "engine" if isinstance(kernel, ChoiceLayout) else "variant", **asdict(kernel)}


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

    def reference(self) -> None:
        paged.choose_units(
            self.scores_RHU, self.contexts_R, self.budgets_R, self.selector, self.ids_RHN, pages_RHN=self.pages_RHN,
            block_table_RM=self.table_RM, units_per_block=self.units_per_block, fill_rest=False,
        )  # fmt: skip

    def choose(self, kernel: Kernel, stage: str = STAGES[-1]) -> None:
        given = (
            self.scores_RHU, self.contexts_R, self.budgets_R, self.selector, self.ids_RHN, self.pages_RHN,
            self.table_RM, self.units_per_block,
        )  # fmt: skip
        if isinstance(kernel, ChoiceLayout):
            layout = ChoiceLayout.default(self.size.units) if kernel == ENGINE else kernel
            triton_top_k.choose_units(*given, fill_rest=False, layout=layout)
        else:
            choice_kernels.choose_units(*given, kernel, stage)

    def chosen(self, choose: Callable[[], None]) -> tuple[Tensor, Tensor]:
        self.ids_RHN.fill_(-2), self.pages_RHN.fill_(-2)
        choose()
        return self.ids_RHN.clone(), self.pages_RHN.clone()


def check(size: Size, kernel: Kernel, device: str, requests: int) -> None:
    """Raises where a kernel chooses other units than the reference. Variants may leave lists of ties as they are."""
    for kind in SCORES:
        for mixed in (False, True):
            job = Job.build(size, device, kind, mixed, requests)
            for its in (job, job.with_long_lists()) if isinstance(kernel, ChoiceLayout) else (job,):
                expected = its.chosen(its.reference)
                found = its.chosen(lambda its=its: its.choose(kernel))
                left = (found[0] == -2).all(-1) & isinstance(kernel, Variant) & (kind == "ties")
                for ours, theirs, what in zip(found, expected, ("units", "pages"), strict=True):
                    rows = int(((ours != theirs).any(-1) & ~left).sum())
                    assert not rows, f"{what} differ in {rows} rows, {kind}, {'mixed' if mixed else 'equal'} contexts"


def compile_stages(size: Size, variants: tuple[Variant, ...], device: str) -> None:
    job = Job.build(size, device)
    for variant in variants:
        for stage in STAGES[:-1]:
            job.choose(variant, stage)
    if device == "cuda":
        torch.cuda.synchronize()


def tasks(kernels: dict[Size, tuple[Kernel, ...]]) -> list[tuple[str, Size, Any]]:
    """What is run in processes of their own."""
    checks = [("check", size, kernel) for size, its in kernels.items() for kernel in its]
    return checks + [("stages", size, variants) for size, variants in STAGED.items() if size in kernels]


def run_task(number: int) -> None:
    what, size, its = tasks(KERNELS)[number]
    if what == "check":
        check(size, its, "cuda", requests=32)
        torch.cuda.synchronize()
    else:
        compile_stages(size, its, "cuda")


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


def timed(clock: decode_kernels.Clock, call: Callable[[], Any], **about: Any) -> dict[str, Any]:
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


def rows_of(clock: decode_kernels.Clock, size: Size, ready: list[Kernel], staged: bool) -> Iterator[dict[str, Any]]:
    """Each kernel, and stages of variants."""
    job, mixed = Job.build(size, "cuda"), Job.build(size, "cuda", mixed=True)
    expected = job.chosen(job.reference)
    for kernel in ready:
        what = {"size": size.name, **about(kernel)}
        yield timed(clock, lambda kernel=kernel: job.choose(kernel), contexts="equal", **what)
        # Timed runs wrote the same outputs many times over.
        if not all(map(torch.equal, (job.ids_RHN, job.pages_RHN), expected)):
            yield {**what, "contexts": "equal", "error": "chooses other units than the reference"}
        yield timed(clock, lambda kernel=kernel: mixed.choose(kernel), contexts="mixed", **what)
        if kernel == ENGINE:
            for contexts, its in (("equal", job.with_long_lists()), ("mixed", mixed.with_long_lists())):
                yield timed(clock, lambda its=its: its.choose(ENGINE), contexts=contexts, lists="of all units", **what)
    if staged:
        nothing = Job.build(size, "cuda")
        nothing.budgets_R.zero_()
        yield timed(clock, lambda: nothing.choose(ENGINE), size=size.name, kernel="nothing wanted")
        for variant in STAGED[size]:
            for stage in STAGES[:-1]:
                what = {"size": size.name, **about(variant), "until": stage}
                yield timed(clock, lambda variant=variant, stage=stage: job.choose(variant, stage), **what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --dry")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--task", type=int, help="check one kernel or compile the stages of some, as the call does itself"
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes in triton's interpreter; times nothing")
    options = parser.parse_args()
    if options.dry:
        for what, size, kernel in tasks(DRY_KERNELS):
            check(size, kernel, "cpu", requests=3)
            print(f"{what} {size.name} {kernel}: equal")
        return
    if not torch.cuda.is_available() or (options.out is None and options.task is None):
        parser.error("timing needs a CUDA GPU and --out; --dry needs neither")
    if options.task is not None:
        run_task(options.task)
        return
    started = time.perf_counter()
    failed = failures([sys.executable, __file__, "--task"], len(tasks(KERNELS)), CHECK_SECONDS)
    rows: list[dict[str, Any]] = []
    ready: dict[Size, list[Kernel]] = {size: [] for size in KERNELS}
    staged: set[Size] = set()
    for number, (what, size, its) in enumerate(tasks(KERNELS)):
        if number in failed:
            rows.append({"size": size.name, "task": what, "of": str(its), "error": failed[number]})
            print(f"failed: {what} {size.name} {its}: {failed[number]}", flush=True)
        elif what == "check":
            ready[size].append(its)
        else:
            staged.add(size)
    print(f"checked and compiled after {time.perf_counter() - started:.0f} s", flush=True)
    clock = decode_kernels.Clock(options.repeats, 10)
    for size in KERNELS:
        rows += rows_of(clock, size, ready[size], size in staged)
        decode_kernels.write_record(options, "choice-sweep", {"rows": rows}, started)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
