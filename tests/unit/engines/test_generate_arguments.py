"""Numbers that cannot be sampled with are refused before anything runs, in every engine with the same words."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from sparroll.calibrate.measure import MeasureSettings
from sparroll.calibrate.open_study import open_study
from sparroll.engines.generate_arguments import check_counts, check_temperature, end_ids, seeds
from sparroll.engines.make import check_samples_at
from sparroll.errors import UserError
from sparroll.evaluate.request import EvaluationRequest
from sparroll.evaluate.settings import DENSE, EvaluationSettings
from sparroll.train.config.file import load_config, load_distill_config
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


def test_temperatures_that_only_hf_samples_at_are_refused_for_vllm_before_anything_starts() -> None:
    for check, name in (
        (lambda kind, at: check_samples_at(kind, at), "temperature"),
        (lambda kind, at: load_config(None, [f"engine={kind}", f"rollout.temperature={at}"]), "rollout.temperature"),
        (lambda kind, at: load_config(None, [f"engine={kind}", f"evaluate.temperature={at}"]), "evaluate.temperature"),
        (
            lambda kind, at: load_distill_config(
                None,
                [f"engine={kind}", "attention=budget", "attention.kv_budget_tokens=64", f"rollout.temperature={at}"],
            ),
            "rollout.temperature",
        ),
        (
            lambda kind, at: EvaluationRequest("m", [], [DENSE], EvaluationSettings(temperature=at), engine=kind),
            "temperature",
        ),
    ):
        with pytest.raises(
            UserError, match=f"^{name} = 0.005 is below 0.01, the least that .* vllm samples at"
        ) as raised:
            check("vllm", 0.005)
        assert raised.value.hint == "set it to 0.01, or take the engine hf, which goes down to 0.001"
        check("vllm", 0.01)
        check("hf", 0.005)
    check_samples_at("vllm", 0)
    settings = MeasureSettings(max_new_tokens=8, temperature=0.005)
    with pytest.raises(UserError, match="temperature = 0.005 is below 0.01"):
        open_study("tiny-reasoner", [], False, settings, [], engine="vllm")


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
