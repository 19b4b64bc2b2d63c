"""The kernels that draw tokens from logits against the draw over the whole vocabulary, in float64."""

# N rows, R requests, V vocabulary

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE

pytest.importorskip("triton", reason="triton runs on Linux only")

from sparroll.engines.vllm.windows import draws
from sparroll.engines.vllm.windows.triton_draws import draw_of_logits

HEAT_R = torch.tensor([1.0, 0.6, 1.4])


def rows(vocabulary: int, dtype: torch.dtype, spread: float = 2.0, count: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, of which some are -inf, whose row each is, and a uniform number for each, the smallest and largest among
    them."""
    made = torch.Generator().manual_seed(vocabulary)
    logits = (spread * torch.randn(count, vocabulary, generator=made)).to(dtype)
    logits[:, vocabulary // 4 : vocabulary // 2] = -torch.inf
    logits[:, -vocabulary // 5 :] = -torch.inf
    uniform = torch.rand(count, dtype=torch.float64, generator=made)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    return logits, torch.arange(count) % 3, uniform


def drawn(logits: Tensor, request: Tensor, uniform: Tensor, greedy: list[bool]) -> Tensor:
    given = (each.to(DEVICE) for each in (logits, request, HEAT_R, torch.tensor(greedy)))
    # Every second number is another row's, as in a step that takes a column of its draws.
    apart = torch.stack([uniform, torch.full_like(uniform, torch.nan)], 1).to(DEVICE)[:, 0]
    return draw_of_logits(*given, apart).cpu()


def assert_drawn(ids: Tensor, logits: Tensor, request: Tensor, uniform: Tensor, rounding: float = 1e-5) -> None:
    """Each token's interval of the cumulative probabilities holds the uniform number, up to `rounding`."""
    probability = torch.softmax(logits.double() / HEAT_R.double()[request][:, None], -1)
    own = probability.gather(-1, ids[:, None])[:, 0]
    end = probability.cumsum(-1).gather(-1, ids[:, None])[:, 0]
    assert (own > 0).all(), "a token without probability was drawn"
    assert (uniform < end + rounding).all() and (uniform >= end - own - rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [5, 64, 2048, 2049, 9001])
def test_a_token_is_drawn_where_the_uniform_number_falls(vocabulary: int, dtype: torch.dtype) -> None:
    logits, request, uniform = rows(vocabulary, dtype)
    ids = drawn(logits, request, uniform, [False] * 3)
    assert_drawn(ids, logits, request, uniform)
    assert ids[0] == 0 and logits[1, ids[1] + 1 :].isneginf().all(), "the ends of the uniform numbers"


def test_sharp_distributions_and_tiles_without_any_mass() -> None:
    logits, request, uniform = rows(9001, torch.float32, spread=60.0)
    logits[:, 2048:4096] = -torch.inf
    assert_drawn(drawn(logits, request, uniform, [False] * 3), logits, request, uniform)


def test_greedy_requests_take_their_most_likely_token() -> None:
    logits, request, uniform = rows(5000, torch.float32)
    # Two equal ones in different tiles: the first is taken.
    logits[1::3, 700] = logits[1::3, 4000 - 7] = 50.0
    ids = drawn(logits, request, uniform, [False, True, False])
    greedy = request == 1
    assert torch.equal(ids[greedy], torch.full_like(ids[greedy], 700))
    assert_drawn(ids[~greedy], logits[~greedy], request[~greedy], uniform[~greedy])


def test_shares_of_many_draws_are_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, 0.5]]).expand(4000, -1)
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    ids = drawn(logits, torch.zeros(4000, dtype=torch.int64), uniform, [False] * 3)
    expected = torch.softmax(logits[0].double(), -1)
    torch.testing.assert_close(torch.bincount(ids, minlength=5) / 4000, expected.float(), atol=3e-4, rtol=0)


def test_rows_that_lie_apart() -> None:
    """A vocabulary that was padded, and what lies between is poison."""
    logits, request, uniform = rows(5001, torch.float32)
    padded = torch.full((len(logits), 5056), torch.nan)
    padded[:, :5001] = logits
    found = draw_of_logits(
        padded.to(DEVICE)[:, :5001], request.to(DEVICE), HEAT_R.to(DEVICE), torch.zeros(3, dtype=torch.bool).to(DEVICE),
        uniform.to(DEVICE),
    )  # fmt: skip
    assert torch.equal(found.cpu(), drawn(logits, request, uniform, [False] * 3))


@pytest.mark.parametrize("temperatures", [(1.0, 0.7, 1.3), (0.0, 0.8, 0.0), (0.0, 0.0, 0.0)])
def test_a_step_with_the_kernels_draws_what_it_draws_without(
    temperatures: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, request, uniform = rows(5000, torch.float32)
    tempers = draws.Tempers.of(temperatures, [1.0] * 3, lambda values: torch.from_numpy(values).to(DEVICE))
    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr(draws, "has_kernel", lambda *_, there=has_kernel: there)
        given = logits.to(DEVICE), uniform.to(DEVICE), request.numpy(), request.to(DEVICE)
        found.append(tempers.draw_of_logits(*given).cpu())
    # Rounding may move a draw that falls between two tokens.
    assert (found[0] == found[1]).sum() >= len(logits) - 1


def test_no_row_is_no_error() -> None:
    logits, request, uniform = rows(64, torch.float32, count=2)
    assert drawn(logits[:0], request[:0], uniform[:0], [False] * 3).shape == (0,)
