"""The k best units of each (request, head), in ascending order: a selection, not a sort, of any number of units.

One program does it for one head, in the first of these ways that suits:

1. Where there is a lane for each unit, it searches for the k-th largest score, and writes the units above it and, of
   those equal to it, the lowest.
2. Of more units it makes candidates first (triton_candidates.py): the units whose scores reach a number that at least k
   scores reach, and hardly more. They are listed, and the search goes on among them. The number comes from lanes that keep
   the largest of some scores each, of which k must reach it: where few are wanted and the kernel that scores left the
   best score of every eight neighbours, their peak, these are the lanes, and only scores under peaks that reach it are
   loaded; where there are no peaks, all scores are held in registers, if they fit. Where that does not suit, because
   many are wanted or neighbours are too alike, it comes from a sample of the scores.
3. Of the largest budgets, and where candidates are more than there is room for, as among equal scores, the choice is
   left to triton_large_choice.py.

In large batches with many units (workspace.by_sample) candidates always come from a sample.

All are exact. The way follows each request's own length and budget, which lie on the device, so one CUDA graph holds
for all of them. Where the shape of the scores leaves only the first one open, the kernel is compiled for no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.choice.triton_candidates import (
    PEAK,
    candidates_by_sample,
    candidates_of_all,
    candidates_under_peaks,
)
from sparroll.attention.decode.choice.triton_large_choice import choose_between_bounds
from sparroll.attention.decode.choice.triton_listing import ordered_scores, page_of, places_of_best, put
from sparroll.attention.decode.choice.triton_threshold import (
    LARGEST,
    LEAST,
    below,
    closely_above,
    ends,
    ordered_bits,
    searched,
)
from sparroll.attention.decode.triton_launch import announce, let_next_begin, overlapping, runs_ptx, wait_for_previous
from sparroll.attention.decode.workspace import FEW_PAIRS, MANY_PAIRS, PEAK_UNITS, by_sample
from sparroll.attention.selectors.base import Selector

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import StepWorkspace

LEAST_LANES = 256


@dataclass(frozen=True)
class ChoiceLayout:
    """How a program is laid out. It changes the speed and never the result. All are powers of two."""

    warps: int = 8
    lanes: int = 2048
    """Up to so many units there is a lane for each; up to twice as many where no request can have more, and where there are
    peaks. There is room for twice as many candidates."""
    rows: int = 8
    """Scores that a thread holds at a time while it makes candidates, in fours; 4 or more. By a sample it is always 4."""
    sampled: bool = False
    """Whether a sample always says which of more units than lanes are candidates, instead of lanes for all or peaks."""
    crowded: bool = False
    """Whether more than two programs of 8 warps have to fit on a multiprocessor. With peaks, two may have all registers that
    they can use."""

    @staticmethod
    def default(units: int, pairs: int = 1) -> ChoiceLayout:
        """For scores of so many units and so many (request, head). Few lanes need few warps. Where more programs are
        launched than run at a time with 8 warps each, 4 warps are faster, and a sample where units are many: measured on an
        H200 with 62 and 89 requests of 8 heads, and 2,560 and 10,240 units."""
        sampled = by_sample(units, pairs)
        few = units <= 1024 or (pairs > MANY_PAIRS and 2048 < units <= 4096)
        return ChoiceLayout(warps=4 if few or sampled else 8, sampled=sampled, crowded=pairs > FEW_PAIRS)

    def peak_lanes(self, units: int) -> int:
        """Lanes for the peaks of so many units; 0 where so few are chosen as fast without, or peaks are too many."""
        lanes = triton.next_power_of_2(-(-units // PEAK_UNITS))
        return lanes if 4 * self.lanes < units and lanes <= 2 * self.lanes and not self.sampled else 0

    def constants(self, units: int) -> dict[str, int]:
        """What the kernel is compiled for, as far as this layout and the shape of the scores say."""
        lanes = max(LEAST_LANES, triton.next_power_of_2(units))
        most = self.lanes if self.sampled else 2 * self.lanes
        return {
            "LANES": min(lanes, self.lanes), "MORE_LANES": lanes if self.lanes < lanes <= most else 0,
            "MANY": lanes if lanes > most else 0, "ROWS": self.rows, "QUADS": 32 * self.warps, "SAMPLED": self.sampled,
        }  # fmt: skip

    def options(self, units: int, peaked: bool = False) -> dict[str, int]:
        """How it is launched: with as few registers as let four programs of 8 warps fit on a multiprocessor, three with
        twice the lanes, three or two with peaks, or two that hold all scores to make candidates; of 4 warps four with more
        scores than lanes, but two that hold them all."""
        if units <= self.lanes:
            registers = 64
        elif peaked and not self.crowded:
            registers = 128
        elif self.sampled or peaked or units <= 2 * self.lanes:
            registers = 128 if self.warps == 4 else 80
        else:
            registers = min(1024 // self.warps, 248)
        return {"num_warps": self.warps, "maxnreg": registers}


def choose_units(
    scores_RHU: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    unit_ids_RHN: Tensor,
    pages_RHN: Tensor | None,
    block_table_RM: Tensor | None,
    units_per_block: int,
    fill_rest: bool = True,
    peaks_RHK: Tensor | None = None,
    planned: bool = False,
    workspace: StepWorkspace | None = None,
    layout: ChoiceLayout | None = None,
) -> None:
    """See paged.choose_units. `layout` is for measurements and tests."""
    requests, heads, units = scores_RHU.shape
    if requests == 0:
        return
    layout = layout or ChoiceLayout.default(units, requests * heads)
    constants = layout.constants(units)
    aligned = not any(stride % 4 for stride in scores_RHU.stride()[:2]) and scores_RHU.data_ptr() % 16 == 0
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    block_table = unit_ids_RHN if block_table_RM is None else block_table_RM.int()
    peak_lanes = 0 if peaks_RHK is None else layout.peak_lanes(units)
    peaks = scores_RHU if peaks_RHK is None else peaks_RHK
    # Candidates, twice as many as lanes; under peaks as many as lanes, and behind them the peaks. Inside a CUDA graph this
    # belongs to the graph, and all layers share it.
    room = 2 * layout.lanes if constants["MANY"] else 0
    announced = workspace.listed_RH if workspace is not None and workspace.begins_early(requests) else None
    candidates = torch.empty(requests, heads, room, dtype=torch.int32, device=scores_RHU.device)
    _choose[(heads, requests)](
        scores_RHU,
        peaks,
        context_tokens_R,
        kv_budget_tokens_R,
        unit_ids_RHN,
        pages,
        block_table,
        candidates if room else unit_ids_RHN,
        unit_ids_RHN if announced is None else announced,
        *scores_RHU.stride()[:2],
        *peaks.stride()[:2],
        *unit_ids_RHN.stride()[:2],
        *pages.stride()[:2],
        block_table.stride(0),
        unit_ids_RHN.shape[2],
        UNIT=selector.unit_tokens,
        UNITS_PER_BLOCK=units_per_block,
        # Rows that begin at whole 16 bytes also have room up to the next ones.
        LOADED=4 if aligned else 1,
        WITH_PAGES=pages_RHN is not None,
        FILL_REST=fill_rest,
        COMPILED=runs_ptx(scores_RHU),
        PEAK_LANES=peak_lanes,
        PLANNED=planned,
        ANNOUNCED=announced is not None,
        **constants,
        **layout.options(units, peak_lanes > 0),
        **overlapping(scores_RHU),
    )


@triton.jit
@no_type_check
def _choose(
    scores,
    peaks,
    context_tokens,
    kv_budget_tokens,
    unit_ids,
    pages,
    block_table,
    candidates,
    lists_complete,
    scores_per_request,
    scores_per_head,
    peaks_per_request,
    peaks_per_head,
    ids_per_request,
    ids_per_head,
    pages_per_request,
    pages_per_head,
    table_per_request,
    most,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MORE_LANES: tl.constexpr,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    FILL_REST: tl.constexpr,
    COMPILED: tl.constexpr,
    PEAK_LANES: tl.constexpr,
    PLANNED: tl.constexpr,
    ANNOUNCED: tl.constexpr,
    SAMPLED: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    if not PLANNED:
        wait_for_previous(launch_pdl)
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    context = tl.load(context_tokens + request).to(tl.int32)
    budget = tl.load(kv_budget_tokens + request).to(tl.int32)
    units = (context + UNIT - 1) // UNIT
    wanted = tl.minimum(tl.where(budget >= context, units, budget // UNIT), most)
    wait_for_previous(launch_pdl)
    let_next_begin(launch_pdl)
    if LOADED == 4:
        # Of the numbers that it is given, the compiler only knows which are multiples of 16.
        scores_per_request = scores_per_request // 4 * 4
        scores_per_head = scores_per_head // 4 * 4
    scores_row = scores + request * scores_per_request + head * scores_per_head
    ids_row = unit_ids + request * ids_per_request + head * ids_per_head
    pages_row = pages + request * pages_per_request + head * pages_per_head
    table_row = block_table + request * table_per_request
    FILL: tl.constexpr = QUADS

    if wanted == units:
        for start in range(0, wanted, FILL):
            each = start + tl.arange(0, FILL)
            tl.store(ids_row + each, each, mask=each < wanted)
            if WITH_PAGES:
                page = page_of(table_row, each, each < wanted, UNITS_PER_BLOCK, COMPILED)
                tl.store(pages_row + each, page, mask=each < wanted)
    elif wanted > 0:
        if MANY:
            listed_row = candidates + (request * tl.num_programs(0) + head) * (2 * LANES)
            if PEAK_LANES == 0 and not SAMPLED:
                _choose_of_many(
                    scores_row, peaks, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, MANY,
                    LANES, ROWS, QUADS, LOADED, WITH_PAGES, COMPILED, PEAK_LANES, SAMPLED,
                )  # fmt: skip
            elif units <= LANES:
                _choose_of_few(
                    scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, LANES, LOADED, WITH_PAGES,
                    COMPILED,
                )  # fmt: skip
            elif PEAK_LANES > 0 and units <= 2 * LANES:
                _choose_of_few(
                    scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, 2 * LANES, LOADED,
                    WITH_PAGES, COMPILED,
                )  # fmt: skip
            else:
                _choose_of_many(
                    scores_row, peaks + request * peaks_per_request + head * peaks_per_head, ids_row, pages_row,
                    table_row, listed_row, units, wanted, UNITS_PER_BLOCK, MANY, LANES, ROWS, QUADS, LOADED, WITH_PAGES,
                    COMPILED, PEAK_LANES, SAMPLED,
                )  # fmt: skip
        # Known when the kernel is compiled, and then what follows is left out.
        elif MORE_LANES == 0:  # noqa: SIM114
            _choose_of_few(
                scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, LANES, LOADED, WITH_PAGES,
                COMPILED,
            )  # fmt: skip
        elif units <= LANES:
            _choose_of_few(
                scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, LANES, LOADED, WITH_PAGES,
                COMPILED,
            )  # fmt: skip
        else:
            _choose_of_few(
                scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, MORE_LANES, LOADED,
                WITH_PAGES, COMPILED,
            )  # fmt: skip

    if FILL_REST:
        nothing = tl.full([FILL], -1, tl.int32)
        for start in range(wanted, most, FILL):
            spare = start + tl.arange(0, FILL)
            tl.store(ids_row + spare, nothing, mask=spare < most)
            if WITH_PAGES:
                tl.store(pages_row + spare, nothing, mask=spare < most)
    # Nobody reads an empty list.
    if ANNOUNCED:  # noqa: SIM102
        if wanted > 0:
            announce(lists_complete + request * tl.num_programs(0) + head)


@triton.jit
@no_type_check
def _choose_of_few(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Write the `wanted` best, at least one and not all, of units that all have a lane."""
    unit = tl.arange(0, LANES)
    ordered = ordered_scores(scores_row, unit, units, LOADED)
    low, finite = ends(ordered)
    first, second, third, fourth = below(finite, low)
    threshold = searched(ordered, low, units, LARGEST, first, second, third, fourth, wanted, wanted, True)
    place, chosen = places_of_best(ordered, threshold, wanted)
    put(ids_row, place, unit, chosen, COMPILED)
    if WITH_PAGES:
        put(pages_row, place, page_of(table_row, unit, chosen, UNITS_PER_BLOCK, COMPILED), chosen, COMPILED)


