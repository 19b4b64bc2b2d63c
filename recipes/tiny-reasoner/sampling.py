"""Batched dense sampling with a fixed cache, to measure accuracy during and after training. Not an engine."""

# B rows, K kv heads, G query heads per kv head, S cache slots, D head dimension

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from folder import WORD_ID
from transformers import AttentionInterface, AttentionMaskInterface

from sparroll.tasks.synthetic.kinds import EOS, VOCABULARY
from sparroll.tasks.synthetic.task import RESPONSE_TOKENS, SyntheticTask

WORDS = list(VOCABULARY)


class _Cache:
    def __init__(self, config, rows: int, slots: int, device, dtype) -> None:
        shape = (rows, config.num_key_value_heads, slots, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.row_B = torch.arange(rows, device=device)
        self.position_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.used = slots


_cache: _Cache | None = None


def _cached_attention(module, query, key, value, attention_mask, scaling=None, **_):
    keys, values = _cache.keys[module.layer_idx], _cache.values[module.layer_idx]
    if query.shape[2] > 1:
        keys[:, :, : key.shape[2]], values[:, :, : key.shape[2]] = key, value
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    keys[_cache.row_B, :, _cache.position_B] = key[:, :, 0]
    values[_cache.row_B, :, _cache.position_B] = value[:, :, 0]
    used = _cache.used
    query_BKGD = query.view(query.shape[0], keys.shape[1], -1, query.shape[-1])
    scores = torch.matmul(query_BKGD, keys[:, :, :used].transpose(2, 3)).float() * scaling
    hidden_BS = torch.arange(used, device=query.device) > _cache.position_B[:, None]
    weights = scores.masked_fill(hidden_BS[:, None, None], float("-inf")).softmax(-1).to(query.dtype)
    return torch.matmul(weights, values[:, :, :used]).reshape(query.shape[0], 1, -1, query.shape[-1]), None


AttentionInterface.register("recipe_cached", _cached_attention)
AttentionMaskInterface.register("recipe_cached", lambda *_, **__: None)


@torch.no_grad()
def sample(model, prompts: list[list[int]], max_new_tokens: int, greedy: bool = False) -> list[list[int]]:
    """One response per prompt, end-of-sequence included when it was reached."""
    global _cache
    device, before = model.device, model.config._attn_implementation
    model.set_attn_implementation("recipe_cached")
    lengths_B = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths_B.max())
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    _cache = _Cache(model.config, len(prompts), longest + max_new_tokens, device, model.dtype)
    hidden = model.model(input_ids=ids.to(device), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[_cache.row_B, lengths_B - 1])
    end = WORD_ID[EOS]
    out = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        probs = logits.float().softmax(-1)
        token_B = probs.argmax(-1) if greedy else (probs / torch.empty_like(probs).exponential_()).argmax(-1)
        out[:, step] = token_B.masked_fill(done, 0)
        done |= token_B == end
        if step + 1 == max_new_tokens or (step % 16 == 0 and bool(done.all())):
            break
        _cache.position_B = lengths_B + step
        _cache.used = longest + step + 1
        hidden = model.model(
            input_ids=token_B[:, None], position_ids=_cache.position_B[:, None], use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[:, 0])
    _cache = None
    model.set_attn_implementation(before)
    rows = out.tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def accuracy_table(model, levels, count: int, kinds, deadline: float, greedy: bool = False, keep: int = 0):
    """Accuracy and response tokens over `count` eval problems of each kind and level, and `keep` token rows of each."""
    table, samples = [], {}
    for level in levels:
        if time.time() > deadline:
            break
        began = time.time()
        tasks = {kind: SyntheticTask(kind, (kind,)) for kind in kinds}
        prompts = [prompt for task in tasks.values() for prompt in task.prompts("eval", level, 0, count)]
        ids = [[WORD_ID[word] for word in prompt.text.split()] for prompt in prompts]
        responses = sample(model, ids, int(RESPONSE_TOKENS[level][1] * 1.2), greedy)
        for place, (kind, task) in enumerate(tasks.items()):
            rows = range(place * count, (place + 1) * count)
            texts = {row: " ".join(WORDS[i] for i in responses[row]) for row in rows}
            right = sum(task.reward(prompts[row], texts[row]) for row in rows)
            tokens = sorted(len(responses[row]) for row in rows)
            table.append(
                {
                    "kind": kind,
                    "level": level,
                    "problems": count,
                    "accuracy": right / count,
                    "prompt_tokens": len(ids[rows[0]]),
                    "response_tokens_mean": round(sum(tokens) / count, 1),
                    "response_tokens_q05": tokens[count // 20],
                    "response_tokens_q95": tokens[count * 19 // 20],
                    "ended": sum(responses[row][-1] == WORD_ID[EOS] for row in rows) / count,
                }
            )
            samples[kind, level] = [(ids[row], responses[row]) for row in rows[:keep]]
        scores = "  ".join(f"{row['kind']} {row['accuracy']:.3f}" for row in table[-len(kinds) :])
        print(f"  level {level} ({time.time() - began:.1f} s): {scores}", flush=True)
    return table, samples
