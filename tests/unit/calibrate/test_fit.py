"""Fitting a schedule: on the published curves, and on small tables whose answer is known."""

import dataclasses

import pytest

from sparroll.attention.selectors import OracleToken, PageMean
from sparroll.calibrate.curve import Cell
from sparroll.calibrate.fit import fit_schedule
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step

from .published import FIGURE_4A

BIN = 2000


def cell(budget, number, value, margin=0.0, tokens=50_000, rollouts=100):
    return Cell(budget, number * BIN, (number + 1) * BIN, value, value - margin, value + margin, tokens, rollouts)


def table(rows, margin=0.0):
    """budget -> values per bin."""
    return [cell(budget, i, value, margin) for budget, values in rows.items() for i, value in enumerate(values)]


def fit(cells, target=0.86, **settings):
    defaults = {"selector": PageMean(), "dense_layers": (0, 1), "estimator": "top_k_lower", "top_k": 20}
    return fit_schedule(cells, target=target, **{**defaults, **settings})


def budgets(fitted):
    return [found.kv_budget_tokens for found in fitted.bins]


def test_the_published_curves_give_the_published_schedule():
    fitted = fit(table({16 * pages: values for pages, values in FIGURE_4A.items()}))
    published = Schedule.load("qwen3-1.7b-0.86")
    ratios = [b.kv_budget_tokens / published.kv_budget_tokens(b.from_context_tokens) for b in fitted.bins]
    assert len(ratios) == 10
    assert sum(ratios) / 10 == pytest.approx(1, abs=0.01)
    # 6k-8k stands out: there the published 96 pages reach .841 only.
    assert ratios[3] == pytest.approx(117 / 96)
    assert all(0.92 < ratio < 1.08 for number, ratio in enumerate(ratios) if number != 3)


def test_every_published_bin_meets_the_target_by_its_own_figures():
    fitted = fit(table({16 * pages: values for pages, values in FIGURE_4A.items()}))
    assert all(found.measured["low"] >= 0.86 for found in fitted.bins)
    assert all(found.kv_budget_tokens % 16 == 0 for found in fitted.bins)
    assert budgets(fitted) == sorted(budgets(fitted))


def test_a_measured_budget_that_just_meets_is_taken_as_it_is():
    fitted = fit(table({512: [0.80], 1024: [0.86], 1536: [0.90]}))
    assert budgets(fitted) == [1024]
    assert fitted.bins[0].measured == {"value": 0.86, "low": 0.86, "high": 0.86, "tokens": 50_000, "rollouts": 100}


def test_interpolation_is_in_log_budget_and_rounds_up_to_whole_units():
    fitted = fit(table({512: [0.80], 1024: [0.92]}), target=0.86)
    # Half way: 512 * sqrt(2) = 724.1, so 736 in pages of 16 and 725 in single tokens.
    assert budgets(fitted) == [736]
    measured = fitted.bins[0].measured
    assert measured["interpolated"] is True
    assert 0.86 <= measured["low"] < 0.865
    assert budgets(fit(table({512: [0.80], 1024: [0.92]}), selector=OracleToken(), target=0.86)) == [725]


def test_the_lower_bound_decides_not_the_value():
    rows = {512: [0.85], 1024: [0.87], 1536: [0.91]}
    assert budgets(fit(table(rows))) < budgets(fit(table(rows, margin=0.02)))
    fitted = fit(table(rows, margin=0.02))
    assert fitted.bins[0].measured["low"] >= 0.86
    assert fitted.bins[0].measured["value"] == pytest.approx(fitted.bins[0].measured["low"] + 0.02, abs=1e-6)


def test_the_smallest_measured_budget_is_not_undercut():
    assert budgets(fit(table({512: [0.95], 1024: [0.97]}))) == [512]


def test_budgets_never_fall_with_length():
    fitted = fit(table({512: [0.95, 0.80, 0.90], 1024: [0.96, 0.90, 0.93]}))
    assert budgets(fitted) == [512, *[budgets(fitted)[1]] * 2]
    assert budgets(fitted)[1] > 512
    assert fitted.bins[2].measured["interpolated"] is True
    assert 0.90 < fitted.bins[2].measured["value"] < 0.93


