"""Corrections against plain loops, known answers and the conventions of the method."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sparroll.corrections import correction, names
from sparroll.corrections.base import LogRatio, per_sequence
from sparroll.errors import UserError

INF = math.inf


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Seven rollouts of unlike length, one of them empty, with log ratios that now and then are huge."""
    generator = torch.Generator().manual_seed(seed)
    sparse = -50 - 3 * torch.rand(7, 19, generator=generator, dtype=dtype)
    dense = sparse + 1.5 * torch.randn(7, 19, generator=generator, dtype=dtype)
    mask = torch.arange(19) < torch.tensor([19, 1, 0, 7, 16, 3, 12])[:, None]
    dense[0, 3], dense[0, 4], dense[3, 2] = sparse[0, 3] - 40, sparse[0, 4] + 40, -INF
    return dense, sparse, mask


def ratio(dense: float, sparse: float) -> float:
    return 0.0 if dense == -INF else math.exp(max(-20.0, min(20.0, dense - sparse)))


def test_no_correction_weighs_every_response_token_one() -> None:
    dense, sparse, mask = batch()
    result = correction("none")(dense_logp=dense, sparse_logp=sparse, mask=mask)
    assert torch.equal(result.weights, mask.to(dense.dtype))
    assert torch.equal(result.keep, mask)
    assert result.metrics["correction/effective_sample_share"] == 1.0


def test_log_ratios_of_a_rollout_are_summed_in_double_precision() -> None:
    """1 + 2 ** -25 is no number of single precision."""
    values = torch.tensor([[1.0, 2.0**-25]])
    (total,) = per_sequence(LogRatio(values, torch.ones(1, 2, dtype=torch.bool))).flatten().tolist()
    assert total == 1 + 2.0**-25


@pytest.mark.parametrize("weight_max", [0.5, 1.0, 2.0, 8.0])
def test_tis_equals_a_plain_loop(weight_max: float) -> None:
    dense, sparse, mask = batch()
    result = correction("tis", weight_max=weight_max)(dense_logp=dense, sparse_logp=sparse, mask=mask)
    truncated = 0
    for b in range(7):
        for t in range(19):
            rho = ratio(float(dense[b, t]), float(sparse[b, t]))
            expected = min(rho, weight_max) if mask[b, t] else 0.0
            truncated += bool(mask[b, t]) and rho > weight_max
            assert float(result.weights[b, t]) == pytest.approx(expected, rel=1e-12, abs=0)
    assert torch.equal(result.keep, mask)
    assert result.metrics["correction/truncated_share"] == truncated / int(mask.sum())
    assert result.metrics["correction/masked_token_share"] == 0.0


@pytest.mark.parametrize(("weight_min", "weight_max"), [(0.5, 5.0), (0.0, 2.0), (0.9, 1.1)])
def test_icepop_equals_a_plain_loop(weight_min: float, weight_max: float) -> None:
    dense, sparse, mask = batch(1)
    made = correction("icepop", weight_min=weight_min, weight_max=weight_max)
    result = made(dense_logp=dense, sparse_logp=sparse, mask=mask)
    kept_tokens, kept_rows = 0, 0
    for b in range(7):
        row_kept = 0
        for t in range(19):
            raw = float(dense[b, t]) - float(sparse[b, t])
            inside = math.log(weight_min) <= raw <= math.log(weight_max) if weight_min else raw <= math.log(weight_max)
            keep = bool(mask[b, t]) and inside
            assert bool(result.keep[b, t]) == keep
            expected = ratio(float(dense[b, t]), float(sparse[b, t])) if keep else 0.0
            assert float(result.weights[b, t]) == pytest.approx(expected, rel=1e-12, abs=0)
            row_kept += keep
        kept_tokens += row_kept
        kept_rows += row_kept > 0
    assert result.metrics["correction/masked_token_share"] == pytest.approx(1 - kept_tokens / int(mask.sum()))
    assert result.metrics["correction/masked_sequence_share"] == pytest.approx(1 - kept_rows / 6)


def test_the_ends_of_the_interval_are_inside() -> None:
    sparse = torch.tensor([[0.0, -math.log(5.0), 0.0, -math.log(5.1)]], dtype=torch.float64)
    dense = torch.tensor([[math.log(0.5), 0.0, math.log(0.49), 0.0]], dtype=torch.float64)
    result = correction("icepop")(dense_logp=dense, sparse_logp=sparse, mask=torch.ones(1, 4))
    assert result.keep.tolist() == [[True, True, False, False]]


