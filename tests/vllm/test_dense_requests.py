"""Dense requests beside sparse ones in VLLMEngine, and requests with schedules of their own: dense rows are the dense
engine's, sparse rows those of an engine with their schedule, and none reuses what others left in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mixed_requests import assert_same, cached_tokens, each_of_its_kind, each_of_its_schedule
from sparroll.attention.selectors import PageMean
from sparroll.engines import HFEngine
from sparroll.engines.vllm import requests
from sparroll.engines.vllm.launch import installed_version
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.types import Rollout

if installed_version() is None:
    pytest.skip("needs vllm; `make test-vllm` installs it", allow_module_level=True)

from sparroll.engines.vllm.attention import preemptions, request_schedules
from sparroll.engines.vllm.attention.decode_rows import ENGINES
from sparroll.engines.vllm.engine import VLLMEngine

MODEL = "tiny-reasoner"
RISING = Schedule(
    steps=(Step(0, 64), Step(150, 80)),
    selector=PageMean(page_tokens=16, first_tokens=16, recent_tokens=32),
    name="rising",
)
GROUPED = replace(
    RISING, steps=(Step(0, (96, 64)), Step(150, (128, 80))), layer_groups=((2, 5), (3, 4)), name="grouped"
)
LENGTHS = [5, 100, 37, 170, 64]
FLAGS = [True, False, False, False, True, True, False, True, True, False]
"""Two of each prompt."""
WITHIN = {"atol": 1e-4, "list_atol": 5e-4, "read_share_rel": 1e-6}


@pytest.fixture(scope="module")
def started() -> Iterator[VLLMEngine]:
    # Few rows: requests wait, and rows of either kind become those of the other.
    engine = VLLMEngine(
        MODEL,
        schedule=RISING,
        dtype=torch.float32,
        max_batch=4,
        max_context_tokens=1024,
        enable_prefix_caching=True,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(started: VLLMEngine) -> VLLMEngine:
    """With an empty prefix cache and report."""
    started.set_schedule(None)
    started.set_schedule(RISING)
    started.reset_report()
    return started


@pytest.fixture(scope="module")
def hf() -> HFEngine:
    return HFEngine(MODEL, dtype=torch.float32, device="cpu", max_batch=8)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 130, (length,), generator=generator).tolist() for length in lengths]


def generated(engine: Any, schedule: Schedule | None, **settings: Any) -> list[Rollout]:
    engine.set_schedule(schedule)
    engine.reset_report()
    asked = {"n": 2, "max_new_tokens": 60, "stop_ids": [], "seed": 4, "top_k": 3} | settings
    return engine.generate(prompts(LENGTHS), **asked)


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        (RISING, {}),
        (RISING, {"temperature": 0}),
        (RISING, {"temperature": 0.8, "top_p": 0.9, "stop_ids": [5, 44, 9]}),
        (GROUPED, {}),
    ],
    ids=["sampled", "greedy", "stops", "grouped"],
)
def test_a_mixed_batch_is_two_separate_ones(engine: VLLMEngine, schedule: Schedule, settings: dict[str, Any]) -> None:
    dense, sparse = (generated(engine, each, **settings) for each in (None, schedule))
    expected = each_of_its_kind(dense, sparse, FLAGS)
    mixed = generated(engine, schedule, dense=FLAGS, **settings)
    assert_same(mixed, expected, **WITHIN)
    assert {each.attention for each, flag in zip(mixed, FLAGS, strict=True) if flag} == {"dense"}
    assert "sparse" in {each.attention for each in mixed}


def test_a_mixed_batch_and_its_report_are_the_oracles(engine: VLLMEngine, hf: HFEngine) -> None:
    found = generated(engine, RISING, dense=FLAGS, temperature=0)
    expected = generated(hf, RISING, dense=FLAGS, temperature=0)
    assert_same(found, expected, **WITHIN)
    ours, theirs = engine.report(), hf.report()
    assert ours.layers == theirs.layers
    assert ours.dense_request_steps == theirs.dense_request_steps == sum(FLAGS) * 59
    assert ours.dense_request_context_tokens == theirs.dense_request_context_tokens
    assert ours.kv_read_share == theirs.kv_read_share < 1


def test_without_dense_requests_nothing_is_flagged_or_salted_and_a_dense_engine_takes_any_flags(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []
    run = requests.run

    def noted(llm: Any, asked: Any, parameters: Any, *more: Any) -> Any:
        seen.extend(zip(asked, parameters, strict=True))
        return run(llm, asked, parameters, *more)

    monkeypatch.setattr(requests, "run", noted)
    for schedule, flags in ((RISING, None), (RISING, [False] * 10), (None, FLAGS), (None, [True] * 10)):
        generated(engine, schedule, dense=flags, max_new_tokens=3)
        assert engine.report().dense_request_steps == 0
    assert all(prompt.keys() == {"prompt_token_ids"} and sampling.extra_args is None for prompt, sampling in seen)
    seen.clear()
    generated(engine, RISING, dense=FLAGS, max_new_tokens=3)
    assert [sampling.extra_args is not None for _, sampling in seen] == FLAGS
    assert ["cache_salt" in prompt for prompt, _ in seen] == FLAGS
    with pytest.raises(UserError, match="dense needs one flag per request, 10 in all, got 2"):
        generated(engine, RISING, dense=[True, False])


# -- schedules of their own ---------------------------------------------------------------------------------------------


WIDE = replace(RISING, steps=(Step(0, 96), Step(128, 112)), name="wide")
OWN = [GROUPED, RISING, WIDE, GROUPED, WIDE, RISING, GROUPED, WIDE, RISING, WIDE]
"""Of two requests of each prompt."""


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}], ids=["sampled", "greedy"])
def test_requests_with_schedules_of_their_own_are_those_of_their_schedules(
    engine: VLLMEngine, hf: HFEngine, settings: dict[str, Any]
) -> None:
    alone = {each.name: generated(engine, each, **settings) for each in (RISING, GROUPED, WIDE)}
    dense = generated(engine, None, **settings)
    found = generated(engine, RISING, schedules=OWN, **settings)
    assert_same(found, each_of_its_schedule(alone, OWN), **WITHIN)
    report = engine.report()
    oracle = generated(hf, RISING, schedules=OWN, **settings)
    if settings:
        assert_same(found, oracle, **WITHIN)
        assert report.layers == hf.report().layers and report.dense_request_steps == 0
    # Dense ones beside them, too.
    mixed = generated(engine, RISING, schedules=OWN, dense=FLAGS, **settings)
    assert_same(mixed, each_of_its_kind(dense, found, FLAGS), **WITHIN)
    assert engine.report().dense_request_steps == sum(FLAGS) * 59
    # The next call has none of them.
    assert_same(generated(engine, RISING, **settings), alone["rising"], **WITHIN)


def test_a_worker_that_does_not_know_whose_schedules_are_whose_is_an_error(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wider budgets have fewer sparse rows than those that the requests were to be read by; narrower ones have enough."""
    wide = replace(RISING, steps=(Step(0, 512),), name="everything")
    monkeypatch.setattr(preemptions, "number_of", lambda *about: 1)
    with pytest.raises(RuntimeError, match="of them sparse; the rollouts needed .* under schedule everything, rising"):
        generated(engine, RISING, schedules=[wide, RISING] * 5)
    monkeypatch.setattr(preemptions, "number_of", lambda *about: ENGINES)
    with pytest.raises(
        RuntimeError, match="read 0 decode rows by the schedule everything of requests, and 295 were needed"
    ):
        generated(engine, RISING, schedules=[wide, RISING] * 5)
    monkeypatch.undo()
    own = [replace(RISING, steps=(Step(0, 64 + 16 * number),)) for number in range(32)]
    with pytest.raises(UserError, match="at most 31 schedules of their own, got 32"):
        engine.generate(prompts([20] * 32), max_new_tokens=4, schedules=own)


