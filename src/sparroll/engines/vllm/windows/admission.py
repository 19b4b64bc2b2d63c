"""Refuses requests whose sampling parameters a check of drafts does not cover, where vLLM admits requests."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

_NEUTRAL: dict[str, Any] = {
    "top_k": (0, -1),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
    "logprob_token_ids": (None,),
    "watermarking": (None, False),
}
"""Parameter -> its values that leave the model's distribution alone."""


class Admission(LogitsProcessor):
    """Changes no logits. Named by the plugin as one of `logits_processors`, so that vLLM calls `validate_params`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError, which a server answers with status 400."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(sampling_params, name, neutral[0])
            if value not in neutral:
                raise ValueError(
                    f"this engine checks drafts against the dense policy, which does not know {name}={value!r}; "
                    f"leave {name} out, or serve a schedule without a check"
                )

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass
