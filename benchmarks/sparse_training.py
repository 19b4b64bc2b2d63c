"""The sparse policy's training forward and backward against dense attention, on a CUDA GPU.

    python benchmarks/sparse_training.py --out benchmarks/results/sparse-training-h200.json     # about two minutes

First the compiled kernels at odd sizes, the choice of units against exact scores and attention against the reference:
nothing is timed before that holds. Then one layer of Qwen3-1.7B's attention at each length: the choice of units by the
kernels and by the generic path, forward, and forward with backward, medians of warm repeats, beside torch's flash
attention of the same shape; with impl triton also each part of them alone, and the kernel of dk and dv with other
tiles. How much a block of 32 positions loads depends on how alike their choices are, so queries come in two kinds:
`random` (nothing alike: the worst there is) and `smooth` (neighbours alike). Last whole training passes (forward and
backward) of a model of that shape with random weights, gradient checkpointing and the trainer's precision (fp32 weights,
bf16 arithmetic): seconds and peak GPU memory of the policy's, and of a LoRA adapter's under dense and sparse attention.
`--device cpu --impl reference` with small sizes runs everything but the GPU's own figures.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from random_models import random_qwen3
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparroll import records
from sparroll.attention.masked.api import implementation, masked_attention
from sparroll.attention.masked.unit_bitmap import unpack
from sparroll.attention.masked.unit_choice import chosen_words
from sparroll.attention.masked.unit_choice import implementation as choice_implementation
from sparroll.attention.selectors import PageMean
from sparroll.engines.adapter import Adapter
from sparroll.engines.scoring import response_logp
from sparroll.progress import quiet_transformers
from sparroll.schedule import Schedule
from sparroll.train.update.gradient_step import autocast
from sparroll.types import TokenBatch

ODD_TOKENS = (1, 15, 17, 63, 100, 1000)
# Query heads per KV head, head size, dtype.
CHECKED = ((2, 128, torch.bfloat16), (4, 64, torch.float32), (8, 96, torch.float16))
PROMPT_TOKENS = 512
# Keys that a program of dk and dv owns, and its warps; the first is the default.
KEY_TILES = ((None, None), (64, 8), (128, 8), (32, 4))
SMOOTH_OVER = 64
"""Positions over which smooth queries go from one random direction to the next."""


def choice_checks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every unit that is read has an exact score no lower than any that competes and is not read, but for the rounding of
    fp32 sums, and there are as many as the budget holds. Also how many (position, unit) pairs the generic path changes."""
    found = []
    selector = PageMean(page_tokens=4, first_tokens=4, recent_tokens=8)
    impl = choice_implementation(options.impl, selector)
    for group, dim, dtype in CHECKED:
        for tokens in ODD_TOKENS:
            generator = torch.Generator().manual_seed(tokens)
            drawn = [torch.randn(2, tokens, heads, dim, generator=generator) for heads in (2 * group, 2)]
            query, keys = (each.to(options.device, dtype).transpose(1, 2) for each in drawn)
            context = torch.arange(1, tokens + 1, device=options.device)
            budgets = (selector.least_budget_tokens + context // 5) // 4 * 4
            dense = (context <= torch.tensor([[3], [40]], device=options.device)) | (budgets >= context)
            ours, generic = (
                unpack(chosen_words(query, keys, dense, budgets, selector, 1.0, each), 0, tokens)
                for each in (impl, "reference")
            )
            units = (context + 3)[:, None] // 4
            unit = torch.arange(ours.shape[3], device=options.device)
            wanted = torch.where(dense, units[:, 0], budgets // 4)
            assert bool((ours.sum(-1) == wanted[:, None]).all()), f"{tokens} tokens, group {group}: too many or too few"
            competes = (unit >= 1) & (unit < units - 2)
            assert bool((ours | competes | (unit >= units)).all()), f"{tokens} tokens, group {group}: a unit is missing"
            index = selector.build_index(F.pad(keys, (0, 0, 0, -tokens % 4)).unflatten(2, (-1, 4))).double()
            scores = query.double().unflatten(1, (2, group)).mean(2) @ index.transpose(2, 3)
            lowest = scores.masked_fill(~(ours & competes), torch.inf).amin(-1)
            highest = scores.masked_fill(ours | ~competes, -torch.inf).amax(-1)
            allowed = 2e-6 * float(scores.abs().max())
            assert bool((lowest >= highest - allowed).all()), (
                f"{tokens} tokens, group {group}, {dtype}: not the best units"
            )
            found.append(
                {
                    "tokens": tokens,
                    "group": group,
                    "head_dim": dim,
                    "dtype": str(dtype),
                    "differ_from_generic": int((ours != generic).sum()),
                }
            )
    return found


def checks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Largest error of output and gradients over the largest value, next to what is allowed. AssertionError beyond it."""
    found = []
    for group, dim, dtype in CHECKED:
        if options.device == "cpu" and dtype == torch.bfloat16:
            # Triton's interpreter multiplies the bits of bf16 matrices instead of their values.
            dtype = torch.float16
        for tokens in ODD_TOKENS:
            generator = torch.Generator().manual_seed(tokens)

            def made(heads: int, tokens: int = tokens, dim: int = dim, dtype: torch.dtype = dtype) -> Tensor:
                drawn = torch.randn(2, tokens, heads, dim, generator=generator)  # noqa: B023
                return drawn.to(options.device, dtype).transpose(1, 2)

            query, keys, values, grad_out = made(2 * group), made(2), made(2), made(2 * group)
            units = -(-tokens // 16)
            words = torch.randint(-(1 << 31), 1 << 31, (2, 2, -(-tokens // 32), units), generator=generator)
            words = words.int().to(options.device)
            words[:, :, :, ::3] &= words[:, :, :, ::3] >> 7
            exact = _both(query.double(), keys.double(), values.double(), grad_out.double(), words, "reference")
            ours = _both(query, keys, values, grad_out, words, options.impl)
            worst = 0.0
            for name, mine, known in zip(("out", "dq", "dk", "dv"), ours, exact, strict=True):
                largest = max(float(known.abs().max()), 0.1)
                error = float((mine.double() - known).abs().max()) / largest
                allowed = 4 * torch.finfo(dtype).eps + 1e-5
                assert error <= allowed, (
                    f"{tokens} tokens, group {group}, {dtype}: {name} off by {error:.1e} of {allowed:.1e}"
                )
                worst = max(worst, error)
            found.append({"tokens": tokens, "group": group, "head_dim": dim, "dtype": str(dtype), "error": worst})
    return found


def _both(query: Tensor, keys: Tensor, values: Tensor, grad_out: Tensor, words: Tensor, impl: str) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in (query, keys, values)]
    out = masked_attention(*leaves, words, 16, query.shape[-1] ** -0.5, impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def layer(options: argparse.Namespace, schedule: Schedule, tokens: int, queries: str) -> dict[str, Any]:
    """One layer's attention at one length."""
    device, dtype = options.device, getattr(torch, options.dtype)
    torch.manual_seed(tokens)

    def made(heads: int, smooth: bool = False) -> Tensor:
        drawn = torch.randn(1, heads, tokens, options.head_dim, device=device)
        if smooth:
            every = torch.randn(1, heads, -(-tokens // SMOOTH_OVER) + 1, options.head_dim, device=device).flatten(0, 1)
            slow = F.interpolate(every.mT, size=tokens, mode="linear", align_corners=True).mT.unflatten(0, (1, heads))
            drawn = slow + 0.3 * drawn
        return drawn.to(dtype).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()

    leaves = [made(options.heads, queries == "smooth"), made(options.kv_heads), made(options.kv_heads)]
    grad_out = torch.randn_like(leaves[0])
    context = torch.arange(1, tokens + 1, device=device)
    budgets = schedule.kv_budget_tokens(context)
    dense = ((context <= PROMPT_TOKENS) | (budgets >= context))[None]
    unit, scale = schedule.selector.unit_tokens, options.head_dim**-0.5

    def choose(impl: str = choice_implementation(options.impl, schedule.selector)) -> Tensor:
        query, keys = leaves[0].detach(), leaves[1].detach()
        return chosen_words(query, keys, dense, budgets, schedule.selector, scale, impl)

    words = choose()

    def sparse() -> Tensor:
        return masked_attention(*leaves, words, unit, scale, options.impl)

    def flash() -> Tensor:
        only = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else contextlib.nullcontext()
        with only:
            return F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale, enable_gqa=True)

    def with_backward(attend: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), leaves, grad_out)

    row: dict[str, Any] = {"tokens": tokens, "queries": queries, **_shares(words, unit, tokens)}
    differing = words ^ choose("reference")
    row["choice_differs_from_generic"] = sum(
        int(unpack(differing, at, min(at + 1024, tokens)).sum()) for at in range(0, tokens, 1024)
    )
    row["choose_ms"] = _median_ms(choose, options)
    row["choose_generic_ms"] = _median_ms(lambda: choose("reference"), options, repeats=max(2, options.repeats // 3))
    for name, attend in (("sparse", sparse), ("dense", flash)):
        with torch.no_grad():
            row[f"{name}_forward_ms"] = _median_ms(attend, options)
        row[f"{name}_both_ms"] = _median_ms(with_backward(attend), options)
    row["words_bytes"] = words.numel() * 4
    row["extra_bytes"] = _extra_bytes(with_backward(sparse), leaves, options)
    if options.impl == "triton":
        row["parts"] = parts(options, [*(leaf.detach() for leaf in leaves), grad_out], words, unit, scale)
    return row


def parts(options: argparse.Namespace, given: list[Tensor], words: Tensor, unit: int, scale: float) -> dict[str, float]:
    """Milliseconds of each kernel of a forward and backward alone; dk and dv also with other tiles and warps."""
    from sparroll.attention.masked import triton_backward, triton_unit_lists
    from sparroll.attention.masked.triton_forward import masked_attention as attend
    from sparroll.attention.masked.triton_tiles import Layout, MaskedTile

    query, keys, values, grad_out = given
    heads, (many, dim) = keys.shape[1], query.shape[1::2]
    tile = MaskedTile.default(dim, many // heads, query.element_size(), query.device)
    out = attend(query, keys, values, words, unit, scale)
    grad_query, grad_keys, grad_values = (torch.empty_like(each) for each in given[:3])
    listed, counts = triton_unit_lists.units_read(words, unit)
    # Any log-sums will do for the time, as long as no probability overflows.
    log_sum = torch.full((*keys.shape[:3], many // heads), 100.0, device=query.device)
    product = torch.zeros_like(log_sum)
    found = {"units_read_ms": _median_ms(lambda: triton_unit_lists.units_read(words, unit), options)}

    def query_gradient() -> None:
        triton_backward.query_gradient(
            query, keys, values, words, listed, counts, out, grad_out, log_sum, product, grad_query, unit, scale, tile
        )

    found["dq_ms"] = _median_ms(query_gradient, options)
    for lanes, warps in KEY_TILES:
        other = replace(tile, owned_key_lanes=lanes or tile.owned_key_lanes, key_warps=warps or tile.key_warps)
        layout = Layout.of(query, heads, unit, other.owning_rows, other.owned_key_lanes)
        readers, reader_counts = triton_unit_lists.readers_of(words, unit, layout.tile_units)
        name = "" if not lanes else f"_{lanes}_keys_{warps}_warps"
        if not lanes:
            found["readers_of_ms"] = _median_ms(
                lambda layout=layout: triton_unit_lists.readers_of(words, unit, layout.tile_units), options
            )

        def key_gradient(
            layout: Layout = layout,
            other: MaskedTile = other,
            readers: Tensor = readers,
            reader_counts: Tensor = reader_counts,
        ) -> None:
            triton_backward.key_gradient(
                query, keys, values, words, readers, reader_counts, grad_out, log_sum, product, grad_keys, grad_values,
                layout, scale, other,
            )  # fmt: skip

        found[f"dk_dv{name}_ms"] = _median_ms(key_gradient, options)
        found[f"dk_dv{name}_loaded_share"] = float(reader_counts.sum()) / float(
            (words.shape[2] - torch.arange(readers.shape[2]) * layout.tile_units * unit // 32).sum()
            * heads
            * len(words)
        )
    return found


def _shares(words: Tensor, unit: int, tokens: int) -> dict[str, float]:
    """Of the units that causal attention reads: those that positions read, and those that blocks of 32 load."""
    first = torch.arange(words.shape[3], device=words.device) * unit
    last = torch.arange(words.shape[2], device=words.device) * 32 + 31
    whole = int((first <= last.clamp_max(tokens - 1)[:, None]).sum()) * words.shape[1]
    seen = int((first <= torch.arange(tokens, device=words.device)[:, None]).sum()) * words.shape[1]
    read = sum(int(unpack(words, at, min(at + 1024, tokens)).sum()) for at in range(0, tokens, 1024))
    return {"read_share": read / seen, "loaded_share": int((words != 0).sum()) / whole}


def _extra_bytes(run: Callable[[], object], leaves: list[Tensor], options: argparse.Namespace) -> int | None:
    """Peak memory of a forward and backward beyond what was there and beyond output and gradients."""
    if options.device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    results = 2 * leaves[0].nbytes + leaves[1].nbytes + leaves[2].nbytes
    return torch.cuda.max_memory_allocated() - before - results


def model(options: argparse.Namespace, schedule: Schedule, length: int) -> dict[str, Any]:
    """One training pass of a whole model as the trainer runs it: the policy's own, the adapter's under dense attention, and
    the adapter's under the schedule, which is what DistillSparse adds to a step."""
    quiet_transformers()
    policy = random_qwen3(
        options.device, "float32", 0, vocab_size=options.vocabulary, hidden_size=options.hidden,
        intermediate_size=3 * options.hidden, num_hidden_layers=options.layers, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=options.head_dim, max_position_embeddings=length + 1,
        rope_theta=1_000_000.0,
    )  # fmt: skip
    adapted = Adapter(policy).adapted
    prompt = min(PROMPT_TOKENS, length // 2)
    counts = (torch.tensor([each], device=options.device) for each in (prompt, length - prompt))
    ids = torch.randint(1, options.vocabulary, (1, length), device=options.device)
    batch = TokenBatch(ids, *counts, torch.zeros(1, length - prompt, device=options.device))
    found: dict[str, Any] = {"tokens": length, "parameters": sum(each.numel() for each in policy.parameters())}
    for name, module, used in (
        ("policy", policy, None),
        ("adapter_dense", adapted, None),
        ("adapter", adapted, schedule),
    ):
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.train()
        passes, peak = [], None
        for _ in range(options.passes + 1):
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            started = _now(options)
            with autocast("bf16" if options.dtype == "bfloat16" else "fp32", torch.device(options.device)):
                logp = response_logp(module, batch, 1.0, used, impl=options.impl)
            forward = _now(options)
            logp.mean().backward()
            passes.append({"forward_seconds": forward - started, "both_seconds": _now(options) - started})
            peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
            assert all(bool(each.grad.isfinite().all()) for each in module.parameters() if each.grad is not None)
            module.zero_grad(set_to_none=True)
            del logp
        # The first pass compiles and fills allocator pools.
        medians = {each: statistics.median(taken[each] for taken in passes[1:]) for each in passes[0]}
        found[name] = {**medians, "peak_gib": peak, "all_passes": passes}
    found["adapter_over_policy"] = found["adapter"]["both_seconds"] / found["policy"]["both_seconds"]
    return found


def _now(options: argparse.Namespace) -> float:
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _median_ms(run: Callable[[], object], options: argparse.Namespace, repeats: int | None = None) -> float:
    run(), run()
    taken = []
    for _ in range(repeats or options.repeats):
        started = _now(options)
        run()
        taken.append(_now(options) - started)
    return 1000 * statistics.median(taken)


def table(rows: list[dict[str, Any]]) -> str:
    columns = {
        "tokens": "6d", "queries": "8s", "read_share": "11.3f", "loaded_share": "13.3f", "choose_ms": "10.2f",
        "choose_generic_ms": "17.2f",
        "sparse_forward_ms": "18.2f", "dense_forward_ms": "17.2f", "sparse_both_ms": "15.2f", "dense_both_ms": "14.2f",
    }  # fmt: skip
    lines = [" ".join(columns)]
    lines += [" ".join(f"{row[name]:{form}}".ljust(len(name)) for name, form in columns.items()) for row in rows]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--impl", default="auto", help="what runs the sparse attention")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--schedule", default="qwen3-1.7b-0.86")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384, 32_768])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--passes", type=int, default=3, help="timed passes of the whole model; 0 leaves it out")
    parser.add_argument(
        "--model-tokens", type=int, nargs="+", help="lengths of the whole model's pass (default: the longest)"
    )
    options = parser.parse_args(arguments)
    options.impl = implementation(options.impl, options.device)
    options.model_tokens = options.model_tokens or [max(options.tokens)]
    started, schedule = time.perf_counter(), Schedule.load(options.schedule)
    results: dict[str, Any] = {"impl": options.impl, "choice_checks": choice_checks(options)}
    differing = sum(each["differ_from_generic"] for each in results["choice_checks"])
    print(
        f"the choice is the best in {len(results['choice_checks'])} cases, {differing} units beside the generic one's"
    )
    results["checks"] = checks(options)
    print(f"{options.impl} equals the reference in {len(results['checks'])} cases", flush=True)
    results["layer"] = [
        layer(options, schedule, tokens, queries) for tokens in options.tokens for queries in ("random", "smooth")
    ]
    print(table(results["layer"]), flush=True)
    for row in results["layer"]:
        if "parts" in row:
            told = ", ".join(f"{name.removesuffix('_ms')} {value:.2f}" for name, value in row["parts"].items())
            print(f"{row['tokens']} {row['queries']}, ms: {told}", flush=True)
    results["model"] = [model(options, schedule, length) for length in options.model_tokens if options.passes]
    for found in results["model"]:
        for name in ("policy", "adapter_dense", "adapter"):
            taken = found[name]
            memory = "" if taken["peak_gib"] is None else f", peak {taken['peak_gib']:.1f} GiB"
            print(
                f"model, {found['tokens']} tokens, {name}: forward {taken['forward_seconds']:.2f} s, "
                f"with backward {taken['both_seconds']:.2f} s{memory}"
            )
    wall = time.perf_counter() - started
    config = {name: value for name, value in vars(options).items() if name != "out"}
    path = records.write(options.out, "sparse-training", results, config=config, seed=0, wall_seconds=wall)
    print(f"wrote {path} after {wall:.0f} s")


if __name__ == "__main__":
    main()
