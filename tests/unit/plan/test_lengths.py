"""Length mixes: every written form, its mean, and the contexts that rollouts pass through."""

import json

import numpy as np
import pytest

from sparroll.errors import UserError
from sparroll.plan.length_mix import LengthMix


@pytest.mark.parametrize("form", [12_000, "12000", "12_000", [12_000], "[12000]"])
def test_a_fixed_length(form):
    mix = LengthMix.parse(form)
    assert mix.mean_tokens == 12_000
    assert mix.tokens.tolist() == [12_000]


def test_a_range_is_uniform():
    mix = LengthMix.parse("0-32768")
    assert mix.mean_tokens == pytest.approx(16_384)
    assert mix.mean_of(lambda tokens: tokens**2) == pytest.approx(32_768**2 / 3, rel=1e-6)


def test_a_log_normal_has_its_median_and_ends_at_its_cut_off():
    mix = LengthMix.parse("lognormal:18000,0.6,max=32768")
    assert np.median(mix.tokens) == pytest.approx(18_000, rel=1e-3)
    assert mix.longest_tokens == 32_768
    # 15.9 % lie above 18,000 * exp(0.599) = 32,768 and are cut there.
    assert mix.weights[mix.tokens == 32_768].sum() == pytest.approx(0.159, abs=0.001)
    uncut = LengthMix.parse("lognormal:1000,0.5")
    assert uncut.mean_tokens == pytest.approx(1000 * np.exp(0.125), rel=2e-3)


def test_lists_and_files(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([3000, 1000]))
    for form in ([3000, 1000], "3000,1000", path, str(path)):
        assert LengthMix.parse(form).tokens.tolist() == [1000, 3000]
        assert LengthMix.parse(form).mean_tokens == 2000


def test_decode_steps_of_one_length_are_uniform_from_the_prompt():
    mix = LengthMix.parse(1000).decode_contexts(200)
    assert mix.mean_tokens == pytest.approx(600)
    assert mix.tokens.min() > 200


def test_long_rollouts_take_more_of_the_decode_steps():
    mix = LengthMix.parse([100, 300]).decode_contexts(0)
    # Steps: 100 by the short one, 300 by the long one; sum of contexts 100^2/2 + 300^2/2.
    assert mix.mean_tokens == pytest.approx((100**2 + 300**2) / 2 / 400, rel=1e-3)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("abc", "'abc' in the lengths 'abc' is not a number"),
        ("5-", "'' in the lengths '5-' is not a number"),
        ("500-100", "must end above its start"),
        ("lognormal:18000", "has no sigma"),
        ("lognormal:18000,0.6,min=3", "unknown option 'min=3'"),
        ("lognormal:0,0.6", "must be positive"),
        ("lognormal:1,1000", "at most 10"),
        ("lognormal:1000,1,max=0", "max must be positive"),
        ("1e30", "between 0 and 1,073,741,824, got '1e30'"),
        ([10**49], "between 0 and 1,073,741,824"),
        ([], "list of lengths is empty"),
        ([0, 0], "all lengths are 0"),
        ([100, -1], "got -1"),
        ([100, "x"], "got 'x'"),
        ("[1, 2", "not valid JSON"),
        ("nowhere.json", r"cannot read the lengths file nowhere\.json"),
        (True, "cannot read lengths from True"),
        (None, "cannot read lengths from None"),
        ("inf", "must lie between 0"),
    ],
)
def test_what_is_no_length_is_refused(form, message):
    with pytest.raises(UserError, match=message):
        LengthMix.parse(form)


def test_a_prompt_longer_than_every_rollout_is_refused():
    with pytest.raises(UserError, match="no rollout of the mix '1000' is longer than its prompt of 1000 tokens"):
        LengthMix.parse(1000).decode_contexts(1000)
