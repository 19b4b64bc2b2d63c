"""A paged cache with everything poisoned that must not be read, and the same requests unpaged."""

# R requests, P blocks, B tokens per block, M blocks per request, S units per block, H kv heads, C cached tokens,
# G query heads per kv head, U units, N chosen units, D head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparroll.attention.decode import paged
from sparroll.attention.decode.workspace import StepWorkspace
from sparroll.attention.selectors import PageMean, Selector

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD_CONTEXTS = [1, 15, 16, 17, 0, 63, 100, 111, 1000, 4097, 0]
"""In one batch, with padding rows between and after."""
SHORT_CONTEXTS = [17, 0, 100, 1, 111, 257]


def selector_of(unit: int, kind: type[Selector] = PageMean) -> Selector:
    return kind(page_tokens=unit, first_tokens=16, recent_tokens=32)


def poison(selector: Selector) -> float:
    """What fills index rows that nobody wrote: NaN, also as a scale or an fp8 number in rows of bytes."""
    return torch.nan if selector.index_dtype.is_floating_point else 255


@dataclass
class PagedCache:
    selector: Selector
    contexts: list[int]
    query_RHGD: Tensor
    keys_PBHD: Tensor
    values_PBHD: Tensor
    index_PSHW: Tensor
    block_table_RM: Tensor
    context_tokens_R: Tensor
    keys_RHCD: Tensor
    values_RHCD: Tensor

    @property
    def scale(self) -> float:
        return self.query_RHGD.shape[-1] ** -0.5

    @property
    def units(self) -> int:
        return -(-max(self.contexts) // self.selector.unit_tokens) + 3

    def index_written(self, impl: str = "reference") -> PagedCache:
        paged.update_index(self.keys_PBHD, self.index_PSHW, self.slots(), self.selector, impl)
        return self

    def slots(self) -> Tensor:
        """Of every token of every request, in a fixed order."""
        block_tokens = self.keys_PBHD.shape[1]
        slots = [
            int(self.block_table_RM[row, position // block_tokens]) * block_tokens + position % block_tokens
            for row, context in enumerate(self.contexts)
            for position in range(context)
        ]
        return torch.tensor(slots, dtype=torch.int64, device=DEVICE)

    def scores(self, impl: str, **settings: Any) -> Tensor:
        requests, heads = self.query_RHGD.shape[:2]
        scores = torch.full((requests, heads, self.units), torch.nan, device=DEVICE)
        paged.score_units(
            self.query_RHGD, self.index_PSHW, self.block_table_RM, self.context_tokens_R, self.selector, scores, impl,
            workspace=self.workspace(), **settings,
        )  # fmt: skip
        return scores

    def workspace(self, programs: int | None = None) -> StepWorkspace:
        """Full of rubbish."""
        requests, heads, group, dim = self.query_RHGD.shape
        workspace = StepWorkspace.allocate(
            requests, group, dim, self.query_RHGD.dtype, self.selector, DEVICE, programs=programs, kv_heads=heads
        )
        for plan in (workspace.read_before_R, workspace.scored_before_R, workspace.arrivals_X, workspace.listed_RH):
            plan.fill_(-1 << 30)
        for part in (
            workspace.mixed_XGD,
            workspace.log_sum_XG,
            workspace.unread_mixed_XGD,
            workspace.unread_log_sum_XG,
        ):
            part.fill_(torch.nan)
        return workspace

    def chosen(self, scores: Tensor, budgets: Tensor, most: int, impl: str) -> tuple[Tensor, Tensor]:
        """Unit ids and pages, written over poison."""
        ids, pages = (
            torch.full((*scores.shape[:2], most), 1 << 30, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )
        paged.choose_units(
            scores, self.context_tokens_R, budgets, self.selector, ids, impl, pages_RHN=pages,
            block_table_RM=self.block_table_RM, units_per_block=self.index_PSHW.shape[1],
        )  # fmt: skip
        return ids, pages

    def attended(
        self,
        ids: Tensor,
        budgets: Tensor,
        impl: str,
        programs: int | None = None,
        pages_RHN: Tensor | None = None,
        groups_PSHV: Tensor | None = None,
        log_weights_RHGN: Tensor | None = None,
    ) -> Tensor:
        out = torch.full_like(self.query_RHGD, torch.nan)
        workspace = self.workspace(programs)
        paged.paged_decode(
            self.query_RHGD, self.keys_PBHD, self.values_PBHD, self.block_table_RM, ids, self.context_tokens_R,
            budgets, self.selector, self.scale, out, workspace, impl, pages_RHN=pages_RHN,
            index_PSHW=self.index_PSHW, groups_PSHV=groups_PSHV, log_weights_RHGN=log_weights_RHGN,
        )  # fmt: skip
        return out


def paged_cache(
    contexts: list[int],
    unit: int = 16,
    block_tokens: int = 16,
    heads: int = 2,
    group: int = 2,
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    layout: Literal["token_head", "head_token"] = "token_head",
    selector: Selector | None = None,
    seed: int = 0,
) -> PagedCache:
    """Blocks in random order; every slot that holds no token, and every index row, is NaN."""
    generator = torch.Generator().manual_seed(seed)
    selector = selector or selector_of(unit)
    needed = [-(-context // block_tokens) for context in contexts]
    blocks, columns = sum(needed) + 3, max(needed) + 1
    order = torch.randperm(blocks - 1, generator=generator)
    # What lies past a request's blocks is somebody else's: here a block that nobody wrote.
    table = torch.full((len(contexts), columns), blocks - 1, dtype=torch.int32)
    capacity = max(contexts) + selector.unit_tokens
    capacity -= capacity % selector.unit_tokens
    unpaged = torch.full((len(contexts), heads, capacity, 2 * dim), torch.nan, dtype=dtype)
    cache = torch.full((blocks, block_tokens, heads, 2 * dim), torch.nan, dtype=dtype)
    taken = 0
    for row, (context, count) in enumerate(zip(contexts, needed, strict=True)):
        own = order[taken : taken + count]
        taken += count
        table[row, :count] = own
        tokens = torch.randn(context, heads, 2 * dim, generator=generator).to(dtype)
        unpaged[row, :, :context] = tokens.transpose(0, 1)
        places = torch.arange(context)
        cache[own[places // block_tokens], places % block_tokens] = tokens
    units_per_block, width = block_tokens // selector.unit_tokens, selector.index_width(dim)
    index = torch.full((blocks, units_per_block, heads, width), poison(selector), dtype=selector.index_dtype)
    cache, index = cache.to(DEVICE), index.to(DEVICE)
    if layout == "head_token":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        index = index.transpose(1, 2).contiguous().transpose(1, 2)
    query = torch.randn(len(contexts), heads, group, dim, generator=generator).to(dtype).to(DEVICE)
    return PagedCache(
        selector, contexts, query, cache[..., :dim], cache[..., dim:], index, table.to(DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE), unpaged[..., :dim].to(DEVICE),
        unpaged[..., dim:].to(DEVICE),
    )  # fmt: skip


def budgets_of(cache: PagedCache, seed: int = 0) -> Tensor:
    """A different budget for each request: from one unit to choose up to more than its context, whole units."""
    unit, least = cache.selector.unit_tokens, cache.selector.least_budget_tokens
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(len(cache.contexts), generator=generator)
    most = torch.tensor(cache.contexts).clamp_max(512) * 1.25
    return ((least + drawn * most).int() // unit * unit).to(DEVICE, torch.int32)


def units_wanted(cache: PagedCache, budgets: Tensor) -> int:
    """Columns that the list of chosen units needs."""
    unit = cache.selector.unit_tokens
    units = -(-cache.context_tokens_R // unit)
    return max(1, int(torch.minimum(units, budgets // unit).max()))


def assert_attends(cache: PagedCache, ids: Tensor, mixed: Tensor) -> None:
    """Within twice the error that rounding softmax weights and output to the cache's dtype makes by itself."""
    exact = _attention(cache, ids, torch.float64, torch.float64)
    rough = _attention(cache, ids, torch.float32, mixed.dtype).double()
    # Where the rough result happens to round well, its error says little: two roundings of the largest output instead.
    rounding = torch.finfo(mixed.dtype).eps * float(exact.abs().max())
    allowed = max(2 * float((rough - exact).abs().max()), rounding, 2e-5)
    assert not mixed.isnan().any(), "NaN in the output"
    error = float((mixed.double() - exact).abs().max())
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def _attention(cache: PagedCache, ids: Tensor, dtype: torch.dtype, rounded: torch.dtype) -> Tensor:
    unit, tokens = cache.selector.unit_tokens, cache.keys_RHCD.shape[2]
    units = tokens // unit
    read = torch.zeros(*ids.shape[:2], units + 1, dtype=torch.bool, device=DEVICE)
    read.scatter_(2, torch.where(ids < 0, units, ids).long(), True)
    visible = read[..., :units].repeat_interleave(unit, 2)
    visible &= torch.arange(tokens, device=DEVICE) < cache.context_tokens_R[:, None, None]
    keys, values = (
        held.to(dtype).masked_fill(~visible[..., None], 0.0) for held in (cache.keys_RHCD, cache.values_RHCD)
    )
    logits = cache.scale * cache.query_RHGD.to(dtype) @ keys.transpose(2, 3)
    weights = logits.masked_fill(~visible[:, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights.to(rounded).to(dtype) @ values).to(rounded)
