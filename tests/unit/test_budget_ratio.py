"""recipes/code-lm: intervals of what cells measure, ratios of budgets at the same statistic, and published schedules that
are scaled by them."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparroll.cli import main
from sparroll.errors import UserError
from sparroll.mismatch import histogram
from sparroll.plan.speedup import plan
from sparroll.report.training_runs import _what_they_read as what_they_read
from sparroll.schedule import Schedule

RECIPE = Path(__file__).parents[2] / "recipes" / "code-lm"
sys.path.insert(0, str(RECIPE))

import budget_ratio  # noqa: E402
import cell_files  # noqa: E402
import scale_presets  # noqa: E402
from cell_files import SUMS, Measured  # noqa: E402
from cells import PUBLISHED, Cell, Rule  # noqa: E402

FINE = Rule("quantized_mean", 4, 4)


def curve(budget: int, sequences: int = 8) -> Measured:
    """A made-up rule: 1 - q05 and the KL fall as 1 / budget, a little differently in each sequence."""
    counts, sums = torch.zeros(sequences, 1, histogram.CELLS).long(), torch.zeros(sequences, 1, len(SUMS)).double()
    for sequence in range(sequences):
        values = torch.full((1000,), 1 - 20 * (1 + 0.1 * sequence) / budget)
        counts[sequence, 0] = torch.bincount(histogram.cells(values), minlength=histogram.CELLS)
        sums[sequence, 0, :3] = torch.tensor([1000, values.sum().item(), 1000 * (10 + sequence) / budget])
    return Measured(counts, sums, 0.0)


def test_a_replicate_without_a_sequence_that_is_long_enough_does_not_count() -> None:
    assert cell_files.interval(np.array([1.0, np.nan, 1.0, 1.0]), 8) == [1.0, 1.0]


def test_below_eight_sequences_there_is_no_interval() -> None:
    values = np.array([1.0, 0.5, 2.0])
    assert cell_files.interval(values, 7) == [None, None] and None not in cell_files.interval(values, 8)
    # Eight sequences, of which four reach the second bin.
    few = curve(128, 8)
    counts, sums = (torch.cat([each, each], 1) for each in (few.counts_NBC, few.sums_NBK))
    counts[4:, 1], sums[4:, 1] = 0, 0
    rows = Measured(counts, sums, 0.0).rows((1024, 2048, 4096))
    assert [None in row["q05_interval"] for row in rows] == [False, True]
    assert rows[1]["kl_sparse_to_dense_interval"] == [None, None]


def test_ends_move_away_from_the_value_and_stay_where_it_can_be() -> None:
    # Student's quantile for 7 degrees of freedom is 2.365.
    factor = 2.3646 / 1.9600 * math.sqrt(8 / 7)
    assert cell_files.widening(8) == pytest.approx(factor, abs=1e-4)
    values = np.array([0.5, *np.linspace(0.3, 0.9, 1001)])
    low, high = cell_files.interval(values, 8)
    assert (low, high) == pytest.approx((0.5 - 0.185 * factor, 0.5 + 0.385 * factor), abs=1e-4)
    assert cell_files.interval(values, 8, 0.3, 0.9) == [0.3, 0.9]
    # An end on the other side of the value moves outward too.
    assert cell_files.interval(values + np.array([-0.3, *[0.0] * 1001]), 8)[0] < 0.315


@pytest.mark.parametrize("sequences", [8, 20])
def test_an_interval_of_few_sequences_holds_the_mean_about_as_often_as_it_says(sequences: int) -> None:
    weights_WN = cell_files.resamplings(sequences).numpy()
    drawn = np.random.default_rng(0).normal(size=(2000, sequences))
    ends = np.array([cell_files.interval(means, sequences) for means in drawn @ weights_WN.T / sequences], dtype=float)
    assert 0.93 <= ((ends[:, 0] <= 0) & (ends[:, 1] >= 0)).mean() <= 0.97


def test_a_rule_that_needs_a_quarter_has_a_ratio_of_four() -> None:
    measured = {Cell(PUBLISHED, budget): curve(budget) for budget in (128, 256, 512, 1024, 2048)}
    measured |= {Cell(FINE, budget): curve(4 * budget) for budget in (64, 128, 256, 512)}
    found = budget_ratio.ratios(measured, (2048, 4096))
    assert {(row.statistic, row.published_budget) for row in found} == {
        (name, budget) for name in budget_ratio.STATISTICS for budget in (128, 256, 512)
    }
    for row in found:
        # At 128 tokens the rule's smallest budget of 64 is already better, so 2 is a bound.
        assert row.bound == ("at least" if row.published_budget == 128 else None)
        # A percentile is known to a cell.
        expected, rel = 2 if row.bound else 4, 0.03 if row.statistic == "q05" else 1e-3
        assert (row.ratio, row.low, row.high) == pytest.approx((expected,) * 3, rel=rel)
    least = budget_ratio.smallest(found, FINE.name)
    assert least is not None and least.ratio == pytest.approx(4, rel=0.03)
    assert budget_ratio.smallest([row for row in found if row.bound], FINE.name) is None
    few = {cell: Measured(each.counts_NBC[:4], each.sums_NBK[:4], 0.0) for cell, each in measured.items()}
    row = budget_ratio.smallest(budget_ratio.ratios(few, (2048, 4096)), FINE.name)
    assert row is not None and (row.low, row.high) == (None, None) and row.ratio == pytest.approx(4, rel=0.03)
    assert budget_ratio.in_words(row) == f"{row.ratio:.2f}" and " to " in budget_ratio.in_words(least)


def test_a_rule_that_never_gets_there_has_a_bound_from_above() -> None:
    measured = {Cell(PUBLISHED, budget): curve(budget) for budget in (256, 512)}
    measured |= {Cell(FINE, budget): curve(budget // 2) for budget in (256, 512)}
    rows = {row.published_budget: row for row in budget_ratio.ratios(measured, (2048, 4096))}
    assert rows[512].bound == "at most" and rows[512].ratio == 1 and rows[256].ratio == pytest.approx(0.5, rel=0.03)
    with pytest.raises(UserError, match="nothing is gained"):
        scale_presets.scaled(Schedule.load("qwen3-1.7b-0.86"), FINE.selector(), (0, 1), rows[256].ratio, "made up")


def ratio_row(
    begin: int, published: int, ratio: float, statistic: str = "q05", bound: str | None = None
) -> budget_ratio.Ratio:
    return budget_ratio.Ratio(FINE.name, statistic, begin, published, ratio, ratio, ratio, bound)


SHORT = [ratio_row(1024, 768, 1.5), ratio_row(1024, 96, 2.5)]
LONG = [*SHORT, ratio_row(8192, 768, 6.0), ratio_row(8192, 1536, 4.0), ratio_row(8192, 6144, 2.0)]
OTHER = [ratio_row(8192, 1536, 3.0, "kl_sparse_to_dense")]
EDGES = (1024, 2048, 8192, 16_384)


def test_a_ratio_is_that_of_the_share_which_is_read_and_the_smallest_of_the_models() -> None:
    one = budget_ratio.SmallestRatio.of([(LONG, EDGES)], FINE.name)
    # Rows of a bin stand for its mean context: 12,288, or 1,536. Of other shares, linear in their logarithm.
    assert one.at(12_288, 768) == one.at(8192, 512) == one.at(16_384, 1024) == pytest.approx(6.0)
    assert one.at(12_288, 3072) == pytest.approx(3.0)
    # The bin of the longest contexts that are not longer, or the first one.
    found = [one.at(8191, 4096), one.at(1536, 768), one.at(512, 256)]
    assert found == pytest.approx([1.5] * 3, abs=1e-3)
    # All of a context is read by both, and less than was measured is taken for the least that was.
    assert one.at(8192, 8192) == one.at(8192, 9000) == 1.0
    assert one.at(12_288, 96) == pytest.approx(6.0)
    two = budget_ratio.SmallestRatio.of([(LONG, EDGES), (OTHER, EDGES)], FINE.name)
    # 6,144 and 1,536 of 12,288 tokens are the most that was measured.
    assert (one.measured_up_to, two.measured_up_to) == ((0.5,), (0.5, 0.125))
    assert two.at(12_288, 768) == two.at(12_288, 1536) == pytest.approx(3.0)


def test_a_bound_from_below_counts_only_where_a_bin_has_nothing_else_and_one_from_above_never() -> None:
    bound = ratio_row(8192, 1536, 1.1, bound="at least")
    assert budget_ratio.SmallestRatio.of([([*LONG, bound], EDGES)], FINE.name).at(12_288, 1536) == pytest.approx(4.0)
    assert budget_ratio.SmallestRatio.of([([bound], EDGES)], FINE.name).at(12_288, 1536) == pytest.approx(1.1)
    worse = ratio_row(8192, 3072, 0.8, bound="at most")
    with pytest.raises(UserError, match="still worse than 3,072 published tokens from 8,192 on"):
        budget_ratio.SmallestRatio.of([([*LONG, worse], EDGES)], FINE.name)


def test_budgets_are_divided_by_the_ratio_at_their_steps_mean_context_and_never_fall() -> None:
    preset = Schedule.load("qwen3-1.7b-0.86")
    found = budget_ratio.SmallestRatio.of([(LONG, EDGES), (OTHER, EDGES)], FINE.name)
    made = scale_presets.scaled(preset, FINE.selector(), (0,), found, "made up")
    begins = [step.from_context_tokens for step in preset.steps]
    budgets = [int(made.kv_budget_tokens(begin)) for begin in begins]
    assert budgets == sorted(budgets)
    reached = int(made.kv_budget_tokens(1999))
    for begin, end, budget in zip(begins[1:], [*begins[2:], 32_768], budgets[1:], strict=True):
        published = preset.kv_budget_tokens(begin)
        units = math.ceil(published / found.at((begin + end) // 2, published) / FINE.unit_tokens)
        reached = max(reached, units * FINE.unit_tokens)
        assert budget == reached and made.kv_budget_tokens(end - 1) == budget
    # 4,096 tokens are .161 of 25,384. The other model has 3 at .125 and 1 at 1, so 3 - 2 ln(.161 / .125) / ln(8) = 2.76.
    assert budgets[-1] == 1488
    assert made.made_by is not None and made.made_by["budget_ratio"] == pytest.approx(4096 / budgets[-1], abs=1e-4)
    nothing = budget_ratio.SmallestRatio.of([([ratio_row(8192, 1024, 0.9)], EDGES)], FINE.name)
    with pytest.raises(UserError, match="nothing is gained"):
        scale_presets.scaled(preset, FINE.selector(), (0,), nothing, "made up")


def test_a_step_of_more_than_an_octave_is_cut_and_contexts_within_its_budget_do_not_count() -> None:
    assert scale_presets._octaves(18_000, 32_768, 4096) == [(18_000, 25_384)]
    assert scale_presets._octaves(10_000, 30_000, 8192) == [(10_000, 12_500), (15_000, 22_500)]
    assert scale_presets._octaves(0, 4000, 512) == [(0, 756), (1000, 1500), (2000, 3000)]
    # The last step may begin behind the longest responses.
    assert scale_presets._octaves(36_000, 32_768, 8192) == [(36_000, 36_000)]


def test_presets_are_divided_by_the_smallest_ratio_of_all_models_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [budget_ratio.Ratio(FINE.name, "q05", 2048, 512, ratio, 2.0, 5.0).__dict__ for ratio in (4.0, 3.0)]
    results = {"a": {"ratios": rows[:1]}, "b": {"ratios": rows}}
    found = scale_presets.smallest_of_models(results, FINE.name)
    assert {name: row.ratio for name, row in found.items()} == {"a": 4.0, "b": 3.0}
    with pytest.raises(UserError, match="no ratio of 'quest-16'"):
        scale_presets.smallest_of_models(results, "quest-16")
    preset = Schedule.load("qwen3-1.7b-0.86")
    made = scale_presets.scaled(preset, FINE.selector(), (0,), 3.0, "made up")
    assert made.kv_budget_tokens(17_000) == 1196 == -(-3584 // 3 // 4) * 4 and made.dense_layers == (0,)
    assert scale_presets.scaled(preset, FINE.selector(), (0, 1), 100, "made up").kv_budget_tokens(0) == 52
    assert preset.caveat is None
    # Whatever shows the schedule says what it is.
    path, said = made.save(tmp_path / "scaled.toml"), "scaled, to be calibrated on the real model"
    assert Schedule.load(path).caveat == said
    assert main(["schedule", "show", str(path)]) == 0 and said in capsys.readouterr().out
    assert f"the schedule is {said}" in plan("qwen3-1.7b", Schedule.load(path)).assumptions
    assert what_they_read({}, Schedule.load(path)).endswith(f"({said})")


def test_a_scaled_schedule_says_up_to_which_shares_its_ratio_was_measured() -> None:
    """By the committed records of the ten models: 4 x 4 up to 4,096 tokens, and in the study's model up to 1,024 of 3,780;
    4 x 2 in four models of code up to 1,024 of 12,288."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    names = [f"code-lm-seed-{seed}-h200" for seed in (4, 5, 6, 7, 8, 10, 11, 12)]
    names += ["code-lm-study-low-bits-cpu", "code-lm-tiny-reasoner-low-bits-cpu"]
    paths = [folder / f"{name}.json" for name in names]
    for units, shares in (("4x4", "33% (9), 27% (1)"), ("4x2", "33% (5), 27% (1), 8% (4)")):
        of_rule = scale_presets.from_records(paths, f"quantized_mean-{units}-dense-none-first-two-4")
        made = scale_presets.scaled(Schedule.load("qwen3-1.7b-0.86"), *of_rule)
        assert made.made_by is not None
        told = f"models: 10, measured up to these shares of their longest contexts: {shares}"
        assert told in made.made_by["source"]