def test_requests_reuse_keys_and_values_of_their_own_schedule_alone(engine: VLLMEngine) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 90, "stop_ids": [], "temperature": 0}
    (before,) = engine.generate(prompts([100], 3), schedules=[WIDE], **asked)
    continued = [before.prompt_ids + before.response_ids]
    # By its budgets, whatever it is called, and whatever else the call has.
    again = replace(WIDE, name="another name")
    for own, cached in ((RISING, 0), (GROUPED, 0), (again, 176), (WIDE, 176)):
        with cached_tokens(engine) as found:
            engine.generate([*continued, [7] * 20], schedules=[own, GROUPED], **asked | {"max_new_tokens": 2})
        assert (found[0] >= cached) if cached else found[0] == 0, own.name


# -- the prefix cache --------------------------------------------------------------------------------------------------


def continued(engine: VLLMEngine, first: bool, then: bool) -> tuple[Rollout, int]:
    """A request of one kind, and one whose prompt is that one's prompt and response; and how many of its tokens were
    cached."""
    engine.set_schedule(None)
    engine.set_schedule(RISING)
    asked: dict[str, Any] = {"max_new_tokens": 90, "stop_ids": []}
    (before,) = engine.generate(prompts([100], 3), dense=[first], **asked)
    with cached_tokens(engine) as cached:
        (rollout,) = engine.generate([before.prompt_ids + before.response_ids], dense=[then], temperature=0, **asked)
    return rollout, cached[0]


