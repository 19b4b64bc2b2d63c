"""Configuration: files, overrides, sections with several kinds, and one line for every mistake."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from sparroll.compression import make_compression
from sparroll.control.control_group import ControlGroupSettings
from sparroll.errors import UserError
from sparroll.train.config.base import Section, kinds_of
from sparroll.train.config.control_group import notices
from sparroll.train.config.distill import DistillConfig
from sparroll.train.config.file import (
    as_command,
    as_toml,
    config_from,
    distill_config_from,
    load_config,
    load_distill_config,
    refuse_other_config,
    write_config,
)
from sparroll.train.config.rollout import CompressionAttention, DenseAttention, ScheduleAttention
from sparroll.train.config.run import TrainConfig
from sparroll.train.schedules import control_group_settings, make_guard, starting_schedule

BUDGET = ["attention.kind=budget", "attention.kv_budget_tokens=512"]
PRESET = ["attention.kind=schedule", "attention.name=qwen3-1.7b-0.86"]
R_KV = ["attention.kind=compression", "attention.policy=r_kv"]
CONTROLLER = ["control.by=controller", "control.target=0.86"]
GUARD = ["control.by=guard", 'control.stricter=["qwen3-1.7b-0.90"]']
CHEAPER = ["control.by=cheaper", 'control.schedules=["qwen3-1.7b-0.80"]']
GROUP = ["rollout.control_share=0.03125"]
NO_GROUP = ["rollout.control_share=0"]


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nlr = 1e-4\nsteps = 7\n[correction]\nname = "icepop"\nweight_max = 3.0\n')
    config = load_config(path, ["train.lr=3e-4", *PRESET, "guard.at_least=0.8"])
    assert (config.train.lr, config.train.steps, config.train.clip_high) == (3e-4, 7, 0.28)
    assert config.correction.model_dump() == {"name": "icepop", "weight_max": 3.0}
    assert config.attention == ScheduleAttention(name="qwen3-1.7b-0.86")
    assert config.guard.at_least == 0.8


def test_none_names_the_correction_where_a_name_is_asked_for() -> None:
    assert load_config(None, ["correction.name=none"]).correction.name == "none"


def test_override_values_are_read_like_toml_and_none_clears() -> None:
    config = load_config(None, ["train.max_gradient_norm=none", 'log.sinks=["console"]', "task.chat_template=true"])
    assert config.train.max_gradient_norm is None
    assert config.log.sinks == ("console",)
    assert config.task.chat_template is True


def test_a_file_says_none_with_the_same_word(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nmax_gradient_norm = "none"\n')
    assert load_config(path).train.max_gradient_norm is None


def test_a_whole_section_can_be_set_and_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[attention]\nkind = "schedule"\nname = "qwen3-1.7b-0.86"\nforce = true\n[distill]\nrank = 4\n'
        '[correction]\nname = "icepop"\nweight_max = 3.0\n'
    )
    dense = load_config(path, ["attention=dense", "distill=none"])
    assert dense.attention == DenseAttention() and dense.distill is None
    other = load_config(path, ["attention=schedule", "attention.name=qwen3-1.7b-0.80", "correction=tis"])
    assert other.attention == ScheduleAttention(name="qwen3-1.7b-0.80")
    assert other.correction.model_dump() == {"name": "tis"}
    table = load_config(path, ['attention={kind = "budget", kv_budget_tokens = 64}'])
    assert table.attention.model_dump() == {"kind": "budget", "kv_budget_tokens": 64}
    on = load_config(None, [*BUDGET, "distill={}"])
    assert on.distill is not None and on.distill.rank == 16


def test_a_file_may_name_a_kind_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('attention = "dense"\nengine = "vllm"\n[task]\nlevel = 2\n')
    config = load_config(path, ["engine.sleep_level=1"])
    assert (config.attention.kind, config.engine.kind, config.engine.sleep_level) == ("dense", "vllm", 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lrr=1"], r"(?s)unknown key train\.lrr.*did you mean 'lr'"),
        (["rollout.prompts_per_step=1"], r"(?s)unknown key rollout\.prompts_per_step.*mean train\.prompts_per_step\?"),
        (["trian.lr=1"], r"(?s)unknown section \[trian\].*did you mean 'train'"),
        (["lr=1e-5"], r"(?s)unknown section \[lr\].*did you mean train\.lr"),
        (["control_share=0"], r"(?s)unknown section \[control_share\].*did you mean rollout\.control_share\?"),
        (["train.lr=fast"], r"(?s)train\.lr: must be a number, not text.*'fast'.*`sparroll config train\.lr` says"),
        (["train.clip_low=2"], r"train\.clip_low: input should be less than 1, got 2"),
        (["train.steps=0"], r"train\.steps"),
        (["train=3"], r"\[train\] must be a section, got 3"),
        (["rollout.samples_per_prompt=1"], r"rollout\.samples_per_prompt"),
        (["rollout.temperature=0"], r"rollout\.temperature"),
        (
            ["rollout.control_share=0.7"],
            r"rollout\.control_share: input should be less than or equal to 0\.5, got 0\.7",
        ),
        (["guard.reward_gap=-1"], r"guard\.reward_gap: input should be greater than or equal to 0, got -1"),
        (["rollout.top_p=0.9"], r"(?s)unknown key rollout\.top_p.*from the whole distribution.*evaluate\.top_p is for"),
        (["evaluate.top_p=0"], r"evaluate\.top_p: input should be greater than 0"),
        (["evaluate.top_p=0.9", "evaluate.temperature=0"], r"evaluate\.top_p = 0\.9 does nothing with evaluate\.temp"),
        (["correction.name=tsi"], r"(?s)unknown correction 'tsi'.*known: .*icepop.*none.*tis"),
        (["correction.weight_mx=2"], r"(?s)no setting 'weight_mx'.*weight_max"),
        (["correction.weight_max=-1"], r"weight_max must be a positive number"),
        (["train.lr"], r"(?s)section\.key=value, got 'train\.lr'.*--set train\.lr=1e-6"),
        (['log.sinks=["mlflow"]'], r"log\.sinks.*'mlflow'"),
        ([*R_KV, "attention.policy=rkv"], r"(?s)unknown compression 'rkv'.*did you mean 'r_kv'"),
        ([*R_KV, "attention.budget=9"], r"(?s)no setting 'budget'.*budget_tokens"),
        ([*R_KV, "attention.budget_tokens=8"], r"above the 8 tokens that always stay, got 8"),
    ],
)
def test_every_mistake_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_config(None, overrides)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention.kind=fixed"], r"attention\.kind must be one of dense, schedule, budget, compression, got 'fixed'"),
        (["attention.kind=schedul"], r"(?s)got 'schedul'.*did you mean 'schedule'"),
        (["attention.kind=3"], r"attention\.kind must be one of .*, got 3"),
        (["attention.kind=schedule"], r'(?s)attention\.name is missing, which .*"schedule" needs.*"qwen3-1.7b-0.86"'),
        (["attention.kind=budget", "attention.kv_budget_tokens=0"], r"^attention\.kv_budget_tokens: .*, got 0"),
        (
            ["attention.kind=budget", "attention.kv_budget=64"],
            r"(?s)attention\.kv_budget\n.*did you mean 'kv_budget_tokens'",
        ),
        (
            ["attention.kv_budget_tokens=512"],
            r'(?s)attention\.kv_budget_tokens is for attention\.kind = "budget", .* is "dense".*kind = "budget", or leave',
        ),
        ([*BUDGET, "attention.name=x"], r'attention\.name is for attention\.kind = "schedule", .* is "budget"'),
        ([*PRESET, "attention.kind=dense"], r"(?s)attention\.name is for .*--set attention=dense starts"),
        ([*PRESET, "attention.budget_tokens=64"], r'attention\.budget_tokens is for attention\.kind = "compression"'),
        (["control.by=controller"], r"(?s)control\.target is missing.*control\.target = 0\.86"),
        (["control.margin=0.05"], r'control\.margin is for control\.by = "controller", and control\.by is "nobody"'),
        ([*CONTROLLER, "control.at_least=0.8"], r'control\.at_least is for control\.by = "cheaper"'),
        (["control.by=guard"], r"(?s)control\.stricter is missing.*\[\"qwen3-1.7b-0.90\", \"dense\"\]"),
        (["control.patience=3"], r'is for control\.by = "controller" or "cheaper", and'),
        (["engine.sleep_level=1"], r'engine\.sleep_level is for engine\.kind = "vllm", and engine\.kind is "hf"'),
        (["distill.objective=kl", "distill.kl_coefficient=1"], r'kl_coefficient is for distill\.objective = "ppo_kl"'),
    ],
)
def test_what_belongs_to_another_kind_is_named_with_the_way_out(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_config(None, overrides)
    assert "\n" not in raised.value.message
    if "got 0" not in message:
        assert raised.value.hint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rollout.schedule=qwen3-1.7b-0.86", r"attention\.name"),
        ("rollout.kv_budget_tokens=64", r"attention\.kv_budget_tokens"),
        ("rollout.force_schedule=true", r"attention\.force"),
        ("rollout.engine=vllm", r"engine\.kind"),
        ("rollout.sleep_level=1", r"engine\.sleep_level"),
        ("compression.kind=r_kv", r"\[attention\] with kind"),
        ("controller.target=0.86", r"\[control\] with by"),
        ("guard.stricter=[]", r"control\.stricter"),
        ("guard.action=stricter", r'control\.by = "guard"'),
        ("distill.enabled=true", r"\[distill\] itself"),
        ("distill.cheaper=[]", r"control\.schedules"),
        ("distill.cheaper_at_least=0.8", r"control\.at_least"),
    ],
)
def test_a_key_of_version_0_1_is_told_where_it_is_now(old: str, new: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)hint: it is now .*{new}"):
        load_config(None, [old])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*R_KV, "engine=vllm"], r'"compression" needs engine\.kind = "hf", got "vllm"'),
        (GUARD, r'control\.by = "guard" moves a schedule, and attention\.kind = "dense" has none'),
        (
            [*R_KV, *CONTROLLER],
            r'control\.by = "controller" moves a schedule, and attention\.kind = "compression" has none',
        ),
        (
            [*R_KV, *NO_GROUP, "guard.action=stop"],
            r'guard\.action = "stop" needs guard\.at_least: attention\.kind = "compression"',
        ),
        (
            [*BUDGET, *NO_GROUP, "guard.action=stop"],
            r'guard\.action = "stop" needs guard\.at_least: attention\.kind = "budget"',
        ),
        ([*BUDGET, *NO_GROUP, *GUARD], r'control\.by = "guard" needs guard\.at_least'),
        ([*PRESET, *GUARD, "guard.action=off"], r'does nothing with guard\.action = "off"'),
        ([*BUDGET, *CONTROLLER, "control.start_share=0.3"], r"start_share = 0\.3 does nothing with attention\.kind"),
        ([*CONTROLLER, "guard.at_least=0.9"], r"guard\.at_least = 0\.9 asks for more than the controller holds"),
        (["distill.rank=4"], r"\[distill\] needs the sparse rollouts of a schedule"),
        ([*R_KV, "distill.rank=4"], r'\[distill\] needs .* got attention\.kind = "compression"'),
        ([*PRESET, *CHEAPER], r'control\.by = "cheaper" needs \[distill\]'),
        (
            [*PRESET, "distill.rank=4", "control.by=cheaper", 'control.schedules=["dense"]'],
            r'control\.by = "cheaper" goes on to "dense"',
        ),
        (GROUP, r'control_share = 0\.03125 asks for .* attention\.kind = "dense" has no sparse ones to compare with'),
        ([*BUDGET, *GROUP, "distill.rank=4"], r"control_share = 0\.03125 and \[distill\] exclude each other"),
        (
            [*BUDGET, "rollout.control_share=0.25", "rollout.control_share_first=0.125"],
            r"control_share_first = 0\.125 must be at least rollout\.control_share = 0\.25",
        ),
        (
            [*BUDGET, *NO_GROUP, "rollout.control_first_steps=9"],
            r"control_first_steps = 9 does nothing without a control group",
        ),
        (
            [*BUDGET, "distill.rank=4", "rollout.control_first_steps=9"],
            r"control_share is 0 by default: the engine holds the adapter",
        ),
        (
            [*BUDGET, *NO_GROUP, "guard.reward_gap=0.1"],
            r"guard\.reward_gap = 0\.1 does nothing without a control group",
        ),
        (
            [*BUDGET, *GROUP, "guard.action=stop", "guard.reward_gap=none"],
            r'guard\.action = "stop" needs guard\.at_least: attention\.kind = "budget"',
        ),
    ],
)
def test_sections_that_do_not_go_together_are_refused_with_a_hint(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_config(None, overrides)
    assert raised.value.hint
    assert "\n" not in raised.value.message


EVERY_KIND = [
    [],
    [*BUDGET, "distill.rank=4"],
    [*BUDGET, "distill.objective=kl", "distill.max_gradient_norm=none"],
    [*R_KV, "attention.budget_tokens=64"],
    [*CONTROLLER, "control.start_share=0.3"],
    [*BUDGET, *CONTROLLER],
    [*BUDGET, *GUARD, "guard.at_least=0.8"],
    [*PRESET, *CHEAPER, "distill.rank=4"],
    [*PRESET, *GROUP, "rollout.control_share_first=0.5", "rollout.control_first_steps=0", "guard.reward_gap=none"],
    [*CONTROLLER, *GROUP],
    ["engine=vllm", "engine.kv_cache_gib=2", "train.max_gradient_norm=none"],
    [
        "task.name=data",
        "data.contest_from=2024-08-01",
        'data.train="a.jsonl"',
        'reward.terms=[{use="m:f", settings={n=2}}]',
    ],
    ["correction.name=icepop", "correction.weight_min=0.25", 'log.run_name="a \\"b\\""'],
]


@pytest.mark.parametrize("overrides", EVERY_KIND, ids=" ".join)
def test_the_printed_and_the_stored_configuration_read_back_as_the_same_one(
    overrides: list[str], tmp_path: Path
) -> None:
    config = load_config(None, overrides)
    assert config_from(tomllib.loads(as_toml(config))) == config
    table = json.loads(write_config(config, tmp_path / "config.json").read_text())
    assert config_from(table) == config
    refuse_other_config(Path("run"), table, config)


def test_an_adapter_alone_has_only_what_it_reads() -> None:
    config = load_distill_config(None, [*BUDGET, "distill.rank=4", "train.steps=7"])
    assert distill_config_from(tomllib.loads(as_toml(config))) == config
    assert (config.distill.objective, config.distill.kl, config.distill.lr) == ("kl", "top_k", 1e-4)
    trainer = config.for_trainer()
    assert trainer.distill is not None and trainer.distill.model_dump() == config.distill.model_dump()
    assert (trainer.train.steps, trainer.guard.action, trainer.control.by) == (7, "off", "nobody")
    for section in ("guard", "control", "correction", "reward"):
        with pytest.raises(UserError, match=rf"(?s)unknown section \[{section}\].*only `sparroll train` has it"):
            load_distill_config(None, [*BUDGET, f"{section}.x=1"])
    for key in ("train.kl_coefficient", "train.lr", "rollout.dynamic_sampling", "evaluate.temperature"):
        with pytest.raises(UserError, match=rf"(?s)unknown key {key}.*only `sparroll train` has it"):
            load_distill_config(None, [*BUDGET, f"{key}=1"])
    with pytest.raises(UserError, match=r"attention\.kind must be one of schedule, budget, got 'dense'"):
        load_distill_config(None, ["attention=dense"])
    with pytest.raises(UserError, match=r"(?s)\[attention\] is missing.*sparroll distill --budget 512"):
        load_distill_config(None, ["train.steps=7"])
    with pytest.raises(UserError, match=r"attention\.kind is missing"):
        load_distill_config(None, ["attention.name=x"])


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(UserError, match="cannot read the configuration"):
        load_config(path)
    path.write_text("[train\nlr = 1")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(path)
    path.write_text("train = 3\n")
    with pytest.raises(UserError, match=r"\[train\] must be a section"):
        load_config(path)


def test_a_compression_is_recorded_with_all_its_settings() -> None:
    asked = ["attention.kind=compression", "attention.policy=snap_kv"]
    config = load_config(None, [*asked, "attention.budget_tokens=64"])
    table = config.model_dump(mode="json")
    assert table["attention"] == {
        "kind": "compression", "policy": "snap_kv", "budget_tokens": 64, "every_tokens": 128, "window_tokens": 8,
        "pool_tokens": 7, "pool": "max",
    }  # fmt: skip
    assert isinstance(config.attention, CompressionAttention)
    assert config.attention.make() == make_compression("snap_kv", budget_tokens=64)
    with pytest.raises(UserError, match=r"attention\.budget_tokens = 64, and .* = 128 is asked"):
        refuse_other_config(Path("run"), table, load_config(None, [*asked, "attention.budget_tokens=128"]))


def test_a_resumed_run_may_change_steps_logging_and_checkpoints_only() -> None:
    before = load_config(None, []).model_dump(mode="json")
    run, same = Path("run"), ["train.steps=500", "checkpoint.every_steps=1", "log.project=x"]
    refuse_other_config(run, before, load_config(None, same))
    with pytest.raises(UserError, match=r"(?s)train\.lr = 1e-06, and train\.lr = 0\.1 .*train\.steps, checkpoint, log"):
        refuse_other_config(run, before, load_config(None, ["train.lr=0.1"]))
    with pytest.raises(UserError, match=r"correction\.weight_max = null"):
        refuse_other_config(run, before, load_config(None, ["correction.weight_max=3"]))
    with pytest.raises(UserError, match=r'attention\.kind = "dense", and attention\.kind = "budget" is asked'):
        refuse_other_config(run, before, load_config(None, BUDGET))


def test_a_run_from_before_a_key_was_added_goes_on_with_its_default_and_no_other_value() -> None:
    before = load_config(None, BUDGET).model_dump(mode="json")
    del before["rollout"]["control_share"], before["guard"]["reward_gap"]
    refuse_other_config(Path("run"), before, load_config(None, [*BUDGET, *NO_GROUP]))
    for group in (GROUP, []):
        with pytest.raises(
            UserError, match=r"rollout\.control_share = 0\.0, and rollout\.control_share = 0\.03125 is asked"
        ):
            refuse_other_config(Path("run"), before, load_config(None, [*BUDGET, *group]))


def test_the_settings_of_a_control_group_are_those_of_rollout_and_guard() -> None:
    defaults = control_group_settings(load_config(None, [*BUDGET, *GROUP]))
    assert defaults == ControlGroupSettings()
    other = ["rollout.control_share_first=0.5", "rollout.control_first_steps=7", "guard.reward_gap=0.1"]
    given = control_group_settings(load_config(None, [*BUDGET, *GROUP, *other]))
    assert (given.share, given.share_first, given.first_steps, given.reward_gap) == (0.03125, 0.5, 7, 0.1)


def test_a_control_group_gives_the_guard_something_to_act_on() -> None:
    for acting in (["guard.action=stop"], ["control.by=guard", 'control.stricter=["dense"]']):
        config = load_config(None, [*BUDGET, *GROUP, *acting])
        guard = make_guard(config, starting_schedule(config))
        assert guard.at_least is None and guard.reward_gap is not None
        assert guard.notice(dense=False)[0].startswith("the guard watches the reward alone")
    without = load_config(None, [*BUDGET, *NO_GROUP])
    assert make_guard(without, starting_schedule(without)).reward_gap is None


@pytest.mark.parametrize("sparse", [BUDGET, PRESET, R_KV, [*BUDGET, "check.floor=0.1"], CONTROLLER])
def test_sparse_rollouts_have_a_control_group_unless_it_is_left_out(sparse: list[str]) -> None:
    config = load_config(None, sparse)
    assert config.control_share == 1 / 32 and not config.names_control_share
    assert "# the control group of dense rollouts" in as_toml(config)
    (told,) = notices(config)
    assert "0.03125 of the rollouts are dense, 0.25 in the first 30 steps" in told
    without = load_config(None, [*sparse, *NO_GROUP])
    assert without.control_share == 0 and notices(without) == [] and "control group" not in as_toml(without)
    assert as_command(config) == as_command(load_config(None, [*sparse, *GROUP]))
    assert "--set rollout.control_share=0.0" in as_command(without)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([], 'attention.kind = "dense" has no sparse rollouts'),
        ([*BUDGET, "distill.rank=4"], "the engine holds the adapter of [distill]"),
        ([*BUDGET, "train.whole_union=true", "correction.name=jackpot"], "train.whole_union scores all rollouts"),
        ([*BUDGET, "train.rollouts_behind_steps=2"], "train.rollouts_behind_steps = 2 samples with older weights"),
    ],
)
def test_where_no_control_group_is_possible_the_default_is_none_and_says_why(overrides: list[str], why: str) -> None:
    config = load_config(None, overrides)
    assert config.control_share == config.rollout.control_share == 0
    assert f"\n# no control group: {why}" in as_toml(config)
    assert "control_share" not in as_command(config)
    assert [why in told for told in notices(config)] == ([True] if overrides else [])
    with pytest.raises(UserError, match="control_share"):
        load_config(None, [*overrides, *GROUP])
    assert notices(load_config(None, [*overrides, *NO_GROUP])) == []


@pytest.mark.parametrize("config", [TrainConfig, DistillConfig])
def test_every_field_says_what_it_does(config: type[Section]) -> None:
    for section in config.model_fields.values():
        for kind in kinds_of(section):
            for name, field in kind.model_fields.items():
                assert field.description, f"{kind.__name__}.{name} has no docstring"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.lr=1e-5", "train.max_gradient_norm=none", "model.device=cuda:1"],
        [*PRESET, *CONTROLLER],
        [*BUDGET, "correction=mis", "correction.weight_min=0.25", "distill=ppo_kl"],
        [*R_KV, "attention.window_tokens=4", "log.sinks=[]"],
        ['reward.terms=[{use = "mine:brief", settings = {most = 3}}]', "data.eval=['x y.jsonl']", "task.name=data"],
    ],
)
def test_a_command_holds_everything_that_its_run_was_told(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    words = shlex.split(as_command(config))
    assert words[:2] == ["sparroll", "train"]
    assert words[2::2] == ["--set"] * (len(words) // 2 - 1)
    assert load_config(None, words[3::2]) == config
