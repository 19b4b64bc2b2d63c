"""Requests with a filled cache, what is chosen of it and attended to, and checks of both against the paged reference. The
benchmarks of decode kernels share them."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sparroll.attention.decode import paged
from sparroll.attention.decode.choice import triton_top_k
from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout
from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.workspace import StepWorkspace, log_weights_for, peaks_for, peaks_to_choose_by
from sparroll.attention.selectors import PageMean, QuantizedMean


@dataclass
class Case:
    """Requests with a filled cache and a written index; outputs start as NaN."""

    selector: PageMean
    name: str
    contexts: np.ndarray
    query_RHGD: Tensor
    keys_PBHD: Tensor
    values_PBHD: Tensor
    index_PSHW: Tensor
    groups_PSHV: Tensor | None
    """Of a selector with a remainder; complete."""
    block_table_RM: Tensor
    context_tokens_R: Tensor
    scores_RHU: Tensor
    workspace: StepWorkspace
    peaks_RHK: Tensor | None = None
    log_weights_RHGN: Tensor | None = None
    """Of a selector whose remainder is weighed with the scores."""
    new_tokens: NewTokens | None = None
    """The last token of each request, which a layer stores anew."""

    @staticmethod
    def build(
        options: argparse.Namespace,
        name: str,
        contexts: np.ndarray,
        selector: PageMean | QuantizedMean | None = None,
        room: int = 0,
    ) -> Case:
        """selector: instead of the one that --unit and --bits say.  room: tokens that scores have room for, where no context
        is so long."""
        device, dtype, batch = options.device, getattr(torch, options.dtype), len(contexts)
        if selector is None:
            sizes = (options.unit, options.unit, 2 * options.unit)
            selector = QuantizedMean(*sizes, options.bits) if options.bits else PageMean(*sizes)
        block = max(options.block, selector.row_tokens)
        columns = -(-contexts // block)
        blocks = int(columns.sum())
        units = -(-max(int(contexts.max()), room) // selector.unit_tokens)
        cache = torch.empty(blocks, block, options.heads, 2 * options.dim, dtype=dtype, device=device).normal_()
        keys, values = cache[..., : options.dim], cache[..., options.dim :]
        order = torch.randperm(blocks).int()
        table = torch.zeros(batch, int(columns.max()), dtype=torch.int32)
        for row, own in enumerate(order.split(columns.tolist())):
            table[row, : len(own)] = own
        # As in vLLM, the rows of a head stand together in a block.
        index = torch.full(
            (blocks, options.heads, block // selector.unit_tokens, selector.index_width(options.dim)),
            torch.nan if selector.index_dtype.is_floating_point else 255,
            dtype=selector.index_dtype,
            device=device,
        ).transpose(1, 2)
        groups = None
        if selector.remainder is not None:
            held = (blocks, options.heads, block // selector.row_tokens, selector.group_width(options.dim))
            groups = torch.full(held, 255, dtype=torch.uint8, device=device).transpose(1, 2)
        query = torch.randn(batch, options.heads, options.group, options.dim, dtype=dtype, device=device)
        return Case(
            selector, name, contexts, query, keys, values, index, groups, table.to(device),
            torch.from_numpy(contexts).to(device, torch.int32),
            torch.full((batch, options.heads, units), torch.nan, device=device),
            StepWorkspace.allocate(
                batch, options.group, options.dim, dtype, selector, device, kv_heads=options.heads
            ),
            peaks_to_choose_by(peaks_for(selector, batch, options.heads, units, device), batch, units),
            log_weights_for(selector, batch, options.heads, options.group, units, device),
            newest(keys, values, table, contexts),
        )  # fmt: skip

    def without_peaks(self) -> Case | None:
        """What peaks of scores spare; None where engines keep none either."""
        return None if self.peaks_RHK is None else dataclasses.replace(self, peaks_RHK=None)

    @property
    def slots_T(self) -> Tensor:
        """The last slot of every unit in the cache."""
        blocks, block_tokens = self.keys_PBHD.shape[:2]
        unit = self.selector.unit_tokens
        return torch.arange(unit - 1, blocks * block_tokens, unit, device=self.keys_PBHD.device)

    def index(self, slots_T: Tensor, impl: str = "triton", into: Tensor | None = None) -> None:
        target = self.index_PSHW if into is None else into
        paged.update_index(self.keys_PBHD, target, slots_T, self.selector, impl)

    def sum_groups(self, impl: str = "triton", into: Tensor | None = None) -> None:
        """Write the rows of all groups, where there is a remainder."""
        target = self.groups_PSHV if into is None else into
        if target is not None:
            blocks, block_tokens = self.keys_PBHD.shape[:2]
            group, device = self.selector.row_tokens, self.keys_PBHD.device
            for slots in torch.arange(group - 1, blocks * block_tokens, group, device=device).split(1 << 12):
                paged.update_groups(self.keys_PBHD, self.values_PBHD, target, slots, self.selector, impl)

    def score(
        self, impl: str = "triton", into: Tensor | None = None, budgets_R: Tensor | None = None, stores: bool = False
    ) -> None:
        paged.score_units(
            self.query_RHGD, self.index_PSHW, self.block_table_RM, self.context_tokens_R, self.selector,
            self.scores_RHU if into is None else into, impl, kv_budget_tokens_R=budgets_R, workspace=self.workspace,
            planned=budgets_R is not None, peaks_RHK=self.peaks_RHK if into is None else None,
            groups_PSHV=self.groups_PSHV, log_weights_RHGN=self.log_weights_RHGN if impl == "triton" else None,
            new_tokens=self.new_tokens if stores else None,
        )  # fmt: skip


def newest(keys_PBHD: Tensor, values_PBHD: Tensor, table_RM: Tensor, contexts: np.ndarray) -> NewTokens:
    """The last token of each request."""
    block, last_R = keys_PBHD.shape[1], torch.from_numpy(contexts).long() - 1
    slots_R = table_RM[torch.arange(len(last_R)), last_R // block].long() * block + last_R % block
    return NewTokens.held_at(slots_R.to(keys_PBHD.device), keys_PBHD, values_PBHD)


@dataclass
class Choice:
    """A case under one budget: what is chosen and what is attended to."""

    case: Case
    budget: str
    budgets: np.ndarray
    budgets_R: Tensor
    unit_ids_RHN: Tensor
    pages_RHN: Tensor
    out_RHGD: Tensor

    @staticmethod
    def build(case: Case, budget: str, budgets: np.ndarray) -> Choice:
        requests, heads = case.query_RHGD.shape[:2]
        device = case.query_RHGD.device
        shape = (requests, heads, min(int(budgets.max()) // case.selector.unit_tokens, case.scores_RHU.shape[2]))
        return Choice(
            case, budget, budgets, torch.from_numpy(budgets).to(device, torch.int32),
            torch.full(shape, -2, dtype=torch.int32, device=device),
            torch.full(shape, -2, dtype=torch.int32, device=device),
            torch.full_like(case.query_RHGD, torch.nan),
        )  # fmt: skip

    def choose_as(self, layout: ChoiceLayout) -> None:
        """With another layout than the default one."""
        case = self.case
        triton_top_k.choose_units(
            case.scores_RHU, case.context_tokens_R, self.budgets_R, case.selector, self.unit_ids_RHN, self.pages_RHN,
            case.block_table_RM, case.index_PSHW.shape[1], peaks_RHK=case.peaks_RHK, planned=True, layout=layout,
        )  # fmt: skip

    def choose(self, impl: str = "triton", announce: bool = False) -> None:
        paged.choose_units(
            self.case.scores_RHU, self.case.context_tokens_R, self.budgets_R, self.case.selector, self.unit_ids_RHN, impl,
            pages_RHN=self.pages_RHN, block_table_RM=self.case.block_table_RM,
            units_per_block=self.case.index_PSHW.shape[1], peaks_RHK=self.case.peaks_RHK, planned=True,
            workspace=self.case.workspace if announce else None,
        )  # fmt: skip

    def attend(self, impl: str = "triton", announced: bool = False) -> None:
        case = self.case
        paged.paged_decode(
            case.query_RHGD, case.keys_PBHD, case.values_PBHD, case.block_table_RM, self.unit_ids_RHN,
            case.context_tokens_R, self.budgets_R, case.selector, case.query_RHGD.shape[-1] ** -0.5, self.out_RHGD,
            case.workspace, impl, pages_RHN=self.pages_RHN, planned=True, index_PSHW=case.index_PSHW,
            groups_PSHV=case.groups_PSHV, log_weights_RHGN=case.log_weights_RHGN, announced=announced,
        )  # fmt: skip

    def plan(self) -> None:
        """Once a step, for all layers."""
        case = self.case
        paged.plan_step(
            case.context_tokens_R, self.budgets_R, case.selector, self.unit_ids_RHN.shape[2], case.workspace
        )

    def select(self) -> None:
        self.case.score(budgets_R=self.budgets_R), self.choose()

    def layer(self) -> None:
        """As in engines, new tokens are stored while units are scored, and attention begins while lists are still made or
        after the choice, as StepWorkspace.begins_early says."""
        self.case.score(budgets_R=self.budgets_R, stores=True), self.choose(announce=True), self.attend(announced=True)

    def torch_top_k(self) -> None:
        self.case.scores_RHU.topk(self.unit_ids_RHN.shape[2], dim=-1, sorted=False)


def attention_begins(early: bool) -> AbstractContextManager[Any]:
    """While lists are still made or after the choice, whichever engines would take."""
    return mock.patch.object(StepWorkspace, "begins_early", return_value=early)


def check_case(case: Case) -> None:
    """Index, groups and scores; leaves them written by the kernels."""
    remainder, dim = case.selector.remainder, case.query_RHGD.shape[-1]
    if case.groups_PSHV is not None and remainder is not None:
        rows, units = torch.zeros_like(case.groups_PSHV), case.selector.units_per_group
        case.sum_groups("reference", rows), case.sum_groups()
        torch.testing.assert_close(
            remainder.means(case.groups_PSHV, dim), remainder.means(rows, dim), rtol=2**-7, atol=0
        )
        spreads = [remainder.spread(held, dim, units) for held in (case.groups_PSHV, rows)]
        torch.testing.assert_close(*spreads, rtol=2**-7, atol=0)
    expected = torch.full_like(case.index_PSHW, 255)
    for slots in case.slots_T.split(1 << 14):
        case.index(slots, "reference", expected)
        case.index(slots)
    torch.testing.assert_close(case.index_PSHW, expected)
    case.score()
    for row in range(0, len(case.query_RHGD), max(1, len(case.query_RHGD) // 32)):
        one = dataclasses.replace(
            case, query_RHGD=case.query_RHGD[row : row + 1], block_table_RM=case.block_table_RM[row : row + 1],
            context_tokens_R=case.context_tokens_R[row : row + 1],
        )  # fmt: skip
        scores = torch.full_like(case.scores_RHU[row : row + 1], torch.nan)
        one.score("reference", scores)
        # Below 8 bits scores are defined to the last bit.
        exact = isinstance(case.selector, QuantizedMean) and case.selector.bits < 8
        close = {"atol": 0.0, "rtol": 0.0} if exact else {"atol": 1e-4, "rtol": 1e-5}
        torch.testing.assert_close(case.scores_RHU[row : row + 1], scores, **close)


def check_choice(choice: Choice) -> None:
    """Choice, also in a layout of 8 warps, and attention; leaves all written by the kernels."""
    choice.plan()
    choice.choose("reference")
    expected = choice.unit_ids_RHN.clone(), choice.pages_RHN.clone()
    for choose in (lambda: choice.choose_as(ChoiceLayout()), choice.choose):
        choice.unit_ids_RHN.fill_(-2), choice.pages_RHN.fill_(-2)
        choose()
        assert torch.equal(choice.unit_ids_RHN, expected[0]) and torch.equal(choice.pages_RHN, expected[1]), (
            "choice differs"
        )
    check_attention(choice)
    alone = choice.out_RHGD.clone()
    for early in (True, False):
        choice.out_RHGD.fill_(torch.nan)
        with attention_begins(early):
            choice.layer()
        assert torch.equal(choice.out_RHGD, alone), f"attention in a layer differs, early: {early}"


def check_attention(choice: Choice) -> None:
    choice.plan()
    choice.out_RHGD.fill_(torch.nan)
    choice.attend()
    check_output(choice)


def check_output(choice: Choice) -> None:
    """What attention left, against the reference."""
    exact = torch.empty_like(choice.out_RHGD, dtype=torch.float32)
    dataclasses.replace(choice, out_RHGD=exact).attend("reference")
    error = float((choice.out_RHGD.float() - exact).norm() / exact.norm())
    # NaN is not below either.
    assert error < (1e-2 if choice.out_RHGD.dtype != torch.float32 else 1e-4), f"attention is off by {error:.1e}"
