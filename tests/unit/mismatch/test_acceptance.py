"""Known answers of the four estimators, their order on random distributions, and what they refuse."""

from __future__ import annotations

import math
import sys
from random import Random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch import acceptance as module_level_acceptance
from sparroll.mismatch import acceptance_sampled, acceptance_top_k
from sparroll.mismatch.acceptance import acceptance

P = torch.tensor([0.6, 0.3, 0.1])
Q = torch.tensor([0.3, 0.4, 0.3])


def top_k(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best = probabilities.topk(k, dim=-1)
    return best.indices, best.values.log()


def test_acceptance_is_the_shared_mass_of_two_known_distributions() -> None:
    torch.testing.assert_close(acceptance(P.log(), Q.log()), torch.tensor(0.7))


def test_acceptance_is_one_minus_total_variation() -> None:
    dense, sparse = torch.randn(2, 3, 5, 97, generator=torch.Generator().manual_seed(0))
    variation = 0.5 * (dense.softmax(-1) - sparse.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(acceptance(dense, sparse), 1 - variation)


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 1000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_logits_give_exactly_one(vocabulary: int, dtype: torch.dtype) -> None:
    logits = 4 * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert acceptance(logits, logits.clone()).tolist() == [1.0] * 7


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
def test_lists_of_half_precision_are_taken_with_their_rounding_and_too_much_mass_is_not(
    dtype: torch.dtype, off: float
) -> None:
    ids, logp = torch.arange(2), torch.tensor([0.5, 0.5]).log().to(dtype)
    lower, upper = acceptance_top_k(ids, logp, ids, logp)
    assert float(lower) == pytest.approx(1, abs=off) and float(upper) == pytest.approx(1, abs=off)
    with pytest.raises(UserError, match=r"a probability mass of 1\.1"):
        acceptance_top_k(ids, torch.tensor([0.55, 0.55]).log().to(dtype), ids, logp)


def test_logits_shifted_by_a_constant_are_the_same_policy() -> None:
    logits = torch.randn(11, 100, dtype=torch.float64)
    torch.testing.assert_close(acceptance(logits, logits - 1e4), torch.ones(11, dtype=torch.float64))


def test_no_common_token_gives_exactly_zero() -> None:
    dense = torch.tensor([0.0, 1.0, -math.inf, -math.inf])
    assert float(acceptance(dense, dense.flip(0))) == 0.0


def test_strides_do_not_matter() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(2)).t()
    assert acceptance(logits, logits.contiguous()).tolist() == [1.0] * 9


def test_slices_of_rows_give_what_one_pass_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse = torch.randn(2, 23, 40, generator=torch.Generator().manual_seed(3))
    ids, more = dense.topk(5).indices, sparse.topk(6).indices
    lists = (ids, dense.log_softmax(-1).gather(-1, ids), more, sparse.log_softmax(-1).gather(-1, more))
    whole, bounds = acceptance(dense, sparse), torch.stack(acceptance_top_k(*lists))
    monkeypatch.setattr(sys.modules["sparroll.mismatch.acceptance"], "_CHUNK_ELEMENTS", 100)
    assert torch.equal(acceptance(dense, sparse), whole)
    assert torch.equal(torch.stack(acceptance_top_k(*lists)), bounds)


def test_inputs_are_left_as_they_were_and_no_gradient_is_kept() -> None:
    dense, sparse = torch.randn(2, 4, 10)
    before = dense.clone(), sparse.clone()
    dense.requires_grad_()
    assert not acceptance(dense, sparse).requires_grad
    assert torch.equal(dense.detach(), before[0])
    assert torch.equal(sparse, before[1])


def test_no_tokens_give_no_acceptances() -> None:
    assert acceptance(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)
    none, logp = torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4)
    assert [bound.shape for bound in acceptance_top_k(none, logp, none, logp)] == [(0,), (0,)]
    assert acceptance_sampled(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_the_package_offers_the_functions_under_their_names() -> None:
    assert module_level_acceptance is acceptance


@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        (torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), torch.zeros(2, 2), "dense_logits hold NaN in row 1 of 2"),
        (torch.zeros(1, 2), torch.tensor([[math.inf, 0.0]]), r"sparse_logits hold \+inf in row 0 of 1"),
        (torch.zeros(1, 2), torch.full((1, 2), -math.inf), "sparse_logits hold only -inf in row 0"),
        (torch.zeros(3, 5), torch.zeros(3, 6), r"one shape, got \[3, 5\] and \[3, 6\]"),
        (torch.zeros(3, 0), torch.zeros(3, 0), r"must be \[.., V\] with V of 1 or more"),
        (torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5), "must be floating point"),
    ],
)
def test_logits_without_a_distribution_are_refused_with_a_hint(dense: Tensor, sparse: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        acceptance(dense, sparse)
    assert refusal.value.hint


def test_a_row_behind_the_first_slice_is_named_by_its_place_among_all() -> None:
    dense = torch.zeros(6, 2**22, dtype=torch.float16)
    sparse = dense.clone()
    sparse[5, 0] = torch.nan
    with pytest.raises(UserError, match="sparse_logits hold NaN in row 5 of 6"):
        acceptance(dense, sparse)


@st.composite
def two_policies(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """Two distributions over a small vocabulary, from nearly equal to unrelated, some with impossible tokens."""
    vocabulary = draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sharpness, noise = draw(st.sampled_from([0.1, 1.0, 5.0, 30.0])), draw(st.sampled_from([0.0, 0.01, 0.3, 3.0]))
    dense = sharpness * torch.randn(6, vocabulary, dtype=torch.float64, generator=generator)
    sparse = dense + noise * torch.randn(6, vocabulary, dtype=torch.float64, generator=generator)
    if draw(st.booleans()):
        dense[torch.rand(6, vocabulary, generator=generator) < 0.3] = -math.inf
        dense[:, 0] = 0.0
    return dense, sparse, draw(st.integers(1, vocabulary)), draw(st.integers(1, vocabulary))


@given(two_policies())
@settings(deadline=None, max_examples=150)
def test_the_bounds_hold_for_any_two_policies(case: tuple[Tensor, Tensor, int, int]) -> None:
    dense, sparse, k_dense, k_sparse = case
    exact = acceptance(dense, sparse)
    lower, upper = acceptance_top_k(*top_k(dense.softmax(-1), k_dense), *top_k(sparse.softmax(-1), k_sparse))
    assert ((lower >= 0) & (lower <= exact + 1e-12) & (exact <= upper + 1e-12) & (upper <= 1)).all()


@given(two_policies(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_the_bounds_hold_for_lists_of_any_tokens(case: tuple[Tensor, Tensor, int, int], random: Random) -> None:
    dense, sparse, k_dense, k_sparse = case
    p, q = dense.softmax(-1), sparse.softmax(-1)
    lists = []
    for probabilities, k in ((p, k_dense), (q, k_sparse)):
        ids = torch.tensor(random.sample(range(p.shape[1]), k)).expand(6, -1)
        logp = probabilities.gather(-1, ids).log()
        assume(bool((logp > -math.inf).any(-1).all()))
        lists += [ids, logp]
    exact, (lower, upper) = acceptance(dense, sparse), acceptance_top_k(*lists)
    assert ((lower >= 0) & (lower <= exact + 1e-12) & (exact <= upper + 1e-12) & (upper <= 1)).all()


@given(two_policies())
@settings(deadline=None, max_examples=50)
def test_whole_lists_give_the_exact_acceptance_twice(case: tuple[Tensor, Tensor, int, int]) -> None:
    dense, sparse, _, _ = case
    exact, vocabulary = acceptance(dense, sparse), dense.shape[1]
    lists = (*top_k(dense.softmax(-1), vocabulary), *top_k(sparse.softmax(-1), vocabulary))
    for bound in acceptance_top_k(*lists):
        torch.testing.assert_close(bound, exact)


def test_lists_of_one_give_a_bound_that_the_masses_of_the_lists_alone_would_not() -> None:
    lower, upper = acceptance_top_k(*top_k(P, 1), *top_k(Q, 1))
    mass_alone = min(1 - 0.6, 1 - 0.4)
    assert float(lower) == 0.0
    assert mass_alone < 0.7 <= float(upper)
    assert float(upper) == pytest.approx(1.0)


def test_known_bounds_of_lists_of_two() -> None:
    lower, upper = acceptance_top_k(
        torch.tensor([4, 9]), torch.tensor([0.5, 0.3]).log(), torch.tensor([9, 4]), torch.tensor([0.6, 0.3]).log()
    )
    assert float(lower) == pytest.approx(0.3 + 0.3)
    assert float(upper) == pytest.approx(0.6 + min(1 - 0.8, 1 - 0.9))


def test_order_and_padding_and_list_length_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(4)
    p, q = torch.randn(2, 8, 30, generator=generator).softmax(-1)
    plain = torch.stack(acceptance_top_k(*top_k(p, 6), *top_k(q, 6)))
    order = torch.randperm(6, generator=generator)
    dense_ids, dense_logp = (x[:, order] for x in top_k(p, 6))
    sparse_ids, sparse_logp = top_k(q, 6)
    # Padding that repeats a listed id on both sides.
    sparse_ids = torch.cat([sparse_ids[:, :1], dense_ids[:, :2], sparse_ids], dim=1)
    sparse_logp = torch.cat([torch.full((8, 3), -math.inf), sparse_logp], dim=1)
    torch.testing.assert_close(torch.stack(acceptance_top_k(dense_ids, dense_logp, sparse_ids, sparse_logp)), plain)


def test_rounding_never_lifts_a_bound_over_one() -> None:
    logp = torch.tensor([0.25, 0.25, 0.25, 0.25]).log() + 5e-5
    lower, upper = acceptance_top_k(torch.arange(4), logp, torch.arange(4), logp)
    assert float(lower) == float(upper) == 1.0


IDS = torch.tensor([[3, 5]])
LOGP = torch.tensor([[-0.5, -1.5]])


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((IDS, LOGP, torch.tensor([[3, 3]]), LOGP), r"sparse_ids lists token 3 twice at \[0\]"),
        ((IDS, LOGP, IDS.expand(2, 2), LOGP.expand(2, 2)), r"all dimensions but the last, got \[1, 2\] and \[2, 2\]"),
        ((IDS, LOGP[:, :1], IDS, LOGP), r"dense_ids and dense_logp must have one shape .* got \[1, 2\] and \[1, 1\]"),
        ((LOGP, LOGP, IDS, LOGP), "dense_ids must be integers, got torch.float32"),
        ((IDS, IDS, IDS, LOGP), "dense_logp must be floating point"),
        ((IDS, LOGP * math.nan, IDS, LOGP), "dense_logp must be log-probabilities .* got nan"),
        ((IDS, LOGP, IDS, -LOGP), r"sparse_logp must be log-probabilities \(at most 0\), got 0.5"),
        ((IDS, LOGP, IDS, torch.full((1, 2), math.inf)), "got inf"),
        ((IDS, LOGP, IDS, torch.zeros(1, 2)), "probability mass of 2"),
        ((IDS, LOGP, IDS, torch.full((1, 2), -math.inf)), "so the list there is empty"),
        ((IDS[:, :0], LOGP[:, :0], IDS, LOGP), "K of 1 or more"),
    ],
)
def test_lists_that_are_none_are_refused(lists: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        acceptance_top_k(*lists)


def test_sampled_is_the_ratio_capped_at_one() -> None:
    dense, sparse = torch.tensor([0.2, 0.5, 0.0, 0.3]).log(), torch.tensor([0.4, 0.1, 0.5, 0.3]).log()
    assert acceptance_sampled(dense, sparse).tolist() == pytest.approx([0.5, 1.0, 0.0, 1.0])


def test_sampled_is_right_in_the_mean_and_wrong_in_the_percentiles() -> None:
    generator = torch.Generator().manual_seed(5)
    dense = torch.randn(4000, 50, dtype=torch.float64, generator=generator)
    sparse = dense + 0.3 * torch.randn(4000, 50, dtype=torch.float64, generator=generator)
    drawn = torch.multinomial(sparse.softmax(-1), 1, generator=generator)
    sampled = acceptance_sampled(*(x.log_softmax(-1).gather(-1, drawn)[:, 0] for x in (dense, sparse)))
    exact = acceptance(dense, sparse)
    assert float(sampled.mean()) == pytest.approx(float(exact.mean()), abs=0.01)
    assert float(exact.quantile(0.05) - sampled.quantile(0.05)) > 0.1


@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        ([-1.0], [-math.inf], r"sparse_logp is -inf at \[0\]: a token of probability 0"),
        ([-1.0, math.nan], [-1.0, -1.0], r"got nan at \[1\]"),
        ([0.7], [-1.0], "dense_logp must be log-probabilities"),
        ([-1.0, -1.0], [-1.0], r"one shape, got \[2\] and \[1\]"),
    ],
)
def test_log_probabilities_that_are_none_are_refused(dense: list[float], sparse: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        acceptance_sampled(torch.tensor(dense), torch.tensor(sparse))