def test_noise_between_budgets_is_pooled():
    # .87 then .85: pooled to .86, which meets; .85 then .83: pooled to .84, which does not.
    fitted = fit(table({512: [0.70], 1024: [0.87], 1536: [0.85], 2048: [0.95]}), target=0.855)
    assert 512 < budgets(fitted)[0] <= 1024
    fitted = fit(table({512: [0.70], 1024: [0.85], 1536: [0.83], 2048: [0.95]}), target=0.855)
    assert 1536 < budgets(fitted)[0] < 2048


def test_a_budget_beyond_the_bin_is_dense_and_shows_the_ceiling():
    fitted = fit(table({512: [0.70], 1024: [0.80], 2048: [0.99]}), target=0.97, ceiling=[cell(0, 0, 0.97)])
    # 2048 tokens hold every context below 2000, so 2000 do, and the figure is the ceiling's.
    assert budgets(fitted) == [2000]
    assert fitted.bins[0].measured["dense"] is True
    assert fitted.bins[0].measured["value"] == 0.97
    assert fitted.bins[0].dense_ceiling["value"] == 0.97


def test_a_bin_without_data_takes_the_next_measured_one_and_says_so():
    cells = [c for c in table({512: [0.90, 0.9, 0.70], 1024: [0.95, 0.95, 0.92]}) if c.from_context_tokens != 2000]
    cells += [cell(512, 1, 0.99, rollouts=3), cell(1024, 1, 0.99, rollouts=3)]
    fitted = fit(cells)
    assert budgets(fitted)[1] == budgets(fitted)[2] > 512
    assert fitted.bins[1].measured is None
    assert "2k-4k: fewer than 400 tokens or 8 rollouts" in fitted.notes[0]
    assert f"takes {budgets(fitted)[2]} tokens, those of 4k-6k" in fitted.notes[0]
    assert fitted.schedule.kv_budget_tokens(3000) == budgets(fitted)[2]


def test_a_gap_in_the_table_counts_as_without_data():
    cells = [c for c in table({512: [0.90, 0.9, 0.70], 1024: [0.95, 0.95, 0.92]}) if c.from_context_tokens != 2000]
    fitted = fit(cells)
    assert fitted.schedule.kv_budget_tokens(3000) == fitted.schedule.kv_budget_tokens(5000)


def test_beyond_the_longest_measured_bin_the_share_that_it_reads_goes_on():
    cells = [*table({512: [0.90], 1024: [0.95]}), cell(512, 1, 0.5, tokens=20), cell(1024, 1, 0.5, tokens=20)]
    fitted = fit(cells)
    assert budgets(fitted) == [512, 1024]
    assert "takes up to 1024 tokens, the share of the context read in 0-2k" in fitted.notes[0]
    assert "contexts from 4000 on were not measured; they take the 1024 tokens of 2k-4k" in fitted.notes[1]
    assert fitted.schedule.kv_budget_tokens(100_000) == 1024
    assert [step.measured is None for step in fitted.schedule.steps] == [False, True]
    # Only where a bound holds a bin up are bounds named; without any, calibrations give each bin a least budget of 0.
    assert fit(cells, least_budgets={0: 0, BIN: 0}).notes == fitted.notes
    bounded = fit(cells, least_budgets={0: 0, BIN: 1536})
    assert bounded.notes[0].endswith("1536 tokens, the share of the context read in 0-2k, or what the bounds need")


def raised(fitted, *steps):
    """The notes where a verification left these steps."""
    return fitted.notes_under(dataclasses.replace(fitted.schedule, steps=tuple(Step(*step) for step in steps)))


def test_notes_about_lengths_without_data_name_the_budgets_of_the_schedule_that_was_verified():
    cells = [*table({512: [0.90], 1024: [0.95]}), cell(512, 1, 0.5, tokens=20), cell(1024, 1, 0.5, tokens=20)]
    fitted = fit(cells)
    assert fitted.notes_under(fitted.schedule) == fitted.notes
    few, beyond = raised(fitted, (0, 1024), (2000, 1536))
    assert few.endswith("at the budgets that matter, so it takes up to 1536 tokens")
    assert beyond == "contexts from 4000 on were not measured; they take the 1536 tokens of 2k-4k"
    # The bin between keeps its budget, which is not that of the raised one any more.
    fitted = fit([c for c in table({512: [0.90, 0.9, 0.9]}) if c.from_context_tokens != 2000])
    assert fitted.notes[0].endswith("so it takes 512 tokens, those of 4k-6k")
    assert raised(fitted, (0, 512), (4000, 1024))[0].endswith("so it takes 512 tokens")
    assert raised(fitted, (0, 1024), (4000, 1024))[1].endswith("they take the 1024 tokens of 4k-6k")