def test_a_wide_first_layer_reads_four_times_the_others_in_cells_and_in_scaled_presets() -> None:
    wide = dataclasses.replace(FINE, dense_layers=(0,), shape="first-4")
    cell = wide.schedule(256, 6)
    assert wide.name == f"{FINE.name}-dense-0-first-4" and cell.layer_groups == ((1,), (2, 3, 4, 5))
    assert [cell.of_layer(layer).kv_budget_tokens(9_000) for layer in (1, 2, 5)] == [1024, 256, 256]
    two = dataclasses.replace(FINE, dense_layers=(), shape="first-8-4").schedule(256, 6)
    assert (two.layer_groups, two.steps[0].kv_budget_tokens) == (((0,), (1,), (2, 3, 4, 5)), (2048, 1024, 256))
    halves = dataclasses.replace(FINE, shape="early").schedule(256, 6)
    assert (halves.layer_groups, halves.steps[0].kv_budget_tokens) == (((2, 3), (4, 5)), (384, 128))
    preset = Schedule.load("qwen3-1.7b-0.86")
    even, made = (scale_presets.scaled(preset, FINE.selector(), (0,), 3.0, "", shape) for shape in ("even", "first-4"))
    made.check_layers(28)
    for context in (100, 9_000, 30_000):
        budget = even.kv_budget_tokens(context)
        assert [made.of_layer(layer).kv_budget_tokens(context) for layer in (1, 2, 27)] == [4 * budget, budget, budget]
    late = scale_presets.scaled(preset, FINE.selector(), (0, 1), 100, "", "late")
    assert late.steps[0].kv_budget_tokens[0] == FINE.selector().least_budget_tokens
    with pytest.raises(UserError, match="'first-two-4' need more sparse layers than 2 of 2"):
        dataclasses.replace(FINE, dense_layers=(), shape="first-two-4").schedule(256, 2)
    with pytest.raises(UserError, match="does not say how many layers"):
        scale_presets.scaled(dataclasses.replace(preset, fingerprint=None), FINE.selector(), (0,), 3.0, "", "first-4")
