"""Names of bins, columns that align, and plain data that JSON takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparroll.mismatch import TailRow, TailStatistics, TailTable, bin_name, tail


@pytest.mark.parametrize(
    ("start", "stop", "name"),
    [
        (16_000, 18_000, "16k-18k"),
        (0, 2000, "0-2k"),
        (0, 250, "0-250"),
        (250, 500, "250-500"),
        (750, 1000, "750-1000"),
        (1000, 1250, "1000-1250"),
        (1024, 2048, "1024-2048"),
        (998_000, 1_000_000, "998k-1000k"),
    ],
)
def test_bins_are_named_by_their_ends(start: int, stop: int, name: str) -> None:
    assert bin_name(start, stop) == name


def row(start: int, stop: int, tokens: int, value: float) -> TailRow:
    return TailRow(start, stop, tokens, 31, 0.97712, 0.4, value, 0.93, value, value - 0.01, value + 0.01, 0.731)


def table(quantile: float = 0.05) -> TailTable:
    rows = [row(0, 2000, 1_234_567, 0.8996), row(16_000, 18_000, 81, 0.61)]
    return TailTable(rows, row(0, 18_000, 1_234_648, 0.88), quantile, "top_k_lower", -0.1234)


def test_the_text_is_aligned_and_names_its_estimator() -> None:
    lines = str(table()).splitlines()
    assert lines == [
        "acceptance (top_k_lower) by context length in tokens; interval of q05; correlation with length -0.123",
        "context     tokens  rollouts   mean    q01    q05    q10  95 % interval  >= .999",
        "--------------------------------------------------------------------------------",
        "0-2k     1,234,567        31  0.977  0.400  0.899  0.930  0.889 - 0.909   73.1 %",
        "16k-18k         81        31  0.977  0.400  0.610  0.930  0.600 - 0.620   73.1 %",
        "--------------------------------------------------------------------------------",
        "all      1,234,648        31  0.977  0.400  0.880  0.930  0.870 - 0.890   73.1 %",
    ]


def test_a_value_just_under_a_target_never_reads_as_the_target() -> None:
    assert "0.859" in str(TailTable([], row(0, 2000, 5, 0.85999), 0.05, "exact", None))


@pytest.mark.parametrize(("quantile", "columns"), [(0.02, "q01    q02    q05    q10"), (0.125, "q05    q10  q12.5")])
def test_another_quantile_gets_its_own_column_in_order(quantile: float, columns: str) -> None:
    assert columns in str(table(quantile))
    assert f"interval of q{100 * quantile:g}".replace("q2", "q02") in str(table(quantile))


def test_plain_data_survive_json() -> None:
    measured = tail(torch.rand(50), torch.arange(50), torch.arange(50) // 5, bin_tokens=25)
    data = json.loads(json.dumps(measured.table(), allow_nan=False))
    assert [TailRow.from_table(each) for each in data["rows"]] == measured.rows
    assert TailRow.from_table(data["overall"]) == measured.overall
    assert (data["estimator"], data["quantile"]) == ("exact", 0.05)


def test_rows_know_their_names() -> None:
    assert [each.name for each in table().rows] == ["0-2k", "16k-18k"]


def test_a_row_has_the_figures_that_a_schedule_file_keeps() -> None:
    row = TailRow(1000, 2000, 4000, 32, 0.98, 0.7, 0.86, 0.9, 0.8612345678, 0.85, 0.87, 0.7)
    assert row.summary() == {"value": 0.861235, "low": 0.85, "high": 0.87, "tokens": 4000, "rollouts": 32}
    assert (row.name, row.middle) == ("1k-2k", 1500)


def test_a_bin_counts_with_enough_tokens_from_eight_rollouts() -> None:
    eight = replace(row(0, 100, 200, 0.9), rollouts=8)
    assert eight.counts(200) and not eight.counts(201)
    seven = replace(eight, rollouts=7)
    assert not seven.counts(20) and seven.counts(20, least_rollouts=7)


def test_what_quantiles_do_not_show_stands_in_lines_of_its_own() -> None:
    statistics = TailStatistics()
    for rollout in range(10):
        off_T = torch.zeros(100)
        off_T[0] = 12.0
        statistics.add((-off_T).exp(), torch.arange(100), rollout, off_T)
    worst, impossible = statistics.table("exact").beside()
    assert worst == "mean of the worst 1 % 0.000, of the worst 5 % 0.800; skew -9.85"
    assert "10 nats 0.01 (0.0042 - 0.02)" in impossible and "20 nats 0 (0 - 0.00" in impossible
    bare = TailStatistics()
    bare.add(torch.ones(10), torch.arange(10), 0)
    assert bare.table("exact").beside() == ["mean of the worst 1 % 1.000, of the worst 5 % 1.000"]
