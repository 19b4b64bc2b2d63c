"""The kernels that say how likely sampled tokens are, and which are the likeliest, against the reference; compiled where
there is a GPU, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE
from sparroll.engines.vllm.scores import reference

triton_scores = pytest.importorskip("sparroll.engines.vllm.scores.triton_scores", reason="triton runs on Linux only")


def of_kind(kind: str, rows: int, vocabulary: int) -> Tensor:
    normal = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    token = torch.arange(vocabulary)
    return {
        "normal": normal,
        "all equal": torch.zeros(rows, vocabulary),
        "few values": normal.round(),
        "zeros of both signs": torch.where(normal > 0, 0.0, -0.0),
        "probability 0 behind the tokenizer's end": normal.masked_fill(token > vocabulary // 3, -torch.inf),
        "one token alone": normal.masked_fill(token != vocabulary // 2, -torch.inf),
        "very sure": normal.masked_fill(token == vocabulary - 1, 200.0),
        "rising": normal.sort(dim=1).values,
    }[kind]


KINDS = [
    "normal",
    "all equal",
    "few values",
    "zeros of both signs",
    "probability 0 behind the tokenizer's end",
    "one token alone",
    "very sure",
    "rising",
]


def assert_same(logits_NV: Tensor, top_k: int) -> None:
    rows, vocabulary = logits_NV.shape
    # One token of each row has probability, whatever the kind.
    sampled_N = torch.where(torch.arange(rows) % 2 == 0, logits_NV.float().argmax(1), vocabulary // 2)
    logits_NV, sampled_N = logits_NV.to(DEVICE), sampled_N.to(DEVICE)
    expected = reference.row_scores(logits_NV, sampled_N, top_k)
    found = triton_scores.row_scores(logits_NV, sampled_N, top_k)
    for name, ours, theirs in zip(expected._fields, found, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        if name == "logp_NW":
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5, equal_nan=True)
        else:
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [130, 4097, 9000])
def test_kernels_are_the_reference_for_every_kind_of_logits(kind: str, vocabulary: int) -> None:
    assert_same(of_kind(kind, 3, vocabulary), 20)


@pytest.mark.parametrize("top_k", [0, 1, 2, 20, 31, 32, 33, 63, 64])
def test_lists_have_every_length(top_k: int) -> None:
    assert_same(of_kind("few values", 2, 5000), top_k)


@pytest.mark.parametrize(("vocabulary", "top_k"), [(1, 0), (1, 1), (2, 2), (63, 63), (64, 64), (65, 20), (4096, 5)])
def test_vocabularies_may_be_smaller_than_a_block_and_the_list_may_be_all_of_them(vocabulary: int, top_k: int) -> None:
    assert_same(of_kind("normal", 2, vocabulary), top_k)


def test_a_vocabulary_of_qwen3_and_logits_in_half_precision() -> None:
    assert_same(of_kind("normal", 2, 151_936).bfloat16(), 20)


def test_rows_may_lie_apart() -> None:
    wide = torch.full((3, 2 * 5000), torch.nan)
    wide[:, :5000] = of_kind("normal", 3, 5000)
    assert_same(wide[:, :5000], 20)


def test_no_row_has_no_scores() -> None:
    found = triton_scores.row_scores(torch.zeros(0, 100, device=DEVICE), torch.zeros(0, dtype=torch.int64), 20)
    assert [tuple(each.shape) for each in found] == [(0, 21), (0, 21), (0,)]


def test_a_row_with_nan_among_its_logits_is_nan_and_spoils_no_other() -> None:
    logits_NV = of_kind("normal", 2, 5000)
    logits_NV[0, 4321] = torch.nan
    sampled_N = torch.tensor([7, 7])
    found = triton_scores.row_scores(logits_NV.to(DEVICE), sampled_N.to(DEVICE), 20)
    expected = reference.row_scores(logits_NV, sampled_N, 20)
    assert found.logp_NW[0].isnan().all()
    torch.testing.assert_close(found.logp_NW[1].cpu(), expected.logp_NW[1], atol=2e-5, rtol=1e-5)
    assert ((found.ids_NW >= 0) & (found.ids_NW < 5000)).all()


def test_lists_longer_than_the_kernel_has_lanes_for_are_refused() -> None:
    with pytest.raises(AssertionError, match="lists of 65 tokens"):
        triton_scores.row_scores(torch.zeros(1, 100), torch.zeros(1, dtype=torch.int64), 65)
