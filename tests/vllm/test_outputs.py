"""What is taken out of vLLM's outputs, and what is left in them for others."""

from __future__ import annotations

import pytest
import torch
from vllm.logprobs import FlatLogprobs, Logprob

from sparroll.engines.vllm import outputs


def test_the_view_of_sampled_tokens_is_what_vllm_gives() -> None:
    tokens, logp = [7, 9, 7], [-0.5, -1.25, -2.0]
    view = outputs.SampledOnly(tokens, logp)
    whole = [{token: Logprob(value, rank=1)} for token, value in zip(tokens, logp, strict=True)]
    assert list(view) == whole
    assert len(view) == 3
    assert view[-1] == whole[-1]
    assert list(view[1:]) == whole[1:]
    with pytest.raises(IndexError):
        view[3]


def test_lists_come_apart_from_the_sampled_token() -> None:
    flat = FlatLogprobs()
    flat.append_fast([5, 5, 3], [-0.5, -0.5, -1.0], iter((1, 1, 2)), iter((None, None, None)))
    flat.append_fast([2, 4, 8], [-3.0, -0.25, -2.0], iter((9, 1, 2)), iter((None, None, None)))
    logp_T, lists = outputs.log_probs(flat, [5, 2], 2)
    assert lists is not None
    assert torch.equal(logp_T, torch.tensor([-0.5, -3.0]))
    assert torch.equal(lists.ids, torch.tensor([[5, 3], [4, 8]]))
    assert torch.equal(lists.logp, torch.tensor([[-0.5, -1.0], [-0.25, -2.0]]))
    with pytest.raises(AssertionError, match="of other tokens"):
        outputs.log_probs(flat, [5, 3], 2)
    with pytest.raises(AssertionError, match="6 log-probabilities for 2 rows of 4"):
        outputs.log_probs(flat, [5, 2], 3)
    logp_T, lists = outputs.log_probs(FlatLogprobs(), [], 2)
    assert lists is not None and (logp_T.shape, lists.ids.shape) == ((0,), (0, 2))
