"""Quantiles from counts against quantiles of the values, to a cell; the ends exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparroll.mismatch import histogram
from sparroll.mismatch.histogram import CELLS, cells, quantile, share_nearly_one

CELL = 1 / 2000


def counted(values: list[float]) -> torch.Tensor:
    return torch.bincount(cells(torch.tensor(values, dtype=torch.float64)), minlength=CELLS)


@given(
    st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.999, 0.5]), min_size=1, max_size=60),
    st.floats(0.001, 0.999) | st.sampled_from([0.01, 0.05, 0.1, 0.3]),
)
@settings(deadline=None, max_examples=200)
def test_a_quantile_is_off_by_less_than_a_cell(values: list[float], level: float) -> None:
    counts = counted(values)
    # Rounding of level * count may move a rank by one; the value must lie between those of the two ranks.
    least = np.quantile(values, max(level - 1e-8, 0), method="inverted_cdf")
    most = np.quantile(values, min(level + 1e-8, 1), method="inverted_cdf")
    assert least - CELL <= float(quantile(counts, level)) <= most + CELL


def test_zero_and_one_come_out_exactly() -> None:
    counts = counted([0.0] * 10 + [0.4] * 10 + [1.0] * 80)
    assert [float(quantile(counts, level)) for level in (0.05, 0.1, 0.2001, 0.5, 0.999)] == [0, 0, 1, 1, 1]


def test_values_next_to_zero_and_one_do_not_come_out_as_zero_and_one() -> None:
    assert 0 < float(quantile(counted([1e-12]), 0.5)) < CELL
    assert 1 - CELL < float(quantile(counted([1 - 1e-12]), 0.5)) < 1


def test_ranks_do_not_slip_by_rounding() -> None:
    """0.1 * 30 is 3.0000000000000004 in floating point; the third of thirty values is the 10th percentile."""
    values = [(place + 0.5) / 30 for place in range(30)]
    assert float(quantile(counted(values), 0.1)) == pytest.approx(values[2], abs=CELL)


def test_a_histogram_of_nothing_has_no_quantile() -> None:
    assert quantile(torch.zeros(3, CELLS, dtype=torch.int64), 0.05).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_share_from_999_on_counts_999_itself(dtype: torch.dtype) -> None:
    values = torch.tensor([0.99899, 0.999, 0.9995, 1.0], dtype=dtype)
    assert float(share_nearly_one(torch.bincount(cells(values), minlength=CELLS))) == 0.75


def test_rows_are_independent() -> None:
    rows = torch.stack([counted([0.2, 0.3]), counted([0.8, 1.0]), torch.zeros(CELLS, dtype=torch.int64)])
    whole = quantile(rows, 0.5)
    assert torch.equal(whole[:2], torch.stack([quantile(row, 0.5) for row in rows[:2]]))
    assert whole[2].isnan()


def test_the_mean_of_the_lowest_is_that_of_the_sorted_values() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()
    counts = torch.bincount(histogram.cells(values), minlength=histogram.CELLS)
    for share, count in ((0.01, 10), (0.05, 50), (1.0, 1000)):
        expected = float(values.sort().values[:count].mean())
        assert histogram.mean_of_lowest(counts, share) == pytest.approx(expected, abs=2.5e-4)


def test_the_mean_of_the_lowest_takes_a_part_of_a_cell_and_exact_ends() -> None:
    counts = torch.zeros(histogram.CELLS, dtype=torch.int64)
    counts[0], counts[-1] = 2, 98
    assert histogram.mean_of_lowest(counts, 0.01) == 0.0
    assert histogram.mean_of_lowest(counts, 0.05) == pytest.approx(0.6)


def test_skew_is_scipys_and_none_where_nothing_varies() -> None:
    from scipy import stats

    values = torch.rand(2000, generator=torch.Generator().manual_seed(1)).double() ** 0.1
    counts = torch.bincount(histogram.cells(values), minlength=histogram.CELLS)
    assert histogram.skew(counts) == pytest.approx(stats.skew(values.numpy()), abs=0.01)
    alike = torch.bincount(histogram.cells(torch.full((9,), 0.3)), minlength=histogram.CELLS)
    assert histogram.skew(alike) is None
