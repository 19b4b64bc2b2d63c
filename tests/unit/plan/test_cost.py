"""The eFLOPs formulas against independent evaluations: exact fractions for the closed forms, quadrature for schedules."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.integrate import quad

from sparroll.errors import UserError
from sparroll.plan import cost
from sparroll.schedule import Schedule, Step

QWEN3_1_7B = {"parameters": 1_720_574_976, "kv_width": 28 * 8 * 128, "gqa_ratio": 2}
CASES = [
    {**QWEN3_1_7B, "samples": 1, "prompt_tokens": 0, "response_tokens": 1},
    {**QWEN3_1_7B, "samples": 8, "prompt_tokens": 317, "response_tokens": 20_011},
    {
        "parameters": 14_768_307_200,
        "kv_width": 40_960,
        "gqa_ratio": 5,
        "samples": 3,
        "prompt_tokens": 2_000,
        "response_tokens": 7,
    },
]


def _fractions(case, intensity):
    names = ("parameters", "samples", "prompt_tokens", "response_tokens", "kv_width", "gqa_ratio")
    return (*(Fraction(case[name]) for name in names), Fraction(intensity))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("intensity", [562.5, 412.0])
def test_dense_is_the_published_formula(case, intensity):
    P, N, Lin, Lout, D, r, I = _fractions(case, intensity)  # noqa: E741
    expected = 2 * P * N * Lout + r * (2 * Lin + Lout) * Lout * N * D + I * (2 * Lin * Lout * D + N * Lout**2 * D)
    assert cost.dense(**case, intensity=intensity) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scoring", ["none", "published", "corrected"])
def test_sparse_with_a_fixed_budget_is_the_published_formula(case, scoring):
    P, N, Lin, Lout, D, r, I = _fractions(case, 562.5)  # noqa: E741
    B, s = Fraction(512), Fraction(16)
    expected = 2 * N * P * Lout + 2 * r * N * D * B * Lout + 2 * I * N * D * B * Lout
    prompt_divisor = {"published": 1, "corrected": s}.get(scoring)
    if prompt_divisor:
        expected += 2 * N * Lin * D * Lout / prompt_divisor + r * N * D * Lout**2 / (2 * s)
        expected += 2 * I * Lin * D * Lout / prompt_divisor + I * N * D * Lout**2 / (2 * s)
    got = cost.sparse(**case, kv_budget_tokens=512, unit_tokens=16, scoring=scoring)
    assert got == pytest.approx(float(expected), rel=1e-12)


def test_corrected_scoring_is_the_default_and_costs_less_than_the_published_one():
    case = CASES[1]
    default = cost.sparse(**case, kv_budget_tokens=512)
    assert default == cost.sparse(**case, kv_budget_tokens=512, scoring="corrected", unit_tokens=16, intensity=562.5)
    assert default < cost.sparse(**case, kv_budget_tokens=512, scoring="published")


def test_a_schedule_is_integrated_exactly_over_positions():
    schedule = Schedule.load("qwen3-1.7b-0.86")
    breaks = [512, 1024, 1536, 2000, 4000, 8000, 10000, 12000, 14000, 18000]
    numeric, _ = quad(
        lambda x: min(schedule.kv_budget_tokens(int(x)), x),
        317,
        20_328,
        points=breaks,
        limit=400,
        epsabs=0,
        epsrel=1e-13,
    )
    assert cost.integrated_budget(schedule, 317, 20_328) == pytest.approx(numeric, rel=1e-12)


def test_a_schedule_sums_by_hand():
    schedule = Schedule((Step(0, 512), Step(1000, 800), Step(2000, 1600)))
    # 0..512 reads x; 512..1000 reads 512; 1000..2000 reads 800; 2000..3000 reads 1600.
    assert cost.integrated_budget(schedule, 0, 3000) == 512**2 / 2 + 488 * 512 + 1000 * 800 + 1000 * 1600
    assert cost.integrated_budget(schedule, 2500, 2500) == 0


def test_groups_of_layers_count_by_their_size():
    grouped = Schedule((Step(0, (512, 256)),), dense_layers=(0,), layer_groups=((1, 2, 3), (4,)))
    alone = [cost.integrated_budget(Schedule.fixed(budget), 100, 5000) for budget in (512, 256)]
    assert cost.integrated_budget(grouped, 100, 5000) == pytest.approx((3 * alone[0] + alone[1]) / 4)
    case = {**QWEN3_1_7B, "samples": 4, "prompt_tokens": 4096, "response_tokens": 1000}
    mean = cost.sparse(**case, kv_budget_tokens=(3 * 512 + 256) // 4)
    assert cost.sparse(**case, kv_budget_tokens=grouped) == pytest.approx(mean)


def test_the_integral_is_the_sum_of_what_steps_read_but_for_incomplete_units():
    schedule = Schedule.load("qwen3-1.7b-0.86")
    contexts = np.arange(318, 20_329)
    summed, longer = int(schedule.read_tokens(contexts).sum()), contexts > schedule.kv_budget_tokens(contexts)
    # Of 16 lengths in a row, the last unit lacks 7.5 tokens on average; a step of the integral ends half a token later.
    expected = summed + 7.5 * int(longer.sum()) - 0.5 * int((~longer).sum())
    assert cost.integrated_budget(schedule, 317, 20_328) == pytest.approx(expected, rel=1e-4)


def test_a_fixed_schedule_equals_the_int_where_the_budget_is_below_the_context():
    case = {**QWEN3_1_7B, "samples": 4, "prompt_tokens": 4096, "response_tokens": 1000}
    fixed = cost.sparse(**case, kv_budget_tokens=Schedule.fixed(2048))
    assert fixed == pytest.approx(cost.sparse(**case, kv_budget_tokens=2048), rel=1e-14)


def test_a_budget_beyond_the_context_reads_what_dense_reads_for_one_sample():
    case = {**QWEN3_1_7B, "samples": 1, "prompt_tokens": 100, "response_tokens": 3000}
    got = cost.sparse(**case, kv_budget_tokens=Schedule.fixed(4096), scoring="none")
    assert got == pytest.approx(cost.dense(**case), rel=1e-12)


def test_unit_tokens_come_from_the_schedule():
    case = CASES[1]
    schedule = Schedule.fixed(512)
    assert cost.sparse(**case, kv_budget_tokens=schedule) == cost.sparse(
        **case, kv_budget_tokens=schedule, unit_tokens=16
    )
    assert cost.sparse(**case, kv_budget_tokens=schedule) < cost.sparse(
        **case, kv_budget_tokens=schedule, unit_tokens=8
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": 0}, "parameters must be positive, got 0"),
        ({"response_tokens": -1}, "lengths must be 0 or more, got prompt 317 and response -1"),
        ({"prompt_tokens": math.nan}, "lengths must be 0 or more, got prompt nan"),
        ({"intensity": -2.0}, "intensity must be positive"),
        ({"kv_budget_tokens": 0}, "kv_budget_tokens must be positive, got 0"),
        ({"kv_budget_tokens": math.nan}, "kv_budget_tokens must be positive, got nan"),
        ({"kv_budget_tokens": "qwen3-1.7b-0.86"}, r"(?s)or a Schedule, got 'qwen3-1.7b-0.86'.*hint: .*Schedule.load"),
        ({"kv_budget_tokens": None}, "a number of tokens or a Schedule, got None"),
        ({"unit_tokens": 0}, "unit_tokens must be positive, got 0"),
        ({"unit_tokens": 0, "kv_budget_tokens": Schedule.fixed(512)}, "unit_tokens must be positive, got 0"),
        ({"unit_tokens": math.nan}, "unit_tokens must be positive, got nan"),
        ({"scoring": "publishd"}, "unknown scoring 'publishd'\nhint: did you mean 'published'"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        cost.sparse(**{**CASES[1], "kv_budget_tokens": 512, **change})
