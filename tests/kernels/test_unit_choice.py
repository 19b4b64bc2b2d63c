"""Units of whole sequences chosen by the kernels of page means, against the generic choice; test_ties.py has equal scores.
Compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE
from sparroll.attention.masked import unit_bitmap, unit_choice
from sparroll.attention.selectors import PageMean, Quest
from sparroll.errors import UserError

pytest.importorskip("triton", reason="triton runs on Linux only")
from sparroll.attention.masked import triton_unit_choice

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclasses.dataclass(frozen=True)
class Case:
    query_BASD: Tensor
    keys_BHSD: Tensor
    dense_BS: Tensor
    budgets_S: Tensor
    selector: PageMean

    def words(self, impl: str) -> Tensor:
        given = self.query_BASD, self.keys_BHSD, self.dense_BS, self.budgets_S, self.selector
        return unit_choice.chosen_words(*given, 0.25, impl)

    def read(self, impl: str) -> Tensor:
        """[B, H, S, U] bool."""
        return unit_bitmap.unpack(self.words(impl), 0, self.keys_BHSD.shape[2])

    def scores(self) -> Tensor:
        """[B, H, S, U] in fp64, of all units that are complete at the end, from landmarks as they are stored."""
        unit, (_, heads, tokens, _) = self.selector.unit_tokens, self.keys_BHSD.shape
        keys = self.keys_BHSD[:, :, : tokens // unit * unit].unflatten(2, (-1, unit))
        mean = self.query_BASD.unflatten(1, (heads, -1)).double().mean(2)
        return mean @ self.selector.build_index(keys).double().transpose(2, 3)


def case(
    tokens: int,
    group: int = 2,
    dim: int = 32,
    unit: int = 4,
    batch: int = 2,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Prompts of different lengths, budgets that rise with the context, tensors as transformers lays them."""
    generator = torch.Generator().manual_seed(tokens + 7 * group + dim)

    def heads_of(count: int) -> Tensor:
        return torch.randn(batch, tokens, count, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)

    selector = PageMean(page_tokens=unit, first_tokens=unit, recent_tokens=2 * unit)
    context = torch.arange(1, tokens + 1, device=DEVICE)
    budgets = (selector.least_budget_tokens + context // 5) // unit * unit
    prompts = torch.tensor([[3 + 20 * row] for row in range(batch)], device=DEVICE)
    dense = (context <= prompts) | (budgets >= context)
    return Case(heads_of(group * heads), heads_of(heads), dense, budgets, selector)


def assert_same_but_for_rounding(given: Case, found: Tensor, expected: Tensor) -> int:
    """Only in units whose exact scores are within what rounding fp32 sums can do. Returns how many do."""
    differ = (found != expected).nonzero()
    scores = given.scores()
    largest = float(scores.abs().max()) if scores.numel() else 0.0
    for request, head, position in {tuple(place[:3].tolist()) for place in differ}:
        row = scores[request, head, position]
        ours, theirs = found[request, head, position], expected[request, head, position]
        assert int(ours.sum()) == int(theirs.sum())
        both = torch.cat([row[(ours & ~theirs).nonzero()[:, 0]], row[(theirs & ~ours).nonzero()[:, 0]]])
        assert float(both.max() - both.min()) <= 2e-6 * largest, (request, head, position)
    return len(differ)


@pytest.mark.parametrize("tokens", [1, 3, 4, 17, 31, 32, 33, 63, 130])
def test_triton_chooses_what_the_reference_chooses_at_odd_lengths(tokens: int) -> None:
    given = case(tokens, batch=2 if tokens < 64 else 1, heads=2 if tokens < 64 else 1)
    assert assert_same_but_for_rounding(given, given.read("triton"), given.read("reference")) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "dim"), [(1, 128), (2, 64), (3, 96), (5, 8), (8, 256)])
def test_triton_at_every_head_size_group_and_dtype(group: int, dim: int, dtype: torch.dtype) -> None:
    given = case(45, group, dim, dtype=dtype, batch=1)
    assert assert_same_but_for_rounding(given, given.read("triton"), given.read("reference")) <= 2


@pytest.mark.parametrize("unit", [1, 3, 16, 128])
def test_triton_at_every_unit(unit: int) -> None:
    given = case(2 * unit + 50 if unit < 128 else 560, unit=unit, batch=1, heads=1)
    assert not given.dense_BS.all()
    assert assert_same_but_for_rounding(given, given.read("triton"), given.read("reference")) <= 2


def test_queries_between_two_bf16_numbers_are_not_rounded_to_one() -> None:
    given = case(75, group=1, batch=1, heads=1)
    # Landmarks of even and odd units differ in direction alone, and the query in its 15th bit.
    keys, query = torch.zeros_like(given.keys_BHSD), torch.zeros_like(given.query_BASD)
    query[..., 0], query[..., 1] = 1.0, 1.0 + 2.0**-14
    for unit in range(18):
        keys[:, :, 4 * unit : 4 * unit + 4, unit % 2] = 1.0
    read = dataclasses.replace(given, keys_BHSD=keys, query_BASD=query).read("triton")[0, 0, 74]
    assert read.nonzero()[:, 0].tolist() == [0, 1, 3, 5, 7, 17, 18]


@pytest.mark.parametrize("scratch", [1, 3 * 4 * 32 * 32, 1 << 20])
def test_the_size_of_the_scratch_changes_nothing(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(100, batch=3, heads=1)
    expected = given.words("reference")
    monkeypatch.setattr(triton_unit_choice, "SCRATCH_BYTES", scratch)
    assert torch.equal(given.words("triton"), expected)


def test_tensors_of_any_strides_are_taken() -> None:
    given = case(50)
    turned = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (given.query_BASD, given.keys_BHSD)]
    expected = given.words("reference")
    assert torch.equal(dataclasses.replace(given, query_BASD=turned[0], keys_BHSD=turned[1]).words("triton"), expected)


def test_a_selector_without_kernels_is_refused_and_named() -> None:
    given, quest = case(40), Quest(page_tokens=4, first_tokens=4, recent_tokens=8)
    assert (
        unit_choice.implementation("triton", quest)
        == unit_choice.implementation("reference", PageMean())
        == "reference"
    )
    assert unit_choice.implementation("triton", PageMean()) == "triton"
    with pytest.raises(UserError, match="no kernels choose units for the selector 'quest'"):
        unit_choice.chosen_words(
            given.query_BASD, given.keys_BHSD, given.dense_BS, given.budgets_S, quest, 1.0, "triton"
        )
    with pytest.raises(UserError, match="take bf16, fp16 and fp32, got torch.float64"):
        dataclasses.replace(given, query_BASD=given.query_BASD.double()).words("triton")


def test_kernels_are_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = case(10)
    cpu = dataclasses.replace(given, query_BASD=given.query_BASD.cpu(), keys_BHSD=given.keys_BHSD.cpu())
    with pytest.raises(UserError, match="needs CUDA tensors, got cpu"):
        cpu.words("triton")
