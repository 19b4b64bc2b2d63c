"""Attention as in triton_attend.py, in one loop over all tiles of a program's stretch. Where there are more (request, head)
than programs, a program comes to several of them. Here the first keys and values of the next one are on their way while one
ends, instead of after that.

It takes plans of equal stretches, in which a request has as many tiles as it reads, and no remainder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.triton_attend_tile import arrive, clear_idle, end_pair, look_up, parted, with_tile
from sparroll.attention.decode.triton_launch import let_next_begin, overlapping, wait_for_previous
from sparroll.attention.decode.triton_work_split import by_request, number_of, request_at, stretch

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import Tile


def attend(
    query_RHGD: Tensor, arguments: tuple[Any, ...], constants: dict[str, Any], tile: Tile, programs: int
) -> None:
    """Launch the kernel with so many programs. arguments: those before its constants."""
    _gather_flat[(programs,)](
        *arguments,
        **constants,
        **options(tile, constants["LANES_D"] * query_RHGD.element_size()),
        **overlapping(query_RHGD),
    )


def options(tile: Tile, head_bytes: int) -> dict[str, int]:
    """How the kernel is launched. As many programs are launched as fit three to a multiprocessor, so where heads of 128
    channels of 16 bits leave room for their keys and values, they take as few registers as let them fit. Without that limit
    they would take 210."""
    fewer = {"maxnreg": 168} if tile.warps == 4 and head_bytes <= 256 else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages, **fewer}


@triton.jit(do_not_specialize=["requests"])
@no_type_check
def _gather_flat(
    query,
    keys,
    values,
    block_table,
    unit_ids,
    pages,
    context_tokens,
    kv_budget_tokens,
    read_before,
    arrivals,
    out,
    mixed,
    log_sum,
    query_per_request,
    query_per_head,
    query_per_member,
    keys_per_block,
    keys_per_token,
    keys_per_head,
    values_per_block,
    values_per_token,
    values_per_head,
    table_per_request,
    ids_per_request,
    ids_per_head,
    pages_per_request,
    pages_per_head,
    out_per_request,
    out_per_head,
    out_per_member,
    scale_log2,
    most_units,
    requests,
    UNIT_SHIFT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_R: tl.constexpr,
    LANES_G: tl.constexpr,
    ADDED_G: tl.constexpr,
    LANES_D: tl.constexpr,
    TILE: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    ALIKE: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Constants are those of triton_attend._gather."""
    let_next_begin(launch_pdl)
    ends_R = by_request(read_before + 1, requests, LANES_R)
    contexts_R = by_request(context_tokens, requests, LANES_R)
    budgets_R = by_request(kv_budget_tokens, requests, LANES_R)
    share = tl.load(read_before + requests + 1)
    at, end = stretch(ends_R, HEADS, share)
    member = tl.arange(0, LANES_G)
    channel = tl.arange(0, LANES_D)
    in_group = (member < G)[:, None] & (channel < D)[None, :]
    in_tile = tl.arange(0, TILE)
    if at < end:
        request, request_begins, tiles = request_at(at, ends_R, requests, HEADS, LANES_R)
        context, budget = number_of(request, contexts_R, LANES_R), number_of(request, budgets_R, LANES_R)
        chosen_units = _chosen(context, budget, most_units, UNIT_SHIFT)
        head = (at - request_begins) // tiles
        pair = request * HEADS + head
        begins = request_begins + head * tiles
        # Where the pair ends in the row of all tiles.
        ends = begins + tiles
        first_pair, first_begins, first_tiles = pair, begins, tiles
        wait_for_previous(launch_pdl)
        query_tile = _query_tile(
            query, pair, query_per_request, query_per_head, query_per_member, member, channel, in_group, HEADS
        )
        ids_row, pages_row, table_row = _rows(
            unit_ids, pages, block_table, pair,
            ids_per_request, ids_per_head, pages_per_request, pages_per_head, table_per_request, HEADS,
        )  # fmt: skip
        page = look_up(
            ids_row, pages_row, table_row, (at - begins) * TILE + in_tile,
            chosen_units, most_units, UNIT_SHIFT, UNITS_PER_BLOCK, WITH_PAGES,
        )  # fmt: skip
        last_id = tl.load(ids_row + chosen_units - 1)
        top = tl.full([LANES_G], float("-inf"), tl.float32)
        total_weight = tl.zeros([LANES_G], tl.float32)
        mix = tl.zeros([LANES_G, LANES_D], tl.float32)
        # Keys and values are loaded iterations before they are used. Of what is known of a tile's pair, `pair`, `tiles`,
        # `ends`, `context` and `chosen_units` are for the loads; `read_pair` and `begins` are for what comes of them.
        read_pair = pair
        for tile in range(at, end):
            # Whose the next tile is, and where it lies, is looked up one iteration early, so that its keys wait for no other
            # load. Past the stretch nobody's is: it stays the pair's.
            next_pair, next_tiles, next_ends, next_context, next_chosen = pair, tiles, ends, context, chosen_units
            if (tile + 1 == ends) & (tile + 1 < end):
                next_pair = pair + 1
                _, next_head = parted(next_pair, HEADS)
                if next_head == 0:
                    # What is known of requests is read anew: to hold it takes registers in every iteration.
                    in_row = (tile + 1) // HEADS
                    ended = by_request(read_before + 1, requests, LANES_R) <= in_row
                    next_request = tl.sum(ended.to(tl.int32), axis=0) - (LANES_R - requests)
                    next_tiles = tl.load(read_before + next_request + 1) - in_row
                    next_context = tl.load(context_tokens + next_request).to(tl.int32)
                    next_budget = tl.load(kv_budget_tokens + next_request).to(tl.int32)
                    next_chosen = _chosen(next_context, next_budget, most_units, UNIT_SHIFT)
                    next_pair = next_request * HEADS
                next_ends = ends + next_tiles
            ids_row, pages_row, table_row = _rows(
                unit_ids, pages, block_table, next_pair,
                ids_per_request, ids_per_head, pages_per_request, pages_per_head, table_per_request, HEADS,
            )  # fmt: skip
            next_page = look_up(
                ids_row, pages_row, table_row, (tile + 1 + next_tiles - next_ends) * TILE + in_tile,
                next_chosen, most_units, UNIT_SHIFT, UNITS_PER_BLOCK, WITH_PAGES,
            )  # fmt: skip
            next_last_id = tl.load(ids_row + next_chosen - 1)

            # Of the listed tokens, those of an incomplete last unit do not exist yet.
            units = (context + (1 << UNIT_SHIFT) - 1) >> UNIT_SHIFT
            listed = chosen_units << UNIT_SHIFT
            listed -= tl.where(last_id == units - 1, (units << UNIT_SHIFT) - context, 0)
            # This takes away 0. Triton runs a branch as early as these loads only if they depend on it; else the next tile
            # would be known too late.
            listed += tl.minimum(next_pair, 0)
            slot = (tile + tiles - ends) * TILE + in_tile
            _, head = parted(pair, HEADS)
            top, total_weight, mix = with_tile(
                top, total_weight, mix, query_tile, keys + head * keys_per_head, values + head * values_per_head,
                page, slot, slot < listed, (tile - begins) * TILE + in_tile < listed, channel, scale_log2,
                keys_per_block, keys_per_token, values_per_block, values_per_token,
                UNIT_SHIFT, UNITS_PER_BLOCK, D, LANES_D, ALIKE,
            )  # fmt: skip
            pair_ends = tile + 1 == ends
            if pair_ends | (tile + 1 == end):
                # This is 0. What comes of it is worked out here; else it would be before the loop, or iterations ago, and
                # held in registers.
                nothing = tl.minimum(read_pair, 0)
                row = member + nothing
                row_in_group = (row < G)[:, None] & (channel < D)[None, :]
                query_tile = _query_tile(
                    query, next_pair + nothing, query_per_request, query_per_head, query_per_member,
                    row, channel, row_in_group, HEADS,
                )  # fmt: skip
                target = _pair_at(out, read_pair, out_per_request, out_per_head, HEADS)
                end_pair(
                    top, total_weight, mix, mixed, log_sum, target, out_per_member, (begins >= at) & pair_ends,
                    tl.maximum(at - begins, 0), row, channel, row_in_group, G, D,
                )  # fmt: skip
                top = tl.full([LANES_G], float("-inf"), tl.float32)
                total_weight = tl.zeros([LANES_G], tl.float32)
                mix = tl.zeros([LANES_G, LANES_D], tl.float32)
                read_pair, begins = next_pair, tile + 1
            pair, tiles, ends, context, chosen_units = next_pair, next_tiles, next_ends, next_context, next_chosen
            page, last_id = next_page, next_last_id
        # All threads have stored their parts before one of them says so. Triton pipelines no loop with a barrier, and a
        # program takes as long if it adds up parts behind it.
        tl.debug_barrier()
        for number in range(tl.where(first_pair == pair, 1, 2)):
            if number == 1:
                first_pair, first_begins, first_tiles = pair, ends - tiles, tiles
            if (first_begins < at) | (first_begins + first_tiles > end):
                target = _pair_at(out, first_pair, out_per_request, out_per_head, HEADS)
                arrive(
                    mixed, log_sum, arrivals, target, out_per_member, first_begins, first_tiles, share, channel,
                    G, D, ADDED_G, LANES_D,
                )  # fmt: skip
    wait_for_previous(launch_pdl)
    clear_idle(
        read_before, out, requests, out_per_request, out_per_head, out_per_member, member, channel, in_group,
        HEADS, LANES_G, LANES_D,
    )  # fmt: skip


