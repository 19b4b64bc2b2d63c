"""Every correction against plain loops over Python floats: weights, kept sets and metrics, on a batch of hard cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparroll.corrections import AcceptedMass, correction, names
from sparroll.errors import UserError

INF = math.inf
LENGTHS = [11, 1, 0, 6, 9, 3, 5, 4, 11]

Rows = list[list[float]]
"""Raw log ratios of the response tokens, row by row."""
Oracle = Callable[[Rows], tuple[Rows, list[list[bool]], Rows, list[list[bool]]]]
"""-> (weights, kept, log weights before, truncated), each row by row over response tokens."""


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nine rollouts: one empty, one vetoed at every token, one on which both agree; log ratios of +-40 and -inf."""
    generator = torch.Generator().manual_seed(seed)
    sparse = -50 - 3 * torch.rand(9, 11, generator=generator, dtype=torch.float64)
    dense = sparse + 0.4 * torch.randn(9, 11, generator=generator, dtype=torch.float64)
    dense[0, 3] = sparse[0, 3] - 40
    dense[3, 2] = -INF
    dense[4, 1] = sparse[4, 1] + 40
    dense[5] = sparse[5] - 12
    dense[6] = sparse[6]
    mask = torch.arange(11) < torch.tensor(LENGTHS)[:, None]
    # What stands in the padding must not matter.
    dense[~mask], sparse[~mask] = math.nan, -INF
    return dense, sparse, mask


