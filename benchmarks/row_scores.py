"""What it takes to score the sampled tokens of a decode step, and to list the likeliest ones, by our kernels and by vLLM's
own function, on a CUDA GPU with vLLM: checked, then timed.

    python benchmarks/row_scores.py --out benchmarks/results/row-scores-h200.json
    python benchmarks/row_scores.py --dry     # no GPU and no vLLM: tiny sizes in triton's interpreter, nothing is timed

One call runs the kernels' own tests, compiled, and the record says how many passed. Then both sides score the same
logits, their scores are compared, and both are timed: `us` is as in decode_kernels.py (CUDA graph replay, the L2 cache
flushed before each call, median of repeats). 1,024 rows are a chunk of a prompt that is read again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

if "--dry" in sys.argv:
    # Read when triton is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

import decode_kernels
import fine_kernels
import torch
from kernel_clock import AnyClock
from torch import Tensor

from sparroll.engines.vllm.scores import reference, triton_scores

TESTS = ("test_row_scores.py",)
DRY = {"rows": [2], "vocabulary": 5000, "repeats": 1}


def of_vllm(logits_NV: Tensor, sampled_N: Tensor, top_k: int) -> reference.RowScores:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    found = compute_topk_scores(logits_NV, top_k, sampled_N)
    return reference.RowScores(found.logprob_token_ids, found.logprobs, found.selected_token_ranks)


def check(ours: reference.RowScores, theirs: reference.RowScores) -> None:
    """Raise unless both say the same. The order of equal logits, which bf16 has, is nobody's promise but ours, so that
    the lists are compared by their log-probabilities."""
    torch.testing.assert_close(ours.logp_NW, theirs.logp_NW, atol=2e-5, rtol=1e-5)
    assert torch.equal(ours.ids_NW[:, 0], theirs.ids_NW[:, 0]) and torch.equal(ours.ranks_N, theirs.ranks_N)


def rows_of(clock: AnyClock, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    other = reference.row_scores if options.dry else of_vllm
    for dtype, rows, top_k in itertools.product(("bfloat16", "float32"), options.rows, options.top_k):
        generator = torch.Generator(options.device).manual_seed(options.seed)
        logits_NV = 3 * torch.randn(rows, options.vocabulary, generator=generator, device=options.device)
        logits_NV = logits_NV.to(getattr(torch, dtype))
        sampled_N = torch.randint(options.vocabulary, (rows,), generator=generator, device=options.device)
        given = (logits_NV, sampled_N, top_k)
        check(triton_scores.row_scores(*given), other(*given))
        sides: dict[str, Callable[..., Any]] = {"ours": triton_scores.row_scores, "vllm": other}
        us = {name: clock.graph_us(lambda call=call, given=given: call(*given)) for name, call in sides.items()}
        row = {"dtype": dtype, "rows": rows, "top_k": top_k, **{f"{name}_us": value for name, value in us.items()}}
        found.append(row | {"speedup": us["vllm"] / us["ours"]})
        print(f"{dtype:>9} {rows:>6} {top_k:>6} {us['ours']:>10.1f} {us['vllm']:>10.1f}", flush=True)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON record; not needed with --dry")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64, 1024])
    parser.add_argument("--top-k", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--calls", type=int, default=10, help="calls in each graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="tiny sizes in triton's interpreter; times nothing")
    options = parser.parse_args()
    if options.dry:
        vars(options).update(DRY)
    elif not torch.cuda.is_available() or options.out is None:
        parser.error("timing needs a CUDA GPU and --out; --dry needs neither")
    options.device = "cpu" if options.dry else "cuda"
    return options


def main() -> None:
    options = parsed()
    started = time.perf_counter()
    tests, clock = fine_kernels.tested(options, TESTS)
    print(f"{'logits':>9} {'rows':>6} {'listed':>6} {'ours us':>10} {'vllm us':>10}")
    rows = rows_of(clock, options)
    assert options.dry or not any(math.isnan(row["speedup"]) for row in rows)
    if options.out:
        decode_kernels.write_record(options, "row-scores", {"tests": tests, "rows": rows}, started)
    print(f"wrote {options.out}" if options.out else "no record without --out")


if __name__ == "__main__":
    main()
