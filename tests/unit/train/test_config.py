"""Configuration: files, overrides, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from sparroll.compression import make_compression
from sparroll.errors import UserError
from sparroll.train.config.file import config_from, load_config, refuse_other_config, write_config
from sparroll.train.config.sections import TrainConfig


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nlr = 1e-4\nsteps = 7\n[correction]\nname = "icepop"\nweight_max = 3.0\n')
    config = load_config(path, ["train.lr=3e-4", "rollout.schedule=qwen3-1.7b-0.86", "guard.at_least=0.8"])
    assert (config.train.lr, config.train.steps, config.train.clip_high) == (3e-4, 7, 0.28)
    assert config.correction.model_dump() == {"name": "icepop", "weight_max": 3.0}
    assert config.rollout.schedule == "qwen3-1.7b-0.86"
    assert config.guard.at_least == 0.8


def test_none_names_the_correction_where_a_name_is_asked_for() -> None:
    assert load_config(None, ["correction.name=none"]).correction.name == "none"


def test_override_values_are_read_like_toml_and_none_clears() -> None:
    config = load_config(None, ["train.max_gradient_norm=none", 'log.sinks=["console"]', "task.chat_template=true"])
    assert config.train.max_gradient_norm is None
    assert config.log.sinks == ("console",)
    assert config.task.chat_template is True


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lrr=1"], r"(?s)unknown key train\.lrr.*did you mean 'lr'"),
        (["trian.lr=1"], r"(?s)unknown section \[trian\].*did you mean 'train'"),
        (["train.lr=fast"], r"train\.lr: input should be a valid number.*'fast'"),
        (["train.clip_low=2"], r"train\.clip_low: input should be less than 1, got 2"),
        (["train.steps=0"], r"train\.steps"),
        (["rollout.samples_per_prompt=1"], r"rollout\.samples_per_prompt"),
        (["rollout.temperature=0"], r"rollout\.temperature"),
        (["correction.name=tsi"], r"(?s)unknown correction 'tsi'.*known: .*icepop.*none.*tis"),
        (["correction.weight_mx=2"], r"(?s)no setting 'weight_mx'.*weight_max"),
        (["correction.weight_max=-1"], r"weight_max must be a positive number"),
        (["train.lr"], r"(?s)section\.key=value, got 'train\.lr'.*--set train\.lr=1e-6"),
        (["rollout.schedule=x", "rollout.kv_budget_tokens=64"], r"exclude each other"),
        (["guard.action=stricter"], r"needs guard\.stricter"),
        (['log.sinks=["mlflow"]'], r"log\.sinks.*'mlflow'"),
        (["compression.kind=rkv"], r"(?s)unknown compression 'rkv'.*did you mean 'r_kv'"),
        (["compression.kind=r_kv", "compression.budget=9"], r"(?s)no setting 'budget'.*budget_tokens"),
        (["compression.kind=r_kv", "compression.budget_tokens=8"], r"above the 8 tokens that always stay, got 8"),
        (["compression.budget_tokens=64"], r"compression\.budget_tokens does nothing without a compression"),
        (["compression.kind=r_kv", "rollout.kv_budget_tokens=64"], r"exclude each other; leave one out"),
        (["compression.kind=r_kv", "rollout.schedule=qwen3-1.7b-0.86"], r"exclude each other; leave one out"),
        (["compression.kind=r_kv", "rollout.engine=vllm"], r'needs rollout\.engine = "hf", got "vllm"'),
        (
            ["compression.kind=r_kv", "guard.action=stricter", 'guard.stricter=["dense"]'],
            r'"stricter" goes through schedules, and a compression has none',
        ),
        (["compression.kind=r_kv", "distill.enabled=true"], r"distill\.enabled replays a schedule"),
        (["compression.kind=r_kv", "guard.action=stop"], r"needs guard\.at_least"),
    ],
)
def test_every_mistake_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_config(None, overrides)
    assert "\n" not in raised.value.message


SPARSE = "rollout.kv_budget_tokens=512"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["distill.rank=4", SPARSE],
            r"(?s)distill\.rank does nothing without distill\.enabled.*distill\.enabled = true",
        ),
        (["distill.objective=kl", "distill.kl=top_k"], r"distill\.kl does nothing without distill\.enabled"),
        (
            ["distill.enabled=true", SPARSE, "distill.cheaper_patience=1"],
            r"(?s)distill\.cheaper_patience does nothing without distill\.cheaper\n.*distill\.cheaper = \[",
        ),
        (
            ["distill.enabled=true", SPARSE, "distill.objective=kl", "distill.kl_coefficient=0.5"],
            r'(?s)distill\.kl_coefficient = 0\.5 does nothing with .* = "kl".*"ppo_kl"',
        ),
        (["controller.margin=0.05"], r"(?s)controller\.margin does nothing without controller\.target.*0\.86"),
        (
            ["controller.target=0.86", "controller.start_share=0.3", SPARSE],
            r"(?s)start_share = 0\.3 does nothing beside rollout\.kv_budget_tokens.*leave one",
        ),
        (
            ["controller.target=0.86", "controller.start_share=0.3", "rollout.schedule=qwen3-1.7b-0.86"],
            r"start_share = 0\.3 does nothing beside rollout\.schedule",
        ),
        (['guard.stricter=["dense"]'], r'(?s)guard\.stricter does nothing with guard\.action = "warn".*"stricter"'),
        (["guard.action=stop", 'guard.stricter=["dense"]'], r'guard\.stricter does nothing .* = "stop"'),
    ],
)
def test_what_would_have_no_effect_is_refused_with_a_hint(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_config(None, overrides)
    assert raised.value.hint
    assert "\n" not in raised.value.message


def test_a_section_can_be_turned_off_whatever_else_it_holds() -> None:
    off = ["distill.enabled=false", "distill.rank=4", "distill.cheaper_patience=1", "distill.kl_coefficient=0.5"]
    off += [
        "controller.target=none",
        "controller.start_share=0.3",
        SPARSE,
        "guard.action=off",
        'guard.stricter=["dense"]',
    ]
    config = load_config(None, off)
    assert (config.distill.rank, config.controller.start_share) == (4, 0.3)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["distill.enabled=true", SPARSE],
        ["distill.enabled=true", "distill.objective=kl", SPARSE],
        ["controller.target=0.86", "controller.start_share=0.3"],
        ["controller.target=0.86", SPARSE],
        ["guard.at_least=0.8", "guard.action=stricter", 'guard.stricter=["dense"]', SPARSE],
    ],
)
def test_a_stored_configuration_loads_again_with_every_field_given(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    assert config_from(config.model_dump(mode="json")) == config


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


def test_the_resolved_configuration_reads_back_as_the_same_one(tmp_path: Path) -> None:
    config = load_config(None, ["correction.name=icepop", "correction.weight_min=0.25", "train.seed=5"])
    table = json.loads(write_config(config, tmp_path / "config.json").read_text())
    assert config_from(table) == config
    assert table["train"]["lr"] == 1e-6
    refuse_other_config(Path("run"), table, config)


def test_a_compression_is_recorded_with_all_its_settings() -> None:
    config = load_config(None, ["compression.kind=snap_kv", "compression.budget_tokens=64", "guard.at_least=0.8"])
    table = config.model_dump(mode="json")
    assert table["compression"] == {
        "kind": "snap_kv", "budget_tokens": 64, "every_tokens": 128, "window_tokens": 8, "pool_tokens": 7, "pool": "max",
    }  # fmt: skip
    assert config_from(table) == config
    assert config.compression.make() == make_compression("snap_kv", budget_tokens=64)
    assert load_config(None, []).compression.make() is None
    with pytest.raises(UserError, match=r"compression\.budget_tokens = 64, and .* = 128 is asked"):
        refuse_other_config(
            Path("run"),
            table,
            load_config(None, ["compression.kind=snap_kv", "compression.budget_tokens=128", "guard.at_least=0.8"]),
        )


def test_a_resumed_run_may_change_steps_logging_and_checkpoints_only() -> None:
    before = load_config(None, []).model_dump(mode="json")
    refuse_other_config(
        Path("run"), before, load_config(None, ["train.steps=500", "checkpoint.every_steps=1", "log.project=x"])
    )
    with pytest.raises(UserError, match=r"(?s)train\.lr = 1e-06, and train\.lr = 0\.1 .*train\.steps, checkpoint, log"):
        refuse_other_config(Path("run"), before, load_config(None, ["train.lr=0.1"]))
    with pytest.raises(UserError, match=r"correction\.weight_max = null"):
        refuse_other_config(Path("run"), before, load_config(None, ["correction.weight_max=3"]))


def test_every_field_says_what_it_does() -> None:
    for section in TrainConfig.model_fields.values():
        kind = section.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name} has no docstring"
