"""Gives vLLM's newer model runner these scores in the place of its own, which take some 230 us of each decode step of 32
requests with lists, and 170 us without (benchmarks/row_scores.py). Their numbers are the same to rounding; of equally
likely tokens, which are many among logits in bf16, ours list the lower id first, so that two passes over one prefix list
the same.

Only a worker that asked for sparroll does it, since vLLM has no other place for it: a function that two of its modules
look up by name. Dense engines without sparroll keep vLLM's, unless they share a process with such a worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparroll.engines.vllm.scores import reference
from sparroll.engines.vllm.scores.reference import MOST_LISTED, RowScores

_NAME = "compute_topk_scores"
_PARAMETERS = (
    "logits",
    "num_logprobs",
    "sampled_token_ids",
    "cu_num_logits",
    "logprob_token_ids_state",
    "expanded_idx_mapping",
    "max_per_req_token_ids",
    "logits_mode",
)
"""Of vLLM's function from 0.26 to 0.32. Another one stays in its place."""


def take_over() -> bool:
    """Put `scored` before vLLM's function in this process. -> whether this vLLM has that function"""
    try:
        from vllm.v1.worker.gpu.sample import logprob, prompt_logprob, sampler
    except ImportError:
        return False
    theirs = getattr(logprob, _NAME, None)
    if theirs is None or tuple(inspect.signature(theirs).parameters) != _PARAMETERS:
        return False
    for module in (prompt_logprob, sampler):
        setattr(module, _NAME, scored(theirs))
    return True


def scored(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's function, with our scores for what an RL rollout asks for: one row for each request, the sampled token and
    lists of up to MOST_LISTED. Everything else is vLLM's."""
    from vllm.v1.outputs import LogprobsTensors

    @functools.wraps(theirs)
    def compute(
        logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, cu_num_logits: Any = None, **further: Any
    ) -> Any:
        others = further.get("max_per_req_token_ids", 0) or further.get("logits_mode", False)
        if cu_num_logits is not None or others or num_logprobs > MOST_LISTED or logits.stride(1) != 1:
            return theirs(logits, num_logprobs, sampled_token_ids, cu_num_logits, **further)
        return LogprobsTensors(*row_scores(logits, sampled_token_ids, num_logprobs))

    return compute


def row_scores(logits_NV: Tensor, sampled_N: Tensor, top_k: int) -> RowScores:
    """As reference.row_scores, by the kernels on CUDA."""
    if not logits_NV.is_cuda:
        return reference.row_scores(logits_NV, sampled_N, top_k)
    from sparroll.engines.vllm.scores import triton_scores

    return triton_scores.row_scores(logits_NV, sampled_N, top_k)


def compile_ahead(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels for engines with that vocabulary and logits of that dtype, without lists and with the usual
    ones, so that no step of a rollout waits for it."""
    logits_NV = torch.zeros(2, vocabulary, dtype=dtype, device=device)
    for top_k in (0, min(20, vocabulary)):
        row_scores(logits_NV, torch.zeros(2, dtype=torch.int64, device=device), top_k)
