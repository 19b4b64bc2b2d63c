"""The fields that verl's loss reads give our own loss, token for token and in the denominator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparroll.corrections import correction, names
from sparroll.integrations.verl.loss_fields import WRITES, corrected_fields, never_empty, rows_of_updates, stale_tokens
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.step_correction import correct_step
from sparroll.train.update.loss import LossSettings, policy_loss
from sparroll.types import Rollout, TokenBatch, TokenScores

USABLE = [name for name in names() if not correction(name).needs]
LENGTHS = (3, 9, 5, 7)


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def world() -> tuple[dict[str, Tensor], list[Rollout], list[TokenScores], Tensor]:
    """verl's fields, and the same as rollouts and scores of our own loop with their advantages [B]."""
    generator = torch.Generator().manual_seed(3)
    sparse = [-3 * torch.rand(length, generator=generator) for length in LENGTHS]
    dense = [(row + 0.7 * torch.randn(len(row), generator=generator)).clamp(max=-1e-3) for row in sparse]
    advantage_B = torch.tensor([0.7, -1.2, 0.0, 0.4])
    fields = {
        "old_log_probs": nested(dense),
        "rollout_log_probs": nested(sparse),
        "response_mask": nested([torch.ones(length, dtype=torch.int64) for length in LENGTHS]),
        "advantages": nested(
            [advantage.expand(length) for advantage, length in zip(advantage_B, LENGTHS, strict=True)]
        ),
    }
    rollouts = [Rollout([1], [5] * len(row), row, "length", prompt_index=n) for n, row in enumerate(sparse)]
    return fields, rollouts, [TokenScores(row) for row in dense], advantage_B


@pytest.mark.parametrize("control", [None, [False, True, False, False]])
@pytest.mark.parametrize("name", USABLE)
def test_the_fields_give_our_own_loss_and_our_own_metrics(name: str, control: list[bool] | None) -> None:
    fields, rollouts, scores, advantage_B = world()
    ours = TokenBatch.from_rollouts(rollouts, pad_id=0)
    metrics = correct_step(correction(name), ours, rollouts, scores, Ranks(), 0, 1, control or ())
    assert ours.weight_BT is not None and ours.kept_BT is not None
    dense_BT = fields["old_log_probs"].to_padded_tensor(0.0)
    now_BT = dense_BT - 0.1
    expected, _ = policy_loss(
        now_BT, dense_BT, advantage_B, ours.weight_BT, ours.kept_BT, ours.kept_tokens, LossSettings(0.2, 0.28)
    )
    control_B = None if control is None else torch.tensor(control)
    found = corrected_fields(correction(name), fields, [[0, 1, 2, 3]], control_B=control_B)
    assert set(found.nested) == set(WRITES)
    padded = {name: tensor.to_padded_tensor(0) for name, tensor in found.nested.items()}
    ratio_BT = (now_BT - dense_BT).exp()
    token_BT = -torch.minimum(ratio_BT * advantage_B[:, None], ratio_BT.clamp(0.8, 1.28) * advantage_B[:, None])
    loss = (token_BT * padded["rollout_is_weights"] * padded["response_mask"]).sum() / padded["loss_mask"].sum()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    assert int(padded["loss_mask"].sum()) == ours.kept_tokens == found.report["policy/kept_tokens"]
    assert {key: value for key, value in found.report.items() if not key.startswith("policy/")} == pytest.approx(
        metrics
    )


def test_a_token_with_dense_probability_0_counts_and_moves_nothing() -> None:
    fields, *_ = world()
    rows = [row.clone() for row in fields["old_log_probs"].unbind()]
    rows[1][2] = -torch.inf
    without = corrected_fields(correction("none"), fields, [[0, 1, 2, 3]]).nested
    assert "old_log_probs" not in without
    found = corrected_fields(correction("none"), {**fields, "old_log_probs": nested(rows)}, [[0, 1, 2, 3]]).nested
    moves, counts = (found[name].unbind()[1].tolist() for name in ("response_mask", "loss_mask"))
    assert moves == [1, 1, 0, 1, 1, 1, 1, 1, 1] and counts == [1] * 9
    rows[1][2] = 0.0
    assert all(map(torch.equal, found["old_log_probs"].unbind(), rows))


def test_an_update_without_a_kept_token_keeps_one_of_weight_zero() -> None:
    fields, *_ = world()
    far = {**fields, "old_log_probs": nested([row - 9 for row in fields["rollout_log_probs"].unbind()])}
    found = corrected_fields(correction("icepop"), far, rows_of_updates(4, 2, 1))
    assert [int(row.sum()) for row in found.nested["loss_mask"].unbind()] == [1, 0, 1, 0]
    assert all(not row.any() for row in found.nested["rollout_is_weights"].unbind())
    assert found.report["policy/kept_tokens"] == 0 == found.report["policy/trained_tokens"]
    assert found.report["policy/trained_rollouts"] == 3


def test_a_padding_rollout_has_no_token_that_could_stay() -> None:
    kept_BT = torch.zeros(2, 3, dtype=torch.bool)
    assert not never_empty(kept_BT, kept_BT, [[0, 1]]).any()


def test_updates_take_the_next_rows_of_every_rank() -> None:
    assert rows_of_updates(8, 4, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of_updates(8, 4, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_tokens_of_older_weights_are_those_of_the_parts_before() -> None:
    assert stale_tokens([(3, 2), (4, 0), (5, 3)], 5, 5).tolist() == [True, True, False, False, False]
    # verl cuts a response behind its parts.
    assert stale_tokens([(3, 2), (5, 3)], 3, 5).tolist() == [True, True, False]
    with pytest.raises(AssertionError, match="parts of 2 tokens"):
        stale_tokens([(3, 2)], 3, 5)


def test_staleness_is_kept_apart_from_sparsity_token_by_token() -> None:
    fields, *_ = world()
    stale = [torch.zeros(length, dtype=torch.bool) for length in LENGTHS]
    # One rollout is stale throughout, and one up to its third token.
    stale[1][:], stale[3][:3] = True, True
    found = corrected_fields(correction("tis"), fields, [[0, 1, 2, 3]], stale).report
    off = [s - d for s, d in zip(fields["rollout_log_probs"].unbind(), fields["old_log_probs"].unbind(), strict=True)]
    old = torch.cat([row[mask] for row, mask in zip(off, stale, strict=True)])
    fresh = torch.cat([row[~mask] for row, mask in zip(off, stale, strict=True)])
    assert found["staleness/kl_sampler_to_dense"] == pytest.approx(float(old.mean()))
    assert found["mismatch/kl_sparse_to_dense"] == pytest.approx(float(fresh.mean()))
    assert found["staleness/token_share"] == 12 / 24


def test_where_every_token_is_stale_sparsity_has_no_distance_of_its_own() -> None:
    fields, *_ = world()
    stale = [torch.ones(length, dtype=torch.bool) for length in LENGTHS]
    found = corrected_fields(correction("tis"), fields, [[0, 1, 2, 3]], stale).report
    assert found["staleness/token_share"] == 1 and "mismatch/kl_sparse_to_dense" not in found
