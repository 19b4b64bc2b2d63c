"""A calibration that cannot succeed ends before the first budget is measured, with the reason."""

import pytest

from sparroll.attention.selectors import PageMean
from sparroll.calibrate.prospects import check_ceiling, check_request
from sparroll.calibrate.run import calibrate
from sparroll.errors import UserError

from . import fakes
from .fakes import CEILING, study

GRID = [64, 128, 256]


def run(bench, out, **settings):
    about = {"budgets": GRID, "target": 0.9, "dense_layers": (0,), "verify_rounds": 0, "min_tokens": 100} | settings
    return calibrate(bench, out=out, **about)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ((1.0, 64, 8, 1024), "the target must be above 0 and below 1, got 1.0"),
        ((0.86, 7, 1, 1024), "needs 8 rollouts, and 7 prompts with 1 samples each give 7\nhint: .*--count"),
        ((0.86, 4, 2, 49), "needs 400 tokens, and 8 rollouts of at most 49 give 392\nhint: .*--max-new-tokens"),
    ],
)
def test_what_no_rollout_can_change_is_refused_before_a_model_is_loaded(about, message):
    with pytest.raises(UserError, match=message):
        check_request(*about)
    check_request(0.86, 4, 2, 50)


def test_too_few_rollouts_are_refused_before_the_dense_ones(tmp_path):
    bench = study(prompts=3, samples=2)
    with pytest.raises(UserError, match="needs 8 rollouts"):
        run(bench, tmp_path)
    assert bench.engine.generated == []


def test_a_target_above_the_ceiling_is_refused_before_the_first_budget(tmp_path):
    bench = study()
    with pytest.raises(
        UserError, match=r"dense ceiling at .* is 0\.9\d+, below the target of 0.99.*trainer differ"
    ) as raised:
        run(bench, tmp_path, target=0.99)
    assert "raise the engine's precision" in raised.value.hint
    assert bench.engine.generated == [(None, 0)]


def test_mass_beyond_the_lists_is_told_from_a_difference_of_the_policies(tmp_path, monkeypatch):
    # The engine's lists hold `accepted` of the mass instead of all of it: no two policies could share more.
    whole = fakes.lists
    monkeypatch.setattr(fakes, "lists", lambda accepted_T: _first(whole(accepted_T)))
    bench = study(prompts=8)
    with pytest.raises(
        UserError, match="(?s)counts only the 20 most likely tokens.*two equal policies would have"
    ) as raised:
        run(bench, tmp_path, target=0.99)
    assert "sample at a lower temperature, or count every token" in raised.value.hint
    assert bench.engine.generated == [(None, 0)]


def _first(lists):
    return type(lists)(lists.ids[:, :1], lists.logp[:, :1])


def test_a_ceiling_at_the_target_is_no_obstacle(tmp_path):
    bench = study()
    check_ceiling(bench, bench.ceiling(), CEILING - 0.02, min_tokens=100)


def test_dense_rollouts_that_fill_no_bin_are_refused_before_the_first_budget(tmp_path):
    bench = study(bin_tokens=1)
    with pytest.raises(UserError, match="no bin can be fitted: a cell needs 100 tokens from 8 rollouts"):
        run(bench, tmp_path)
    assert bench.engine.generated == [(None, 0)]


def test_a_grid_that_reads_every_context_whole_is_refused_with_what_would_be_sparse(tmp_path):
    bench = study()
    longest = max(int(rollout.context_tokens[-1]) for rollout in study().dense_rollouts())
    budget = -(-longest // 16) * 16
    with pytest.raises(
        UserError, match=f"longest context has {longest} tokens, and the smallest budget, {budget}"
    ) as raised:
        run(bench, tmp_path, budgets=[budget, budget + 16])
    assert f"({PageMean().least_budget_tokens} or more)" in raised.value.hint
    assert bench.engine.generated == [(None, 0)]
    with pytest.raises(UserError, match=r"keeps all 4 layers of the model dense, so nothing would be sparse"):
        run(study(), tmp_path / "dense", dense_layers=(0, 1, 2, 3))
