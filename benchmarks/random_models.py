"""Models with random weights, for benchmarks whose times and bytes do not depend on them. Measures nothing."""

from __future__ import annotations

from pathlib import Path
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


SURE_NORM_WEIGHT = 8.0


def make_sure_of_tokens(folder: Path) -> None:
    """Make the next token of a saved model with random weights as sure as a trained one's, by the weight of its last norm.
    Among 152K equally likely tokens lists of 20 would hold nothing, and a tail would say nothing."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"].fill_(SURE_NORM_WEIGHT)
    save_file(weights, path, metadata={"format": "pt"})
