"""What a verl user types under custom.sparroll becomes the configuration of our own loop, and mistakes are refused by the
names that they typed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparroll.control.control_group import ControlGroupSettings
from sparroll.control.controller import Controller
from sparroll.errors import UserError
from sparroll.integrations.verl.settings import PREFIX, RunFacts, SparseSettings, in_verls_words
from sparroll.schedule import Schedule, Step
from sparroll.train.config.describe import describe
from sparroll.train.config.run import TrainConfig

FACTS = RunFacts("Qwen/Qwen3-4B", 512, 8, 1024, 16384)


def read(facts: RunFacts = FACTS, **table: Any) -> SparseSettings:
    return SparseSettings.read({"schedule": "qwen3-4b-0.86", **table}, facts)


def test_a_preset_is_enough_and_brings_the_guards_target() -> None:
    settings = read()
    assert settings.first_schedule() == Schedule.load("qwen3-4b-0.86")
    guard, _ = settings.watchers()
    assert guard.name == "guard" and guard.at_least == 0.86  # type: ignore[attr-defined]
    assert settings.correction == read(correction={"name": "tis"}).correction


def test_a_path_is_read_once_and_travels_as_the_schedule_itself(tmp_path: Path) -> None:
    names = [str(Schedule.fixed(budget).save(tmp_path / f"s{budget}.toml")) for budget in (512, 1024)]
    settings = read(
        schedule=names[0],
        verify={"window": 32, "dense_logp": "engine"},
        control={"by": "guard", "stricter": [names[1], "dense"]},
        guard={"at_least": 0.8},
        rescoring={"probe_rollouts": None},
    )
    inline = json.loads(json.dumps(settings.inline()))
    for path in tmp_path.iterdir():
        path.unlink()
    again = SparseSettings.read(inline, FACTS)
    assert again == settings and again.inline() == inline
    assert again.dense_logp_from_engine and not read(verify={"window": 32}).dense_logp_from_engine
    first, (guard, _) = again.first_schedule(), again.watchers()
    assert first is not None and first.name == "s512-checked-32-0.01"
    stricter, dense = guard.may_switch_to
    assert dense is None and stricter is not None and stricter.kv_budget_tokens(9999) == 1024


def test_a_check_that_the_schedules_file_describes_is_kept_where_nothing_else_is_said() -> None:
    source = Schedule.fixed(512).checked(window_tokens=32, floor=0.1).inline()
    for verify, expected in (({"dense_logp": "engine"}, (32, 0.1)), ({"window": 16}, (16, 0.1))):
        check = read(schedule=source, verify=verify).config.check
        assert check is not None and (check.window_tokens, check.floor) == expected
    check = read(verify={}).config.check
    assert check is not None and (check.window_tokens, check.floor) == (64, 0.01)


def test_windows_of_two_lengths_are_refused_unless_one_is_given_for_all(tmp_path: Path) -> None:
    paths = [str(Schedule.fixed(64).checked(window).save(tmp_path / f"by{window}.toml")) for window in (64, 16)]
    about = {
        "schedule": paths[0],
        "guard": {"at_least": 0.8},
        "control": {"by": "guard", "stricter": [paths[1], "dense"]},
    }
    with pytest.raises(UserError, match="check windows of 16 and 64 tokens") as refused:
        read(**about)
    assert f"+{PREFIX}.verify.window=64" in (refused.value.hint or "")
    assert read(**about, verify={"window": 64}).config.check is not None


def test_groups_of_layers_travel_as_the_schedule_itself_and_the_controller_keeps_them(tmp_path: Path) -> None:
    grouped = Schedule((Step(0, (512, 256)),), layer_groups=((2, 3), (4,)), name="grouped")
    settings = read(schedule=str(grouped.save(tmp_path / "grouped.toml")), guard={"at_least": 0.8})
    again = SparseSettings.read(json.loads(json.dumps(settings.inline())), FACTS)
    assert again.first_schedule() == settings.first_schedule() == grouped
    controlled = read(schedule=grouped.inline(), control={"by": "controller", "target": 0.86})
    first, capacity = controlled.first_schedule(), Schedule.load(json.loads(json.dumps(controlled.capacity().inline())))
    assert first is not None and first.plain_budgets() == grouped.plain_budgets()
    assert capacity.layer_groups == grouped.layer_groups


def test_an_engine_is_started_for_every_schedule_that_may_come() -> None:
    settings = read(schedule="dense", control={"by": "controller", "target": 0.86}, verify={"window": 64})
    capacity, controller = settings.capacity(), settings.watchers()[-1]
    assert isinstance(controller, Controller)
    assert capacity.check is not None and capacity.check.window_tokens == 64
    assert capacity.steps == controller.widest().steps
    assert settings.first_schedule() == controller.schedule()
    table = settings.engine_table()
    assert json.loads(json.dumps(table)) == table


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ({"schedul": "x"}, rf"unknown key {PREFIX}\.schedul", "did you mean 'schedule'"),
        ({"schedule": None}, rf"{PREFIX}\.schedule is missing", r"\+actor_rollout_ref"),
        ({"schedule": "dense"}, "leaves nothing for sparroll to do", "control.by=controller"),
        ({"schedule": "qwen3-4b-0.8"}, "unknown schedule preset", "qwen3-4b-0.88"),
        ({"schedule": "qwen3-1.7b-0.86"}, "made for Qwen/Qwen3-1.7B", rf": \+{PREFIX}\.force_schedule=true$"),
        ({"correction": {"name": "jackpot"}}, "Jackpot needs", "icepop"),
        ({"correction": {"name": "tis", "weight_mx": 2}}, "no setting 'weight_mx'", "weight_max"),
        ({"verify": {"windows": 3}}, rf"unknown key {PREFIX}\.verify\.windows", "'window'"),
        ({"verify": {"dense_logp": "check"}}, rf"{PREFIX}\.verify\.dense_logp: .*'check'", ""),
        ({"verify": {"window": 1}}, rf"{PREFIX}\.verify\.window: .*got 1", ""),
        ({"guard": {"actoin": "stop"}}, rf"{PREFIX}\.guard\.actoin", "'action'"),
        ({"control": {"by": "cheaper", "schedules": ["x"]}}, "DistillSparse", "nobody, guard or controller"),
        ({"rescoring": {"probe_rollouts": 4}}, "needs 8 rollouts", "null re-scores all"),
        ({"rescoring": {"top_k": 10}}, "this run measures", rf"\+{PREFIX}\.guard\.at_least=0\.86"),
        ({"control_group": {"shares": 1}}, rf"unknown key {PREFIX}\.control_group\.shares", "'share'"),
        ({"control_group": {"share": 0.6}}, rf"{PREFIX}\.control_group\.share: .*0\.6", ""),
        (
            {"control_group": {"share": 0.4}},
            rf"{PREFIX}\.control_group\.share_first = 0\.25 must be at least {PREFIX}\.control_group\.share = 0\.4",
            "the same share",
        ),
        (
            {"control_group": {"first_steps": 5}},
            rf"{PREFIX}\.control_group\.first_steps = 5 does nothing",
            rf"{PREFIX}\.control_group\.share=0\.03125",
        ),
        ({"control": {"by": "guard", "stricter": "dense"}}, rf"{PREFIX}\.control\.stricter: .*'dense'", ""),
        ({"control": {"by": "guard", "stricter": 5}}, rf"{PREFIX}\.control\.stricter: .*5", ""),
        ({"mismatch": 5}, "mismatch", ""),
        ({"guard": {"reward_gap": 0.1}}, rf"{PREFIX}\.guard\.reward_gap = 0\.1 does nothing", ""),
        ({"attention": "fa4"}, rf"unknown {PREFIX}\.attention 'fa4'", "triton"),
    ],
)
def test_mistakes_are_refused_by_the_names_that_were_typed(table: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        read(**table)
    if hint:
        assert re.search(hint, refused.value.hint or ""), refused.value.hint


@pytest.mark.parametrize("section", ["verify", "rescoring", "control_group"])
@pytest.mark.parametrize("value", [False, 0, "", []])
def test_a_section_that_is_no_table_is_refused_and_only_null_is_a_section_left_out(section: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{PREFIX}\.{section} must be a table, got {re.escape(repr(value))}"):
        read(**{section: value})
    assert read(**{section: None}) == read()


@pytest.mark.parametrize(
    ("prompts", "samples", "asked", "probe"),
    [
        (128, 8, {}, 32),
        (4, 8, {}, 8),
        (8, 8, {}, 16),
        (128, 8, {"probe_rollouts": 100}, 100),
        (4, 8, {"probe_rollouts": None}, None),
    ],
)
def test_the_probe_is_a_quarter_of_a_steps_rollouts_from_8_to_32(
    prompts: int, samples: int, asked: dict[str, Any], probe: int | None
) -> None:
    facts = replace(FACTS, prompts_per_step=prompts, samples_per_prompt=samples)
    assert SparseSettings.read({"schedule": "qwen3-4b-0.86", "rescoring": asked}, facts).probe_rollouts == probe


def test_another_temperature_needs_checks_or_whole_lists() -> None:
    warm = replace(FACTS, temperature=0.6, vocabulary=151_936)
    with pytest.raises(UserError, match=r"temperature 0\.6") as refused:
        read(warm)
    assert "verify.window" in str(refused.value.hint)
    assert read(warm, verify={"window": 64}).config.rollout.temperature == 0.6
    assert read(replace(warm, vocabulary=20)).config.rollout.temperature == 0.6
    # vLLM would sample at .01 and say nothing.
    with pytest.raises(UserError, match=r"actor_rollout_ref\.rollout\.temperature = 0\.005 is below 0\.01") as refused:
        read(replace(FACTS, temperature=0.005), verify={"window": 64})
    assert refused.value.hint == "actor_rollout_ref.rollout.temperature=0.01 or more"


def test_hints_of_our_own_loop_say_what_to_type_in_verl() -> None:
    assert in_verls_words("--set guard.window_steps=2, or train.prompts_per_step = 8") == (
        f"+{PREFIX}.guard.window_steps=2, or data.train_batch_size = 8"
    )
    assert in_verls_words("--set 'control.stricter=[\"a\"]'") == f"'+{PREFIX}.control.stricter=[\"a\"]'"


def test_hints_name_commands_that_know_what_they_are_asked() -> None:
    for table, known in (
        ({"guard": {"window_steps": 0}}, "guard.window_steps"),
        ({"control": {"by": "controller", "target": 2}}, "control.target"),
        ({"force_schedule": "maybe"}, "attention.force"),
    ):
        with pytest.raises(UserError) as refused:
            read(**table)
        assert f"`sparroll config {known}` says what it may be" == refused.value.hint
        assert describe(TrainConfig, known)


@pytest.mark.parametrize("reward_gap", [0.1, None])
def test_a_control_group_is_that_of_our_own_loop_and_travels_whole(reward_gap: float | None) -> None:
    group = {"share": 1 / 16, "share_first": 1 / 8, "first_steps": 5, "seed": 11}
    settings = read(control_group=group, guard={"reward_gap": reward_gap})
    guard, _ = settings.watchers()
    assert guard.reward_gap.settings == ControlGroupSettings(1 / 16, 1 / 8, 5, reward_gap=reward_gap)  # type: ignore[attr-defined]
    assert settings.config.train.seed == 11
    inline = json.loads(json.dumps(settings.inline()))
    assert inline["control_group"] == group and SparseSettings.read(inline, FACTS) == settings
    assert read(control_group={"share": 0}) == read() and "control_group" not in read().inline()


def test_a_control_group_needs_several_rollouts_of_a_prompt() -> None:
    with pytest.raises(UserError, match=r"rollout\.n = 1"):
        read(replace(FACTS, samples_per_prompt=1), control_group={"share": 1 / 32})
