"""Of equal scores the lowest units are read: everything that chooses units against a sort in plain Python. Kernels are
compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE
from sparroll.attention.decode import api, paged
from sparroll.attention.masked import unit_bitmap, unit_choice
from sparroll.attention.selectors import PageMean

pytest.importorskip("triton", reason="triton runs on Linux only")

IMPLEMENTATIONS = ["reference", "triton"]
UNITS = [1, 2, 31, 33, 257]
"""The last is more than the kernel's smallest tile, and the others fall into its parts."""
NAN, INF = math.nan, math.inf


def chosen_by_hand(scores: list[float], wanted: int) -> list[int]:
    """The rule: the highest scores, NaN above +inf, of equal scores the lowest units. In ascending order."""
    ranked = sorted(range(len(scores)), key=lambda unit: (not math.isnan(scores[unit]), -_number(scores[unit]), unit))
    return sorted(ranked[:wanted])


def _number(score: float) -> float:
    return 0.0 if math.isnan(score) else score


def drawn(units: int, seed: int, values: list[float]) -> list[float]:
    places = torch.randint(len(values), (units,), generator=torch.Generator().manual_seed(seed))
    return [values[place] for place in places.tolist()]


SCORES: dict[str, Any] = {
    "all equal": lambda units: [0.25] * units,
    "all of them zeros of both signs": lambda units: [0.0 if unit % 3 else -0.0 for unit in range(units)],
    "blocks of equal ones, rising": lambda units: [float(unit // 5) for unit in range(units)],
    "blocks of equal ones, falling": lambda units: [-float(unit // 7) for unit in range(units)],
    "equal at the threshold": lambda units: [2.0 if unit % 4 == 3 else 1.0 for unit in range(units)],
    "one above, many equal": lambda units: [*[-1.5] * (units - 1), 3.0],
    "three values": lambda units: drawn(units, units, [-1.0, 0.0, 1.0]),
    "neighbouring numbers": lambda units: drawn(units, units, [1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, -1e-45, 1e-45]),
    "all of them -inf": lambda units: [-INF] * units,
    "-inf and its neighbours": lambda units: drawn(units, units, [-INF, -3.4028234663852886e38, -1.0]),
    "+inf among them": lambda units: drawn(units, units, [INF, 3.4028234663852886e38, -INF]),
    "NaN among them": lambda units: drawn(units, units, [NAN, -NAN, INF, 1.0, -INF]),
    "all of them NaN": lambda units: drawn(units, units, [NAN, -NAN]),
}


def floats(scores: list[Any]) -> Tensor:
    return torch.tensor(scores, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("kind", SCORES)
def test_paged_choice(kind: str, units: int, impl: str) -> None:
    selector = PageMean(page_tokens=4, first_tokens=0, recent_tokens=4)
    scores = SCORES[kind](units)
    # Each request wants another number of units of the same scores; what lies past its context must not be chosen.
    wanted = sorted({count for count in (0, 1, units // 3, units - 1) if count < units})
    contexts = torch.full((len(wanted),), 4 * units - 1, dtype=torch.int32, device=DEVICE)
    budgets = torch.tensor([4 * count for count in wanted], dtype=torch.int32, device=DEVICE)
    given = floats([[[*scores, NAN, INF]]] * len(wanted))
    ids = torch.full((len(wanted), 1, units), 1 << 30, dtype=torch.int32, device=DEVICE)
    paged.choose_units(given, contexts, budgets, selector, ids, impl)
    for row, count in enumerate(wanted):
        expected = chosen_by_hand(scores, count) + [-1] * (units - count)
        assert ids[row, 0].tolist() == expected, f"{count} of {units}"


@dataclass(frozen=True)
class Given(PageMean):
    """Index rows are the scores themselves."""

    kind = "given"

    def index_width(self, head_dim: int) -> int:
        return 1

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        return index[..., 0].float()[:, None].expand(-1, query.shape[1], -1, -1)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("kind", SCORES)
def test_choice_of_the_reference_and_so_of_the_hf_engine(kind: str, units: int) -> None:
    selector = Given(page_tokens=4, first_tokens=4, recent_tokens=8)
    scores = SCORES[kind](units)
    forced = [INF if unit < 1 or unit >= units - 2 else score for unit, score in enumerate(scores)]
    wanted = sorted({min(count, units) for count in (4, 5, units // 2, units + 3) if count >= 4})
    context = torch.full((1, len(wanted)), 4 * units - 3, device=DEVICE)
    budget = torch.tensor([[4 * count for count in wanted]], device=DEVICE)
    query = torch.zeros(1, len(wanted), 2, 1, 8, device=DEVICE)
    index = floats([[[*scores, NAN, INF]] * 2])[..., None]
    ids = api.select(query, index, context, budget, selector, 1.0)
    for position, count in enumerate(wanted):
        for head in range(2):
            read = sorted(unit for unit in ids[0, position, head].tolist() if unit >= 0)
            assert read == chosen_by_hand(forced, count), f"{count} of {units}"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("values", [[1.0], [0.0, 1.0], [-1.0, 0.0, 2.0], [1.0, NAN]])
@pytest.mark.parametrize("tokens", [31, 75])
def test_choice_of_the_training_pass(tokens: int, values: list[float], impl: str) -> None:
    unit, heads = 4, 2
    selector = PageMean(page_tokens=unit, first_tokens=unit, recent_tokens=2 * unit)
    # A query of 1 and keys that are alike within a unit: the score of a unit is its key.
    complete = tokens // unit
    scores = [drawn(complete + 1, tokens + head, values) for head in range(heads)]
    keys = floats(scores).repeat_interleave(unit, dim=1)[None, :, :tokens, None]
    query = torch.ones(1, heads, tokens, 1, device=DEVICE)
    context = torch.arange(1, tokens + 1, device=DEVICE)
    budgets = (selector.least_budget_tokens + context // 5) // unit * unit
    dense = torch.zeros(1, tokens, dtype=torch.bool, device=DEVICE)
    words = unit_choice.chosen_words(query, keys, dense, budgets, selector, 1.0, impl)
    read = unit_bitmap.unpack(words, 0, tokens)
    for position in range(tokens):
        units = position // unit + 1
        for head in range(heads):
            seen = [INF if at < 1 or at >= units - 2 else scores[head][at] for at in range(units)]
            expected = chosen_by_hand(seen, min(int(budgets[position]) // unit, units))
            assert read[0, head, position].nonzero()[:, 0].tolist() == expected, (position, head)
