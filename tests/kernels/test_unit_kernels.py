"""The kernels for attention and scores of small units that benchmarks/attention_sweep.py times beside the engines' own
make what the reference does. They are compiled where there is a GPU, else interpreted; the product of bits, which only a
GPU makes, is also worked out from its instructions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paged_caches import DEVICE, ODD_CONTEXTS, PagedCache, budgets_of, paged_cache, units_wanted
from sparroll.attention.decode import paged
from sparroll.attention.selectors import PageMean, QuantizedMean

pytest.importorskip("triton", reason="triton runs on Linux only")

ROOT = Path(__file__).parents[2]
OFF: dict[str, Any] = {"placed": False, "ascending": False, "fused": False}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The kernels for attention and for scores."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import attention_kernels
    import score_kernels

    yield attention_kernels, score_kernels
    for name in ("attention_kernels", "score_kernels"):
        sys.modules.pop(name, None)


def attended(attention: Any, cache: PagedCache, budgets: Any, most: int, programs: int, **settings: Any) -> Any:
    """Called twice, over poison: what a call leaves behind must not change the next one."""
    ids, pages = cache.chosen(cache.scores("reference"), budgets, most, "reference")
    # What lies behind the budget is not looked at.
    column = torch.arange(most, device=DEVICE)
    units = -(-cache.context_tokens_R // cache.selector.unit_tokens)
    wanted = torch.where(budgets >= cache.context_tokens_R, units, budgets // cache.selector.unit_tokens)
    behind = (column >= wanted[:, None])[:, None]
    rubbish = ids.masked_fill(behind, 1 << 30), pages.masked_fill(behind, 1 << 30)
    out = torch.full_like(cache.query_RHGD, torch.nan)
    workspace = replace(cache.workspace(programs), tile=paged.Tile(16, 4, 2, 1))
    places = attention.Places.allocate(workspace)
    paged.plan_step(cache.context_tokens_R, budgets, cache.selector, most, workspace)
    heads, selector = cache.query_RHGD.shape[1], cache.selector
    places.write(cache.context_tokens_R, budgets, heads, most, selector, workspace)
    for _ in range(2):
        out.fill_(torch.nan), workspace.mixed_XGD.fill_(torch.nan), workspace.log_sum_XG.fill_(torch.nan)
        attention.attend(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, *rubbish, cache.context_tokens_R, budgets, selector,
            cache.scale, out, workspace, places, attention.Variant(workspace.tile, **settings),
        )  # fmt: skip
        assert not places.arrivals_X.any()
    expected = cache.attended(ids, budgets, "reference")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    return out


@pytest.mark.parametrize("programs", [1, 3, 7, 40])
@pytest.mark.parametrize("left_out", [(), ("placed",), ("ascending",), ("fused",), tuple(OFF)])
def test_attention_equals_the_reference_for_any_number_of_programs(
    kernels: Any, left_out: tuple[str, ...], programs: int
) -> None:
    cache = paged_cache([17, 0, 100, 1, 111, 257], 4, selector=PageMean(4, 16, 32)).index_written()
    budgets = budgets_of(cache)
    attended(
        kernels[0], cache, budgets, units_wanted(cache, budgets) + 3, programs, **dict.fromkeys(left_out, False)
    )  # fmt: skip


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_attention_at_every_group_and_head_size(kernels: Any, group: int, dim: int) -> None:
    unit = (1, 2, 4, 8, 16)[group % 5]
    layout: Any = "head_token" if group % 2 else "token_head"
    cache = paged_cache([63, 0, 130], unit, group=group, dim=dim, layout=layout, selector=PageMean(unit, 16, 32))
    budgets = torch.tensor([64, 64, 80], dtype=torch.int32, device=DEVICE)
    attended(kernels[0], cache.index_written(), budgets, 80 // unit, 5)


def test_attention_over_odd_contexts(kernels: Any) -> None:
    cache = paged_cache(ODD_CONTEXTS, 16).index_written()
    budgets = budgets_of(cache)
    attended(kernels[0], cache, budgets, units_wanted(cache, budgets), 6)


def scored(
    scores: Any, cache: PagedCache, tile_units: int, budgets: torch.Tensor | None = None, stages: int = 1
) -> Any:
    found = torch.full((*cache.query_RHGD.shape[:2], cache.units), torch.nan, device=DEVICE)
    workspace = replace(cache.workspace(), scored_tile_units=tile_units)
    if budgets is None:
        from sparroll.attention.decode import triton_work_split

        triton_work_split.plan_step(cache.context_tokens_R, None, cache.selector, cache.units, workspace)
    else:
        paged.plan_step(cache.context_tokens_R, budgets, cache.selector, 1, workspace)
    scores.score_units(
        cache.query_RHGD, cache.index_PSHW, cache.block_table_RM, cache.context_tokens_R, cache.selector, found,
        workspace, scores.BitLayout(tile_units, 1, 1, stages),
    )  # fmt: skip
    return found


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("unit", "block_tokens"), [(1, 16), (1, 32), (2, 16), (4, 64)])
def test_scores_of_one_bit_equal_the_reference_to_the_last_bit(
    kernels: Any, unit: int, block_tokens: int, group: int
) -> None:
    selector = QuantizedMean(unit, 16, 32, 1)
    cache = paged_cache(
        [17, 0, 100, 1, 111, 257], unit, block_tokens, group=group, dim=128, layout="head_token", selector=selector
    )
    cache.index_written()
    found = scored(kernels[1], cache, 64, stages=group % 3 + 1)
    assert torch.equal(found, cache.scores("reference"))


def test_rows_within_their_budget_are_left_as_they_are(kernels: Any) -> None:
    cache = paged_cache(
        [100, 0, 300], 1, dim=128, layout="head_token", selector=QuantizedMean(1, 16, 32, 1)
    ).index_written()
    budgets = torch.tensor([128, 128, 128], dtype=torch.int32, device=DEVICE)
    found, expected = scored(kernels[1], cache, 128, budgets), cache.scores("reference")
    assert found[0].isnan().all() and torch.equal(found[2], expected[2])


def test_scores_of_extreme_queries(kernels: Any) -> None:
    cache = paged_cache(
        [90, 90, 90], 1, dim=128, layout="head_token", selector=QuantizedMean(1, 16, 32, 1)
    ).index_written()
    cache.query_RHGD[0] = 0
    cache.query_RHGD[1] = -1e30
    cache.query_RHGD[2, :, :, ::2] = -1
    assert torch.equal(scored(kernels[1], cache, 64), cache.scores("reference"))


def warp(code: str, registers: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """What 32 threads make of the PTX of score_kernels: registers $n hold a number for each thread."""
    named: dict[str, np.ndarray] = {f"${number}": values for number, values in registers.items()}
    lane = np.arange(32)
    group, place = lane // 4, lane % 4

    def value(name: str) -> np.ndarray:
        return named[name] if name in named else np.full(32, int(name))

    for line in code.strip("{} ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation.startswith("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc"):
            out, a, b, c = ([each.strip() for each in part.split(",")] for part in re.findall(r"\{([^}]*)\}", rest))
            # Rows of 8 words of A, columns of 8 words of B, as the PTX manual lays out their fragments.
            rows, columns = np.zeros((16, 8), np.int64), np.zeros((8, 8), np.int64)
            for number, (row, word) in enumerate(((0, 0), (8, 0), (0, 4), (8, 4))):
                rows[group + row, place + word] = value(a[number]) & 0xFFFFFFFF
            for number, word in enumerate((0, 4)):
                columns[group, place + word] = value(b[number]) & 0xFFFFFFFF
            both = rows[:, None] & columns[None]
            sums = np.array([[sum(int(word).bit_count() for word in cell) for cell in row] for row in both])
            added = [value(each) for each in c]
            for number, name in enumerate(out):
                named[name] = added[number] + sums[group + number // 2 * 8, 2 * place + number % 2]
        elif operation == "mov.b32":
            name, given = rest.split(", ")
            named[name] = value(given)
        elif operation == "mad.lo.s32":
            name, first, second, third = rest.split(", ")
            named[name] = value(first) * value(second) + value(third)
        elif operation == "shl.b32":
            name, given, by = rest.split(", ")
            named[name] = value(given) << int(by)
        else:
            assert operation in (".reg", ""), line
    return {number: named[f"${number}"] for number in range(8)}


def test_the_product_of_bits_adds_up_what_the_query_has_where_bits_are_set(kernels: Any) -> None:
    random = np.random.default_rng(0)
    query = random.integers(-127, 128, 128)
    query[:2] = -127, 127
    words = random.integers(0, 1 << 32, (32, 2, 4))
    # Word w has channels 32 w and on, bit by bit.
    bits = (words[..., None] >> np.arange(32)) & 1
    expected = (bits.reshape(32, 2, 128) * query).sum(-1)
    planes = [((query.reshape(4, 32) >> plane & 1) << np.arange(32)).sum(-1) for plane in range(8)]
    registers = {8 + 4 * unit + word: words[:, unit, word] for unit in (0, 1) for word in range(4)}
    lane = np.arange(32)
    column = lane // 4
    for pair in range(4):
        for word in range(4):
            plane = np.where(column % 2 == 0, planes[2 * pair][word], planes[2 * pair + 1][word])
            # As in _planes_of_lanes.
            registers[16 + 8 * pair + word] = np.where(lane % 4 == column // 2, plane, 0)
    found = warp(kernels[1]._product(), registers)
    for unit in (0, 1):
        assert (sum(found[4 * unit + each] for each in range(4)) == expected[:, unit]).all()


def test_kernels_compile_for_hopper_and_words_lie_as_the_product_wants_them(tmp_path: Path) -> None:
    from triton import knobs

    try:
        _ = knobs.nvidia.ptxas.path, knobs.nvidia.cuobjdump.path
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this triton lacks a tool: {error}")
    fresh = {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("src", "benchmarks")),
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | fresh
    command = [sys.executable, str(Path(__file__).with_name("sm90_units.py"))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    assert len(lines) > 10 and all("STACK:0 " in line for line in lines), f"registers spill: {run.stdout}"
    scores = [line for line in lines if line.startswith("scores")]
    assert scores
    for line in scores:
        assert "sizePerThread = [1, 4], threadsPerWarp = [32, 1]" in line, line
        assert int(re.findall(r"(\d+) products", line)[0]) % 8 == 0 and " 0 products" not in line, line
