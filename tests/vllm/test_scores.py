"""Our scores in the place of vLLM's: for what a rollout asks for, and for nothing else. On a GPU also that both agree:

python -m pytest -n0 -q tests/vllm/test_scores.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_runs import HAVE_VLLM

pytestmark = pytest.mark.skipif(not HAVE_VLLM, reason="vllm is not installed in this environment")

ROWS, VOCABULARY = 3, 130


def logits(rows: int = ROWS, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))


@pytest.fixture
def in_vllm() -> Any:
    from sparroll.engines.vllm.scores import in_vllm

    return in_vllm


@pytest.fixture
def theirs() -> Any:
    """A stand-in for vLLM's function, which says what it was given: vLLM's own needs a GPU."""

    def compute_topk_scores(*given: Any, **further: Any) -> Any:
        return "theirs", given, further

    return compute_topk_scores


@pytest.mark.parametrize("top_k", [0, 1, 20, 64])
def test_rollouts_get_our_scores(in_vllm: Any, theirs: Any, top_k: int) -> None:
    sampled = torch.tensor([5, 6, 7])
    found = in_vllm.scored(theirs)(logits(), top_k, sampled, None, max_per_req_token_ids=0, logits_mode=False)
    dense = logits().log_softmax(1)
    assert type(found).__name__ == "LogprobsTensors"
    assert found.logprob_token_ids.tolist() == torch.cat([sampled[:, None], dense.topk(top_k).indices], 1).tolist()
    torch.testing.assert_close(found.logprobs, dense.gather(1, found.logprob_token_ids))
    assert found.selected_token_ranks.tolist() == (dense >= dense.gather(1, sampled[:, None])).sum(1).tolist()


@pytest.mark.parametrize(
    ("top_k", "cu_num_logits", "further"),
    [
        (65, None, {}),
        (20, [0, 1, 2], {}),
        (20, None, {"max_per_req_token_ids": 4}),
        (20, None, {"logits_mode": True}),
    ],
)
def test_the_rest_is_left_to_vllm(in_vllm: Any, theirs: Any, top_k: int, cu_num_logits: Any, further: Any) -> None:
    rows, sampled = logits(), torch.tensor([5, 6, 7])
    found = in_vllm.scored(theirs)(rows, top_k, sampled, cu_num_logits, **further)
    assert found == ("theirs", (rows, top_k, sampled, cu_num_logits), further)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """vLLM's modules, which are as they were afterwards."""
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob, sampler

    found = (logprob, prompt_logprob, sampler)
    for module in found:
        monkeypatch.setattr(module, "compute_topk_scores", logprob.compute_topk_scores)
    return found


def test_both_ways_to_scores_are_ours_and_vllms_function_stays_at_hand(in_vllm: Any, modules: tuple[Any, ...]) -> None:
    own, *users = modules
    before = own.compute_topk_scores
    assert in_vllm.take_over() and in_vllm.take_over()
    assert own.compute_topk_scores is before
    assert [module.compute_topk_scores.__wrapped__ for module in users] == [before, before]


def test_a_function_with_other_parameters_stays(
    in_vllm: Any, modules: tuple[Any, ...], theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules[0], "compute_topk_scores", theirs)
    before = [module.compute_topk_scores for module in modules]
    assert not in_vllm.take_over()
    assert [module.compute_topk_scores for module in modules] == before


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 20, 64])
@pytest.mark.parametrize("rows", [1, 33])
def test_our_scores_are_vllms_on_a_gpu(in_vllm: Any, rows: int, top_k: int) -> None:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    rows_NV = logits(rows, 151_936).cuda()
    sampled = torch.randint(151_936, (rows,), generator=torch.Generator().manual_seed(1)).cuda()
    expected = compute_topk_scores(rows_NV, top_k, sampled)
    found = in_vllm.scored(compute_topk_scores)(rows_NV, top_k, sampled)
    # Logits in float32 are all different, so there is one order.
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-5, rtol=1e-5)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
