"""How far block-sparse attention is from dense on the model's own samples, by budget and context length.

Teacher-forced: one forward over whole sequences with the mask that decoding would have used. A quick look for tuning
the recipe; `sparroll calibrate` is the measurement.
"""

# B rows, H query heads, K kv heads, T positions, P pages

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface


@dataclass
class Setting:
    budget: int
    page: int
    prompt_tokens_B: torch.Tensor
    first: int = 16
    recent: int = 32
    dense_layers: int = 2


_setting: Setting | None = None


def read_mask(query, key, setting: Setting) -> torch.Tensor:
    """[B, K, T, T] bool: which tokens the query at each position reads."""
    rows, kv_heads, tokens, width = key.shape
    page, device = setting.page, key.device
    pages = -(-tokens // page)
    landmarks = F.pad(key.float(), (0, 0, 0, pages * page - tokens)).view(rows, kv_heads, pages, page, width).mean(3)
    mean_query = query.float().view(rows, kv_heads, -1, tokens, width).mean(2)
    scores = mean_query @ landmarks.transpose(2, 3)
    position_T, page_P = torch.arange(tokens, device=device), torch.arange(pages, device=device)
    oldest_recent_T = (position_T // page)[:, None] - setting.recent // page + 1
    forced_TP = (page_P < setting.first // page) | (page_P >= oldest_recent_T)
    scores = scores.masked_fill(forced_TP, float("-inf"))
    chosen = min((setting.budget - setting.first - setting.recent) // page, pages)
    best = scores.topk(chosen, dim=-1)
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > float("-inf"))
    read = (picked | forced_TP).repeat_interleave(page, dim=-1)[..., :tokens]
    dense_BT = (position_T < setting.prompt_tokens_B[:, None]) | (position_T + 1 <= setting.budget)
    return (read | dense_BT[:, None, :, None]) & (position_T <= position_T[:, None])


def _probe_attention(module, query, key, value, attention_mask, scaling=None, **_):
    if module.layer_idx < _setting.dense_layers:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        mask = read_mask(query, key, _setting).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("recipe_probe", _probe_attention)
AttentionMaskInterface.register("recipe_probe", lambda *_, **__: None)


@torch.no_grad()
def acceptance_by_bin(model, pairs, settings, bin_tokens: int, rows_at_once: int, deadline: float) -> list[dict]:
    """`pairs` are (prompt ids, response ids); `settings` are (budget, page). One result per setting and bin."""
    global _setting
    found: dict[tuple, list[torch.Tensor]] = {}
    pairs = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    for start in range(0, len(pairs), rows_at_once):
        part = pairs[start : start + rows_at_once]
        ids, context_BT, response_BT, prompt_B = _rows(part, model.device)
        dense = model(input_ids=ids, use_cache=False).logits.float().softmax(-1)
        entropy = -(dense * dense.clamp_min(1e-9).log()).sum(-1)
        for at in (context_BT[response_BT] // bin_tokens).unique().tolist():
            inside = response_BT & (context_BT // bin_tokens == at)
            found.setdefault((0, 0, at), []).append(entropy[inside].cpu())
        for budget, page in settings:
            if time.time() > deadline:
                break
            _setting = Setting(budget, page, prompt_B)
            model.set_attn_implementation("recipe_probe")
            sparse = model(input_ids=ids, use_cache=False).logits.float().softmax(-1)
            model.set_attn_implementation("sdpa")
            shared = torch.minimum(dense, sparse).sum(-1)
            for at in (context_BT[response_BT] // bin_tokens).unique().tolist():
                inside = response_BT & (context_BT // bin_tokens == at)
                found.setdefault((page, budget, at), []).append(shared[inside].cpu())
    return [_row(key, torch.cat(parts), bin_tokens) for key, parts in sorted(found.items())]


def _rows(part, device):
    longest = max(len(p) + len(r) for p, r in part)
    ids = torch.zeros(len(part), longest, dtype=torch.int64)
    for row, (prompt, response) in enumerate(part):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
    prompt_B = torch.tensor([len(p) for p, _ in part], device=device)
    end_B = torch.tensor([len(p) + len(r) for p, r in part], device=device)
    context_BT = torch.arange(1, longest + 1, device=device).expand(len(part), -1)
    response_BT = (context_BT >= prompt_B[:, None]) & (context_BT < end_B[:, None])
    return ids.to(device), context_BT, response_BT, prompt_B


def _row(key: tuple, values: torch.Tensor, bin_tokens: int) -> dict:
    page, budget, at = key
    row = {"page": page, "budget": budget, "from_context": at * bin_tokens, "tokens": values.numel()}
    if page == 0:
        over = (values > 0.1).float().mean().item()
        return row | {"page": None, "entropy_nats": values.mean().item(), "share_over_0.1_nats": over}
    row["mean"] = values.mean().item()
    points = torch.tensor([0.01, 0.05, 0.10, 0.25])
    q01, q05, q10, q25 = values.sort().values[(points * (values.numel() - 1)).long()].tolist()
    return row | {"q01": q01, "q05": q05, "q10": q10, "q25": q25, "over_999": (values > 0.999).float().mean().item()}
