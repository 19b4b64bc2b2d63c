"""The rule of verified rollouts by enumeration, and the settings that it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sparroll import Schedule
from sparroll.draft_check import (
    DraftCheck,
    acceptance_of_sampled,
    judge,
    residual,
    sampling_probability,
    tokens_that_stand,
)
from sparroll.errors import UserError

FLOORS = [1e-6, 1e-3, 0.01, 0.1, 0.5, 0.99, 1.0]


def _policies(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q [200, 11] in float64: alike, far apart, with zeros in either, and equal."""
    generator = torch.Generator().manual_seed(0)
    sharp = {"alike": 1.0, "far": 6.0, "zeros": 4.0, "equal": 1.0}[kind]
    logits = torch.randn(2, 200, 11, generator=generator, dtype=torch.float64) * sharp
    if kind == "alike":
        logits[1] = logits[0] + 0.3 * logits[1]
    if kind == "zeros":
        logits = logits.masked_fill(torch.rand(2, 200, 11, generator=generator) < 0.4, -torch.inf)
        logits[..., 0] = 0.0
    p, q = logits.softmax(-1)
    return p, (p if kind == "equal" else q)


@pytest.mark.parametrize("kind", ["alike", "far", "zeros", "equal"])
@pytest.mark.parametrize("floor", FLOORS)
def test_the_true_sampling_distribution_by_enumeration(kind: str, floor: float) -> None:
    p, q = _policies(kind)
    keep = torch.where(q > 0, (p / (floor * q)).clamp_max(1), 0.0)
    rejected = (q * (1 - keep)).sum(-1, keepdim=True)
    left = residual(p, q, floor)
    redrawn = torch.where(left.sum(-1, keepdim=True) > 0, left / left.sum(-1, keepdim=True), left)
    enumerated = q * keep + rejected * redrawn
    written_down = sampling_probability(p, q, floor)
    torch.testing.assert_close(written_down, enumerated, atol=1e-12, rtol=0)
    torch.testing.assert_close(written_down.sum(-1), torch.ones(200, dtype=torch.float64), atol=1e-9, rtol=0)
    assert bool((p >= floor * written_down - 1e-12).all())
    if floor == 1:
        torch.testing.assert_close(written_down, p, atol=1e-12, rtol=0)
    if kind == "equal":
        torch.testing.assert_close(written_down, q, atol=1e-12, rtol=0)


def test_a_low_floor_keeps_everything_that_the_dense_policy_could_have_said() -> None:
    p, q = _policies("alike")
    torch.testing.assert_close(sampling_probability(p, q, 1e-9), q, atol=1e-7, rtol=0)


@pytest.mark.parametrize("floor", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["alike", "far", "zeros", "equal"])
def test_the_acceptance_of_what_is_sampled_is_that_of_the_written_distribution(floor: float, kind: str) -> None:
    p, q = _policies(kind)
    expected = torch.minimum(p, sampling_probability(p, q, floor)).sum(-1)
    accepted, found = acceptance_of_sampled(p, q, floor)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(accepted, torch.minimum(q, p / floor).sum(-1), atol=1e-12, rtol=0)
    in_float32 = acceptance_of_sampled(p.float(), q.float(), floor)[1]
    torch.testing.assert_close(in_float32.double(), expected, atol=1e-5, rtol=0)
    assert bool((found >= torch.minimum(p, q).sum(-1) - 1e-12).all()), (
        "a check brings the sampler nearer, never further"
    )


@pytest.mark.parametrize("floor", [0.01, 0.3, 1.0])
def test_judged_tokens_follow_the_written_distribution(floor: float) -> None:
    p, q = _policies("far")
    row, draws = 17, 200_000
    generator = torch.Generator().manual_seed(1)
    drafted = torch.multinomial(q[row], draws, replacement=True, generator=generator)
    uniforms = torch.rand(2, draws, generator=generator, dtype=torch.float64)
    judged = judge(
        p[row].log().expand(draws, -1), q[row].log().expand(draws, -1), drafted, uniforms[0], uniforms[1], floor
    )
    expected = sampling_probability(p[row : row + 1], q[row : row + 1], floor)[0]
    found = torch.bincount(judged.token_ids_N, minlength=11).double() / draws
    spread = (expected * (1 - expected) / draws).sqrt()
    assert bool(((found - expected).abs() <= 5 * spread + 1e-9).all())
    torch.testing.assert_close(judged.sparse_logp_N.double(), expected[judged.token_ids_N].log(), atol=1e-5, rtol=0)
    torch.testing.assert_close(judged.dense_logp_N.double(), p[row][judged.token_ids_N].log(), atol=1e-5, rtol=0)
    assert float(judged.draft_acceptance_N[0]) == pytest.approx(float(torch.minimum(p[row], q[row]).sum()))
    assert bool((judged.token_ids_N[judged.kept_N] == drafted[judged.kept_N]).all())


