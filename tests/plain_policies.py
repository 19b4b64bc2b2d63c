"""The three compression policies a second time, as plain loops over tokens with Python's own numbers, from method's text.
Shares no code with the package. A request's head at a time; tokens are given oldest first."""

from __future__ import annotations

import math

Vector = list[float]


def kept(policy: object, keys: list[Vector], queries: list[list[Vector]], scale: float) -> list[int]:
    """Places in `keys` that stay, ascending. queries: [query head of the group][observed token]."""
    rule = {"streaming": _streaming, "snap_kv": _snap_kv, "r_kv": _r_kv}[policy.kind]  # type: ignore[attr-defined]
    return rule(policy, keys, queries, scale)


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    raised = [math.exp(logit - largest) for logit in logits]
    return [one / math.fsum(raised) for one in raised]


def _streaming(policy, keys, queries, scale):  # type: ignore[no-untyped-def]
    tokens = len(keys)
    return [
        t
        for t in range(tokens)
        if t < policy.first_tokens or t >= tokens - (policy.budget_tokens - policy.first_tokens)
    ]


def _best_and_window(policy, scores: list[float], tokens: int) -> list[int]:  # type: ignore[no-untyped-def]
    best = sorted(range(len(scores)), key=lambda t: -scores[t])[: policy.budget_tokens - policy.window_tokens]
    return sorted(best) + list(range(tokens - policy.window_tokens, tokens))


def _pooled(scores: list[float], width: int, how: str) -> list[float]:
    reach, pooled = width // 2, []
    for t in range(len(scores)):
        around = [scores[u] for u in range(t - reach, t + reach + 1) if 0 <= u < len(scores)]
        pooled.append(max(around) if how == "max" else sum(around) / width)
    return pooled


def _snap_kv(policy, keys, queries, scale):  # type: ignore[no-untyped-def]
    tokens = len(keys)
    older = tokens - policy.window_tokens
    total = [0.0] * older
    for head in queries:
        for w, query in enumerate(head):
            seen = softmax([scale * dot(query, keys[t]) for t in range(older + w + 1)])
            for t in range(older):
                total[t] += seen[t]
    return _best_and_window(policy, _pooled(total, policy.pool_tokens, policy.pool), tokens)


def _r_kv(policy, keys, queries, scale):  # type: ignore[no-untyped-def]
    tokens = len(keys)
    older = tokens - policy.window_tokens
    per_head = []
    for head in queries:
        rows = [softmax([scale * dot(query, keys[t]) for t in range(older)]) for query in head]
        per_head.append([sum(row[t] for row in rows) / len(rows) for t in range(older)])
    importance = _pooled([max(mean[t] for mean in per_head) for t in range(older)], policy.pool_tokens, "max")
    lengths = [math.sqrt(dot(key, key)) for key in keys]
    mean = [0.0] * tokens
    for i in range(tokens):
        alike = [
            0.0 if i == j else dot(keys[i], keys[j]) / (max(lengths[i], 1e-8) * max(lengths[j], 1e-8))
            for j in range(tokens)
        ]
        similar = [j for j in range(tokens) if j != i and alike[j] > policy.similarity_threshold]
        if similar:
            alike[similar[-1]] = 0.0
        for j in range(tokens):
            mean[j] += alike[j] / tokens
    redundancy = softmax(mean)
    weight = policy.importance_weight
    return _best_and_window(
        policy, [weight * importance[t] - (1 - weight) * redundancy[t] for t in range(older)], tokens
    )
