"""HFEngine on a GPU gives what it gives on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from equivalence.models import ARCHITECTURES, prompts, tiny_model
from equivalence.test_hf_engine import ODD_LENGTHS, RISING
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp32_rollouts_score_the_same_on_both_devices(architecture: str) -> None:
    model = tiny_model(architecture)
    on_gpu = copy.deepcopy(model).cuda()
    rollouts = HFEngine(on_gpu, schedule=RISING, max_batch=4).generate(prompts(ODD_LENGTHS), n=2, max_new_tokens=45)
    for scorer in (Scorer(model), Scorer(on_gpu)):
        for rollout, score in zip(rollouts, scorer.sparse(rollouts, RISING), strict=True):
            torch.testing.assert_close(score.logp, rollout.sparse_logp, atol=1e-4, rtol=0)


def test_bf16_engine_stays_within_bf16_error_of_its_replay() -> None:
    model = tiny_model().cuda().bfloat16()
    rollouts = HFEngine(model, max_batch=4).generate(prompts(ODD_LENGTHS), n=4, max_new_tokens=45)
    for rollout, score in zip(rollouts, Scorer(model).dense(rollouts), strict=True):
        assert float((score.logp - rollout.sparse_logp).abs().median()) < 0.05
