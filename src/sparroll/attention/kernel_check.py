"""Whether the kernels of a decode step find on this device what their references find. A compiler can be wrong where neither
it nor the interpreter of the tests says so, and then rollouts would be, too: a new GPU or a new triton is worth a check."""

# R requests, H kv heads, G query heads per kv head, D head dim, P blocks, B tokens of a block, S units or groups of a block,
# U units, N chosen units, K peaks

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.attention.decode import paged
from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.workspace import (
    MANY_PAIRS,
    PEAK_UNITS,
    StepWorkspace,
    by_sample,
    has_peaks,
    log_weights_for,
)
from sparroll.attention.selectors import PageMean, QuantizedMean, Selector
from sparroll.errors import UserError

USUAL: tuple[Selector, ...] = (PageMean(), *(QuantizedMean(unit, 16, 32, unit) for unit in (4, 2, 1)))
"""Pages of 16 tokens, and small units whose index takes as many bytes."""
_READ_SHARES = (0.04, 0.3)
"""What requests read of their contexts beyond the least, by turns: few and many units are chosen in different ways."""


def usual_contexts(selector: Selector) -> tuple[int, ...]:
    """Tokens of a check's requests: a padding row, incomplete units, and two with so many units that they are chosen under
    peaks where there are any. Their number is odd, so rows of scores need padding to be read 16 bytes at a time."""
    return 0, 1, 37, 1000, 5003, 10_001 * selector.unit_tokens - 1, 10_003 * selector.unit_tokens


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model."""

    kv: int = 2
    group: int = 2
    """Query heads for each kv head."""
    dim: int = 128


@dataclass
class _Step:
    """What a decode step gets and writes. All that no kernel may read is NaN."""

    selector: Selector
    query_RHGD: Tensor
    keys_PBHD: Tensor
    values_PBHD: Tensor
    index_PSHW: Tensor
    groups_PSHV: Tensor | None
    block_table_RM: Tensor
    slots_T: Tensor
    contexts_R: Tensor
    budgets_R: Tensor
    scores_RHU: Tensor
    peaks_RHK: Tensor | None
    log_weights_RHGN: Tensor | None
    unit_ids_RHN: Tensor
    pages_RHN: Tensor
    out_RHGD: Tensor
    workspace: StepWorkspace


def differences(
    selector: Selector,
    heads: Heads | None = None,
    *,
    contexts: Sequence[int] | None = None,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> list[str]:
    """A sentence about each kernel that finds something else than its reference; none where all agree.

    Requests of these contexts (tokens; default: `usual_contexts`) attend in a cache of random keys and values, in blocks of
    so many tokens (vLLM's are 16 where nobody asks for others). Index, scores of units below 8 bits, peaks and
    choice must agree to the last bit, and the others within rounding.

    Raises UserError for a selector or heads without kernels, for blocks that do not hold whole units and groups, and where
    there is no triton or no GPU.
    """
    asked = usual_contexts(selector) if contexts is None else contexts
    step = _step(selector, heads or Heads(), asked, block_tokens, dtype, torch.device(device), seed)
    return [*_index(step), *_scores(step), *_choice(step), *_attention(step)]


def _step(
    selector: Selector,
    heads: Heads,
    contexts: Sequence[int],
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> _Step:
    generator, unit = torch.Generator().manual_seed(seed), selector.unit_tokens
    needed = [-(-context // block_tokens) for context in contexts]
    blocks = sum(needed) + 1
    # The last block is nobody's.
    table_RM = torch.full((len(contexts), max(needed) + 1), blocks - 1, dtype=torch.int32)
    cache = torch.full((blocks, block_tokens, heads.kv, 2 * heads.dim), torch.nan, dtype=dtype)
    slots = []
    for row, own in enumerate(torch.randperm(blocks - 1, generator=generator).split(needed)):
        table_RM[row, : len(own)] = own
        position = torch.arange(contexts[row])
        its_slots = own[position // block_tokens] * block_tokens + position % block_tokens
        tokens = torch.randn(contexts[row], heads.kv, 2 * heads.dim, generator=generator)
        cache.view(-1, heads.kv, 2 * heads.dim)[its_slots] = tokens.to(dtype)
        slots.append(its_slots)
    cache = cache.to(device)
    contexts_R = torch.tensor(contexts, dtype=torch.int32)
    share_R = torch.tensor(_READ_SHARES).repeat(len(contexts))[: len(contexts)]
    budgets_R = (selector.least_budget_tokens + contexts_R * share_R).int() // unit * unit
    units, most = -(-max(contexts) // unit), int(budgets_R.max()) // unit
    poison = torch.nan if selector.index_dtype.is_floating_point else 255
    # As in vLLM, the rows of a head stand together in a block.
    index = torch.full(
        (blocks, heads.kv, block_tokens // unit, selector.index_width(heads.dim)), poison, dtype=selector.index_dtype
    )
    groups = None
    if selector.remainder is not None:
        shape = (blocks, heads.kv, block_tokens // selector.row_tokens, selector.group_width(heads.dim))
        groups = torch.full(shape, 255, dtype=torch.uint8, device=device).transpose(1, 2)
    query = torch.randn(len(contexts), heads.kv, heads.group, heads.dim, generator=generator).to(device, dtype)
    lists = (len(contexts), heads.kv, max(most, 1))
    nothing = torch.full(lists, -2, dtype=torch.int32, device=device)
    peaks = None
    if has_peaks(selector):
        peaks = torch.zeros(*lists[:2], -(-units // PEAK_UNITS), dtype=torch.int32, device=device)
    return _Step(
        selector, query, cache[..., : heads.dim], cache[..., heads.dim :], index.to(device).transpose(1, 2), groups,
        table_RM.to(device), torch.cat(slots).to(device), contexts_R.to(device), budgets_R.to(device),
        # As in engines, rows of whole 16 bytes.
        torch.full((*lists[:2], -(-units // 4) * 4), torch.nan, device=device)[..., :units], peaks,
        log_weights_for(selector, len(contexts), heads.kv, heads.group, units, device),
        nothing, nothing.clone(), torch.full_like(query, torch.nan),
        StepWorkspace.allocate(len(contexts), heads.group, heads.dim, dtype, selector, device, kv_heads=heads.kv),
    )  # fmt: skip


def _index(step: _Step) -> list[str]:
    """Leaves index and groups as the kernels write them."""
    expected = step.index_PSHW.clone()
    paged.update_index(step.keys_PBHD, expected, step.slots_T, step.selector)
    paged.update_index(step.keys_PBHD, step.index_PSHW, step.slots_T, step.selector, "triton")
    remainder, dim = step.selector.remainder, step.query_RHGD.shape[-1]
    packed = step.selector if isinstance(step.selector, QuantizedMean) else None
    told = []
    # Where channels leave bits of a row over, these may be any, and only the scores tell.
    if packed is None or dim * packed.bits == 8 * packed.scale_at(dim):
        wrong = _unlike(step.index_PSHW, expected, close=2**-7 if packed is None else 0.0)
        told = [f"{wrong} of the index"] if wrong else []
    if step.groups_PSHV is not None and remainder is not None:
        rows = step.groups_PSHV.clone()
        for into, impl in ((rows, "reference"), (step.groups_PSHV, "triton")):
            paged.update_groups(step.keys_PBHD, step.values_PBHD, into, step.slots_T, step.selector, impl)
        wrong = _unlike(remainder.means(step.groups_PSHV, dim), remainder.means(rows, dim), close=2**-7)
        told += [f"{wrong} of the remainder's means"] if wrong else []
    return told


def _newest(step: _Step) -> NewTokens:
    """The last token of each context, and NaN in its place in the cache."""
    context_R = step.contexts_R.long()
    last_R = (context_R.cumsum(0) - 1).clamp_min(0)
    slots_R = torch.where(context_R > 0, step.slots_T[last_R], -1)
    new = NewTokens.held_at(slots_R, step.keys_PBHD, step.values_PBHD)
    step.keys_PBHD[new.places] = step.values_PBHD[new.places] = torch.nan
    return new


def _scores(step: _Step) -> list[str]:
    """Leaves scores and peaks as the kernels write them, and stores the newest tokens as engines do."""
    expected, peaks = step.scores_RHU.clone(), None if step.peaks_RHK is None else step.peaks_RHK.clone()
    caches = step.keys_PBHD, step.values_PBHD
    held = [cache.clone() for cache in caches]
    for scores, its_peaks, impl in ((expected, peaks, "reference"), (step.scores_RHU, step.peaks_RHK, "triton")):
        paged.score_units(
            step.query_RHGD, step.index_PSHW, step.block_table_RM, step.contexts_R, step.selector, scores, impl,
            workspace=step.workspace, peaks_RHK=its_peaks, groups_PSHV=step.groups_PSHV,
            log_weights_RHGN=step.log_weights_RHGN, new_tokens=_newest(step),
        )  # fmt: skip
    exact = isinstance(step.selector, QuantizedMean) and step.selector.bits < 8
    told = []
    if wrong := _unlike(step.scores_RHU, expected, close=0.0 if exact else 1e-4):
        told.append(f"{wrong} of the scores")
    if step.peaks_RHK is not None and peaks is not None and (wrong := _unlike(step.peaks_RHK, peaks)):
        told.append(f"{wrong} of their peaks")
    for name, cache, right in zip(("keys", "values"), caches, held, strict=True):
        if wrong := _unlike(cache, right):
            told.append(f"{wrong} of the {name} that are stored")
            cache.copy_(right)
    return told


def _choice(step: _Step) -> list[str]:
    """Among the same scores, with and without peaks, also where rows have no padding, and in a batch so large that it
    chooses by a sample. Leaves lists as the reference writes them."""

    def chosen(scores_RHU: Tensor, impl: str, peaks_RHK: Tensor | None = None, times: int = 1) -> tuple[Tensor, Tensor]:
        """times: how often the requests are there."""
        ids, pages = (torch.full_like(lists.repeat(times, 1, 1), -2) for lists in (step.unit_ids_RHN, step.pages_RHN))
        paged.choose_units(
            scores_RHU.repeat(times, 1, 1) if times > 1 else scores_RHU, step.contexts_R.repeat(times),
            step.budgets_R.repeat(times), step.selector, ids, impl, pages_RHN=pages,
            block_table_RM=step.block_table_RM.repeat(times, 1), units_per_block=step.index_PSHW.shape[1],
            peaks_RHK=peaks_RHK,
        )  # fmt: skip
        return ids, pages

    expected = chosen(step.scores_RHU, "reference")
    forms: list[tuple[str, Tensor, Tensor | None]]
    forms = [("", step.scores_RHU, None), (" in rows without padding", step.scores_RHU.contiguous(), None)]
    if step.peaks_RHK is not None:
        forms.append((" under peaks", step.scores_RHU, step.peaks_RHK))
    told = []
    for about, scores_RHU, peaks in forms:
        found = chosen(scores_RHU, "triton", peaks)
        for what, its, right in zip(("chosen units", "places of chosen units"), found, expected, strict=True):
            told += [f"{wrong} of the {what}{about}"] if (wrong := _unlike(its, right)) else []
    requests, heads, units = step.scores_RHU.shape
    times = MANY_PAIRS // (requests * heads) + 1
    if by_sample(units, times * requests * heads):
        found = chosen(step.scores_RHU, "triton", times=times)
        for what, its, right in zip(("chosen units", "places of chosen units"), found, expected, strict=True):
            wrong = _unlike(its, right.repeat(times, 1, 1))
            told += [f"{wrong} of the {what} by a sample"] if wrong else []
    step.unit_ids_RHN, step.pages_RHN = expected
    return told


def _attention(step: _Step) -> list[str]:
    """Also where it begins while lists are still made, as in engines."""

    def attend(out: Tensor, impl: str, early: bool = False) -> None:
        paged.paged_decode(
            step.query_RHGD, step.keys_PBHD, step.values_PBHD, step.block_table_RM, step.unit_ids_RHN, step.contexts_R,
            step.budgets_R, step.selector, step.query_RHGD.shape[-1] ** -0.5, out, step.workspace, impl,
            pages_RHN=step.pages_RHN, index_PSHW=step.index_PSHW, groups_PSHV=step.groups_PSHV,
            log_weights_RHGN=step.log_weights_RHGN, planned=early, announced=early,
        )  # fmt: skip

    exact = torch.zeros_like(step.out_RHGD, dtype=torch.float32)
    attend(exact, "reference")
    attend(step.out_RHGD, "triton")
    wrong = _unlike(step.out_RHGD.float(), exact, close=2e-2 if step.out_RHGD.dtype != torch.float32 else 1e-4)
    told = [f"{wrong} of the attention's outputs"] if wrong else []
    out = torch.full_like(step.out_RHGD, torch.nan)
    paged.plan_step(step.contexts_R, step.budgets_R, step.selector, step.unit_ids_RHN.shape[2], step.workspace)
    step.unit_ids_RHN.fill_(-2), step.pages_RHN.fill_(0)
    paged.choose_units(
        step.scores_RHU, step.contexts_R, step.budgets_R, step.selector, step.unit_ids_RHN, "triton",
        pages_RHN=step.pages_RHN, block_table_RM=step.block_table_RM, units_per_block=step.index_PSHW.shape[1],
        planned=True, workspace=step.workspace,
    )  # fmt: skip
    attend(out, "triton", early=True)
    if wrong := _unlike(out, step.out_RHGD):
        told.append(f"{wrong} of the outputs of attention that begins while lists are made")
    return told


def _unlike(found: Tensor, expected: Tensor, close: float = 0.0) -> str:
    """How many numbers differ by more than `close`, and than that share of the expected one: "3 of 100"; empty if none."""
    same = torch.isclose(found, expected, rtol=close, atol=close, equal_nan=True)
    return "" if bool(same.all()) else f"{int((~same).sum()):,} of {same.numel():,}"


def of_model(query_heads: int | None, kv_heads: int | None, head_dim: int | None) -> Heads:
    """Query heads for each kv head, and the head size, as far as they are known. Two kv heads tell as much as all.

    Raises UserError for numbers that no model has.
    """
    usual = Heads()
    group = usual.group
    if query_heads is not None and kv_heads is not None:
        if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
            raise UserError(f"{query_heads} query heads cannot share {kv_heads} kv heads", "correct the fingerprint")
        group = query_heads // kv_heads
    if head_dim is not None and head_dim < 1:
        raise UserError(f"a head has at least one channel, got {head_dim}", "correct the fingerprint")
    return Heads(group=group, dim=head_dim or usual.dim)
