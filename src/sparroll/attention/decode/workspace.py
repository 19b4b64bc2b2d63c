"""Memory that the kernels of decode steps share, and how their programs are laid out. It is allocated once, for all layers
and batch sizes; what changes from step to step is a plan in it (paged.plan_step)."""

# R requests, H kv heads, K peaks of scores, L layers with budgets of their own, X parts of outputs,
# G query heads per kv head, D head dim

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.quantized_mean import QuantizedMean
from sparroll.attention.selectors.remainder import LEAST_GROUP_TOKENS
from sparroll.errors import UserError

SCORED_TILE_BYTES = 8192
"""Index bytes that a program has in flight when it scores."""
MOST_SCORED_UNITS, MOST_SCORED_UNITS_OF_2_BITS = 128, 64
"""Units that it scores at a time, however small they are. Those of 2 bits are scored by programs of one warp."""
PEAK_UNITS = 8
"""Neighbouring units that have one peak: the best of their scores."""
PEAKED_UNITS = range(8193, 32_769)
"""Units that a request may have where peaks spare more time than they take: fewer are chosen as fast without them, and the
peaks of more have no lanes."""
FEW_PAIRS, MANY_PAIRS = 264, 396
"""An H200 runs the programs that choose units for so many (request, head) at a time, if each of its multiprocessors has
room for two programs of 8 warps, and for three."""
SAMPLED_UNITS = range(8193, 10_241)
"""Units that a request may have where such a batch chooses by a sample of the scores. Other sizes were not timed."""
LEAST_PAIRS_TOGETHER = 32
"""(request, head) from which on attention may begin with all its programs together, after the choice. Of 8 and 32, timed on
an H200, the first were slower so and the second faster (LOG.md)."""
UNREAD_PROGRAMS_PER_MULTIPROCESSOR, MOST_UNREAD_PARTS = 8, 8
"""Programs that sum up what is not read, and most of them that share one (request, head). The kernel that reads takes up
these parts, four at a time."""
MOSTLY_BUSY = 0.85
"""Where less than this share of the programs that run at the same time would have something to read, if each read for a
single (request, head), none does."""
ROOMY = {(8, 0), (9, 0), (10, 0), (10, 3)}
"""Compute capabilities with 164 KB of shared memory or more on each multiprocessor."""


def unread_tile_units(row_bytes: int, units_per_group: int) -> int:
    """Units whose weights a program estimates at a time: whole groups, and fewer of rows that fill much memory."""
    return max(64 if row_bytes >= 256 else 128, units_per_group)


def default_scored_tile(row_bytes: int, bits: int | None, weighed: bool = False) -> int:
    """Units that a program scores at a time: whole groups of a remainder. bits: of a channel; None of an index that is not
    packed. weighed: whether the program also weighs groups, which takes registers."""
    most = MOST_SCORED_UNITS_OF_2_BITS if bits == 2 or (weighed and bits == 1) else MOST_SCORED_UNITS
    return min(max(SCORED_TILE_BYTES >> (row_bytes - 1).bit_length(), 16), most)


@dataclass(frozen=True)
class Tile:
    """How the programs of a decode are laid out. It changes the speed, and the result only by rounding."""

    tokens: int
    """Tokens read per iteration; a power of two, 16 or more."""
    warps: int
    stages: int
    """Iterations in flight, the running one included."""
    programs_per_multiprocessor: int

    @staticmethod
    def default(dim: int, element_bytes: int, device: torch.device) -> Tile:
        """Measured on an H200 for 128 channels of 16 bits: 64 tokens, 4 warps, 3 stages (96 KB, two programs to a
        multiprocessor). Devices with less shared memory, and wider heads, take smaller tiles."""
        token_bytes = 2 * (1 << (dim - 1).bit_length()) * element_bytes
        roomy = device.type == "cuda" and torch.cuda.get_device_capability(device) in ROOMY
        tokens = 64 if roomy and token_bytes <= 512 else 32
        stage_bytes = tokens * token_bytes
        return Tile(tokens, 4, 4 if stage_bytes <= 16384 else 3 if stage_bytes <= 32768 else 2, 2)