@triton.jit
@no_type_check
def _choose_of_many(
    scores_row,
    peaks_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    MANY: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    COMPILED: tl.constexpr,
    PEAK_LANES: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """Write the `wanted` best of up to MANY units, at least one and not all. `listed_row` has two places for each lane."""
    CHUNK: tl.constexpr = 4 * ROWS * QUADS
    count = units
    low = tl.zeros([], tl.int32)
    finite = tl.zeros([], tl.int32)
    if units > LANES:
        count = tl.full([], 2 * LANES + 1, tl.int32)
        if PEAK_LANES > 0:
            # A number that most peaks reach would be reached by too many units.
            if (wanted <= LANES // 2) & (16 * wanted <= units):
                FEWER: tl.constexpr = PEAK_LANES if PEAK_LANES < LANES else LANES
                if units <= FEWER * PEAK:
                    count, low, finite = candidates_under_peaks(
                        scores_row, peaks_row, listed_row, units, wanted, QUADS, LANES, FEWER, LOADED, COMPILED
                    )
                else:
                    count, low, finite = candidates_under_peaks(
                        scores_row, peaks_row, listed_row, units, wanted, QUADS, LANES, PEAK_LANES, LOADED, COMPILED
                    )
        # Known when the kernel is compiled. The wanted units may take up half of the places, and of the lanes that keep the
        # largest scores.
        elif not SAMPLED:  # noqa: SIM102
            if wanted <= LANES // 2:
                if units <= CHUNK:
                    if wanted <= 2 * QUADS:
                        count, low, finite = candidates_of_all(
                            scores_row, listed_row, units, wanted, ROWS, 1, QUADS, LANES, True, LOADED, COMPILED
                        )
                    elif wanted <= 4 * QUADS:
                        count, low, finite = candidates_of_all(
                            scores_row, listed_row, units, wanted, ROWS, 2, QUADS, LANES, True, LOADED, COMPILED
                        )
                # Known when the kernel is compiled.
                elif MANY > CHUNK:
                    if units <= 2 * CHUNK:
                        if wanted <= 4 * QUADS:
                            count, low, finite = candidates_of_all(
                                scores_row, listed_row, units, wanted, 2 * ROWS, 2, QUADS, LANES, True, LOADED, COMPILED
                            )
                    elif wanted <= 8 * QUADS:
                        count, low, finite = candidates_of_all(
                            scores_row, listed_row, units, wanted, ROWS, 4, QUADS, LANES, False, LOADED, COMPILED
                        )
        if count > LANES:
            count, low, finite = candidates_by_sample(
                scores_row, listed_row, units, wanted, QUADS, LANES, LOADED, COMPILED
            )
        # What other threads listed must have arrived.
        tl.debug_barrier()
    if count <= LANES // 4:
        _choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            LANES // 4, WITH_PAGES, True, COMPILED,
        )  # fmt: skip
    elif count <= LANES // 2:
        _choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            LANES // 2, WITH_PAGES, True, COMPILED,
        )  # fmt: skip
    elif count <= LANES:
        _choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            LANES, WITH_PAGES, not SAMPLED, COMPILED,
        )  # fmt: skip
    elif count <= 2 * LANES:
        _choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            2 * LANES, WITH_PAGES, False, COMPILED,
        )  # fmt: skip
    else:
        choose_between_bounds(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, QUADS, LANES, LOADED,
            WITH_PAGES, PEAK_LANES > 0 or SAMPLED, COMPILED,
        )  # fmt: skip


