"""Qwen3's forward over the parameters of a transformers model, for problems of one length: fewer kernels than the
original, dense attention only. For pretraining and quick measurements; not an engine."""

# B rows, S tokens, H query heads, K kv heads, D head dimension, E hidden

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [B, H, S, D], key [B, K, S, D], value) -> [B, H, S, D]"""


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def hidden_states(model: Qwen3ForCausalLM, ids_BS: Tensor, first: int = 0, attend: Attend = causal) -> Tensor:
    """[B, S, E] final hidden states; the tokens stand at positions `first` and following."""
    config = model.config
    cos_SD, sin_SD = _angles(
        config.rope_parameters["rope_theta"], config.head_dim, first, ids_BS.shape[1], ids_BS.device
    )
    hidden = F.embedding(ids_BS, model.model.embed_tokens.weight)
    for number, layer in enumerate(model.model.layers):
        hidden = _block(layer, number, hidden, cos_SD, sin_SD, attend, config)
    return _norm(hidden, model.model.norm.weight, config)


def logits(model: Qwen3ForCausalLM, hidden: Tensor) -> Tensor:
    return F.linear(hidden, model.model.embed_tokens.weight).float()


def _block(layer, number: int, hidden: Tensor, cos_SD: Tensor, sin_SD: Tensor, attend: Attend, config) -> Tensor:
    normed, attention = _norm(hidden, layer.input_layernorm.weight, config), layer.self_attn
    # The norms may answer in fp32; one cast here serves three products.
    normed = normed.to(torch.get_autocast_dtype(hidden.device.type)) if _autocast(hidden) else normed
    heads = (*hidden.shape[:2], -1, config.head_dim)
    query = _norm(F.linear(normed, attention.q_proj.weight).view(heads), attention.q_norm.weight, config)
    key = _norm(F.linear(normed, attention.k_proj.weight).view(heads), attention.k_norm.weight, config)
    value = F.linear(normed, attention.v_proj.weight).view(heads).transpose(1, 2)
    query = _rotated(query.transpose(1, 2), cos_SD, sin_SD).to(value.dtype)
    key = _rotated(key.transpose(1, 2), cos_SD, sin_SD).to(value.dtype)
    read = attend(number, query, key, value).transpose(1, 2).flatten(2)
    hidden = hidden + F.linear(read, attention.o_proj.weight)
    normed, mlp = _norm(hidden, layer.post_attention_layernorm.weight, config), layer.mlp
    normed = normed.to(torch.get_autocast_dtype(hidden.device.type)) if _autocast(hidden) else normed
    inner = F.silu(F.linear(normed, mlp.gate_proj.weight)) * F.linear(normed, mlp.up_proj.weight)
    return hidden + F.linear(inner, mlp.down_proj.weight)


def _autocast(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


def _norm(x: Tensor, gain: Tensor, config) -> Tensor:
    return F.rms_norm(x.float(), gain.shape, gain, config.rms_norm_eps)


def _rotated(x: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos_SD - right * sin_SD, right * cos_SD + left * sin_SD], -1)


def _angles(theta: float, head_dim: int, first: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[S, D / 2] cosines and sines, fp32."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(first, first + tokens, device=device, dtype=torch.float32)
    angle = positions[:, None] * (theta**-pairs)[None]
    return angle.cos(), angle.sin()


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    prompts_BS: Tensor,
    temperature_B: Tensor,
    most_tokens: int,
    end_id: int,
    rows_at_once: int = 16,
) -> Tensor:
    """[B, most_tokens] sampled responses to prompts of one length; 0 after the end. Temperature 0 is greedy."""
    config, device = model.config, prompts_BS.device
    rows, prompt_tokens = prompts_BS.shape
    dtype = torch.get_autocast_dtype(device.type) if _autocast(prompts_BS) else torch.float32
    shape = (
        config.num_hidden_layers,
        2,
        rows,
        config.num_key_value_heads,
        prompt_tokens + most_tokens,
        config.head_dim,
    )
    cache = torch.zeros(shape, dtype=dtype, device=device)
    place = slice(0, 0)
    filled = 0

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache[layer, 0, place, :, filled : filled + key.shape[2]] = key
        cache[layer, 1, place, :, filled : filled + key.shape[2]] = value
        if query.shape[2] > 1:
            return causal(layer, query, key, value)
        known = cache[layer, :, :, :, : filled + 1]
        return F.scaled_dot_product_attention(query, known[0], known[1], enable_gqa=True)

    last = []
    for start in range(0, rows, rows_at_once):
        place = slice(start, start + rows_at_once)
        last.append(hidden_states(model, prompts_BS[place], attend=attend)[:, -1])
    place, hidden = slice(0, rows), torch.cat(last)
    out = torch.zeros(rows, most_tokens, dtype=torch.int64, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    for step in range(most_tokens):
        scores = logits(model, hidden)
        noise = -torch.empty_like(scores).exponential_().log()
        token_B = (scores + noise * temperature_B[:, None]).argmax(-1)
        out[:, step] = token_B.masked_fill(done, 0)
        done |= token_B == end_id
        if step % 32 == 31 and bool(done.all()):
            break
        filled = prompt_tokens + step
        hidden = hidden_states(model, token_B[:, None], filled, attend)[:, 0]
    return out