def test_where_rounding_leaves_nothing_to_draw_from_the_draft_stays() -> None:
    # Both add up to 1 up to rounding, and p is nowhere above q. The last token is impossible under both, as with top-p.
    p = torch.tensor([[0.5, 0.4999999, 0.0]]).log()
    q = torch.tensor([[0.5, 0.5, 0.0]]).log()
    late = torch.tensor([1 - 1e-9], dtype=torch.float64)
    judged = judge(p, q, torch.tensor([1]), late, late, 1.0)
    assert judged.kept_N.tolist() == [True] and judged.token_ids_N.tolist() == [1]
    assert bool(judged.dense_logp_N.isfinite().all()) and bool(judged.sparse_logp_N.isfinite().all())


def test_greedy_keeps_what_is_within_the_floor_of_the_best_token() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.9, 0.08, 0.02]]).log()
    q = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.8, 0.1], [0.1, 0.2, 0.7]]).log()
    drafted, unused = torch.tensor([1, 1, 2]), torch.zeros(3, dtype=torch.float64)
    near = judge(p, q, drafted, unused, unused, 0.1, greedy=True)
    assert near.kept_N.tolist() == [True, True, False] and near.token_ids_N.tolist() == [1, 1, 0]
    assert near.sparse_logp_N.exp().tolist() == pytest.approx([0.7, 0.8, 0.1])
    # At floor 1 an equally likely token is not the one that dense greedy decoding takes.
    exact = judge(p, q, drafted, unused, unused, 1.0, greedy=True)
    assert exact.token_ids_N.tolist() == [0, 0, 0] and exact.kept_N.tolist() == [False, False, False]


@pytest.mark.parametrize(("kept", "stand"), [([1, 1, 1], 3), ([0, 1, 1], 1), ([1, 0, 0], 2), ([1, 1, 0], 3)])
def test_a_window_stands_up_to_its_first_rejected_token(kept: list[int], stand: int) -> None:
    assert tokens_that_stand(torch.tensor(kept, dtype=torch.bool)) == stand


@pytest.mark.parametrize("floor", [0, -0.1, 1.01, math.nan, math.inf, True, "0.1", None])
def test_floors_out_of_range_are_refused(floor: object) -> None:
    with pytest.raises(UserError, match="floor must be above 0 and at most 1"):
        DraftCheck(floor=floor)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, -1, 1.5, True, 100_000, "64", None])
def test_windows_out_of_range_are_refused(window: object) -> None:
    with pytest.raises(UserError, match="window_tokens must be a whole number"):
        DraftCheck(window_tokens=window)  # type: ignore[arg-type]


def test_a_schedule_file_carries_the_check(tmp_path: Path) -> None:
    schedule = Schedule.fixed(128).checked(window_tokens=32, floor=0.05)
    assert schedule.name == "fixed-128-checked-32-0.05"
    assert schedule.checked(64, 0.1).name == "fixed-128-checked-64-0.1"
    loaded = Schedule.load(schedule.save(tmp_path / "checked.toml"))
    assert loaded.check == DraftCheck(32, 0.05)
    assert Schedule.load(Schedule.fixed(128).save(tmp_path / "plain.toml")).check is None
    text = (tmp_path / "checked.toml").read_text().replace("window_tokens", "window_token")
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(UserError, match="unknown key 'window_token' in check") as refused:
        Schedule.load(tmp_path / "wrong.toml")
    assert "window_tokens" in str(refused.value.hint)


def test_a_draw_of_exactly_zero_keeps_and_draws_no_impossible_token() -> None:
    p, q = torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([[0.5, 0.5, 0.0]])
    zero = torch.zeros(1, dtype=torch.float64)
    judged = judge(p.log(), q.log(), torch.tensor([0]), zero, zero, 0.5)
    assert not judged.kept_N[0] and int(judged.token_ids_N[0]) == 1
