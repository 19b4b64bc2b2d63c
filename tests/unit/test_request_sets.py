"""What the rollout benchmark measures: the moments of its sets, what they say of whole runs, and the bytes of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from benchmark_scripts import benchmark
from sparroll import Schedule
from sparroll.attention.selectors import QuantizedMean
from sparroll.plan.model_shape import BUILT_IN


@pytest.fixture(scope="module")
def request_sets() -> ModuleType:
    return benchmark("request_sets")


@pytest.fixture(scope="module")
def step_bytes() -> ModuleType:
    return benchmark("step_bytes")


# -- the sets ------------------------------------------------------------------------------------------------------------


def test_drained_run_starts_with_all_requests_and_ends_with_those_that_are_capped(request_sets: ModuleType) -> None:
    windows = request_sets.drained_windows(5)
    assert windows[0]["contexts"] == [150] * 60
    assert set(windows[-1]["contexts"]) == {150 + 32_767}
    assert len(windows[-1]["contexts"]) == int((request_sets.response_tokens(60) == 32_768).sum())


@pytest.mark.parametrize(("capacity_tokens", "at_once"), [(650_000, 60), (394_224, 27), (33_000, 1)])
def test_drained_run_has_as_many_requests_at_a_time_as_its_cache_always_holds(
    request_sets: ModuleType, capacity_tokens: int, at_once: int
) -> None:
    windows = request_sets.drained_windows(3000, capacity_tokens, slack_tokens=72)
    assert max(len(w["contexts"]) for w in windows) == len(windows[0]["contexts"]) == at_once
    assert max(sum(w["contexts"]) + 72 * len(w["contexts"]) for w in windows) <= capacity_tokens
    # Places that are free are taken until every request of the set has begun.
    lengths, steps = request_sets.response_tokens(60), windows[-1]["step"] + 1
    assert lengths.sum() / at_once <= steps <= lengths.sum() / at_once + lengths.max()
    each = [len(w["contexts"]) for w in windows]
    assert sum(each) / len(each) * steps == pytest.approx(lengths.sum(), rel=0.01)
    if at_once == 60:
        assert windows == request_sets.drained_windows(3000)
    requests_T, tokens_T = request_sets.drained_steps(at_once)
    assert len(requests_T) == len(tokens_T) == steps and requests_T.sum() == lengths.sum()
    for window in windows[::50]:
        assert requests_T[window["step"]] == len(window["contexts"])
        assert tokens_T[window["step"]] == sum(window["contexts"])
    assert max(len(w["contexts"]) for w in request_sets.drained_windows(99, capacity_tokens, most_requests=7)) <= 7


@pytest.mark.parametrize("capacity_tokens", [None, 394_224])
def test_few_moments_stand_for_the_whole_run(request_sets: ModuleType, capacity_tokens: int | None) -> None:
    """Steps that grow with requests and tokens, exactly; those of a budget, which grow by less and less, to 1 %."""
    windows = request_sets.drained_windows(12, capacity_tokens)
    requests_T, tokens_T = request_sets.drained_steps(len(windows[0]["contexts"]))

    def both(seconds: Callable[[Any, Any], Any]) -> tuple[float, float]:
        at_moments = [float(seconds(len(w["contexts"]), sum(w["contexts"]))) for w in windows]
        found, tokens = request_sets.run_seconds(windows, at_moments, "drained")
        assert tokens == requests_T.sum()
        return found, float(seconds(requests_T, tokens_T).sum())

    found, exact = both(lambda requests, tokens: 4e-3 + 2e-5 * requests + 3e-8 * tokens)
    assert found == pytest.approx(exact)
    found, exact = both(lambda requests, tokens: 4e-3 + 1e-5 * (tokens + 1e3 * requests) ** 0.5)
    assert found == pytest.approx(exact, rel=0.01)


def test_drained_set_needs_a_cache_for_its_longest_request(request_sets: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match="a cache of 32000 tokens does not hold the longest request of the drained set"
    ):
        request_sets.drained_windows(3, capacity_tokens=32_000)


def test_steady_requests_fit_the_cache_with_what_they_decode(request_sets: ModuleType) -> None:
    windows = request_sets.steady_windows(6, capacity_tokens=100_000, most_requests=64, slack_tokens=72)
    assert len(windows) == 6
    assert all(sum(w["contexts"]) + 72 * len(w["contexts"]) <= 100_000 for w in windows)
    assert windows == request_sets.steady_windows(6, capacity_tokens=100_000, most_requests=64, slack_tokens=72)


def test_steady_set_says_when_no_moment_fits(request_sets: ModuleType) -> None:
    with pytest.raises(SystemExit, match="a cache of 10000 tokens holds 0 of 3 steady moments"):
        request_sets.steady_windows(3, capacity_tokens=10_000, most_requests=64)


def test_long_requests_lie_between_28k_and_32k_and_fill_the_cache(request_sets: ModuleType) -> None:
    windows = request_sets.long_windows(5, capacity_tokens=1_130_000, most_requests=64, slack_tokens=72)
    assert {len(w["contexts"]) for w in windows} == {int(0.95 * 1_130_000 / (150 + 30_720 + 72))} == {34}
    assert windows[0]["contexts"][0] == 150 + 28_672
    assert all(150 + 28_672 <= context < 150 + 32_768 for w in windows for context in w["contexts"])
    assert all(sum(w["contexts"]) + 34 * 72 <= 1_130_000 for w in windows)
    assert len({tuple(w["contexts"]) for w in windows}) == 5
    with pytest.raises(SystemExit, match="holds no request of the long set"):
        request_sets.long_windows(5, capacity_tokens=30_000, most_requests=64)


def test_moments_are_measured_coarsely_first_and_the_sets_in_turn(request_sets: ModuleType) -> None:
    assert request_sets.coarse_first(9) == [0, 8, 4, 2, 6, 1, 3, 5, 7]
    for count in range(1, 30):
        assert sorted(request_sets.coarse_first(count)) == list(range(count))
    windows = {"drained": [{}] * 3, "long": [{}] * 2}
    order = [("drained", 0), ("long", 0), ("drained", 2), ("long", 1), ("drained", 1)]
    assert request_sets.measuring_order(windows) == order


def test_constant_steps_make_a_run_of_as_many(request_sets: ModuleType) -> None:
    windows = request_sets.drained_windows(4)
    seconds, tokens = request_sets.run_seconds(windows, [0.01] * 4, "drained")
    assert seconds == pytest.approx(0.01 * 32_768)
    assert tokens == request_sets.response_tokens(60).sum()
    two = [{"step": 0, "contexts": [1, 2]}, {"step": 7, "contexts": [3, 4, 5, 6]}]
    assert request_sets.run_seconds(two, [0.01, 0.03], "long") == (0.02, 3)


# -- bytes ---------------------------------------------------------------------------------------------------------------


def test_the_cache_that_all_engines_have_is_smaller_by_the_largest_index_and_a_percent(step_bytes: ModuleType) -> None:
    published = Schedule.load("qwen3-1.7b-0.86")
    assert step_bytes.smaller_capacity(1_000_000, [published], 28) == int(0.99 * 1_000_000 / (1 + 26 / 28 / 32))
    # 4 tokens with 4 bits: 64 bytes of channels and 4 of the scale, beside 4 x 512 of K and V.
    fine = Schedule.fixed(512, QuantizedMean(page_tokens=4, bits=4), dense_layers=(0,))
    assert step_bytes.index_share(fine, 28) == pytest.approx(27 / 28 * 68 / 2048)
    assert step_bytes.index_share(fine, 28) <= 1 / 28
    held = step_bytes.smaller_capacity(1_000_000, [published, fine], 28)
    assert held == int(0.99 * 1_000_000 / (1 + 27 / 28 * 68 / 2048))


def test_step_within_budget_reads_what_a_dense_one_does(step_bytes: ModuleType) -> None:
    schedule = Schedule.fixed(512, dense_layers=(0,))
    assert step_bytes.bytes_read([100, 512], schedule, 4) == 4 * 612 * step_bytes.kv_bytes()
    longer = 1024 * step_bytes.kv_bytes() + 3 * (512 * step_bytes.kv_bytes() + 1024 * 8 * 128 * 2 / 16)
    assert step_bytes.bytes_read([1024], schedule, 4) == longer


@pytest.mark.parametrize("model", ["Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B"])
def test_a_step_reads_all_weights_but_an_embedding_of_its_own(step_bytes: ModuleType, model: str) -> None:
    unread = {"Qwen3-8B": 151_936 * 4096, "Qwen3-14B": 151_936 * 5120}.get(model, 0)
    assert step_bytes.weight_bytes(model.lower()) == 2 * (BUILT_IN[model].parameters - unread)


def test_the_attainable_step_is_that_of_one_token_or_the_weights_and_the_bytes_of_the_cache(
    step_bytes: ModuleType,
) -> None:
    weights = 2 * BUILT_IN["Qwen3-1.7B"].parameters / 4e12
    assert step_bytes.attainable_seconds(2e-3, "qwen3-1.7b", 8e9, 4e12) == pytest.approx(2e-3 + 2e-3)
    assert step_bytes.attainable_seconds(1e-4, "qwen3-1.7b", 8e9, 4e12) == pytest.approx(weights + 2e-3)


def test_fit_finds_what_steps_were_made_of(step_bytes: ModuleType) -> None:
    batches, contexts = [60, 41, 10, 60, 10], [9_000, 603_233, 329_170, 3_840, 640]
    seconds = [4e-3 + 2e-5 * b + 3e-8 * c for b, c in zip(batches, contexts, strict=True)]
    found = step_bytes.fit_steps(batches, contexts, seconds)
    assert found["seconds_per_step"] == pytest.approx(4e-3)
    assert found["seconds_per_request"] == pytest.approx(2e-5)
    assert found["seconds_per_context_token"] == pytest.approx(3e-8)
    assert found["largest_relative_error"] < 1e-9
