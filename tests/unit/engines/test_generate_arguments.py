"""Numbers that cannot be sampled with are refused before anything runs, in every engine with the same words."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from sparroll.calibrate.measure import MeasureSettings
from sparroll.engines.generate_arguments import check_counts, check_temperature, end_ids, seeds
from sparroll.errors import UserError
from sparroll.evaluate.settings import EvaluationSettings
from sparroll.train.config.file import load_config
from sparroll.types import LARGEST_SEED


@pytest.mark.parametrize("temperature", [math.inf, math.nan, -1.0, -math.inf, 1e-40])
def test_temperatures_are_zero_or_finite_and_not_too_small(temperature: float) -> None:
    for check in (
        lambda: check_temperature(temperature),
        lambda: check_counts(1, 1, temperature),
        lambda: MeasureSettings(max_new_tokens=8, temperature=temperature),
        lambda: EvaluationSettings(temperature=temperature),
    ):
        with pytest.raises(UserError, match="temperature must be 0 or from 0.001 up, and finite"):
            check()


def test_zero_one_and_high_temperatures_are_fine() -> None:
    for temperature in (0, 0.001, 1, 100.0):
        check_temperature(temperature)


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 10**30])
def test_seeds_that_no_generator_takes_are_refused(seed: int) -> None:
    for check in (
        lambda: MeasureSettings(max_new_tokens=8, seed=seed),
        lambda: EvaluationSettings(seed=seed),
        lambda: load_config(None, [f"train.seed={seed}"]),
    ):
        with pytest.raises(UserError, match="seed"):
            check()
    assert load_config(None, [f"train.seed={LARGEST_SEED}"]).train.seed == LARGEST_SEED


def test_the_seed_of_one_request_has_63_bits() -> None:
    assert seeds([0, 2**63 - 1], 2, 1) == [0, 2**63 - 1]
    with pytest.raises(UserError, match=r"must be from 0 to 2\^63 - 1, got 9223372036854775808"):
        seeds([0, 2**63], 2, 1)


def test_an_end_id_outside_the_vocabulary_is_left_out_where_another_is_inside() -> None:
    """vLLM refuses every request with such an id, so both engines get those that can be sampled."""
    assert end_ids(SimpleNamespace(eos_token_id=[2, 151_643, -1]), None, 136) == [2]
