"""The check of kernels that users run on their own GPU: silent where they are right, and it says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton runs on Linux only")

from paged_caches import DEVICE
from sparroll.attention import kernel_check
from sparroll.attention.decode import paged, triton_attend, workspace
from sparroll.attention.decode.choice import triton_top_k
from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout
from sparroll.attention.decode.scores import triton_score
from sparroll.attention.decode.workspace import MANY_PAIRS, by_sample, has_peaks
from sparroll.attention.kernel_check import USUAL, Heads, differences, of_model, usual_contexts
from sparroll.attention.selectors import PageMean, QuantizedMean, Remainder, Selector
from sparroll.errors import UserError

FINE = QuantizedMean(4, 16, 32, bits=4)
SUMMED = replace(QuantizedMean(4, 16, 64, bits=4), remainder=Remainder(64, "fp8"))
SMALL: dict[str, Any] = {"contexts": (0, 1, 37, 130), "dtype": torch.float32, "device": DEVICE}


@pytest.mark.parametrize(
    ("selector", "block_tokens"),
    [*((each, 16) for each in USUAL), (QuantizedMean(8, 16, 32, bits=2), 32), (FINE, 64), (SUMMED, 64)],
)
def test_kernels_that_are_right(selector: Selector, block_tokens: int) -> None:
    assert differences(selector, Heads(2, 2, 32), block_tokens=block_tokens, **SMALL) == []


def test_heads_that_leave_bits_of_a_row_over() -> None:
    assert differences(QuantizedMean(2, 16, 32, bits=2), Heads(2, 2, 40), **SMALL) == []


@pytest.mark.parametrize("selector", USUAL, ids=str)
def test_long_requests_are_chosen_from_as_in_engines(selector: Selector) -> None:
    """Under peaks where there are any, in padded rows whose length is no multiple of 4."""
    units = -(-max(usual_contexts(selector)) // selector.unit_tokens)
    assert units % 4
    assert not has_peaks(selector) or ChoiceLayout.default(units).peak_lanes(units)


def test_a_gpus_own_types_and_sizes() -> None:
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    for selector in (*USUAL, QuantizedMean(8, 16, 32, bits=2)):
        assert differences(selector, block_tokens=32) == []


@pytest.fixture
def looked_up_anew() -> Iterator[None]:
    """Which function an operation is."""
    paged._load.cache_clear()
    yield
    paged._load.cache_clear()


@pytest.mark.usefixtures("looked_up_anew")
def test_a_large_batch_is_checked_where_it_chooses_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(by_sample(max(usual_contexts(each)) // each.unit_tokens, MANY_PAIRS + 1) for each in USUAL)
    for module in (workspace, kernel_check, triton_top_k):
        monkeypatch.setattr(module, "MANY_PAIRS", 20)
    monkeypatch.setattr(workspace, "SAMPLED_UNITS", range(1, 100))
    assert differences(FINE, Heads(2, 2, 32), **SMALL) == []
    chosen = triton_top_k.choose_units

    def wrong(scores_RHU: Tensor, *given: Any, **named: Any) -> None:
        chosen(scores_RHU, *given, **named)
        if by_sample(scores_RHU.shape[2], scores_RHU.shape[0] * scores_RHU.shape[1]):
            given[3][0, 0, 0] = 3

    monkeypatch.setattr(triton_top_k, "choose_units", wrong)
    paged._load.cache_clear()
    found = differences(FINE, Heads(2, 2, 32), **SMALL)
    assert len(found) == 1 and found[0].endswith("of the chosen units by a sample")


@pytest.mark.usefixtures("looked_up_anew")
@pytest.mark.parametrize(
    ("module", "kernel", "place", "told"),
    [
        (triton_score, "score_codes", 5, ["1 of 264 of the scores"]),
        (triton_score, "score_codes", 7, ["1 of 40 of their peaks"]),
        (
            triton_top_k,
            "choose_units",
            4,
            ["of the chosen units", "in rows without padding", "of the chosen units under peaks"],
        ),
        (triton_attend, "paged_decode", 9, ["1 of 512 of the attention's outputs"]),
    ],
)
def test_a_kernel_that_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str, place: int, told: list[str]
) -> None:
    right = getattr(module, kernel)

    def wrong(*given: Any, **named: Any) -> None:
        right(*given, **named)
        written = given[place]
        written[(-1 if written.is_floating_point() else 0,) * written.ndim] = 3

    monkeypatch.setattr(module, kernel, wrong)
    found = differences(FINE, Heads(2, 2, 32), **SMALL)
    assert len(found) == len(told) and all(ours.endswith(its) for ours, its in zip(found, told, strict=True)), found


@pytest.mark.usefixtures("looked_up_anew")
def test_tokens_that_are_not_stored_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_score.score_codes
    monkeypatch.setattr(triton_score, "score_codes", lambda *given, new_tokens, **named: right(*given, **named))
    found = differences(FINE, Heads(2, 2, 32), **SMALL)
    newest = 3 * 2 * 32
    assert (
        len(found) == 2 and found[0].startswith(f"{newest} of ") and found[0].endswith(" of the keys that are stored")
    )


def test_what_has_no_kernel_is_refused_and_unknown_heads_are_the_usual_ones() -> None:
    with pytest.raises(UserError, match="whole units of 3 tokens"):
        differences(PageMean(3, 3, 3), Heads(2, 2, 32), **SMALL)
    with pytest.raises(UserError, match="whole groups of 64 tokens"):
        differences(SUMMED, Heads(2, 2, 32), block_tokens=16, **SMALL)
    with pytest.raises(UserError, match="up to 16 query heads per kv head"):
        differences(FINE, Heads(2, 17, 32), **SMALL)
    for heads in ((2, 8, 32), (14, 4, 32), (-8, 2, 32), (8, 2, 0)):
        with pytest.raises(UserError, match="cannot share|at least one channel"):
            of_model(*heads)
    assert of_model(40, 8, 64) == Heads(group=5, dim=64)
    assert of_model(None, 8, None) == Heads()
