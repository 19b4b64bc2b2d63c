"""Compiles all kernels for Hopper, on a machine without a GPU: `python tests/kernels/sm90.py [full] [choice | others]`
prints registers, stack (spills) and shared memory of each, behind the file and the function, how many loads of 16 bytes
it has (WIDE), how many of them are begun before one has to be there (AHEAD), how often it reads global memory before it
waits for the kernel in front of it (EARLY), how often it writes or ends before (HASTY), and how many reductions that
triton gets wrong up to 3.6 (SPLIT). A process of its own, since triton interprets in the tests'.

What the interpreter runs need not compile: a variable of a loop, say, must keep its type. `full` takes every dtype with
head sizes 64 and 128 and groups of 1, 2 and 4, and other layouts (minutes); otherwise each kernel is compiled once, and
the choice of units in every layout that the host can choose. `choice` and `others` take that kernel alone, and all but
it.
"""

from __future__ import annotations

import ast
import itertools
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

from sparroll.attention import row_bytes
from sparroll.attention.decode import (
    triton_attend,
    triton_budgets,
    triton_groups,
    triton_index,
    triton_work_split,
)
from sparroll.attention.decode.choice import triton_top_k
from sparroll.attention.decode.layers_apart import ALIGNED_BYTES
from sparroll.attention.decode.remainder import triton_remainder, triton_unread
from sparroll.attention.decode.scores import triton_score, triton_score_codes
from sparroll.attention.decode.workspace import (
    MANY_PAIRS,
    SCORED_TILE_BYTES,
    Tile,
    default_scored_tile,
    unread_tile_units,
)
from sparroll.attention.masked import triton_backward, triton_forward, triton_unit_choice, triton_unit_lists
from sparroll.attention.masked.triton_tiles import Layout, MaskedTile
from sparroll.attention.selectors import QuantizedMean, Remainder, quantized_mean
from sparroll.engines.vllm.scores import triton_scores
from sparroll.engines.vllm.windows import triton_draws, triton_masses

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_POINTERS = {
    **dict.fromkeys(("words", "listed", "counts", "readers", "reader_counts", "wanted", "limits"), "*i32"),
    **dict.fromkeys(("log_sum", "log_weights", "product", "scores", "heats", "found"), "*fp32"),
    **dict.fromkeys(("block_table", "context_tokens", "kv_budget_tokens", "unit_ids", "pages", "candidates"), "*i32"),
    "peaks": "*i32",
    **dict.fromkeys(("scored_before", "read_before", "arrivals", "lists_complete"), "*i32"),
    **dict.fromkeys(("mixed", "unread_mixed", "unread_log_sum", "groups_fp32"), "*fp32"),
    "groups": "*u8",
    "groups_bf16": "*bf16",
    **dict.fromkeys(("requests", "places", "ids", "slots", "apart"), "*i64"),
    **dict.fromkeys(("index", "dense_logits", "draft_logits"), "*bf16"),
    **dict.fromkeys(
        ("query", "keys", "values", "out", "grad_out", "grad_query", "grad_keys", "grad_values"), "of the model"
    ),
    # Of new tokens: where they lie and where they go, and the strides of both.
    "new": (*("of the model",) * 4, "*i64", *(("i32",) * strides for strides in (2, 2, 3, 3)), "i32"),
}
_POINTERS_OF = {
    "triton_budgets": {
        **dict.fromkeys(("steps", "which", "out"), "*i32"),
        "requests": "i32",
    },
    "triton_draws": {
        **dict.fromkeys(("tile_most", "tile_sum"), "*fp32"),
        "logits": "*bf16",
        "greedy": "*i1",
        "uniforms": "*fp64",
    },
    "triton_scores": {**dict.fromkeys(("logits", "parts", "logp"), "*fp32"), "sampled": "*i64", "ranks": "*i64"},
}
"""Where a name means another thing in one file."""
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


FINE_UNITS = ((4, 4, 16), (2, 2, 16), (1, 1, 16), (8, 2, 32), (16, 4, 16))
"""Tokens and bits of units, and tokens of a block. Four units of 2 bits in one are a layout of their own."""


