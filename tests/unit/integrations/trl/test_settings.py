"""SparseRollouts: what it means in our own loop's terms, and what is refused by the names that a TRL user types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparroll import Schedule
from sparroll.control.control_group import ControlGroupSettings
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.corrections import correction
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.integrations.trl.settings import SparseRollouts, SparseSetup, TrainerFacts, in_trls_words
from sparroll.train.config.describe import describe
from sparroll.train.config.run import TrainConfig

FACTS = TrainerFacts(
    "some/model",
    prompts_per_step=8,
    samples_per_prompt=8,
    max_new_tokens=8000,
    longest_context_tokens=10_000,
    vocabulary=1000,
    processes=3,
)
FIXED = Schedule.fixed(512)


def setup(schedule: Any = FIXED, facts: TrainerFacts = FACTS, **settings: Any) -> SparseSetup:
    return SparseSetup.of(SparseRollouts(schedule, **settings), facts)


def test_a_name_a_table_and_a_schedule_mean_the_same() -> None:
    preset = Schedule.load("qwen3-4b-0.86")
    facts = TrainerFacts("Qwen/Qwen3-4B", 8, 8, 8000, 10_000, 151_936)
    made = [setup(source, facts) for source in ("qwen3-4b-0.86", preset, preset.inline())]
    assert [each.first_schedule() for each in made] == [preset] * 3
    # The guard takes the target that the schedule was calibrated for.
    assert [each.watchers()[0].at_least for each in made] == [0.86] * 3  # type: ignore[attr-defined]


def test_a_schedule_of_another_model_is_refused_unless_forced() -> None:
    with pytest.raises(UserError, match="made for Qwen/Qwen3-4B") as refused:
        setup("qwen3-4b-0.86")
    assert "force_schedule=True" in str(refused.value.hint)
    assert setup("qwen3-4b-0.86", force_schedule=True).first_schedule() is not None


def test_the_correction_is_a_name_or_a_table() -> None:
    assert setup(correction="icepop").correction == correction("icepop")
    tight = setup(correction={"name": "tis", "weight_max": 1.5})
    assert tight.correction == correction("tis", weight_max=1.5)
    with pytest.raises(UserError, match="jackpot|Jackpot"):
        setup(correction="jackpot")
    with pytest.raises(UserError, match="unknown correction"):
        setup(correction="tisss")


def test_the_first_event_says_what_must_be_known_of_the_schedules() -> None:
    scaled = replace(FIXED, made_by={"caveat": "scaled, to be calibrated on the real model"})
    first = setup(scaled, guard={"at_least": 0.86}).events()[0]
    assert first == "the schedule 'fixed-512' is scaled, to be calibrated on the real model"
    stricter = setup(FIXED, guard={"at_least": 0.86}, control={"by": "guard", "stricter": [replace(scaled, name="b")]})
    assert stricter.events()[0].endswith("is scaled, to be calibrated on the real model")
    assert not any("scaled" in line for line in setup(FIXED, guard={"at_least": 0.86}).events())


def test_every_process_rescores_its_part_of_the_probe() -> None:
    assert setup(probe_rollouts=32).rescoring().probe_rollouts == 11
    assert setup(probe_rollouts=None).rescoring().probe_rollouts is None
    # A quarter of the step's 64 rollouts, over 3 processes.
    assert setup().rescoring().probe_rollouts == 6


def test_verified_rollouts_are_checked_under_every_schedule() -> None:
    made = setup(verify=DraftCheck(32), guard={"at_least": 0.86}, control={"by": "guard", "stricter": ["dense"]})
    first = made.first_schedule()
    assert first is not None and first.check == DraftCheck(32)
    assert made.capacity().check == DraftCheck(32)


def test_dense_with_a_controller_begins_as_the_controller_says() -> None:
    made = setup("dense", control={"by": "controller", "target": 0.86})
    first = made.first_schedule()
    assert first is not None and first.name == "controlled"
    with pytest.raises(UserError, match="nothing for sparroll to do"):
        setup("dense")


def test_temperatures_that_rescoring_would_get_wrong_need_checks() -> None:
    warm = TrainerFacts("some/model", 8, 8, 8000, 10_000, 1000, temperature=0.7)
    with pytest.raises(UserError, match="temperature 1") as refused:
        setup(facts=warm)
    assert "verify=DraftCheck" in str(refused.value.hint)
    assert setup(facts=warm, verify=DraftCheck()).rescoring().temperature == 0.7
    # vLLM would sample at .01 and say nothing.
    with pytest.raises(UserError, match=r"^temperature = 0\.005 is below 0\.01") as refused:
        setup(facts=replace(warm, temperature=0.005), verify=DraftCheck())
    assert refused.value.hint == "temperature=0.01 or more"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verify": 64}, "verify must be a DraftCheck"),
        ({"guard": "stop"}, "guard must be a table"),
        ({"probe_rollouts": 4}, "probe_rollouts = 4"),
        ({"top_k": 50}, "top_k must be from 1 to 20"),
        ({"guard": {"actoin": "stop"}}, "actoin"),
        ({"control": {"by": "cheaper", "schedules": ["x"]}}, "DistillSparse"),
        ({"guard": {"action": "stop"}}, "names no target"),
        ({"seed": "a"}, "a seed must be a whole number from 0"),
        ({"control": {"by": "guard", "stricter": "dense"}}, "stricter: .*'dense'"),
    ],
)
def test_mistakes_are_refused_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        setup(**settings)


def test_messages_name_what_a_trl_user_types() -> None:
    text = "--set guard.at_least=0.86, or sample more of rollout.samples_per_prompt"
    assert in_trls_words(text) == 'guard={"at_least": 0.86}, or sample more of num_generations'


@pytest.mark.parametrize(
    ("setting", "argument"),
    [
        ("control.by=controller", 'control={"by": "controller"}'),
        ("guard.action=off, or", 'guard={"action": "off"}, or'),
        ("control.force=true.", 'control={"force": True}.'),
        ("guard.impossible_at_most=1e-4", 'guard={"impossible_at_most": 1e-4}'),
        ('\'control.stricter=["a", "b"]\'', 'control={"stricter": ["a", "b"]}'),
    ],
)
def test_a_setting_in_a_hint_is_an_argument_that_python_reads(setting: str, argument: str) -> None:
    assert in_trls_words(f"--set {setting}") == argument


def test_hints_name_commands_that_know_what_they_are_asked() -> None:
    for settings, known in (
        ({"control_share": 0.9}, "rollout.control_share"),
        ({"control_first_steps": -1}, "rollout.control_first_steps"),
        ({"guard": {"window_steps": 0}}, "guard.window_steps"),
        ({"force_schedule": "x"}, "attention.force"),
    ):
        with pytest.raises(UserError) as refused:
            setup(**settings)
        assert f"`sparroll config {known}` says what it may be" == refused.value.hint
        assert describe(TrainConfig, known)


def test_guard_and_controller_hold_impossible_tokens_in_the_words_of_trl() -> None:
    made = setup(guard={"impossible_at_most": 1e-4, "impossible_nats": 20})
    assert made.watchers()[0].impossible == ImpossibleLimit(20, 1e-4)  # type: ignore[attr-defined]
    led = setup("dense", control={"by": "controller", "impossible_at_most": 1e-3})
    assert [each.name for each in led.watchers()][-1] == "controller"
    with pytest.raises(UserError, match="impossible_nats = 20 does nothing") as refused:
        setup(guard={"impossible_nats": 20})
    assert 'guard={"impossible_at_most": 1e-4}' in str(refused.value.hint)


def test_a_control_group_is_that_of_our_own_loop_and_part_of_a_checkpoint() -> None:
    group = {"control_share": 1 / 16, "control_share_first": 1 / 8, "control_first_steps": 5}
    made = setup(**group, guard={"reward_gap": 0.1}, seed=11)
    guard = made.watchers()[0]
    assert guard.reward_gap.settings == ControlGroupSettings(1 / 16, 1 / 8, 5, reward_gap=0.1)  # type: ignore[attr-defined]
    assert made.config.train.seed == 11
    assert made.table()["control_group"] == {"share": 1 / 16, "share_first": 1 / 8, "first_steps": 5}
    assert made.rescoring_of_control().probe_rollouts == 1
    assert "control_group" not in setup().table() and setup().watchers()[0].reward_gap is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"control_share": 0.6}, "^control_share.*0.6", ""),
        ({"control_share": 0.4}, "^control_share_first = 0.25 must be at least control_share = 0.4", "the same share"),
        ({"control_first_steps": 3}, "^control_first_steps = 3 does nothing", "control_share=0.03125"),
        ({"guard": {"reward_gap": 0.1}}, "reward_gap = 0.1 does nothing.* control_share is 0", "control_share=0.03125"),
    ],
)
def test_a_control_group_is_refused_in_the_words_of_sparse_rollouts(
    settings: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        setup(**settings)
    assert hint in str(refused.value.hint)
