"""What the checks of drafts have computed is found again for the rows of verl's batch, or it is an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.integrations.verl.checked_logp import CheckedResponse, digest, old_log_probs


def response(prompt: list[int], ids: list[int], first: float) -> CheckedResponse:
    return CheckedResponse(digest(prompt), torch.tensor(ids, dtype=torch.int32), first - torch.arange(float(len(ids))))


CHECKED = [response([1, 2], [7, 8, 9], -1.0), response([1, 2], [7, 5], -2.0), response([1], [2, 7, 8, 9], -3.0)]


def found(prompt: list[int], ids: list[int]) -> list[float]:
    (row,) = old_log_probs(CHECKED, [torch.tensor(prompt)], [torch.tensor(ids)], [False])
    return row.tolist()


def test_each_row_gets_its_own_rollouts_log_probabilities() -> None:
    prompts: list[Tensor] = [torch.tensor(ids) for ids in ([1], [1, 2], [1, 2])]
    responses = [torch.tensor(ids) for ids in ([2, 7, 8, 9], [7, 5], [7, 8, 9])]
    rows = old_log_probs(CHECKED, prompts, responses, [False] * 3)
    assert [row.tolist() for row in rows] == [[-3, -4, -5, -6], [-2, -3], [-1, -2, -3]]


def test_a_response_that_verl_cut_off_has_those_of_its_beginning() -> None:
    assert found([1, 2], [7, 8]) == [-1, -2]


@pytest.mark.parametrize(("prompt", "ids"), [([1, 2], [8, 9]), ([1, 2], [7, 8, 9, 9]), ([2], [7, 5])])
def test_a_row_that_no_check_has_seen_is_an_error(prompt: list[int], ids: list[int]) -> None:
    with pytest.raises(UserError, match="no check of drafts has seen rollout 0") as refused:
        found(prompt, ids)
    assert "verify.dense_logp=trainer" in str(refused.value.hint)


def test_a_row_that_fills_the_batch_up_was_seen_by_nobody_and_gets_zeros() -> None:
    prompts = [torch.tensor([1, 2]), torch.tensor([0, 0])]
    rows = old_log_probs(CHECKED, prompts, [torch.tensor([7, 5]), torch.tensor([0])], [False, True])
    assert [row.tolist() for row in rows] == [[-2, -3], [0]]