def fine_unit_kernels(dtype: torch.dtype, dim: int, group: int, layouts: bool = False) -> Iterator[Kernel]:
    """Of a decode step over units of few bits."""
    for unit, bits, block in FINE_UNITS:
        selector = QuantizedMean(unit, 16, 32, bits)
        sizes = {"UNIT": unit, "UNITS_PER_BLOCK": block // unit, "D": dim, "BITS": bits, "launch_pdl": True}
        words, row_words = selector.scale_at(dim) // 4, selector.index_width(dim) // 4
        score = {
            **sizes, "GROUP": block // unit, "FIRST": 16 // unit, "RECENT": 32 // unit, "HEADS": 8, "G": group, "W": words,
            "ROW_WORDS": row_words, "LANES_W": triton.next_power_of_2(words),
            "ALIGN": triton_index.loaded_bytes(selector, dim) // 4, "DP4A": True,
        }  # fmt: skip
        tile = default_scored_tile(4 * words, bits)
        tiles, lanes = ((tile, tile // 2), (32, 64, 128, 256, 512, 1024)) if layouts else ((tile,), (32, 256))
        for its_tile, request_lanes in itertools.product(tiles, lanes):
            layout = triton_score_codes.ScoreLayout.default(its_tile, bits, request_lanes)
            options = {
                "num_warps": layout.warps, "maxnreg": layout.most_registers, "enable_fp_fusion": False,
            }  # fmt: skip
            for with_peaks in (True, False) if layouts else (True,):
                name = f"scores of {unit} x {bits}, {its_tile} units" + (" and their peaks" if with_peaks else "")
                name += f", {request_lanes} lanes"
                constants = {**score, "TILE": its_tile, "WITH_PEAKS": with_peaks, "LANES_R": request_lanes,
                    "PER_GROUP": 0, "SPREADS_AT": 0, "groups_bf16": None, "log_weights": None,
                    "BLOCK_TOKENS": block}  # fmt: skip
                yield name, triton_score_codes._score_codes, constants, options
        if bits == 4 or layouts:
            constants = {
                **sizes, "SCALE_AT": words, "CUT": words, "ROW_WORDS": row_words,
                "LANES": triton.next_power_of_2(row_words), "FP8_PER_MOST": 1 / row_bytes.FP8_MOST,
                "FIXED_MOST": float(quantized_mean.FIXED_MOST), "PER_FIXED_MOST": 1 / quantized_mean.FIXED_MOST,
                "PER_D": 1 / dim, "STEP_PER_RMS": quantized_mean.STEP_PER_RMS[bits], "BLOCK_TOKENS": block,
                "ALIGNED_BYTES": ALIGNED_BYTES,
            }  # fmt: skip
            for layers in ({}, {"apart": None}):
                told = f"index of {unit} x {bits}" + (", one layer" if layers else "")
                yield told, triton_index._quantized_mean, {**constants, **layers}, {"num_warps": 2}
    tile = Tile(64 if dim <= 128 and dtype != torch.float32 else 32, 4, 3, 2)
    attend = {
        "UNIT_SHIFT": 2, "UNITS_PER_BLOCK": 4, "HEADS": 8, "G": group, "D": dim, "LANES_R": 32, "LANES_G": 16,
        "ADDED_G": triton.next_power_of_2(group),
        "LANES_D": triton.next_power_of_2(dim), "TILE": tile.tokens, "WITH_PAGES": True, "ALIKE": True,
        "COMPILED": True,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    for told, with_unread, announced in (
        ("attention", False, False), ("attention to announced lists", False, True),
        ("attention after what is not read", True, False),
    ):  # fmt: skip
        its = {"WITH_UNREAD": with_unread, "ANNOUNCED": announced, "launch_pdl": announced or with_unread}
        yield told, triton_attend._gather, attend | its, options


def remainder_kernels(dim: int, group: int) -> Iterator[Kernel]:
    """Of what a decode step does not read, in blocks of 64 tokens: pages of 16 tokens and small units, few groups in a tile
    and many."""
    lanes_d, lanes_g = triton.next_power_of_2(dim), triton.next_power_of_2(group)
    for unit, bits, in_group in (
        (16, 0, 1), (16, 0, 4), (4, 0, 16), (8, 8, 2), (4, 4, 4), (4, 4, 16), (4, 2, 16), (2, 2, 32), (1, 1, 64)
    ):  # fmt: skip
        sizes = {"D": dim, "LANES_D": lanes_d, "launch_pdl": True}
        fp8, tile = in_group > 2, unread_tile_units(2 * dim if not bits else 0, in_group)
        remainder = Remainder(unit * in_group, "fp8" if fp8 else "bf16")
        spreads_at = remainder.spreads_at(dim)
        rows = {
            **sizes, "BLOCK_TOKENS": 64, "GROUP": unit * in_group, "UNIT": unit, "FP8": fp8, "SPREADS_AT": spreads_at,
            "FP8_PER_MOST": 1 / row_bytes.FP8_MOST, "LEAST_LARGEST": row_bytes.LEAST_LARGEST,
        }  # fmt: skip
        yield f"rows of groups, {unit} x {in_group}", triton_groups._groups, rows, {"num_warps": 4}
        if 0 < bits < 8:
            yield from weighed_kernels(QuantizedMean(unit, 16, 64, bits, remainder=remainder), dim, group)
            continue
        sums = {
            **sizes, "UNIT_SHIFT": unit.bit_length() - 1, "UNITS_PER_BLOCK": 64 // unit, "PER_GROUP": in_group,
            "FIRST": 16 // unit, "RECENT": 64 // unit, "G": group, "LANES_G": lanes_g, "FP8_INDEX": bits == 8,
            "FP8_VALUES": fp8, "SPREADS_AT": spreads_at, "TILE": tile,
        }  # fmt: skip
        yield (
            f"what is not read, {unit} x {bits}, groups of {in_group}",
            triton_remainder._sum_unread,
            sums,
            {"num_warps": triton_remainder.warps(tile, in_group)},
        )


def weighed_kernels(selector: QuantizedMean, dim: int, group: int) -> Iterator[Kernel]:
    """Scores that weigh groups, and what sums these up, in blocks of 64 tokens."""
    unit, bits, remainder = selector.unit_tokens, selector.bits, selector.remainder
    assert remainder is not None
    words, lanes_g = selector.scale_at(dim) // 4, triton.next_power_of_2(group)
    lanes_w, tile, in_group = (
        triton.next_power_of_2(words),
        default_scored_tile(4 * words, bits, True),
        selector.units_per_group,
    )
    sizes = {
        "UNIT": unit, "UNITS_PER_BLOCK": 64 // unit, "PER_GROUP": in_group, "FIRST": 16 // unit, "RECENT": 64 // unit,
        "G": group, "D": dim, "W": words, "ROW_WORDS": selector.index_width(dim) // 4, "LANES_W": lanes_w, "BITS": bits,
        "ALIGN": triton_index.loaded_bytes(selector, dim) // 4, "SPREADS_AT": remainder.spreads_at(dim), "DP4A": True,
        "launch_pdl": True,
    }  # fmt: skip
    about = f"{unit} x {bits}, groups of {in_group}"
    for lanes in (32, 256):
        layout = triton_score_codes.ScoreLayout.default(tile, bits, lanes, group)
        score = {
            **sizes, "GROUP": min(64 // unit, 16, in_group), "HEADS": 8, "LANES_R": lanes, "TILE": tile, "WITH_PEAKS": True,
            "BLOCK_TOKENS": 64,
        }  # fmt: skip
        options = {"num_warps": layout.warps, "maxnreg": layout.most_registers, "enable_fp_fusion": False}
        yield f"scores and weights, {about}, {lanes} lanes", triton_score_codes._score_codes, score, options
    cut, fp8 = triton_unread.UnreadLayout.default(unit), remainder.values == "fp8"
    sums = {
        **sizes, "LANES_G": lanes_g, "LANES_V": triton_unread.value_lanes(dim, fp8), "FP8_VALUES": fp8, "ROW_ALIGN": 16,
        "TILE": cut.groups, "LISTED": cut.listed, "WITH_PAGES": True,
    }  # fmt: skip
    yield f"unread, {about}", triton_unread._sum_weighed, sums, {"enable_fp_fusion": False, **cut.options}


def page_mean_kernels(dim: int, group: int) -> Iterator[Kernel]:
    """Those of a decode step over pages of 16 tokens that the kernels of small units do not share."""
    lanes_d = triton.next_power_of_2(dim)
    score = {
        "UNIT": 16, "FIRST": 1, "RECENT": 2, "HEADS": 8, "G": group, "W": dim,
        "LANES_G": triton.next_power_of_2(group), "LANES_W": lanes_d,
        "TILE": SCORED_TILE_BYTES >> (2 * dim - 1).bit_length(), "FP8": False, "ALIGN": 1, "D": dim, "launch_pdl": True,
    }  # fmt: skip
    options = {"num_warps": triton_score.WARPS, "maxnreg": triton_score.MOST_REGISTERS}
    for block, lanes in ((16, 32), (64, 32), (64, 256)):
        held = {"UNITS_PER_BLOCK": block // 16, "BLOCK_TOKENS": block, "LANES_R": lanes}
        yield f"scores of page_mean, blocks of {block}, {lanes} lanes", triton_score._mean_query, score | held, options
    index = {
        "BLOCK_TOKENS": 16,
        "UNIT": 16,
        "D": dim,
        "LANES_D": lanes_d,
        "ALIGNED_BYTES": ALIGNED_BYTES,
        "launch_pdl": True,
    }
    for layers in ({}, {"apart": None}):
        told = "index of page_mean" + (", one layer" if layers else "")
        yield told, triton_index._page_mean, {**index, **layers}, {"num_warps": 2}


CHOICES = {"few lanes": 1024, "lanes": 2048, "twice the lanes": 4096, "many units": 40_960}
"""A number of units for each layout that the host can choose; fewer lanes are like few."""
PEAKED_CHOICES = {"peaks": 16_384, "twice the peaks": 32_768}
CROWDED_CHOICES = {f"{name}, crowded": units for name, units in PEAKED_CHOICES.items()}
MANY_PAIRS_CHOICES = {"twice the lanes, many pairs": 4096, "by sample, many pairs": 10_240}


def choice_kernels(full: bool) -> Iterator[Kernel]:
    for name, units in (CHOICES | PEAKED_CHOICES | CROWDED_CHOICES | MANY_PAIRS_CHOICES).items():
        peaked = "peaks" in name
        pairs = MANY_PAIRS + 1 if name in MANY_PAIRS_CHOICES else MANY_PAIRS if name in CROWDED_CHOICES else 1
        layout = triton_top_k.ChoiceLayout.default(units, pairs)
        peak_lanes = layout.peak_lanes(units) if peaked else 0
        constants = {
            **layout.constants(units), "UNIT": 4, "UNITS_PER_BLOCK": 4, "LOADED": 4, "WITH_PAGES": True,
            "FILL_REST": False, "COMPILED": True, "PEAK_LANES": peak_lanes, "PLANNED": True, "ANNOUNCED": pairs > 1,
            "launch_pdl": True,
        }  # fmt: skip
        others: tuple[dict[str, Any], ...] = ({}, {"LOADED": 1}, {"FILL_REST": True, "WITH_PAGES": False})
        for other in others if full else others[:1]:
            about = ", ".join(("choice", name, *(f"{key} {value}" for key, value in other.items())))
            yield about, triton_top_k._choose, constants | other, layout.options(units, peak_lanes > 0)


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
    drawn = {"TILE": triton_draws.TILE}
    yield "tiles of logits", triton_draws._measure_tiles, drawn, {"num_warps": triton_draws.WARPS}
    yield "draws", triton_draws._draw_tokens, drawn | {"TILES": 128}, {"num_warps": triton_draws.WARPS}
    scores = {"CHUNK": 64, "CHUNKS_OF_BLOCK": 64, "launch_pdl": True}
    yield "parts of rows", triton_scores._scores_of_blocks, scores, {"num_warps": 4}
    for listed, warps in ((0, 4), (32, 8), (64, 8)) if full else ((32, 8),):
        constants = {**scores, "CHUNKS": 4096, "BLOCKS": 64, "LISTED": listed}
        yield f"rows with {listed} lanes", triton_scores._scores_of_rows, constants, {"num_warps": warps}
    plan = {"HEADS": 8, "UNIT": 16, "READ_TILE": 64, "SCORED_TILE": 32, "LANES_R": 256}
    for own, with_budgets in (("one", True), ("several", True), (None, False)) if full else (("one", True),):
        yield (
            f"plan, {own} of its own, budgets {with_budgets}",
            triton_work_split._plan,
            {**plan, "OWN": own, "WITH_BUDGETS": with_budgets},
            {"num_warps": 4},
        )
    yield "budgets", triton_budgets._look_up, {"X": 29, "S": 64, "UNLIMITED": 1 << 30, "TILE": 8}, {"num_warps": 4}


def compiled(kernel: Kernel, dtype: torch.dtype, of_sixteen: bool = True) -> dict[str, str]:
    """The forms it goes through, by name. Numbers are multiples of 16 as in a real launch, where Triton may know that;
    without `of_sixteen` only pointers are."""
    _, function, constants, options = kernel
    pointers = _POINTERS | _POINTERS_OF.get(place_of(function).partition(".")[0], {})
    if constants.get("FP8_VALUES") and "LISTED" in constants:
        pointers |= {"values": "*i32"}
    elif "LISTED" in constants:
        pointers |= {"values": "*bf16"}
    if constants.get("FP8_INDEX"):
        # Codes; in the same file, rows of page means are numbers.
        pointers |= {"index": "*u8"}
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for number, (name, parameter) in enumerate(zip(function.arg_names, function.params, strict=True)):
        if name in constants:
            signature[name] = "constexpr"
            continue
        number_of = "fp32" if name.startswith(("scale", "floor")) else "i32"
        held = number_of if parameter.do_not_specialize else pointers.get(name, number_of)
        signature[name] = _named(held, f"*{_NAMES[dtype]}")
        if not parameter.do_not_specialize:
            attributes |= dict(_multiples((number,), signature[name], of_sixteen))
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm  # type: ignore[no-any-return]


def _named(held: Any, of_model: str) -> Any:
    """A type, or a tuple of them, with the model's own in its place."""
    if isinstance(held, tuple):
        return tuple(_named(each, of_model) for each in held)
    return of_model if held == "of the model" else held


def _multiples(place: tuple[int, ...], held: Any, of_sixteen: bool) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Pointers, and with `of_sixteen` whole numbers, are multiples of 16."""
    if isinstance(held, tuple):
        for number, each in enumerate(held):
            yield from _multiples((*place, number), each, of_sixteen)
    elif held != "fp32" and (of_sixteen or held.startswith("*")):
        yield place, [["tt.divisibility", 16]]


_REDUCED = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d+)[^}]*\}> \(\{.*?\}\) : \(tensor<[\dx]+x\w+, (.*?)>(?:, |\) ->)', re.S
)


def split_reductions(ttgir: str) -> int:
    """Reductions over an axis that lies on threads of a warp with others between them. Until 3.7 triton takes the numbers
    of the threads between, so the result is wrong, and neither the interpreter nor the compiler says so."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.[^\n]+)$", ttgir, re.MULTILINE))
    split, reduced = 0, _REDUCED.findall(ttgir)
    assert len(reduced) == ttgir.count('"tt.reduce"'), "a reduction is printed otherwise"
    for axis, layout in reduced:
        bits = [bit for bit, moved in enumerate(_lanes(layout, layouts)) if moved[int(axis)]]
        split += bool(bits) and bits[-1] - bits[0] + 1 > len(bits)
    return split


_BRANCH = re.compile(r"^(@\S+)?\s*bra(?:\.uni)?\s+(\$L__BB\w+)")


def before_wait(ptx: str) -> tuple[int, int]:
    """Loads of global memory that a thread can come to before it has waited for the kernel in front of its own; and writes,
    and ends, since what follows takes that kernel for ended, too. None where the kernel never waits. A program may read and
    write once another one has announced what it waits for (an acquire), but not end."""
    if "griddepcontrol.wait" not in ptx:
        return 0, 0
    loads, writes = (
        sum(bool(re.search(rf"\b(?:{kinds})", line)) for line in _come_to(ptx, r"griddepcontrol\.wait|\.acquire\."))
        for kinds in (r"ld\.global", r"st\.global|atom\.|red\.")
    )
    ends = sum("ret;" in line for line in _come_to(ptx, r"griddepcontrol\.wait"))
    return loads, writes + ends


def _come_to(ptx: str, until: str) -> list[str]:
    """Lines that a thread can come to before one of those that it stops at."""
    lines = [line.strip() for line in ptx.splitlines()]
    places = {line.partition(":")[0]: place for place, line in enumerate(lines) if line.startswith("$L__BB")}
    seen: set[int] = set()
    ahead = [0]
    while ahead:
        place = ahead.pop()
        while place < len(lines) and place not in seen and not re.search(until, lines[place]):
            seen.add(place)
            if branch := _BRANCH.match(lines[place]):
                ahead.append(places[branch[2]])
                if not branch[1]:
                    break
            place += 1
    return [lines[place] for place in seen]


def _lanes(layout: str, layouts: dict[str, str]) -> list[list[int]]:
    """How far each bit of a thread's number moves along each axis. Those of `blocked` layouts are never split: none."""
    layout = layouts.get(layout, layout)
    if of_slice := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout):
        axis = int(of_slice[1])
        return [moved[:axis] + moved[axis + 1 :] for moved in _lanes(of_slice[2], layouts)]
    linear = re.match(r"#ttg\.linear<\{.*?lane = (\[.*?\]), warp", layout)
    return ast.literal_eval(linear[1]) if linear else []


def place_of(function: Any) -> str:
    """Its file and its name."""
    return f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__}"


def usage(cubin: bytes) -> str:
    """Registers, stack (where registers spill) and static shared memory, as cuobjdump reads them."""
    told = _told_of(cubin, knobs.nvidia.cuobjdump.path, "-res-usage")
    return " ".join(re.findall(r"\b(?:REG|STACK|SHARED|LOCAL):\d+", told))


def loads_ahead(code: str) -> int:
    """Most loads of 16 bytes that are begun before an instruction takes what one of them brings, in the order of the code.
    Where a loop has more of them, the assembler put arithmetic in between, and a program waits for each load alone."""
    awaited: set[int] = set()
    most = 0
    for instruction in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", code, re.MULTILINE):
        load = re.match(r"(?:@!?U?P\w+ +)?LDG\S*\.128\S* +R(\d+)", instruction)
        # What it writes comes first, unless it is a store, which writes no register.
        named = [int(number) for number in re.findall(r"\bR(\d+)", instruction)]
        if awaited & set(named if " ST" in f" {instruction}" else named[1:]):
            awaited.clear()
        if load:
            awaited |= set(range(int(load[1]), int(load[1]) + 4))
            most = max(most, len(awaited) // 4)
    return most


def _told_of(cubin: bytes, tool: str, *options: str) -> str:
    """What one of NVIDIA's tools says of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, *options, str(path)], capture_output=True, text=True, check=True).stdout


def main(full: bool, choice: bool, others: bool) -> None:
    cases = [(dtype, dim, group) for dtype in _NAMES for dim in (64, 128) for group in (1, 2, 4)]
    if not full:
        cases = [(torch.bfloat16, 64, 2)]

    def show(kernel: Kernel, dtype: torch.dtype, *about: str, of_sixteen: bool = True) -> None:
        told, forms = ", ".join((kernel[0], *about)), compiled(kernel, dtype, of_sixteen)
        wide = forms["ptx"].count("ld.global.v4")
        ahead = loads_ahead(_told_of(forms["cubin"], knobs.nvidia.nvdisasm.path, "-c"))
        early, hasty = before_wait(forms["ptx"])
        split = split_reductions(forms["ttgir"])
        about = f"WIDE:{wide} AHEAD:{ahead} EARLY:{early} HASTY:{hasty} SPLIT:{split}"
        print(f"{place_of(kernel[1])}: {told}: {usage(forms['cubin'])} {about}", flush=True)

    for kernel in choice_kernels(full) if choice else ():
        # Rows of scores are as long as a context may be.
        show(kernel, torch.float32, of_sixteen=False)
    if not others:
        return
    for dtype, dim, group in cases:
        for kernel in kernels(dtype, dim, group):
            show(kernel, dtype, _NAMES[dtype], f"head {dim}, group {group}")
    for dtype, dim, group in cases if full else [(torch.bfloat16, 128, 2)]:
        units = fine_unit_kernels(dtype, dim, group, full)
        for kernel in (*units, *page_mean_kernels(dim, group), *remainder_kernels(dim, group)):
            show(kernel, dtype, _NAMES[dtype], f"head {dim}, group {group}")
    for kernel in untyped(full):
        show(kernel, torch.float32)


if __name__ == "__main__":
    main("full" in sys.argv[1:], "others" not in sys.argv[1:], "choice" not in sys.argv[1:])