def of_ratio(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(dense, sparse) log-probabilities whose difference is exactly the logarithm of the ratio."""
    return ratio.log().clamp(max=0), -ratio.log().clamp(min=0)


def more(name: str, mask: Tensor) -> dict[str, Any]:
    """What a correction takes beside the three arguments of all."""
    if "uniforms" not in correction(name).needs:
        return {}
    mass = AcceptedMass(torch.full(mask.shape, 0.9), torch.ones(mask.shape, dtype=torch.bool))
    return {"uniforms": torch.full(mask.shape, 0.5), "top_k": mass}


def exp(log_weight: float) -> float:
    return 0.0 if log_weight == -INF else math.exp(max(-20.0, min(20.0, log_weight)))


def ln(weight: float) -> float:
    return math.log(weight) if weight > 0 else -INF


def at(level: str, rows: Rows) -> Rows:
    if level == "token":
        return rows
    sums = [sum(row) for row in rows]
    if level == "geometric":
        sums = [total / len(row) if row else 0.0 for total, row in zip(sums, rows, strict=True)]
    return [[total] * len(row) for total, row in zip(sums, rows, strict=True)]


def truncated(level: str, most: float) -> Oracle:
    def oracle(rows: Rows):
        logs = at(level, rows)
        weights = [[min(exp(x), most) for x in row] for row in logs]
        return weights, [[True for _ in row] for row in logs], logs, [[x > ln(most) for x in row] for row in logs]

    return oracle


def masked(level: str, least: float, most: float, weighted: bool = True) -> Oracle:
    def oracle(rows: Rows):
        logs = at(level, rows)
        kept = [[ln(least) <= x <= ln(most) for x in row] for row in logs]
        weights = [[exp(x) if weighted else 1.0 for x in row] for row in logs]
        return weights, kept, logs, [[False for _ in row] for row in logs]

    return oracle


def vetoing(below: float, weighted: bool) -> Oracle:
    def oracle(rows: Rows):
        kept = [[all(x >= ln(below) for x in row) for _ in row] for row in rows]
        weights = [[exp(x) if weighted else 1.0 for x in row] for row in rows]
        return weights, kept, rows, [[False for _ in row] for row in rows]

    return oracle


def released(most: float, least_kept: float, most_kept: float, below: float) -> Oracle:
    def oracle(rows: Rows):
        kept = [
            [ln(least_kept) <= x <= ln(most_kept) and not any(y < ln(below) for y in row) for x in row] for row in rows
        ]
        weights = [[min(exp(x), most) for x in row] for row in rows]
        of_kept = [w for ws, ks in zip(weights, kept, strict=True) for w, k in zip(ws, ks, strict=True) if k]
        mean = sum(of_kept) / len(of_kept)
        cut = [[k and x > ln(most) for x, k in zip(row, ks, strict=True)] for row, ks in zip(rows, kept, strict=True)]
        return [[w / mean for w in row] for row in weights], kept, rows, cut

    return oracle


CASES = [
    ("seq_tis", {}, truncated("sequence", 2.0)),
    ("seq_tis", {"weight_max": 10.0}, truncated("sequence", 10.0)),
    ("mis", {}, masked("sequence", 0.5, 2.0)),
    ("mis", {"weight_min": 0.0, "weight_max": 1e10}, masked("sequence", 0.0, 1e10)),
    ("geometric", {}, masked("geometric", 0.9, 1.1, weighted=False)),
    ("geometric", {"weight_min": 0.0, "weight_max": 5.0}, masked("geometric", 0.0, 5.0, weighted=False)),
    ("veto", {}, vetoing(1e-4, weighted=False)),
    ("veto", {"veto_below": 0.5}, vetoing(0.5, weighted=False)),
    ("veto", {"veto_below": 0.0}, vetoing(0.0, weighted=False)),
    ("sparse_rl", {}, vetoing(1e-4, weighted=True)),
    ("sparse_rl", {"veto_below": 0.6}, vetoing(0.6, weighted=True)),
    ("sparse_rl_released", {}, released(1.5, 0.5, 1.5, 1e-4)),
    ("sparse_rl_released", {"weight_max": 1.2, "keep_max": 3.0}, released(1.2, 0.5, 3.0, 1e-4)),
    ("importance", {"level": "token"}, truncated("token", INF)),
    ("importance", {"level": "sequence"}, truncated("sequence", INF)),
    ("importance", {"level": "geometric"}, truncated("geometric", INF)),
    *[
        ("importance", {"level": level, "action": "truncate", "weight_max": 1.3}, truncated(level, 1.3))
        for level in ("token", "sequence", "geometric")
    ],
    *[
        (
            "importance",
            {"level": level, "action": "mask", "weight_min": 0.6, "weight_max": 1.7},
            masked(level, 0.6, 1.7),
        )
        for level in ("token", "sequence", "geometric")
    ],
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "settings", "oracle"), CASES)
def test_weights_kept_sets_and_metrics_equal_plain_loops(name: str, settings: dict, oracle: Oracle, seed: int) -> None:
    dense, sparse, mask = batch(seed)
    result = correction(name, **settings)(dense_logp=dense, sparse_logp=sparse, mask=mask)
    rows = [[float(dense[b, t] - sparse[b, t]) for t in range(length)] for b, length in enumerate(LENGTHS)]
    weights, kept, logs, cut = oracle(rows)
    kept_BT = result.kept(mask)
    assert int(kept_BT.sum()) == sum(map(sum, kept))
    for b, length in enumerate(LENGTHS):
        assert not kept_BT[b, length:].any()
        assert not result.weights[b, length:].any()
        for t in range(length):
            assert bool(kept_BT[b, t]) == kept[b][t]
            expected = weights[b][t] if kept[b][t] else 0.0
            assert float(result.weights[b, t]) == pytest.approx(expected, rel=1e-12, abs=0)
    flat = [w for ws, ks in zip(weights, kept, strict=True) for w, k in zip(ws, ks, strict=True) if k]
    assert result.metrics == pytest.approx(
        result.metrics
        | weight_metrics(flat, "")
        | weight_metrics([exp(x) for row in logs for x in row], "_before")
        | {
            "correction/truncated_share": sum(map(sum, cut)) / sum(LENGTHS),
            "correction/truncated_sequence_share": sum(map(any, cut)) / 8,
            "correction/masked_token_share": 1 - sum(map(sum, kept)) / sum(LENGTHS),
            "correction/masked_sequence_share": sum(bool(row) and not any(row) for row in kept) / 8,
            "correction/clamped_share": sum(20 < abs(x) < INF for row in logs for x in row) / sum(LENGTHS),
        },
        rel=1e-12,
    )


def weight_metrics(weights: list[float], suffix: str) -> dict[str, float]:
    effective = sum(weights) ** 2 / sum(w * w for w in weights)
    return {
        f"correction/weight_mean{suffix}": sum(weights) / len(weights),
        f"correction/weight_max{suffix}": max(weights),
        f"correction/effective_sample_size{suffix}": effective,
        f"correction/effective_sample_share{suffix}": effective / sum(LENGTHS),
    }


@pytest.mark.parametrize("name", names())
def test_every_correction_reports_the_same_metrics_and_carries_no_gradient(name: str) -> None:
    dense, sparse, mask = batch(3)
    leaf = dense.clone().requires_grad_()
    result = correction(name)(dense_logp=leaf, sparse_logp=sparse, mask=mask, **more(name, mask))
    common = correction("none")(dense_logp=dense, sparse_logp=sparse, mask=mask).metrics.keys()
    assert common <= result.metrics.keys()
    assert len(common) == 13
    assert not result.weights.requires_grad
    assert result.weights.dtype == torch.float64


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("side", ["dense_logp", "sparse_logp"])
def test_a_nan_on_a_response_token_is_refused(name: str, side: str) -> None:
    inputs = {"dense_logp": torch.zeros(2, 3), "sparse_logp": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    inputs[side][1, 1] = math.nan
    with pytest.raises(UserError, match=f"{side} is NaN"):
        correction(name)(**inputs, **more(name, inputs["mask"]))
    inputs = {"dense_logp": torch.zeros(2, 3), "sparse_logp": torch.full((2, 3), -INF), "mask": torch.ones(2, 3)}
    with pytest.raises(UserError, match="sparse_logp is -inf"):
        correction(name)(**inputs, **more(name, inputs["mask"]))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)])
def test_a_batch_without_a_token_keeps_nothing_and_breaks_nothing(name: str, shape: tuple[int, int]) -> None:
    empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    result = correction(name)(dense_logp=empty, sparse_logp=empty, mask=mask, **more(name, mask))
    assert result.weights.shape == shape
    assert not result.kept(mask).any()
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("name", ["mis", "geometric", "veto", "sparse_rl", "sparse_rl_released", "jackpot"])
def test_a_batch_that_is_dropped_whole_is_finite(name: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    dense = torch.full((2, 3), -INF)
    result = correction(name)(dense_logp=dense, sparse_logp=torch.zeros(2, 3), mask=mask, **more(name, mask))
    assert not result.kept(mask).any()
    assert not result.weights.any()
    assert result.metrics["correction/masked_sequence_share"] == 1.0
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("name", ["veto", "sparse_rl"])
def test_the_veto_is_strict(name: str) -> None:
    edge = math.log(1e-4)
    dense = torch.tensor([[edge, 0.0], [math.nextafter(edge, -INF), 0.0]], dtype=torch.float64)
    result = correction(name)(dense_logp=dense, sparse_logp=torch.zeros_like(dense), mask=torch.ones(2, 2))
    assert result.keep.tolist() == [True, False]
    assert result.metrics["correction/vetoed_sequence_share"] == 0.5


def test_the_released_veto_sees_tokens_that_its_mask_drops() -> None:
    ratio = torch.tensor([[1e-5, 1.0, 1.0], [0.4, 1.0, 1.2]], dtype=torch.float64)
    dense, sparse = of_ratio(ratio)
    result = correction("sparse_rl_released")(dense_logp=dense, sparse_logp=sparse, mask=torch.ones(2, 3))
    assert result.keep.tolist() == [[False, False, False], [False, True, True]]
    assert result.weights[1].tolist() == pytest.approx([0.0, 1 / 1.1, 1.2 / 1.1])
    assert result.metrics["correction/weight_mean_normalised_away"] == pytest.approx(1.1)


@pytest.mark.parametrize("name", ["mis", "geometric"])
def test_the_ends_of_an_interval_over_rollouts_are_inside(name: str) -> None:
    dense, sparse = of_ratio(torch.tensor([[0.5], [2.0], [0.499], [2.001]], dtype=torch.float64))
    made = correction(name, weight_min=0.5, weight_max=2.0)
    result = made(dense_logp=dense, sparse_logp=sparse, mask=torch.ones(4, 1))
    assert result.kept(torch.ones(4, 1))[:, 0].tolist() == [True, True, False, False]


def test_the_named_corrections_are_points_of_importance() -> None:
    dense, sparse, mask = batch(5)
    inputs = {"dense_logp": dense, "sparse_logp": sparse, "mask": mask}
    for name, level, action, settings in [
        ("tis", "token", "truncate", {"weight_max": 2.0}),
        ("seq_tis", "sequence", "truncate", {"weight_max": 3.0}),
        ("mis", "sequence", "mask", {"weight_min": 0.4, "weight_max": 3.0}),
        ("icepop", "token", "mask", {"weight_min": 0.4, "weight_max": 3.0}),
    ]:
        named = correction(name, **settings)(**inputs)
        free = correction("importance", level=level, action=action, **settings)(**inputs)
        assert torch.equal(named.weights, free.weights)
        assert named.metrics == free.metrics


def test_the_geometric_mask_keeps_what_importance_keeps_but_multiplies_nothing() -> None:
    dense, sparse = of_ratio(torch.tensor([[1.05, 1.05], [2.0, 2.0]], dtype=torch.float64))
    inputs = {"dense_logp": dense, "sparse_logp": sparse, "mask": torch.ones(2, 2)}
    ends = {"weight_min": 0.9, "weight_max": 1.1}
    named = correction("geometric", **ends)(**inputs)
    free = correction("importance", level="geometric", action="mask", **ends)(**inputs)
    assert named.keep.tolist() == free.keep.tolist() == [True, False]
    assert named.weights[0].tolist() == [1.0, 1.0]
    assert free.weights[0].tolist() == pytest.approx([1.05, 1.05])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "word"}, r"(?s)unknown level 'word'.*token, sequence, geometric"),
        ({"action": "clip"}, r"(?s)unknown action 'clip'.*truncate, mask, weight"),
        ({"action": "truncate"}, r"(?s)was given no weight_max.*it takes weight_max"),
        ({"action": "mask", "weight_max": 2.0}, r"(?s)was given no weight_min"),
        ({"action": "weight", "weight_max": 2.0}, r"(?s)was given weight_max.*neither"),
        ({"action": "mask", "weight_min": 3.0, "weight_max": 2.0}, r"weight_min \(3.0\) is above"),
    ],
)
def test_choices_that_do_not_fit_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        correction("importance", **settings)


def test_crossed_ends_of_the_released_mask_are_refused() -> None:
    with pytest.raises(UserError, match=r"keep_min \(2.0\) is above keep_max"):
        correction("sparse_rl_released", keep_min=2.0)
    with pytest.raises(UserError, match=r"veto_below must be"):
        correction("veto", veto_below=-1.0)