@triton.jit
@no_type_check
def _choose_listed(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    units,
    wanted,
    count,
    low,
    finite,
    UNITS_PER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    PAGES_EARLY: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Write the `wanted` best of `count` listed units, whose scores reach `low`; of all, where there are no more. `finite`:
    the largest finite score that was seen.  PAGES_EARLY: pages arrive while the search goes on, which takes registers."""
    lane = tl.arange(0, LANES)
    listed = lane < count
    made = count < units
    unit = tl.where(made, tl.load(listed_row + lane, mask=listed & made, other=0), lane)
    score = tl.load(scores_row + unit, mask=listed, other=0.0)
    ordered = tl.where(listed, ordered_bits(score), LEAST)
    if WITH_PAGES and PAGES_EARLY:
        page = page_of(table_row, unit, listed, UNITS_PER_BLOCK, COMPILED)
    if made:
        first, second, third, fourth = closely_above(low, finite)
    else:
        low, finite = ends(ordered)
        first, second, third, fourth = below(finite, low)
    threshold = searched(ordered, low, count, LARGEST, first, second, third, fourth, wanted, wanted, True)
    place, chosen = places_of_best(ordered, threshold, wanted)
    put(ids_row, place, unit, chosen, COMPILED)
    if WITH_PAGES:
        if not PAGES_EARLY:
            page = page_of(table_row, unit, chosen, UNITS_PER_BLOCK, COMPILED)
        put(pages_row, place, page, chosen, COMPILED)
