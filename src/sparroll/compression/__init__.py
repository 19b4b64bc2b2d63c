"""Eviction policies by name: which tokens stay in the KV cache when a rollout holds more than its budget. Each policy
is one small file.

Not here: the cache itself (engines/hf/), and selectors, which choose what each step reads while the cache stays whole
(attention/).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sparroll.compression.base import Compression
from sparroll.compression.r_kv import RKV
from sparroll.compression.snap_kv import SnapKV
from sparroll.compression.streaming import StreamingLLM
from sparroll.errors import UserError, nearest

__all__ = ["RKV", "Compression", "SnapKV", "StreamingLLM", "compression_kinds", "make_compression"]

_POLICIES: dict[str, Any] = {policy.kind: policy for policy in (RKV, SnapKV, StreamingLLM)}


def compression_kinds() -> list[str]:
    return sorted(_POLICIES)


def make_compression(kind: str, **settings: Any) -> Compression:
    """The policy of that name. Raises UserError for unknown names, unknown settings and values that make no sense.

    >>> make_compression("r_kv", budget_tokens=512, window_tokens=8)
    """
    if not isinstance(kind, str) or kind not in _POLICIES:
        raise UserError(f"unknown compression {kind!r}", nearest(str(kind), compression_kinds()))
    known = [field.name for field in dataclasses.fields(_POLICIES[kind])]
    for key in settings:
        if key not in known:
            raise UserError(f"compression {kind!r} has no setting {key!r}", nearest(key, known))
    made: Compression = _POLICIES[kind](**settings)
    return made
