"""What checks said arrives in another process as it was, tensors and numbers alike."""

from __future__ import annotations

import torch

from sparroll.engines.vllm.windows.packing import packed, unpacked
from sparroll.types import Checks


def test_what_is_packed_comes_back() -> None:
    said = {
        "a/b-0": {
            "dense_logp": torch.tensor([-0.5, -torch.inf]),
            "dense_ids": torch.tensor([[3, 4]]),
            "lists": None,
            "checks": Checks(2, 1, 126, 7, 1, 40),
            "read": 40,
        },
        "": {"dense_logp": torch.empty(0), "dense_ids": None, "checks": Checks(), "read": 0},
    }
    found = unpacked(packed(said))
    assert list(found) == list(said)
    for name, table in said.items():
        assert found[name].keys() == table.keys()
        for key, value in table.items():
            same = (
                torch.equal(found[name][key], value) if isinstance(value, torch.Tensor) else found[name][key] == value
            )
            assert same, key
    assert unpacked(packed({})) == {}
