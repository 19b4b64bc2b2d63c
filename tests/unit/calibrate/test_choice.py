"""What a choice among checked schedules says, and the arithmetic of its drafts, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from numpy.testing import assert_array_equal

from sparroll.attention.selectors import PageMean
from sparroll.calibrate.bounds import NO_BOUNDS, BlindSpots
from sparroll.calibrate.choice import (
    Candidate,
    CheckChoice,
    Machine,
    predicted_drafts,
    rounding_left_out,
    with_reasons,
)
from sparroll.calibrate.fit import FittedBin, FittedSchedule
from sparroll.calibrate.sweep import Sweep, sweep
from sparroll.draft_check import DraftCheck
from sparroll.plan.hardware import find_hardware
from sparroll.plan.kernel_times import kernel_times_of
from sparroll.plan.length_mix import LengthMix
from sparroll.plan.model_shape import ModelShape
from sparroll.plan.time_model import TimeModel
from sparroll.schedule import Schedule, Step
from sparroll.types import Rollout

from .fakes import study

CHECK = DraftCheck(16, 0.01)
SHAPE = ModelShape("toy", parameters=1_000_000, layers=4, query_heads=4, kv_heads=2, head_dim=64, vocabulary=100)

SINGLE_TOKENS = PageMean(page_tokens=1, first_tokens=1, recent_tokens=1)
"""Any budget is a multiple of its pages."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The largest budget reads every context whole."""
    return sweep(study(), out=tmp_path_factory.mktemp("swept"), budgets=[64, 512], check=CHECK)


def bin_of(ceiling: float | None) -> FittedBin:
    about = None if ceiling is None else {"value": ceiling}
    return FittedBin(0, 100, 64, None, about)


def candidate(token_seconds: float, dense_seconds: float = 1.0, ceilings: tuple[float | None, ...] = ()) -> Candidate:
    schedule = replace(Schedule.fixed(64), check=CHECK, target={"at_least": 0.86})
    fitted = FittedSchedule(schedule, tuple(bin_of(each) for each in ceilings), ("a note",))
    return Candidate(CHECK, 64, fitted, 1.2341, token_seconds, 80.0, dense_seconds)


def chosen(*candidates: Candidate) -> CheckChoice:
    return CheckChoice(candidates, "H200", ())


def test_the_choice_says_the_first_candidate_and_rounds_up() -> None:
    found = chosen(candidate(0.0123411), candidate(0.5))
    assert found.best is found.candidates[0]
    assert found.said() == (
        "windows of 16, floor 0.01 and budgets from 64 have the least predicted time of 2 on H200: 12.35 ms a token, "
        "1.24 drafted per kept"
    )


def test_a_best_schedule_that_is_no_faster_than_dense_decoding_is_noted() -> None:
    def notes(token_seconds: float) -> list[str]:
        found = with_reasons(chosen(candidate(token_seconds, dense_seconds=0.01)), None, NO_BOUNDS)
        return [each for each in found.notes if "dense rollouts are faster" in each]

    assert notes(0.00999) == []
    assert notes(0.0123411)[0].startswith(
        "a token is predicted to take 12.342 ms on H200, and a dense step 10.000 ms: dense rollouts are faster."
    )
    assert len(notes(0.01)) == 1


def test_the_schedule_holds_its_reasons_and_all_bounds() -> None:
    found = with_reasons(chosen(candidate(0.01)), {"command": "me"}, BlindSpots(kl_at_most=0.1))
    assert found.schedule.target == {"at_least": 0.86, "kl_at_most": 0.1}
    assert found.schedule.made_by["command"] == "me" and found.schedule.made_by["chosen"].startswith("windows of 16")
    assert found.notes[:2] == ("a note", found.schedule.made_by["left_out"])


def test_what_rounding_hides_is_measured_by_the_worst_dense_ceiling() -> None:
    with_ceilings = candidate(0.01, ceilings=(0.99, None, 0.98125)).fitted
    assert rounding_left_out(with_ceilings).endswith(
        "dense rollouts have 0.981 against the trainer at their worst length, so against the trainer the tails may be lower "
        "by about 0.019"
    )
    without = rounding_left_out(candidate(0.01, ceilings=(None,)).fitted)
    assert without.endswith("so the rounding between engine and trainer is not in them")


def test_a_budget_of_all_but_the_last_token_of_a_bin_reads_it_whole(swept) -> None:
    """At a context of N tokens a decode step reads at most N - 1 and the token itself."""
    nothing_taken_back = CHECK.drafts / CHECK.window_tokens
    whole = Schedule((Step(0, 99), Step(100, 199), Step(200, 299), Step(300, 600)), selector=SINGLE_TOKENS)
    assert predicted_drafts(swept, whole) == nothing_taken_back
    assert predicted_drafts(swept, replace(whole, steps=(Step(0, 98), *whole.steps[1:]))) > nothing_taken_back


def test_drafts_between_two_measured_budgets_lie_on_a_line_over_their_logarithms(swept) -> None:
    """512 tokens read every context whole and add nothing, so halfway to them is half of what 64 tokens add."""
    least, half = (predicted_drafts(swept, Schedule.fixed(budget, selector=SINGLE_TOKENS)) for budget in (64, 181))
    assert least == pytest.approx(swept.measurements[0].checked.checks.drafted_per_kept)
    nothing_taken_back = CHECK.drafts / CHECK.window_tokens
    rows = {row.from_context_tokens: row.tokens for row in swept.ceiling.tail().rows}
    read_in_part = sum(count for start, count in rows.items() if start + 99 > 181) / sum(rows.values())
    added = least / nothing_taken_back - 1
    assert half == pytest.approx(nothing_taken_back * (1 + 0.5 * added * read_in_part), rel=2e-3)


def test_a_machine_predicts_by_measured_steps_or_else_by_timed_kernels() -> None:
    rollouts = study().dense_rollouts()
    timed = Machine.decoding(rollouts, SHAPE, find_hardware("H200"))
    assert timed.kernels is not None
    assert timed.kernels == kernel_times_of("H200")
    fitted = TimeModel(0.001, 0.0, 1e12, 0.0, worst_relative_error=0.01, steps=7)
    by_steps = Machine.decoding(rollouts, SHAPE, find_hardware("H200"), fitted)
    assert by_steps.kernels is None
    selector = Schedule.fixed(64).selector
    assert by_steps.times_said(selector) == "steps are predicted by a time model that was fitted to 7 measured ones"
    assert timed.times_said(selector).startswith("times: kernels of page_mean")
    unknown = replace(timed, kernels=None)
    assert unknown.times_said(selector).startswith("times: no kernels that were timed on")


def test_a_machine_has_the_lengths_from_the_shortest_prompt_to_each_end() -> None:
    rollouts = [
        Rollout([1] * prompt, [2] * response, sparse_logp=torch.zeros(response), finish_reason="stop")
        for prompt, response in ((20, 100), (40, 300))
    ]
    machine = Machine.decoding(rollouts, SHAPE, find_hardware("H200"))
    expected = LengthMix.parse([120, 340]).decode_contexts(20)
    for name in ("tokens", "weights"):
        assert_array_equal(getattr(machine.lengths, name), getattr(expected, name))
