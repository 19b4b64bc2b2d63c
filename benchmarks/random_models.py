"""Models with random weights, for benchmarks whose times and bytes do not depend on them. Measures nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def random_qwen3(device: str, dtype: str, seed: int, **sizes: Any) -> PreTrainedModel:
    """`sizes` are fields of transformers' Qwen3Config. It never ends a sequence by itself."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=True, pad_token_id=0, eos_token_id=None, **sizes)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval()
