"""The choice of units by the kernel of choice_kernels.py, beside the present one, on a CUDA GPU: checked, then timed.

    python benchmarks/choice_sweep.py --out runs/choice-sweep.json
    python benchmarks/choice_sweep.py --dry     # no GPU: tiny sizes in triton's interpreter, nothing is timed

Every layout is first compiled and compared with the present kernel in a process of its own, all at a time: on normal,
heavy-tailed and tied scores, with equal and with mixed contexts, over outputs that hold rubbish. One that fails is told and
left out. `us` is as in decode_kernels.py (L2 flushed before each call), `warm_us` one of several calls in a row, whose
scores are in L2, as after the kernel that made them. Then both kernels are timed until the end of each of their stages.
Of the scores, the first and the last ones are +inf, as those of units that are always read.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

if "--dry" in sys.argv:
    # Read when triton is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

import choice_kernels
import choice_stages
import decode_kernels
import torch
from choice_kernels import STAGES, Layout
from torch import Tensor

from sparroll import records
from sparroll.attention.decode import triton_top_k
from sparroll.attention.selectors import PageMean

SCORES = ("normal", "heavy tails", "ties")
CHECK_SECONDS = 70
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


SIZES = (Size(7500, 256, 4), Size(15_000, 512, 2), Size(30_000, 1024, 1), Size(1875, 64, 16))
LAYOUTS = {
    SIZES[0]: (
        Layout(8, 8, 1, 1024), Layout(8, 8, 1, 512), Layout(8, 8, 2, 1024), Layout(8, 8, 1, 1024, False),
        Layout(8, 8, 1, 1024, joined=False), Layout(16, 4, 1, 1024), Layout(16, 4, 1, 512), Layout(4, 16, 2, 1024),
        Layout(8, 4, 1, 1024),
    ),
    SIZES[1]: (
        Layout(8, 16, 2, 1024), Layout(8, 16, 2, 2048), Layout(16, 8, 1, 1024), Layout(16, 8, 1, 2048),
        Layout(8, 8, 2, 1024), Layout(16, 8, 1, 1024, False), Layout(16, 8, 1, 1024, joined=False),
        Layout(16, 4, 1, 1024),
    ),
    SIZES[2]: (Layout(8, 8, 4, 2048), Layout(16, 8, 2, 2048), Layout(8, 16, 4, 2048), Layout(16, 4, 2, 2048)),
    SIZES[3]: (Layout(8, 8, 1, 2048), Layout(4, 8, 1, 2048), Layout(16, 4, 1, 2048)),
}  # fmt: skip
DRY_LAYOUTS = {
    Size(700, 24, 4): (Layout(1, 8, 1, 128), Layout(1, 4, 1, 64), Layout(2, 4, 1, 128, False)),
    Size(120, 20, 4): (Layout(1, 8, 1, 128), Layout(1, 8, 1, 128, joined=False)),
}
STAGED = {SIZES[0]: Layout(8, 8, 1, 1024), SIZES[1]: Layout(16, 8, 1, 1024)}
"""Whose stages are timed."""


@dataclass
class Job:
    """Everything that a call of the choice needs, and the present kernel's choice."""

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
        shape = (requests, heads, size.wanted)
        return Job(
            size, scores.to(device), contexts.to(device),
            torch.full((requests,), size.wanted * size.unit_tokens, dtype=torch.int32, device=device),
            table.int().to(device), torch.full(shape, -2, dtype=torch.int32, device=device),
            torch.full(shape, -2, dtype=torch.int32, device=device),
            PageMean(size.unit_tokens, size.unit_tokens, 2 * size.unit_tokens), units_per_block,
        )  # fmt: skip

    def present(self) -> None:
        triton_top_k.choose_units(
            self.scores_RHU, self.contexts_R, self.budgets_R, self.selector, self.ids_RHN, self.pages_RHN, self.table_RM,
            self.units_per_block,
        )  # fmt: skip

    def candidate(self, layout: Layout, stage: str = STAGES[-1]) -> None:
        choice_kernels.choose_units(
            self.scores_RHU, self.contexts_R, self.budgets_R, self.selector, self.ids_RHN, self.pages_RHN, self.table_RM,
            self.units_per_block, layout, stage,
        )  # fmt: skip

    def present_until(self, stage: str) -> None:
        choice_stages.present_until(
            stage, self.scores_RHU, self.contexts_R, self.budgets_R, self.selector, self.ids_RHN
        )

    def chosen(self, choose: Callable[[], None]) -> tuple[Tensor, Tensor]:
        self.ids_RHN.fill_(-2), self.pages_RHN.fill_(-2)
        choose()
        return self.ids_RHN.clone(), self.pages_RHN.clone()


def check(size: Size, layout: Layout, device: str, requests: int) -> None:
    """Raises where the candidate chooses other units than the present kernel."""
    for kind in SCORES:
        for mixed in (False, True):
            job = Job.build(size, device, kind, mixed, requests)
            expected = job.chosen(job.present)
            found = job.chosen(lambda job=job: job.candidate(layout))
            for ours, theirs, what in zip(found, expected, ("units", "pages"), strict=True):
                rows = int((ours != theirs).any(-1).sum())
                assert not rows, f"{what} differ in {rows} rows, {kind}, {'mixed' if mixed else 'equal'} contexts"


