"""Dense requests of a sparse HFEngine: each is the rollout of a dense engine, and those beside it are unchanged. Requests
with schedules of their own likewise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equivalence.models import VOCABULARY, prompts, tiny_model
from mixed_requests import assert_same, each_of_its_kind, each_of_its_schedule, of_kind
from sparroll.attention.selectors import OraclePage, PageMean, QuantizedMean
from sparroll.attention.selectors.remainder import Remainder
from sparroll.compression import compression_kinds, make_compression
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.train.sampling.control_group import in_control_group
from sparroll.types import Checks, Rollout

SMALL_PAGES = PageMean(page_tokens=4, first_tokens=4, recent_tokens=8)
RISING = Schedule((Step(0, 16), Step(20, 20), Step(33, 28)), SMALL_PAGES, (1,), name="rising")
GROUPED = Schedule(
    (Step(0, (16, 24)), Step(30, (20, 32))), SMALL_PAGES, (), layer_groups=((0, 2), (1,)), name="grouped"
)
LENGTHS = [5, 1, 37, 16]
FLAGS = [True, False, False, False, True, True, False, True]
"""Two of each prompt: both kinds, sparse ones alone, dense ones alone, both kinds."""
ATOL = 1e-5


def generated(engine: HFEngine, schedule: Schedule | None, **settings: Any) -> list[Rollout]:
    engine.set_schedule(schedule)
    engine.reset_report()
    asked = {"max_new_tokens": 40, "seed": 3, "top_k": 5} | settings
    return engine.generate(prompts(LENGTHS), n=2, **asked)


def of_two_engines(engine: HFEngine, schedule: Schedule, **settings: Any) -> list[Rollout]:
    """Dense requests from a dense generate, the others from a sparse one."""
    dense, sparse = generated(engine, None, **settings), generated(engine, schedule, **settings)
    return each_of_its_kind(dense, sparse, FLAGS)


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_a_mixed_batch_is_two_separate_ones(max_batch: int) -> None:
    engine = HFEngine(tiny_model(), max_batch=max_batch)
    expected = of_two_engines(engine, RISING, stop_ids=[3, 17, 40])
    assert {each.finish_reason for each in expected} == {"stop", "length"}
    mixed = generated(engine, RISING, stop_ids=[3, 17, 40], dense=FLAGS)
    assert_same(mixed, expected, ATOL)
    assert [each.top_k.ids.tolist() for each in mixed] == [each.top_k.ids.tolist() for each in expected]
    for flag, rollout in zip(FLAGS, mixed, strict=True):
        assert rollout.schedule_name == (None if flag else "rising")
        if flag:
            assert (rollout.attention, rollout.kv_read_share) == ("dense", 1.0)
    assert "sparse" in {rollout.attention for rollout in mixed}


@pytest.mark.parametrize(
    "schedule",
    [
        GROUPED,
        Schedule.fixed(16, QuantizedMean(page_tokens=4, first_tokens=4, recent_tokens=8)),
        Schedule.fixed(16, OraclePage(page_tokens=4, first_tokens=4, recent_tokens=8)),
        Schedule.fixed(32, PageMean(page_tokens=4, first_tokens=4, recent_tokens=16, remainder=Remainder(16))),
    ],
    ids=lambda schedule: schedule.name + "-" + schedule.selector.kind,
)
def test_whatever_the_selector_and_the_groups_of_layers(schedule: Schedule) -> None:
    engine = HFEngine(tiny_model())
    assert_same(generated(engine, schedule, dense=FLAGS), of_two_engines(engine, schedule), ATOL)


@pytest.mark.parametrize("max_batch", [3, 64])
def test_requests_with_schedules_of_their_own_are_those_of_their_schedules(max_batch: int) -> None:
    engine = HFEngine(tiny_model(), max_batch=max_batch)
    wide, narrow = Schedule.fixed(28, SMALL_PAGES, (1,)), Schedule.fixed(16, SMALL_PAGES, (1,))
    own = [narrow, RISING, narrow, wide, wide, RISING, narrow, wide]
    alone = {each.name: generated(engine, each) for each in (RISING, wide, narrow)}
    calls: list[tuple[int, int]] = []
    found = generated(engine, RISING, schedules=own, on_progress=lambda *call: calls.append(call[:2]))
    assert_same(found, each_of_its_schedule(alone, own), ATOL)
    assert [(each.prompt_index, each.sample_index) for each in found] == [(n // 2, n % 2) for n in range(8)]
    assert [each.schedule_name for each in found] == [each.name for each in own]
    assert calls[-1] == (8, 8) and [done for done, _ in calls] == sorted({done for done, _ in calls})
    dense = generated(engine, None)
    mixed = generated(engine, RISING, schedules=own, dense=FLAGS)
    assert_same(mixed, each_of_its_kind(dense, found, FLAGS), ATOL)


def test_schedules_of_requests_that_do_not_fit_are_refused() -> None:
    engine = HFEngine(tiny_model())
    other = Schedule.fixed(16, SMALL_PAGES, (0,))
    for schedule, own, match in (
        (RISING, [RISING] * 3, "one per request, 8 in all, got 3"),
        (RISING, "rising", "must be a list of schedules"),
        (RISING, ["rising"] * 8, "Schedule"),
        (RISING, [RISING] * 7 + [other], "another selector, other dense layers or another check"),
        (RISING, [RISING.checked(8)] * 8, "another check than the engine's, 'rising'"),
        (RISING, [Schedule((Step(0, (16, 24)),), SMALL_PAGES, (1,), layer_groups=((0,), (2, 3)))] * 8, "layer"),
        (None, [RISING] * 8, "only beside one of the engine"),
    ):
        with pytest.raises(UserError, match=match):
            generated(engine, schedule, schedules=own)


def test_temperature_0_and_top_p_hold_for_both_kinds() -> None:
    engine = HFEngine(tiny_model())
    for settings in ({"temperature": 0}, {"temperature": 0.7, "top_p": 0.8}):
        assert_same(
            generated(engine, RISING, dense=FLAGS, **settings), of_two_engines(engine, RISING, **settings), ATOL
        )


def test_dense_requests_read_everything_in_the_report_and_count_no_sparse_step() -> None:
    engine = HFEngine(tiny_model(), max_batch=3)
    mixed = generated(engine, RISING, dense=FLAGS)
    report = engine.report()
    sparse_only = of_kind(mixed, FLAGS, False)
    contexts = {
        flag: [c for each in of_kind(mixed, FLAGS, flag) for c in each.context_tokens[1:]] for flag in (True, False)
    }
    assert report.dense_request_steps == len(contexts[True]) == 4 * 39
    assert report.dense_request_context_tokens == sum(contexts[True])
    whole = sum(contexts[True]) + sum(contexts[False])
    for number, layer in enumerate(report.layers):
        own = torch.stack(contexts[False])
        read = own if number in RISING.dense_layers else RISING.read_tokens(own)
        assert layer.sparse_steps == int((read < own).sum())
        assert layer.dense_steps + layer.sparse_steps == 8 * 39
        assert (layer.context_tokens, layer.read_tokens) == (whole, sum(contexts[True]) + int(read.sum()))
    unread = sum((1 - each.kv_read_share) * int(each.context_tokens[1:].sum()) for each in sparse_only)
    assert report.kv_read_share == pytest.approx(1 - unread / int(whole))
    assert type(report).from_table(report.table()) == report


def test_without_a_dense_request_nothing_changes_and_without_a_schedule_the_flags_do_not_matter() -> None:
    engine = HFEngine(tiny_model())
    for schedule, flags in ((RISING, [False] * 8), (None, [True] * 8), (None, FLAGS)):
        plain = generated(engine, schedule)
        counted = engine.report()
        again = generated(engine, schedule, dense=flags)
        for one, other in zip(plain, again, strict=True):
            assert one.response_ids == other.response_ids
            assert torch.equal(one.sparse_logp, other.sparse_logp)
            assert (one.attention, one.schedule_name) == (other.attention, other.schedule_name)
        assert engine.report().layers == counted.layers
        assert engine.report().dense_request_steps == counted.dense_request_steps == 0


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ([True], "dense needs one flag per request, 8 in all, got 1"),
        ([1, 0] * 4, "dense must hold True and False, got 1"),
        ("yes", "dense must be a list of True and False, got 'yes'"),
        (True, "dense must be a list of True and False, got True"),
    ],
)
def test_flags_that_are_none_are_refused(dense: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generated(HFEngine(tiny_model()), RISING, dense=dense)


# -- under a compression -----------------------------------------------------------------------------------------------


def evicting(kind: str, max_batch: int = 64) -> HFEngine:
    """The longest prompt is compressed right away, the others later."""
    return HFEngine(
        tiny_model(), max_batch=max_batch, compression=make_compression(kind, budget_tokens=24, every_tokens=8)
    )


@pytest.mark.parametrize("kind", compression_kinds())
@pytest.mark.parametrize("max_batch", [3, 64])
def test_a_mixed_batch_under_a_compression_is_two_separate_ones(kind: str, max_batch: int) -> None:
    engine, settings = evicting(kind, max_batch), {"stop_ids": [3, 17, 40]}
    compressed = generated(engine, None, **settings)
    mixed = generated(engine, None, dense=FLAGS, **settings)
    assert engine.compression is not None
    for flag, rollout in zip(FLAGS, mixed, strict=True):
        assert rollout.compression_name == (None if flag else engine.compression.name)
        assert in_control_group(rollout) == flag
        if flag:
            assert (rollout.attention, rollout.kv_read_share) == ("dense", 1.0)
    assert "evicted" in {each.attention for each in of_kind(mixed, FLAGS, False)}
    engine.set_compression(None)
    expected = each_of_its_kind(generated(engine, None, **settings), compressed, FLAGS)
    assert {each.finish_reason for each in expected} == {"stop", "length"}
    assert_same(mixed, expected, ATOL)
    assert [(each.prompt_index, each.sample_index) for each in mixed] == [(p, n) for p in range(4) for n in range(2)]


def test_nothing_is_evicted_of_a_dense_request_and_the_report_has_both_caches() -> None:
    reports = {}
    for kind, flags in {"none": [False] * 8, "mixed": FLAGS, "all": [True] * 8}.items():
        engine = evicting("streaming")
        mixed = generated(engine, None, dense=flags)
        reports[kind] = report = engine.report()
        steps = [c for each in of_kind(mixed, flags, True) for c in each.context_tokens[1:]]
        assert report.dense_request_steps == len(steps) == 39 * sum(flags)
        assert report.dense_request_context_tokens == sum(steps)
        assert report.generated_tokens == 8 * 40
        assert all(layer.dense_steps + layer.sparse_steps == 8 * 39 for layer in report.layers)
    engine.set_compression(None)
    generated(engine, None)
    whole = engine.report()
    none, mixed_report, all_dense = reports.values()
    assert all_dense.peak_kv_bytes == all_dense.peak_dense_kv_bytes == whole.peak_kv_bytes
    assert none.peak_dense_kv_bytes == whole.peak_kv_bytes > 1.5 * none.peak_kv_bytes
    # Each kind has half of the rows, so the larger cache is the dense one, of half the bytes.
    assert mixed_report.peak_kv_bytes == mixed_report.peak_dense_kv_bytes == whole.peak_kv_bytes / 2
    assert none.kv_read_share < mixed_report.kv_read_share < all_dense.kv_read_share == 1


def test_without_a_dense_request_a_compression_runs_as_without_flags() -> None:
    engine = evicting("r_kv")
    plain, counted = generated(engine, None), engine.report()
    again = generated(engine, None, dense=[False] * 8)
    for one, other in zip(plain, again, strict=True):
        assert one.response_ids == other.response_ids and torch.equal(one.sparse_logp, other.sparse_logp)
    assert engine.report().layers == counted.layers
    assert engine.report().peak_kv_bytes == counted.peak_kv_bytes


def test_progress_counts_the_rollouts_of_both_kinds() -> None:
    told: list[tuple[int, int]] = []
    generated(evicting("streaming", 2), None, dense=FLAGS, on_progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1] == (8, 8)
    assert {total for _, total in told} == {8} and any(done <= 4 for done, _ in told)


# -- with checks of drafts ---------------------------------------------------------------------------------------------

TIGHT = Schedule.fixed(16, SMALL_PAGES, dense_layers=())


@pytest.mark.parametrize("floor", [0.01, 1.0])
def test_drafts_of_a_dense_request_are_the_dense_policys_and_all_of_them_stand(floor: float) -> None:
    engine = HFEngine(tiny_model(), max_batch=5)
    checked = TIGHT.checked(7, floor)
    expected = of_two_engines(engine, checked)
    mixed = generated(engine, checked, dense=FLAGS)
    for flag, one, other in zip(FLAGS, mixed, expected, strict=True):
        assert (one.response_ids, one.attention, one.schedule_name) == (
            other.response_ids,
            other.attention,
            other.schedule_name,
        )
        torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=2e-5, rtol=0)
        torch.testing.assert_close(one.top_k.logp, other.top_k.logp, atol=2e-5, rtol=0)
        if not flag:
            assert one.checks == other.checks and one.kv_read_share == other.kv_read_share
            continue
        # A first token, five windows of 6 drafts and a token behind, and one of 4 drafts that ends the response.
        assert one.checks == Checks(windows=6, drafted_tokens=34, extra_tokens=5)
        assert (one.attention, one.schedule_name) == ("dense", None)
        torch.testing.assert_close(one.dense_logp, one.sparse_logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(one.acceptance, torch.ones(40), atol=1e-5, rtol=0)
        torch.testing.assert_close(one.draft_acceptance, torch.ones(40), atol=1e-5, rtol=0)


def test_checks_of_a_dense_request_are_reads_on_top_and_count_no_sparse_token() -> None:
    engine = HFEngine(tiny_model())
    (rollout, *_) = generated(engine, TIGHT.checked(7, 0.01), dense=[True] * 8, top_k=VOCABULARY)
    report = engine.report()
    assert report.dense_request_steps == report.checks.drafted_tokens == 8 * 34
    assert all(layer.sparse_steps == layer.extra_sparse_tokens == 0 for layer in report.layers)
    assert 1 < rollout.kv_read_share < 1 + 1.2 / 6
    (score,) = Scorer(engine.model).dense([rollout], top_k=VOCABULARY)
    torch.testing.assert_close(rollout.dense.logp, score.logp, atol=2e-5, rtol=0)
