"""Which transformers models sparse decoding can run: those with plain multi-head or grouped-query attention over the
whole context."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from sparroll.errors import UserError


def check_supported(model: PreTrainedModel) -> None:
    """Raise UserError with the reason where the model's attention is not plain causal attention over all tokens."""
    reason = unsupported_reason(model)
    if reason:
        raise UserError(
            f"{type(model).__name__} is not supported: {reason}",
            "docs/engines.md lists the architectures that are",
        )


def unsupported_config(config: Any) -> str | None:
    """Why the config alone rules sparse decoding out; None where it does not. Every layer must attend to all K and V,
    kept per head."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "num_attention_heads", None) is None:
        return "it is not a decoder-only transformer"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention keeps no keys per head"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"sliding-window attention of {config.sliding_window} tokens (config.sliding_window = None turns it off)"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention logits are soft-capped"
    if getattr(config, "attention_chunk_size", None):
        return "attention is chunked"
    return None


def changing_positions(config: Any) -> str | None:
    """Why the rotary embeddings of one request depend on the others of its batch; None where they do not. transformers
    takes one of two sets of factors for a whole forward pass, by the longest context in it."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return None
    original = getattr(config, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    if original is not None and config.max_position_embeddings <= original:
        return None
    return (
        "transformers scales the positions of a whole batch (rope_type longrope) by its longest context, so a request's "
        f"numbers depend on the others (config.max_position_embeddings = {original or 'the original number'} keeps to "
        "contexts that are not scaled)"
    )


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why sparse decoding cannot run this model; None where it can. The model is run on three tokens to find out."""
    reason = unsupported_config(model.config) or changing_positions(model.config)
    if reason:
        return reason
    if any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in model.named_parameters()):
        return "it has attention sinks"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    if not _plain_head(model):
        return "its logits are more than its output head applied to the last hidden state"
    return None


@torch.inference_mode()
def _plain_head(model: PreTrainedModel) -> bool:
    # Scoring applies the output head to chunks of hidden states, so a model that scales or caps logits must be refused.
    ids = torch.arange(3, device=model.device).clamp_max(model.config.vocab_size - 1)[None]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return torch.allclose(
        model.get_output_embeddings()(hidden), model(input_ids=ids, use_cache=False).logits, equal_nan=True
    )
