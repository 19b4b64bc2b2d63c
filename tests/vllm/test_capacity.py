"""Which schedules a worker can go on with. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparroll import Schedule
from sparroll.attention.selectors import PageMean
from sparroll.engines.vllm.arguments import widest
from sparroll.errors import UserError
from worker_steps import GROUPED, RISING, started


def test_an_engine_that_starts_with_groups_takes_all_others_and_none() -> None:
    start = widest(GROUPED, 1000, 6)
    assert start.layer_groups == () and start.kv_budget_tokens(1000) >= 1000
    for state in (started(start), started(GROUPED)):
        for schedule in (GROUPED, replace(GROUPED, layer_groups=((2, 3, 4), (5,))), RISING, None):
            state.set_schedule(schedule)
        with pytest.raises(UserError, match="layer_groups leaves out the layers"):
            state.set_schedule(replace(GROUPED, layer_groups=((2,), (3, 4))))
        assert state.schedule is None


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (Schedule.fixed(64, PageMean(page_tokens=8, first_tokens=8)), "keeps the index"),
        (Schedule.fixed(64, dense_layers=(0,)), "has the dense layers"),
    ],
)
def test_a_schedule_that_needs_another_engine_is_refused(schedule: Schedule, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        started().set_schedule(schedule)


def test_an_engine_started_dense_takes_no_schedule() -> None:
    state = started(None)
    assert state.sparse_layers == frozenset()
    with pytest.raises(UserError, match="keeps no index"):
        state.set_schedule(RISING)


def test_a_worker_takes_no_schedule_whose_drafts_it_cannot_check_or_would_not() -> None:
    plain, checked = started(), started(RISING.checked(window_tokens=32))
    for state, other, reason in (
        (plain, RISING.checked(window_tokens=8), "started without checks of drafts"),
        (checked, RISING, "started with checks of drafts"),
        (checked, RISING.checked(window_tokens=33), "windows of 32 tokens, .* asks for 33"),
    ):
        before = state.schedule
        with pytest.raises(UserError, match=reason) as caught:
            state.set_schedule(other)
        windows = "windows" in reason
        assert ("capacity=" if windows else "--check-window 64") in (caught.value.hint or "")
        assert state.schedule is before
    # The scheduler of a server is in another process.
    with pytest.raises(UserError, match="scheduler gives windows of 32 tokens, the schedule .* asks for 8"):
        checked.set_schedule(RISING.checked(window_tokens=8), window_follows=False)
    checked.set_schedule(RISING.checked(window_tokens=32, floor=0.7), window_follows=False)
    for fits in (RISING.checked(window_tokens=8, floor=0.5), None):
        checked.set_schedule(fits)
        assert checked.schedule is fits
