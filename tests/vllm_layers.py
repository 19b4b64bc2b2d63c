"""Layers of the CUDA backend without a GPU: what vLLM and its worker hold around them, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparroll import Schedule
from sparroll.attention.selectors import PageMean, QuantizedMean, Remainder, Selector
from sparroll.engines.vllm.attention.state import STATE
from sparroll.schedule import Step

# R rows, H kv heads, G query heads per kv head, D head dim, P blocks, B tokens per block, M blocks per request
R, H, G, D, P, M = 4, 2, 2, 32, 64, 12
SCHEDULE = Schedule(steps=(Step(0, 64), Step(128, 80)), dense_layers=(0,))
GROUPED = Schedule(steps=(Step(0, (96, 64)), Step(128, (112, 80))), dense_layers=(0,), layer_groups=((2,), (1,)))
SUMMING = Schedule(SCHEDULE.steps, PageMean(16, 16, 32, remainder=Remainder(32, "fp8")), dense_layers=(0,))
SUMMING_FINE = Schedule(
    SCHEDULE.steps, QuantizedMean(4, 16, 32, bits=4, remainder=Remainder(32, "fp8")), dense_layers=(0,)
)
PAIRS = Schedule(SCHEDULE.steps, QuantizedMean(2, 16, 32, bits=2), dense_layers=(0,))


def cache(layout: str, block: int) -> Tensor:
    """[P, H, B, 2D] as vLLM 0.26 shows it, in memory as NHD or HND."""
    torch.manual_seed(0)
    if layout == "NHD":
        return torch.randn(P, block, H, 2 * D).transpose(1, 2)
    return torch.randn(P, H, block, 2 * D)


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, block_table: Tensor, seqused_k: Tensor, **call: Any
) -> None:
    """What FlashAttention does when each sequence has one query and one KV head."""
    assert call["fa_version"] == 3 and call["max_seqlen_q"] == 1
    assert call["cu_seqlens_q"].tolist() == list(range(len(q) + 1))
    for sequence, tokens in enumerate(seqused_k.tolist()):
        if not tokens:
            out[sequence] = 0
            continue
        keys = k[block_table[sequence].long()].flatten(0, 1)[:tokens, 0]
        values = v[block_table[sequence].long()].flatten(0, 1)[:tokens, 0]
        out[sequence] = torch.softmax(q[sequence] @ keys.T * call["softmax_scale"], -1) @ values


def rows_of(rows: int, width: int, dtype: torch.dtype) -> SimpleNamespace:
    """What a layer of rows holds."""
    held = torch.zeros(P, H, rows, width, dtype=dtype).transpose(1, 2)
    return SimpleNamespace(kv_cache=held, rows_PSHW=held)


def workspace(monkeypatch: pytest.MonkeyPatch, backend: Any, selector: Selector, units: int = M) -> Any:
    """That of an engine with three layers."""
    work = backend.Workspace.allocate(R, H, G, D, units, torch.float32, selector, 3, torch.device("cpu"))
    monkeypatch.setattr(backend, "_workspace", work)
    return work


def layer_of(backend: Any, attributes: dict[str, Any], kv_cache: Tensor) -> SimpleNamespace:
    """vLLM's attention layer around our implementation."""
    impl = object.__new__(backend.SparseImpl)
    for name, value in {**attributes, "num_heads": H * G, "num_kv_heads": H, "head_size": D, "scale": D**-0.5}.items():
        setattr(impl, name, value)
    STATE.index_read_share[impl.number] = 0.0
    return SimpleNamespace(impl=impl, kv_cache=kv_cache)
