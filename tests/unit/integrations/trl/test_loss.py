"""The fields that TRL's loss reads, from a correction over all processes. No TRL; tests/in_trl runs its loss on them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparroll.corrections import correction, names
from sparroll.integrations.trl.loss import correct_batch, leave_uncorrected

B, T = 6, 7
USABLE = [name for name in names() if not correction(name).needs]


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sparse_BT = -3 * torch.rand(B, T, generator=generator)
    return {
        "completion_mask": (torch.arange(T) < torch.tensor([7, 3, 1, 6, 5, 2])[:, None]).int(),
        "old_per_token_logps": (sparse_BT + 0.7 * torch.randn(B, T, generator=generator)).clamp(max=-1e-3),
        "sampling_per_token_logps": sparse_BT,
        "advantages": torch.tensor([0.5, -1.0, 0.0, 1.0, -0.5, 0.25]),
        "num_items_in_batch": torch.tensor(24),
    }


def rows(whole: dict[str, Tensor], first: int, last: int, tokens: int) -> dict[str, Tensor]:
    """A process's rows, without padding that only others need."""
    return {key: value[first:last, :tokens] if value.dim() == 2 else value for key, value in whole.items()} | {
        "advantages": whole["advantages"][first:last]
    }


@pytest.mark.parametrize("name", USABLE)
def test_two_processes_get_the_rows_of_one_batch(name: str) -> None:
    whole = batch()
    together = dict(whole)
    expected = correct_batch(together, correction(name), lambda part: part, 0)
    shares = [rows(whole, 0, 3, 7), rows(whole, 3, 6, 6)]
    fields = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
    gathered = {
        key: torch.cat([torch.nn.functional.pad(s[key], (0, T - s[key].shape[1])) for s in shares]) for key in fields
    }

    for process, share in enumerate(shares):
        asked = iter([*(gathered[key] for key in fields), whole["advantages"][:, None], gathered["completion_mask"]])
        report = correct_batch(share, correction(name), lambda part, asked=asked: next(asked), process)  # type: ignore[misc]
        mine, tokens = slice(3 * process, 3 * process + 3), share["completion_mask"].shape[1]
        assert report == expected
        assert share["num_items_in_batch"] == together["num_items_in_batch"]
        for key in ("importance_sampling_ratio", "tool_mask"):
            assert torch.equal(share[key], together[key][mine, :tokens]), key


def test_dropped_tokens_leave_mask_and_denominator_and_padding_is_never_counted() -> None:
    found = batch()
    report = correct_batch(found, correction("icepop"), lambda part: part, 0)
    kept = int((found["tool_mask"] * found["completion_mask"]).sum())
    assert kept == int(found["num_items_in_batch"]) == report["policy/kept_tokens"] < 24
    assert not bool((found["tool_mask"].bool() & ~found["completion_mask"].bool()).any())
    assert report["policy/trained_rollouts"] == 5
    assert report["policy/trained_tokens"] == int((found["tool_mask"].sum(-1) * (found["advantages"] != 0)).sum())


def test_tokens_of_others_stay_out() -> None:
    found = batch()
    given = torch.ones(B, T, dtype=torch.int32)
    given[0] = 0
    found["tool_mask"] = given
    correct_batch(found, correction("none"), lambda part: part, 0)
    assert found["tool_mask"][0].sum() == 0 and found["num_items_in_batch"] == 24 - 7


def test_a_token_that_the_dense_policy_never_says_counts_and_moves_nothing() -> None:
    found = batch()
    found["old_per_token_logps"][0, 2] = -math.inf
    correct_batch(found, correction("none"), lambda part: part, 0)
    assert found["num_items_in_batch"] == 24 and found["tool_mask"][0, 2] == 0
    assert torch.isfinite(found["old_per_token_logps"]).all()


def test_dense_rollouts_have_weights_of_one() -> None:
    found = batch()
    leave_uncorrected(found)
    assert torch.equal(found["importance_sampling_ratio"], torch.ones(B, T))


def test_a_control_group_is_corrected_and_left_out_of_the_distance() -> None:
    control, found, alone = [False, True, False, False, True, False], batch(), batch()
    whole = correct_batch(alone, correction("tis"), lambda part: part, 0)
    report = correct_batch(found, correction("tis"), lambda part: part, 0, control)
    sparse_B1 = ~torch.tensor(control)[:, None]
    mask_BT = found["completion_mask"].bool() & sparse_B1
    distance = (found["sampling_per_token_logps"] - found["old_per_token_logps"])[mask_BT].mean()
    assert report["mismatch/kl_sparse_to_dense"] == pytest.approx(float(distance), abs=1e-6)
    assert report["mismatch/kl_sparse_to_dense"] != pytest.approx(whole["mismatch/kl_sparse_to_dense"], abs=1e-3)
    for name in ("importance_sampling_ratio", "tool_mask", "num_items_in_batch"):
        assert torch.equal(found[name], alone[name])