def compile_stages(size: Size, layout: Layout, device: str) -> None:
    job = Job.build(size, device)
    for stage in STAGES[:-1]:
        job.candidate(layout, stage), job.present_until(stage)
    if device == "cuda":
        torch.cuda.synchronize()


def tasks(layouts: dict[Size, tuple[Layout, ...]]) -> list[tuple[str, Size, Layout]]:
    """What is run in processes of their own."""
    checks = [("check", size, layout) for size, its in layouts.items() for layout in its]
    return checks + [("stages", size, layout) for size, layout in STAGED.items() if size in layouts]


def run_task(number: int) -> None:
    what, size, layout = tasks(LAYOUTS)[number]
    if what == "check":
        check(size, layout, "cuda", requests=32)
        torch.cuda.synchronize()
    else:
        compile_stages(size, layout, "cuda")


def failures() -> dict[int, str]:
    """Why tasks failed, by number. All run at a time, because compiling is what takes the time."""
    command = [sys.executable, __file__, "--task"]
    everything = tasks(LAYOUTS)
    waiting, running, failed = list(range(len(everything))), {}, {}
    ends = time.monotonic() + CHECK_SECONDS
    most = max(2, (os.cpu_count() or 2) - 2)
    while waiting or running:
        while waiting and len(running) < most:
            number = waiting.pop(0)
            running[number] = subprocess.Popen(
                [*command, str(number)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        number, process = next(iter(running.items()))
        try:
            _, told = process.communicate(timeout=max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            told = f"not ready after {CHECK_SECONDS} s"
            waiting.clear()
        if process.returncode:
            failed[number] = told.strip().splitlines()[-1] if told.strip() else f"exit {process.returncode}"
        del running[number]
    return failed | dict.fromkeys(waiting, "not begun in time")


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


def rows_of(clock: decode_kernels.Clock, size: Size, ready: list[Layout], staged: bool) -> Iterator[dict[str, Any]]:
    """The present kernel, the candidates, and the stages of both."""
    job, mixed = Job.build(size, "cuda"), Job.build(size, "cuda", mixed=True)
    expected = job.chosen(job.present)
    yield timed(clock, job.present, size=size.name, kernel="present", contexts="equal")
    yield timed(clock, mixed.present, size=size.name, kernel="present", contexts="mixed")
    for layout in ready:
        about = {"size": size.name, "kernel": "candidate", **asdict(layout)}
        yield timed(clock, lambda layout=layout: job.candidate(layout), contexts="equal", **about)
        # Timed runs wrote the same outputs many times over.
        if not all(map(torch.equal, (job.ids_RHN, job.pages_RHN), expected)):
            yield {**about, "contexts": "equal", "error": "chooses other units than the present kernel"}
        yield timed(clock, lambda layout=layout: mixed.candidate(layout), contexts="mixed", **about)
    if size in STAGED:
        layout = STAGED[size]
        nothing = Job.build(size, "cuda")
        nothing.budgets_R.zero_()
        yield timed(clock, lambda: nothing.candidate(layout), size=size.name, kernel="nothing wanted")
        for stage in STAGES[:-1]:
            yield timed(
                clock, lambda stage=stage: job.present_until(stage), size=size.name, kernel="present", until=stage
            )
        for stage in STAGES[:-1] if staged else ():
            yield timed(
                clock, lambda stage=stage: job.candidate(layout, stage), size=size.name, kernel="candidate", until=stage
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --dry")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--task", type=int, help="check one layout or compile the stages of one, as the call does itself"
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes in triton's interpreter; times nothing")
    options = parser.parse_args()
    if options.dry:
        for what, size, layout in tasks(DRY_LAYOUTS):
            check(size, layout, "cpu", requests=3)
            print(f"{what} {size.name} {layout}: equal")
        return
    if not torch.cuda.is_available() or (options.out is None and options.task is None):
        parser.error("timing needs a CUDA GPU and --out; --dry needs neither")
    if options.task is not None:
        run_task(options.task)
        return
    started = time.perf_counter()
    failed = failures()
    rows: list[dict[str, Any]] = []
    ready: dict[Size, list[Layout]] = {size: [] for size in SIZES}
    staged: set[Size] = set()
    for number, (what, size, layout) in enumerate(tasks(LAYOUTS)):
        if number in failed:
            rows.append({"size": size.name, "task": what, **asdict(layout), "error": failed[number]})
            print(f"failed: {what} {size.name} {layout}: {failed[number]}", flush=True)
        elif what == "check":
            ready[size].append(layout)
        else:
            staged.add(size)
    print(f"checked and compiled after {time.perf_counter() - started:.0f} s", flush=True)
    clock = decode_kernels.Clock(options.repeats, 10)
    for size in SIZES:
        rows += rows_of(clock, size, ready[size], size in staged)
    wall = time.perf_counter() - started
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    print(
        f"wrote {records.write(options.out, 'choice-sweep', {'rows': rows}, config=settings, seed=0, wall_seconds=wall)}"
    )


if __name__ == "__main__":
    main()