def test_a_request_reuses_keys_and_values_of_its_own_kind_alone(engine: VLLMEngine, hf: HFEngine) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 90, "stop_ids": [], "temperature": 0}
    for first, then in ((False, True), (True, False)):
        rollout, cached = continued(engine, first, then)
        assert cached == 0
        hf.set_schedule(RISING)
        (expected,) = hf.generate([rollout.prompt_ids], dense=[then], **asked)
        assert rollout.response_ids == expected.response_ids
        torch.testing.assert_close(rollout.sparse_logp, expected.sparse_logp, atol=1e-4, rtol=0)
    for kind in (False, True):
        assert continued(engine, kind, kind)[1] >= 176


def test_without_the_salt_a_dense_request_would_read_what_sparse_steps_wrote(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, _ = continued(engine, False, True)
    monkeypatch.setattr(requests, "tokens_prompt", lambda ids, _salt=None: {"prompt_token_ids": ids})
    together, cached = continued(engine, False, True)
    assert cached >= 176
    assert (apart.sparse_logp - together.sparse_logp).abs().max() > 1e-2


# -- what the worker knows ---------------------------------------------------------------------------------------------


def test_a_worker_that_does_not_know_the_flags_is_an_error(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_schedules, "asks_dense", lambda parameters: False)
    with pytest.raises(RuntimeError, match="0 rows of dense requests, and 295 were needed"):
        generated(engine, RISING, dense=FLAGS)


def test_rows_that_are_known_to_be_dense_and_read_sparsely_are_an_error(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of rows is that of another step: dense rows are counted, and not those of the dense requests."""
    known = request_schedules.which_rows

    def turned(names: Any, numbers: Any) -> Any:
        rows = known(names, numbers)
        return None if rows is None else -1 - rows

    monkeypatch.setattr(request_schedules, "which_rows", turned)
    with pytest.raises(RuntimeError, match="of them sparse; the rollouts needed|rows of dense requests"):
        # Long prompts are sparse, and become dense.
        engine.generate(prompts([20, 170, 180, 190]), max_new_tokens=20, stop_ids=[], dense=[True, False, False, False])


def test_preempted_requests_stay_what_they_are(engine: VLLMEngine, hf: HFEngine) -> None:
    engine.close()
    asked = prompts([60, 70, 80, 90, 100], 7)
    flags = [True, False] * 5
    # In the second one prompts come in chunks, whose one-token ends stand among decode rows.
    for more in ({"enable_prefix_caching": False}, {"enable_prefix_caching": True, "max_num_batched_tokens": 33}):
        small = VLLMEngine(
            MODEL,
            schedule=RISING,
            dtype=torch.float32,
            max_batch=8,
            max_context_tokens=512,
            num_gpu_blocks_override=48,
            block_size=16,
            **more,
        )
        try:
            found = small.generate(asked, n=2, max_new_tokens=80, stop_ids=[], temperature=0, dense=flags)
            report = small.report()
            # It raises where the rows of a schedule do not add up.
            small.generate(asked, n=2, max_new_tokens=80, stop_ids=[], temperature=0, schedules=OWN, dense=flags)
            assert small.report().preemptions > report.preemptions
        finally:
            small.close()
        assert report.preemptions > 0 and report.resumed_tokens > 0
        assert 395 - report.resumed_tokens <= report.dense_request_steps <= 395
        hf.set_schedule(RISING)
        expected = hf.generate(asked, n=2, max_new_tokens=80, stop_ids=[], temperature=0, dense=flags)
        for flag, one, other in zip(flags, found, expected, strict=True):
            assert (one.attention, one.schedule_name) == (other.attention, other.schedule_name)
            if flag:
                # Dense K and V are the same however they were computed.
                assert one.response_ids == other.response_ids
                torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=1e-4, rtol=0)