@dataclass(frozen=True)
class StepWorkspace:
    """Memory that the programs of a step's kernels share. It is allocated once, for all layers and batch sizes."""

    tile: Tile
    scored_tile_units: int
    """Units that a program scores at a time."""
    processors: int
    """Multiprocessors of the device."""
    kv_heads: int
    running: int
    """Programs that read at the same time. There is room for the parts of half as many again."""
    short_lists: bool
    """Whether batches read a few tiles for each (request, head), as drafts do that are checked."""
    read_before_R: Tensor
    """[most requests + 2] int32: tiles that one head of all requests before this one reads, and behind the total how many
    of them a program takes; see triton_work_split.py. Where every program reads for a single (request, head), the tiles
    of a request are rounded up to whole stretches."""
    scored_before_R: Tensor
    """[most requests + 1] int32: the same for tiles of units that are scored, of which programs take equal numbers."""
    mixed_XGD: Tensor
    """fp32 partial outputs, two for each program: of the (request, head) that it goes on with, and of one it begins."""
    log_sum_XG: Tensor
    """fp32 base-2 logarithms of their softmax sums; -inf where nothing was visible."""
    unread_tile_units: int
    """Units whose weights a program estimates at a time, where the selector has a remainder."""
    unread_mixed_XGD: Tensor
    """fp32: what a (request, head) does not read, in parts. Empty without a remainder."""
    unread_log_sum_XG: Tensor
    arrivals_X: Tensor
    """int32: how many parts of the pair that begins in each program are ready. 0 between kernels; a plan sees to it anew,
    because an engine's sleep may have discarded what is here."""
    listed_RH: Tensor
    """[most requests, kv heads] int32: 1 where a list of chosen units is complete that nobody has read yet. 0 between
    layers, as `arrivals_X` is between kernels."""
    flags: Tensor
    """The memory of `arrivals_X` and `listed_RH`, for a plan that sets all of it to 0."""

    @staticmethod
    def allocate(
        max_requests: int,
        group: int,
        dim: int,
        dtype: torch.dtype,
        selector: Selector,
        device: torch.device | str,
        kv_heads: int,
        tile: Tile | None = None,
        programs: int | None = None,
        scored_tile_units: int | None = None,
        short_lists: bool = False,
    ) -> StepWorkspace:
        """For caches of that dtype and that many heads. tile, programs (that read at the same time) and scored_tile_units
        are for measurements, and short_lists says that most budgets are of a few hundred tokens; results are the same up
        to rounding.

        Raises UserError for more than 16 query heads per KV head, for heads of more than 256, and for groups of a
        remainder that do not hold 1, 2, 4, ... units.
        """
        if group > 16 or dim > 256:
            raise UserError(
                f"the triton decode takes up to 16 query heads per kv head and head size 256, got {group} and {dim}",
                'impl="reference" takes any',
            )
        device = torch.device(device)
        tile = tile or Tile.default(dim, dtype.itemsize, device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        running = programs or processors * tile.programs_per_multiprocessor
        most_programs = running + (running + 1) // 2
        row_bytes = selector.index_row_bytes(dim)
        if selector.cut_at(dim) < selector.index_width(dim):
            row_bytes = selector.cut_at(dim) * selector.index_dtype.itemsize
        bits = selector.bits if isinstance(selector, QuantizedMean) else None

        weighed = selector.remainder is not None and selector.weighed_with_scores
        unread_tile = unread_parts = 0
        if selector.remainder is not None:
            check_groups_cut_evenly(selector)
            in_group = selector.units_per_group
            unread_tile = unread_tile_units(row_bytes, in_group)
            unread_parts = max_requests * kv_heads + processors * UNREAD_PROGRAMS_PER_MULTIPROCESSOR

        def integers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        flags = integers(most_programs + max_requests * kv_heads)
        return StepWorkspace(
            tile,
            scored_tile_units or default_scored_tile(row_bytes, bits, weighed),
            processors,
            kv_heads,
            running,
            short_lists,
            integers(max_requests + 2),
            integers(max_requests + 1),
            floats(2 * most_programs, group, dim),
            floats(2 * most_programs, group),
            unread_tile,
            floats(unread_parts, group, dim),
            floats(unread_parts, group),
            flags[:most_programs],
            flags[most_programs:].view(max_requests, kv_heads),
            flags,
        )

    def own_programs(self, requests: int) -> Literal["several", "one"] | None:
        """Whether a plan may give each (request, head) programs of its own: several where that keeps nearly all busy that
        run at the same time, and one where lists are short and there are more of them than such programs."""
        pairs = requests * self.kv_heads
        each = self.running // pairs
        if each and pairs * each >= MOSTLY_BUSY * self.running:
            return "several"
        return "one" if self.short_lists and pairs > self.running else None

    def programs(self, requests: int) -> int:
        """Programs that are launched: as many as run at the same time, one for each (request, head), or half as many again,
        so that whichever ends first makes room for another. The number depends on nothing else, since CUDA graphs keep it.
        Programs without work would cost time."""
        own = self.own_programs(requests)
        if own == "one":
            return requests * self.kv_heads
        return self.running if own == "several" else len(self.arrivals_X)

    def sharing(self, requests: int) -> int:
        """Programs that can take equal parts of what a batch reads; there is room for the parts of so many."""
        return min(self.programs(requests), len(self.arrivals_X))

    def begins_early(self, requests: int) -> bool:
        """Whether attention begins while lists are still made. It does not where all its programs run at the same time and
        each may read for a single (request, head): there it is faster if they get their room together, after the choice. A
        few (request, head) win more by an early beginning. Where it begins late, it also does with the next power of two of
        requests. A start captures graphs of that batch, so the kernel of both is compiled by then."""
        batches = requests, 1 << (requests - 1).bit_length()
        together = all(self.own_programs(each) == "several" for each in batches)
        return not together or requests * self.kv_heads < LEAST_PAIRS_TOGETHER

    def unread_parts(self, pairs: int) -> int:
        """Programs that share what one of so many (request, head) does not read."""
        return max(1, min(-(-self.processors * UNREAD_PROGRAMS_PER_MULTIPROCESSOR // pairs), MOST_UNREAD_PARTS))


@dataclass(frozen=True)
class LayerPlans:
    """Workspaces of layers whose budgets differ: each has a plan of its own, and all other memory is shared."""

    read_before_LR: Tensor
    scored_before_LR: Tensor
    workspaces: tuple[StepWorkspace, ...]
    """One for each layer, with a row of these tensors as its plan."""

    @staticmethod
    def of(shared: StepWorkspace, layers: int) -> LayerPlans:
        """Plans for so many layers, for the batches of `shared`."""
        read_before_LR, scored_before_LR = (
            torch.zeros(layers, len(plan), dtype=torch.int32, device=plan.device)
            for plan in (shared.read_before_R, shared.scored_before_R)
        )
        workspaces = tuple(
            replace(shared, read_before_R=read_before_R, scored_before_R=scored_before_R)
            for read_before_R, scored_before_R in zip(read_before_LR, scored_before_LR, strict=True)
        )
        return LayerPlans(read_before_LR, scored_before_LR, workspaces)


def has_peaks(selector: Selector) -> bool:
    """Whether the kernel that scores can leave the peaks of its scores."""
    return isinstance(selector, QuantizedMean) and selector.bits < 8


def peaks_for(selector: Selector, requests: int, heads: int, units: int, device: torch.device | str) -> Tensor | None:
    """[R, H, K] int32 for the best score of every PEAK_UNITS of so many units, as whole numbers in the order of the scores;
    None where the kernels have no peaks, or where these spare no time."""
    if not has_peaks(selector) or units not in PEAKED_UNITS:
        return None
    return torch.zeros(requests, heads, -(-units // PEAK_UNITS), dtype=torch.int32, device=device)


def by_sample(units: int, pairs: int) -> bool:
    """Whether a batch of so many (request, head), which may have so many units, chooses by a sample of the scores."""
    return pairs > MANY_PAIRS and units in SAMPLED_UNITS


def peaks_to_choose_by(peaks_RHK: Tensor | None, requests: int, units: int) -> Tensor | None:
    """The peaks of the first so many requests, which may have so many units; None where their choice does not look at
    any."""
    if peaks_RHK is None or by_sample(units, requests * peaks_RHK.shape[1]):
        return None
    return peaks_RHK[:requests]


def log_weights_for(
    selector: Selector, requests: int, heads: int, group: int, units: int, device: torch.device | str
) -> Tensor | None:
    """[R, H, G, N] fp32 for what the groups of so many units weigh to each query head, if none is read; None where the
    kernel that scores weighs none."""
    if selector.remainder is None or not selector.weighed_with_scores:
        return None
    return torch.zeros(requests, heads, group, -(-units // selector.units_per_group), device=device)


def check_groups_cut_evenly(selector: Selector) -> None:
    """Raises UserError where the kernels cannot cut the selector's groups."""
    assert selector.remainder is not None, "a selector without a remainder"
    in_group = selector.units_per_group
    if in_group & (in_group - 1):
        fewer = 1 << (in_group.bit_length() - 1)
        raise UserError(
            f"the triton decode takes groups of 1, 2, 4, ... units, got {in_group} of them in one",
            f"remainder = {{ group_tokens = {fewer * selector.unit_tokens} }}, if that is at least {LEAST_GROUP_TOKENS}",
        )


def check_unread_parts(workspace: StepWorkspace, pairs: int, selector: Selector) -> None:
    """Raises UserError where there is no room for what so many (request, head) do not read."""
    tile, needed = workspace.unread_tile_units, workspace.unread_parts(pairs) * pairs if pairs else 0
    held = len(workspace.unread_log_sum_XG)
    if not tile or tile % selector.units_per_group or held < needed:
        raise UserError(
            f"the workspace is not for this remainder: it holds {held} parts of {needed}, in tiles of {tile} units",
            "allocate it for the same selector and the largest batch",
        )


def check_fits(workspace: StepWorkspace | None, requests: int, heads: tuple[int, int, int] | None = None) -> None:
    """Raises UserError where the workspace is for fewer requests, or for other heads (kv heads, group, head size)."""
    if workspace is None:
        raise UserError('impl="triton" needs a workspace', "StepWorkspace.allocate(...), once")
    held = (workspace.kv_heads, *workspace.mixed_XGD.shape[1:])
    most = len(workspace.scored_before_R) - 1
    if requests > most or (heads and held != heads):
        raise UserError(
            f"the workspace is for {most} requests of (kv heads, group, head size) {held}, needed: {requests} of "
            f"{heads or held}",
            "allocate it for the largest batch",
        )