def test_log_ratios_of_forty_are_clamped_and_counted() -> None:
    dense, sparse = torch.tensor([[-40.0, 0.0, 0.0]]), torch.tensor([[0.0, -40.0, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    result = correction("tis", weight_max=1e12)(dense_logp=dense, sparse_logp=sparse, mask=mask)
    assert result.weights[0].tolist() == pytest.approx([math.exp(-20), math.exp(20), 1.0], rel=1e-6)
    assert result.metrics["correction/clamped_share"] == pytest.approx(2 / 3)
    kept = correction("icepop", weight_max=1e10)(dense_logp=dense, sparse_logp=sparse, mask=mask)
    # The raw ratio decides, not the clamped one: e**40 is above 1e10 although e**20 is not.
    assert kept.keep.tolist() == [[False, False, True]]


def test_a_token_that_dense_cannot_say_weighs_exactly_zero() -> None:
    dense, sparse = torch.tensor([[-INF, -1.0]]), torch.tensor([[-2.0, -1.0]])
    result = correction("tis")(dense_logp=dense, sparse_logp=sparse, mask=torch.ones(1, 2))
    assert result.weights.tolist() == [[0.0, 1.0]]
    assert result.metrics["correction/clamped_share"] == 0.0


@pytest.mark.parametrize("name", ["none", "tis", "icepop"])
@pytest.mark.parametrize(
    ("side", "value", "message"),
    [
        ("sparse_logp", -INF, "sparse_logp is -inf on a sampled token"),
        ("sparse_logp", math.nan, "sparse_logp is NaN"),
        ("dense_logp", math.nan, "dense_logp is NaN"),
        ("dense_logp", INF, "dense_logp is NaN or"),
        ("dense_logp", 5.0, r"dense_logp must be log-probabilities \(at most 0\), got 5 at \[1, 2\]"),
        ("sparse_logp", 0.01, r"sparse_logp must be log-probabilities"),
    ],
)
def test_broken_log_probabilities_are_refused(name: str, side: str, value: float, message: str) -> None:
    inputs = {"dense_logp": torch.full((2, 3), -1.0), "sparse_logp": torch.full((2, 3), -1.0), "mask": torch.ones(2, 3)}
    inputs[side][1, 2] = value
    with pytest.raises(UserError, match=message):
        correction(name)(**inputs)
    # Padding may hold anything.
    inputs["mask"][1, 2] = 0
    assert torch.isfinite(correction(name)(**inputs).weights).all()


def test_rounding_above_zero_passes() -> None:
    """A token that is as good as certain: bf16 or fp32 may put its log-probability a little above 0."""
    dense, sparse, mask = torch.tensor([[1e-3, 0.0]]), torch.tensor([[0.0, 1e-6]]), torch.ones(1, 2)
    result = correction("tis")(dense_logp=dense, sparse_logp=sparse, mask=mask)
    assert result.weights[0].tolist() == pytest.approx([math.exp(1e-3), math.exp(-1e-6)])


@pytest.mark.parametrize("name", ["none", "tis", "icepop"])
def test_an_empty_batch_keeps_nothing_and_breaks_nothing(name: str) -> None:
    empty = torch.zeros(3, 5)
    result = correction(name)(dense_logp=empty, sparse_logp=empty, mask=torch.zeros(3, 5, dtype=torch.bool))
    assert not result.kept(torch.zeros(3, 5)).any()
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_icepop_may_drop_everything() -> None:
    sparse, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    result = correction("icepop")(dense_logp=sparse - 10, sparse_logp=sparse, mask=mask)
    assert not result.keep.any()
    assert result.metrics["correction/masked_sequence_share"] == 1.0
    assert result.metrics["correction/effective_sample_size"] == 0.0


def test_weights_carry_no_gradient() -> None:
    dense = torch.full((1, 2), -1.0, requires_grad=True)
    result = correction("tis")(dense_logp=dense, sparse_logp=torch.full((1, 2), -2.0), mask=torch.ones(1, 2))
    assert not result.weights.requires_grad


def test_effective_sample_size_is_kishs() -> None:
    sparse = -torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64).log()
    dense = torch.zeros(1, 3, dtype=torch.float64)
    result = correction("tis", weight_max=10.0)(dense_logp=dense, sparse_logp=sparse, mask=torch.ones(1, 3))
    assert result.metrics["correction/effective_sample_size"] == pytest.approx(49 / 21)
    assert result.metrics["correction/weight_mean"] == pytest.approx(7 / 3)
    assert result.metrics["correction/weight_max"] == pytest.approx(4.0)


def test_bf16_inputs_are_computed_in_fp32() -> None:
    dense, sparse = torch.full((1, 2), -1.0, dtype=torch.bfloat16), torch.full((1, 2), -1.5, dtype=torch.bfloat16)
    result = correction("tis")(dense_logp=dense, sparse_logp=sparse, mask=torch.ones(1, 2))
    assert result.weights.dtype == torch.float32
    assert result.weights[0, 0].item() == pytest.approx(math.exp(0.5), rel=1e-6)


def test_unknown_names_and_settings_are_named() -> None:
    assert {"icepop", "none", "tis"} < set(names())
    with pytest.raises(UserError, match=r"(?s)unknown correction 'isepop'.*icepop, importance"):
        correction("isepop")
    with pytest.raises(UserError, match=r"(?s)no setting 'weight_mix'.*weight_m"):
        correction("icepop", weight_mix=1.0)
    with pytest.raises(UserError, match="it has no settings"):
        correction("none", weight_max=1.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "2", True])
def test_a_weight_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="weight_max must be a positive number"):
        correction("tis", weight_max=value)  # type: ignore[arg-type]


def test_a_weight_of_numpy_is_a_weight() -> None:
    made = correction("icepop", weight_min=np.float32(0.5), weight_max=np.int64(2))
    assert made == correction("icepop", weight_min=0.5, weight_max=2.0)
    assert {type(value) for value in vars(made).values()} == {float}


def test_crossed_ends_are_refused() -> None:
    with pytest.raises(UserError, match="weight_min"):
        correction("icepop", weight_min=3.0, weight_max=2.0)


def test_unlike_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"(?s)one shape \[B, T\], got .*hint: pad all responses"):
        correction("tis")(dense_logp=torch.zeros(2, 3), sparse_logp=torch.zeros(2, 4), mask=torch.ones(2, 3))
