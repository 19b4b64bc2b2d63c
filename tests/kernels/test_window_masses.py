"""The kernel that compares two rows of logits against its specification in PyTorch's operators."""

# N positions, V vocabulary, R requests, W rows of the longest window

from __future__ import annotations

import pytest
import torch

from paged_caches import DEVICE
from sparroll.engines.vllm.windows.masses import Masses, masses

pytest.importorskip("triton", reason="triton runs on Linux only")

from sparroll.engines.vllm.windows import triton_masses


def both(
    vocabulary: int, dtype: torch.dtype, floor: float, spread: float = 2.0, count: int = 9
) -> tuple[Masses, Masses]:
    """Positions of three requests whose drafts lie in rows of five, some of them behind the last; other rows are NaN."""
    made = torch.Generator().manual_seed(vocabulary)
    request, place = torch.arange(count) % 3, torch.arange(count) // 3 * 2 + 1
    draft = torch.full((3, 5, vocabulary), torch.nan, dtype=dtype)
    rows = spread * torch.randn(count, vocabulary, generator=made)
    draft[request, place.clamp_max(4)] = rows.to(dtype)
    dense = (draft[request, place.clamp_max(4)].float() + torch.randn(count, vocabulary, generator=made)).to(dtype)
    dense[:, : vocabulary // 3 : 2] = -torch.inf
    draft[request, place.clamp_max(4), vocabulary // 4 : vocabulary // 2] = -torch.inf
    heat = torch.tensor([1.0, 0.7, 1.3])[request]
    ids = torch.randint(vocabulary, (count,), generator=made)
    p, q = (torch.softmax(each.float() / heat[:, None], -1) for each in (dense, draft[request, place.clamp_max(4)]))
    given = (each.to(DEVICE) for each in (dense, draft, request, place, heat, ids))
    return triton_masses.masses_of_logits(*given, floor), masses(p, q, ids, floor)


def assert_same(found: Masses, expected: Masses) -> None:
    for name, value in vars(expected).items():
        torch.testing.assert_close(vars(found)[name].cpu(), value, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("floor", [1e-3, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("vocabulary", [7, 100, 4096, 5001])
def test_the_kernel_is_its_specification(vocabulary: int, floor: float) -> None:
    assert_same(*both(vocabulary, torch.float32, floor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_two_bytes(dtype: torch.dtype) -> None:
    assert_same(*both(4097, dtype, 0.01))


def test_sharp_distributions_and_tiles_without_a_likely_token() -> None:
    assert_same(*both(9000, torch.float32, 0.01, spread=60.0))


def test_no_position_is_no_error() -> None:
    found, _ = both(64, torch.float32, 0.1, count=0)
    assert all(len(value) == 0 for value in vars(found).values())
