"""What checks said of requests, as bytes and back, for an engine in another process than its user: vLLM would hand tensors
on as lists of numbers. A safetensors file, with what is no tensor as JSON in one of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from sparroll.types import Checks

_PLAIN = "plain"


def packed(said: dict[str, dict[str, Any]]) -> bytes:
    """said: tables of CheckedTokens, by the request's name."""
    tensors: dict[str, Tensor] = {}
    plain = []
    for number, (name, table) in enumerate(said.items()):
        rest: dict[str, Any] = {}
        for key, value in table.items():
            if isinstance(value, Tensor):
                tensors[f"{number}/{key}"] = value.contiguous()
            else:
                rest[key] = dataclasses.asdict(value) if isinstance(value, Checks) else value
        plain.append([name, rest])
    tensors[_PLAIN] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    return bytes(save(tensors))


def unpacked(data: bytes) -> dict[str, dict[str, Any]]:
    """What `packed` was given."""
    tensors = load(data)
    plain = json.loads(bytes(tensors.pop(_PLAIN).numpy()))
    tables = [dict(rest, checks=Checks(**rest["checks"])) for _, rest in plain]
    for place, tensor in tensors.items():
        number, _, key = place.partition("/")
        tables[int(number)][key] = tensor
    return {name: table for (name, _), table in zip(plain, tables, strict=True)}
