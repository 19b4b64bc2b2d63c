"""Compiles the kernels of the sparse training pass, and the one that checks drafts, for Hopper, on a machine without a
GPU: `python tests/kernels/sm90.py [full]` prints registers, stack (spills) and shared memory of each. A process of its
own, since triton interprets in the tests'.

What the interpreter runs need not compile: a variable of a loop, say, must keep its type. `full` takes every dtype with head
sizes 64 and 128 and groups of 1, 2 and 4 (minutes); otherwise each kernel is compiled once.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparroll.attention.masked import triton_backward, triton_forward, triton_unit_choice, triton_unit_lists
from sparroll.attention.masked.triton_tiles import Layout, MaskedTile
from sparroll.engines.vllm.windows import triton_masses

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_POINTERS = {
    **dict.fromkeys(("words", "listed", "counts", "readers", "reader_counts", "wanted", "limits"), "*i32"),
    **dict.fromkeys(("log_sum", "product", "scores", "heats", "found"), "*fp32"),
    **dict.fromkeys(("requests", "places", "ids"), "*i64"),
    **dict.fromkeys(("index", "dense_logits", "draft_logits"), "*bf16"),
    **dict.fromkeys(
        ("query", "keys", "values", "out", "grad_out", "grad_query", "grad_keys", "grad_values"), "of the model"
    ),
}
Kernel = tuple[str, Any, dict[str, Any], dict[str, int]]


def kernels(dtype: torch.dtype, dim: int, group: int, tile: MaskedTile | None = None) -> Iterator[Kernel]:
    """Name, function, constants and launch options, as they are launched for units of 16 on an H200."""
    query = torch.empty(1, 2 * group, 1, dim, dtype=dtype)
    tile = tile or MaskedTile.default(dim, group, query.element_size(), torch.device("cpu"))
    layout = Layout.of(query, 2, 16, tile.rows, tile.key_lanes).constants()
    yield (
        "forward",
        triton_forward._forward,
        layout,
        {"num_warps": tile.forward_warps, "num_stages": tile.forward_stages},
    )
    backward = triton_backward
    yield "dq", backward._query_gradient, layout, {"num_warps": tile.query_warps, "num_stages": tile.query_stages}
    keyed = Layout.of(query, 2, 16, tile.owning_rows, tile.owned_key_lanes).constants()
    yield "dk, dv", backward._key_gradient, keyed, {"num_warps": tile.key_warps, "num_stages": tile.key_stages}
    choice, sizes = triton_unit_choice, {"HEADS": 2, "UNIT": 16, "RECENT": 2}
    lanes_d = triton.next_power_of_2(dim)
    score = {"G": group, "D": dim, "LANES_D": lanes_d, "ROWS": 64, "LANES_U": 128, "SPAN": 4, "DOT": tl.bfloat16}
    yield "score", choice._score, {**sizes, **score}, {"num_warps": 4, "num_stages": 2}


def untyped(full: bool) -> Iterator[Kernel]:
    """Those that know neither the model's dtype nor its heads."""
    choice, sizes = triton_unit_choice, {"HEADS": 2, "UNIT": 16, "RECENT": 2, "FIRST": 1}
    for lanes, warps in ((256, 1), (2048, 2), (8192, 8))[: None if full else 1]:
        yield f"limit of {lanes}", choice._limit, {**sizes, "LANES": lanes}, {"num_warps": warps}
    yield "mark", choice._mark, {**sizes, "LANES_U": 128}, {"num_warps": 4}
    lists = triton_unit_lists
    yield "list of units", lists._list_units, {"UNIT": 16, "TILE": lists.TILE}, {"num_warps": 4}
    yield (
        "list of readers",
        lists._list_readers,
        {"UNIT": 16, "TILE_UNITS": 4, "TILE": lists.READER_TILE},
        {"num_warps": 4},
    )
    yield "masses", triton_masses._masses, {"TILE": triton_masses.TILE}, {"num_warps": triton_masses.WARPS}


def compiled(kernel: Kernel, dtype: torch.dtype) -> dict[str, str]:
    """The forms it goes through, by name. Numbers are multiples of 16 as in a real launch, where Triton may know that."""
    _, function, constants, options = kernel
    signature: dict[str, str] = {}
    attributes = {}
    for number, (name, parameter) in enumerate(zip(function.arg_names, function.params, strict=True)):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = _POINTERS.get(name, "fp32" if name.startswith(("scale", "floor")) else "i32")
        if signature[name] == "of the model":
            signature[name] = f"*{_NAMES[dtype]}"
        if signature[name] != "fp32" and not parameter.do_not_specialize:
            attributes[(number,)] = [["tt.divisibility", 16]]
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm  # type: ignore[no-any-return]


def usage(cubin: bytes) -> str:
    """Registers, stack (where registers spill) and static shared memory, as cuobjdump reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    return " ".join(re.findall(r"\b(?:REG|STACK|SHARED|LOCAL):\d+", told))


def main(full: bool) -> None:
    cases = [(dtype, dim, group) for dtype in _NAMES for dim in (64, 128) for group in (1, 2, 4)]
    if not full:
        cases = [(torch.bfloat16, 64, 2)]
    for dtype, dim, group in cases:
        for kernel in kernels(dtype, dim, group):
            forms = compiled(kernel, dtype)
            print(f"{kernel[0]}, {_NAMES[dtype]}, head {dim}, group {group}: {usage(forms['cubin'])}", flush=True)
    for kernel in untyped(full):
        print(f"{kernel[0]}: {usage(compiled(kernel, torch.float32)['cubin'])}", flush=True)


if __name__ == "__main__":
    main("full" in sys.argv[1:])