def test_a_bin_measured_only_at_small_budgets_is_undecided_not_refused():
    cells = [*table({512: [0.90, 0.80, 0.80], 1024: [0.95, 0.92, 0.91]})]
    cells = [c for c in cells if (c.kv_budget_tokens, c.from_context_tokens) != (1024, 2000)]
    fitted = fit(cells)
    assert fitted.bins[1].measured is None
    assert budgets(fitted)[1] == budgets(fitted)[2]


def test_the_largest_budget_missing_the_target_is_refused_with_bin_and_figure():
    with pytest.raises(
        UserError, match=r"no budget meets the target of 0\.86 at 2k-4k: the best lower bound is 0\.840"
    ) as error:
        fit(table({512: [0.90, 0.80], 1024: [0.95, 0.85]}, margin=0.01), ceiling=[cell(0, 1, 0.94)])
    assert "at 1024 tokens; dense rollouts reach 0.940" in error.value.message
    assert "measure larger budgets" in error.value.hint


def test_a_dense_ceiling_below_the_target_is_refused():
    with pytest.raises(UserError, match=r"the dense ceiling at 2k-4k is 0\.859, below the target of 0\.86"):
        fit(table({512: [0.90, 0.90]}), ceiling=[cell(0, 0, 0.94), cell(0, 1, 0.8599)])


def test_no_bin_with_enough_data_is_refused():
    with pytest.raises(UserError, match="the fullest one has 100 from 5"):
        fit([cell(512, 0, 0.9, tokens=100, rollouts=5)])


@pytest.mark.parametrize(
    ("cells", "target", "message"),
    [
        ([], 0.86, "no measured cells"),
        ([cell(512, 0, 0.9)], 1.0, "above 0 and below 1, got 1.0"),
        (
            [cell(512, 0, 0.9), dataclasses.replace(cell(512, 0, 0.9), to_context_tokens=1000)],
            0.86,
            "share one bin width",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(cells, target, message):
    with pytest.raises(UserError, match=message):
        fit(cells, target=target)


def test_the_schedule_carries_its_provenance_through_a_file(tmp_path):
    fitted = fit(
        table({512: [0.80], 1024: [0.92]}), model="me/my-model", made_by={"command": "sparroll calibrate"}, name="mine"
    )
    loaded = Schedule.load(fitted.schedule.save(tmp_path / "mine.toml"))
    assert loaded == fitted.schedule
    assert loaded.model == "me/my-model"
    assert loaded.made_by == {"command": "sparroll calibrate"}
    assert loaded.target == {
        "statistic": "acceptance",
        "estimator": "top_k_lower",
        "top_k": 20,
        "quantile": 0.05,
        "at_least": 0.86,
    }
    assert loaded.steps[0].measured["interpolated"] is True


def test_a_lucky_budget_between_worse_ones_is_pooled_with_its_neighbour():
    """.87 at 1,024 tokens holds .86, and .83 at 1,536 says that it was luck: together they have .85."""
    assert budgets(fit(table({512: [0.70], 1024: [0.87], 1536: [0.83], 1984: [0.95]}), target=0.86)) == [1584]


def test_pooling_weighs_budgets_by_their_tokens():
    """The same with nine times as many tokens behind the better figure: together they have .866."""
    cells = [cell(512, 0, 0.70), cell(1024, 0, 0.87, tokens=90_000), cell(1536, 0, 0.83, tokens=10_000)]
    assert budgets(fit([*cells, cell(1984, 0, 0.95)], target=0.86)) == [1008]


def test_a_ceiling_of_too_few_tokens_refuses_no_fit():
    assert budgets(fit([cell(512, 0, 0.9)], target=0.86, ceiling=[cell(0, 0, 0.5, tokens=20)])) == [512]
