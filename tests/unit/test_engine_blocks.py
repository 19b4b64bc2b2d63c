"""How large the blocks of an engine's cache are."""

import pytest

from sparroll.attention.selectors import PageMean, QuantizedMean, Remainder
from sparroll.engines.vllm.capacity import block_tokens


@pytest.mark.parametrize(
    ("selector", "on_gpu", "on_cpu"),
    [
        (PageMean(), 64, 16),
        (PageMean(128, 128, 256), 128, 128),
        (QuantizedMean(4, 16, 32, 2), 64, 16),
        (QuantizedMean(4, 16, 64, 2, remainder=Remainder(32, "fp8")), 64, 32),
    ],
)
def test_blocks_hold_whole_units_and_groups(selector: PageMean | QuantizedMean, on_gpu: int, on_cpu: int) -> None:
    assert (block_tokens(selector), block_tokens(selector, on_cpu=True)) == (on_gpu, on_cpu)
