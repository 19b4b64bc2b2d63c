"""The reader's questions, answered by fixed rules from figures whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from report_data import measured, plans, row, run, runs, schedule
from sparroll.attention.selectors import PageMean, Quest
from sparroll.control.guard import Guard
from sparroll.report.answers import HELD, SAFE, SAVES, answers
from sparroll.report.data import AccuracyPoint, Answer, GapPoint, Measured, TailCurve, TrainingRun, differences
from sparroll.schedule import Schedule, Step
from sparroll.train.config.run import TrainConfig
from tail_worlds import evidence
from tail_worlds import measured as tails

LIKE = schedule(64, 128, 192)


def about(points: list[tuple[float, float]], **changes: object) -> Measured:
    """A calibration whose verification measured these values, with their lower bounds."""
    curve = TailCurve(
        "calibrated schedule", "schedule", tuple(row(250 * k, v, low, 0.99) for k, (v, low) in enumerate(points))
    )
    return measured(curves=(curve,), **changes)


def answer(question: str, of: Measured, its_runs: tuple[TrainingRun, ...] | None = None) -> Answer:
    found = answers([of], runs() if its_runs is None else its_runs, plans())
    (one,) = (each for each in found if each.question == question)
    return one


def test_a_checked_run_is_compared_with_dense_rollouts_which_have_no_drafts_to_check() -> None:
    dense, calibrated, _ = runs()
    checked = replace(calibrated, config=calibrated.config | {"check": {"window_tokens": 64, "floor": 0.01}})
    assert answer(HELD, measured(), (dense, checked)) == answer(HELD, measured(), (dense, calibrated))


@pytest.mark.parametrize(
    "other",
    [
        replace(LIKE, selector=Quest()),
        replace(LIKE, selector=PageMean(first_tokens=0)),
        replace(LIKE, dense_layers=(0,)),
        LIKE.checked(16, 0.01),
        schedule(64, 128, 256),
        replace(LIKE, layer_groups=((2, 3),), steps=(Step(0, (64,)), Step(500, (128,)), Step(1000, (192,)))),
    ],
)
def test_a_run_that_reads_or_checks_in_another_way_is_not_under_the_schedule(other: Schedule) -> None:
    dense, calibrated, _ = runs()
    found = (dense, replace(calibrated, schedule=other))
    assert answer(SAVES, measured(), found).level == answer(HELD, measured(), found).level == "unknown"
    same = (dense, replace(calibrated, schedule=replace(LIKE, name="another name", made_by={"command": "copied"})))
    assert answer(SAVES, measured(), same).level == "yes"


def test_all_three_questions_are_answered_in_their_order() -> None:
    assert [each.question for each in answers([measured()], runs(), plans())] == [SAFE, SAVES, HELD]


@pytest.mark.parametrize(
    ("points", "level", "said"),
    [
        (
            [(0.9, 0.88), (0.95, 0.86)],
            "yes",
            "Yes: from 0 to 500 tokens, the tail is above its target 0.86 with its whole",
        ),
        (
            [(0.9, 0.8599), (0.95, 0.9)],
            "probably",
            "but in 1 of them the interval reaches below it; the lowest is 0.900",
        ),
        (
            [(0.9, 0.88), (0.8599, 0.85)],
            "no",
            "No: the tail misses its target 0.86 at contexts of 250 to 500; the",
        ),
    ],
)
def test_a_schedule_is_safe_where_its_whole_interval_is_above_the_target(
    points: list[tuple[float, float]], level: str, said: str
) -> None:
    found = answer(SAFE, about(points))
    assert found.level == level
    assert said in found.answer


def test_an_alarm_of_the_guard_outweighs_the_calibration() -> None:
    decision = Guard("warn", 0.86).watch(evidence(1, tails(1, {0: 0.7}), Schedule.fixed(64)))
    alarmed = run(
        "calibrated", "", 0.008, 0.7, 0.5, LIKE, events=tuple(f"step 1: {event}" for event in decision.events)
    )
    found = answer(SAFE, about([(0.9, 0.88)]), (alarmed,))
    assert found.level == "no"
    assert "the guard raised an alarm in training" in found.answer
    assert any("0.700, surely under 0.860" in reason for reason in found.reasons)


def test_low_single_steps_are_told_with_what_they_are_worth() -> None:
    low = run("calibrated", "", 0.008, 0.9, 0.5, LIKE, worst_bin_q05=(0.9, 0.8599, 0.95, None, *[0.9] * 16))
    found = answer(SAFE, about([(0.9, 0.88)]), (low,))
    assert found.level == "yes"
    assert any(
        "the worst bin of 1 of 19 single steps was under 0.86, at the lowest 0.859" in each for each in found.reasons
    )


@pytest.mark.parametrize(
    ("last", "said", "interval"),
    [
        (GapPoint(20, 0.0121, -0.0205, 0.0446), "0.013 less", "-0.020 to 0.045"),
        (GapPoint(20, -0.0129, -0.0446, 0.0205), "0.012 more", "-0.021 to 0.044"),
    ],
)
def test_the_last_gap_of_a_control_group_is_told(last: GapPoint, said: str, interval: str) -> None:
    gaps = (GapPoint(1, 0.4, 0.1, 0.7), last)
    found = answer(SAFE, about([(0.9, 0.88)]), (run("calibrated", "", 0.008, 0.9, 0.5, LIKE, reward_gap=gaps),))
    assert any(f"got {said} reward than dense ones of the same prompts (95 % interval {interval}, over" in each
               for each in found.reasons)  # fmt: skip


def test_what_nobody_measured_is_not_known() -> None:
    unverified = measured(curves=measured().curves[:1], bound=None)
    assert answer(SAFE, unverified).level == "unknown"
    thin = TailCurve("calibrated schedule", "schedule", (row(0, 0.99, 0.98, 1.0, rollouts=7),))
    assert answer(SAFE, measured(curves=(thin,))).level == "unknown"
    assert answer(SAVES, measured(), ()).level == answer(HELD, measured(), ()).level == "unknown"


def test_a_schedule_of_checked_drafts_is_not_judged_by_its_tail() -> None:
    checked = Schedule.fixed(64).checked(32, 0.1)
    found = answer(SAFE, measured(schedule=replace(checked, target={"kl_at_most": 0.03}), target=None))
    assert found.level == "unknown"
    assert "what the schedule was to hold is a KL of at most 0.03, of what the checks of drafts leave" in found.answer


def test_savings_are_rounded_towards_the_miss_and_name_other_models_as_such() -> None:
    found = answer(SAVES, measured())
    assert found.answer.startswith("53% of what attention reads: its rollouts read 47% of the KV cache")
    assert any(
        reason.startswith("For comparison, another model: predicted for Qwen/Qwen3-1.7B") for reason in found.reasons
    )
    own = replace(plans()[0], model="tiny-reasoner")
    (shown,) = (each for each in answers([measured()], runs(), [own]) if each.question == SAVES)
    assert any(reason.startswith("Predicted for this model on H200") for reason in shown.reasons)


def with_accuracy(name: str, under: Schedule | None, value: float, half: float) -> TrainingRun:
    before, after = (AccuracyPoint(step, at, at - half, at + half, 128) for step, at in ((0, 0.5), (20, value)))
    return run(name, "", 0.0, 0.9, 0.5, under, accuracy=(before, after))


@pytest.mark.parametrize(
    ("value", "half", "level", "said"),
    [
        (
            0.52,
            0.08,
            "probably",
            "Nothing speaks against it: after 20 steps the dense accuracy is 0.520 [0.440",
        ),
        (0.54, 0.02, "yes", "Yes: after 20 steps"),
        (
            0.42,
            0.05,
            "no",
            "No: after 20 steps the dense accuracy is 0.420 [0.370, 0.470] with it and 0.5",
        ),
    ],
)
def test_training_held_unless_the_dense_run_is_surely_better(value: float, half: float, level: str, said: str) -> None:
    pair = (with_accuracy("dense", None, 0.55, half), with_accuracy("calibrated", LIKE, value, half))
    found = answer(HELD, measured(), pair)
    assert found.level == level
    assert found.answer.startswith(said)


def test_a_dense_run_with_other_settings_is_no_comparison() -> None:
    other = {"model": {"name": "tiny-reasoner"}, "attention": {"kind": "dense"}, "train": {"seed": 1, "lr": 1e-4}}
    pair = (
        replace(with_accuracy("dense", None, 0.9, 0.01), config=other),
        with_accuracy("calibrated", LIKE, 0.5, 0.05),
    )
    found = answer(HELD, measured(), pair)
    assert found.level == "unknown"
    assert found.reasons == ("There is no run with dense rollouts and the same settings here to compare with.",)


def of_seed(seed: int, one: TrainingRun) -> TrainingRun:
    changed = {**one.config, "train": {"seed": seed, "lr": 1e-4}}
    return replace(one, config=changed, name=f"{one.name}-{seed}")


def test_two_runs_at_the_defaults_but_for_their_attention_have_the_same_settings() -> None:
    """By default only a sparse run has a control group."""
    schedule = {"kind": "schedule", "name": "qwen3-1.7b-0.86"}
    dense, sparse = (
        replace(
            with_accuracy(name, under, 0.54, 0.02),
            config=TrainConfig.model_validate({"attention": attention}).model_dump(mode="json"),
        )
        for name, under, attention in (("dense", None, {"kind": "dense"}), ("calibrated", LIKE, schedule))
    )
    assert sparse.config["rollout"]["control_share"] != dense.config["rollout"]["control_share"] == 0
    assert differences([dense, sparse], without=("attention",)) == {}
    assert answer(HELD, measured(model=dense.model), (dense, sparse)).level == "yes"
    other = replace(sparse, config=sparse.config | {"rollout": sparse.config["rollout"] | {"control_share": 0.125}})
    found = differences([dense, sparse, other], without=("attention",))
    assert found == {"rollout.control_share": (0.03125, 0.125)}


def test_the_worst_of_several_runs_decides_and_is_named_wherever_it_stands_in_the_folder() -> None:
    dense = with_accuracy("dense", None, 0.55, 0.02)
    good, bad = (with_accuracy(name, LIKE, value, 0.02) for name, value in (("a", 0.54), ("b", 0.42)))
    for its_runs in ((dense, good, bad), (bad, dense, good)):
        found = answer(HELD, measured(), its_runs)
        assert found.level == "no"
        assert found.answer.startswith(
            "No: in b, the worst of 2 runs, after 20 steps the dense accuracy is 0.420 [0.400"
        )
        assert not any(reason.startswith("What reading less does") for reason in found.reasons)


def test_each_run_is_compared_with_the_dense_run_of_its_own_settings() -> None:
    """The first dense run of the folder has another seed than the sparse run that got worse."""
    pairs = [
        of_seed(seed, with_accuracy(name, under, value, 0.02))
        for seed, dense, sparse in ((0, 0.55, 0.54), (1, 0.60, 0.50))
        for name, under, value in (("dense", None, dense), ("calibrated", LIKE, sparse))
    ]
    found = answer(HELD, measured(), tuple(pairs))
    assert found.level == "no"
    assert found.answer.startswith(
        "No: in calibrated-1, the worst of 2 runs, after 20 steps the dense accuracy is 0.500"
    )
    assert "with it and 0.600 [0.580, 0.620] with dense rollouts (dense-1)" in found.answer


def test_a_run_without_a_dense_one_to_compare_with_is_told_and_decides_only_where_it_got_worse() -> None:
    pair = (with_accuracy("dense", None, 0.55, 0.02), with_accuracy("a", LIKE, 0.54, 0.02))
    found = answer(HELD, measured(), (*pair, of_seed(1, with_accuracy("b", LIKE, 0.52, 0.02))))
    assert found.level == "yes" and found.answer.startswith("Yes: in a, after 20 steps")
    assert found.reasons[-1].startswith("b-1 has no run with dense rollouts and the same settings here to compare with")
    found = answer(HELD, measured(), (*pair, of_seed(1, with_accuracy("b", LIKE, 0.42, 0.02))))
    assert found.answer == (
        "No: in b-1, the worst of 2 runs, the dense accuracy went from 0.500 to 0.420 [0.400, 0.440] in 20 steps."
    )


def test_of_several_runs_the_one_that_read_most_says_what_is_saved() -> None:
    most, least = (run(name, "", 0.008, 0.9, share, LIKE) for name, share in (("a", 0.5), ("b", 0.25)))
    found = answer(SAVES, measured(), (least, most))
    assert found.answer.startswith(
        "50% of what attention reads: its rollouts read 50% of the KV cache in a, the run that"
    )


def test_there_are_no_answers_about_two_schedules_or_two_models() -> None:
    assert answers([measured(), measured(folder="other")], runs(), ()) == ()
    assert answers([measured(model="another")], runs(), ()) == ()
    assert answers([], runs(), plans()) == ()