@triton.jit
@no_type_check
def _chosen(context, budget, most_units, UNIT_SHIFT: tl.constexpr):
    """How many units a request lists."""
    units = (context + (1 << UNIT_SHIFT) - 1) >> UNIT_SHIFT
    return tl.minimum(tl.where(budget >= context, units, budget >> UNIT_SHIFT), most_units)


@triton.jit
@no_type_check
def _pair_at(tensor, pair, per_request, per_head, HEADS: tl.constexpr):
    """Where what a tensor has of a pair begins."""
    request, head = parted(pair, HEADS)
    return tensor + request.to(tl.int64) * per_request + head * per_head


@triton.jit
@no_type_check
def _query_tile(
    query, pair, query_per_request, query_per_head, query_per_member, member, channel, in_group, HEADS: tl.constexpr
):  # fmt: skip
    rows = _pair_at(query, pair, query_per_request, query_per_head, HEADS)
    return tl.load(rows + member[:, None] * query_per_member + channel[None, :], mask=in_group, other=0.0)


@triton.jit
@no_type_check
def _rows(
    unit_ids, pages, block_table, pair, ids_per_request, ids_per_head, pages_per_request, pages_per_head,
    table_per_request, HEADS: tl.constexpr,
):  # fmt: skip
    """Where the lists of a pair and the blocks of its request begin."""
    ids_row = _pair_at(unit_ids, pair, ids_per_request, ids_per_head, HEADS)
    pages_row = _pair_at(pages, pair, pages_per_request, pages_per_head, HEADS)
    request, _ = parted(pair, HEADS)
    return ids_row, pages_row, block_table + request.to(tl.int64) * table_per_request
