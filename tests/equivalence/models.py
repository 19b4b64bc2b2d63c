"""Small random models of every architecture that HFEngine names. Weights are scaled up so that attention is peaked and
logits differ: a uniform attention would hide a wrong selection."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
ARCHITECTURES = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": dict(sliding_window=None),
    "phi3": {},
    "olmo2": {},
    "gemma": {},
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
}


def tiny_model(architecture: str = "qwen3", seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **{**_COMMON, **ARCHITECTURES[architecture], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15 if "embed" not in name else 1.0)
    return model


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
