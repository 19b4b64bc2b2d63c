"""A schedule is compared with the model itself, not with the name of its folder: architecture, config, weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, OlmoConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig, SmolLM3Config

from cli_runs import error_of, save_model
from sparroll.cli import main
from sparroll.engines import HFEngine
from sparroll.errors import UserError
from sparroll.models import fingerprint
from sparroll.models.fingerprint import ModelFingerprint
from sparroll.schedule import Schedule

CONFIG = Qwen3Config(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=50
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models whose folders have the same name, and a copy of the first under another name."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "one" / "model")
    save_model(folder / "two" / "model", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    save_model(folder / "other-weights" / "model", initializer_range=0.3)
    shutil.copytree(folder / "one" / "model", folder / "one" / "copy")
    return folder


@pytest.fixture(scope="module")
def schedule(models: Path) -> Schedule:
    one = str(models / "one" / "model")
    return replace(Schedule.fixed(64), model=one, fingerprint=fingerprint.of_model(one), name="mine")


def test_a_fingerprint_holds_the_sizes_and_survives_a_file(tmp_path: Path) -> None:
    made = fingerprint.of_config(CONFIG)
    sizes = ("qwen3", 3, 64, 4, 2, 16, 50)
    assert replace(made, config=None) == ModelFingerprint(*sizes)
    path = replace(Schedule.fixed(64), model="a/b", fingerprint=made).save(tmp_path / "made.toml")
    assert Schedule.load(path).fingerprint == made


def test_what_a_config_computes_with_counts_and_what_it_is_called_does_not() -> None:
    made = fingerprint.of_config(CONFIG)
    table = CONFIG.to_dict()
    same = Qwen3Config(**table | {"dtype": "bfloat16", "use_cache": False, "transformers_version": "9.9"})
    assert made.difference(fingerprint.of_config(same)) is None
    for change, said in (
        ({"rms_norm_eps": 1e-3}, "the config"),
        ({"intermediate_size": 77}, "the config"),
        ({"num_hidden_layers": 4, "layer_types": None}, "the number of layers is 4 instead of 3"),
        ({"vocab_size": 51}, "the vocabulary's size is 51 instead of 50"),
    ):
        difference = made.difference(fingerprint.of_config(Qwen3Config(**table | change)))
        assert difference is not None and difference.startswith(said)
    llama = LlamaConfig(**{name: table[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")})
    assert made.difference(fingerprint.of_config(llama)) == "the architecture is llama instead of qwen3"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (SmolLM3Config, {"no_rope_layers": [0, 0, 0]}),
        (Qwen3MoeConfig, {"mlp_only_layers": [1]}),
        (OlmoConfig, {"clip_qkv": 8.0}),
    ],
)
def test_layers_that_differ_from_the_others_and_a_cut_of_qkv_count(
    kind: type[PretrainedConfig], change: dict[str, object]
) -> None:
    plain, other = (fingerprint.of_config(kind(num_hidden_layers=3, **each)) for each in ({}, change))
    difference = plain.difference(other)
    assert difference is not None and difference.startswith("the config")


def test_an_empty_list_of_such_layers_leaves_the_digest_as_it_was() -> None:
    config = Qwen3MoeConfig(num_hidden_layers=3)
    assert config.mlp_only_layers == []
    made = fingerprint.of_config(config)
    del config.mlp_only_layers
    assert fingerprint.of_config(config) == made


def test_a_folder_of_the_same_name_with_another_config_is_refused(models: Path, schedule: Schedule) -> None:
    schedule.check_model(str(models / "one" / "model"))
    schedule.check_model(str(models / "one" / "copy"))
    with pytest.raises(UserError, match="not for .*two/model: the config .* with the digest is"):
        schedule.check_model(str(models / "two" / "model"))
    with pytest.raises(UserError, match="not for .*other-weights/model: its weights are others"):
        schedule.check_model(str(models / "other-weights" / "model"))
    any_weights = replace(schedule, fingerprint=replace(schedule.fingerprint, weights=None))
    any_weights.check_model(str(models / "other-weights" / "model"))


def test_an_engine_made_in_python_refuses_the_schedule_of_another_model(models: Path, schedule: Schedule) -> None:
    other, own = (HFEngine(models / name / "model") for name in ("two", "one"))
    with pytest.raises(UserError, match=r"'mine' was made for .*\nhint: .*Schedule.load\(..., force=True\)"):
        other.set_schedule(schedule)
    with pytest.raises(UserError, match="was made for Qwen/Qwen3-1.7B, not for .*: the number of layers is 3"):
        HFEngine(own.model, schedule="qwen3-1.7b-0.86")
    other.set_schedule(replace(schedule, any_model=True))
    own.set_schedule(schedule)
    # A module that is being trained has other weights than its name.
    HFEngine(own.model, schedule=schedule)


def test_a_checkpoint_counts_as_the_model_that_its_training_began_with(
    models: Path, schedule: Schedule, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "step-000002" / "model"
    shutil.copytree(models / "other-weights" / "model", checkpoint)
    began = tmp_path / "step-000002" / "config.json"
    began.write_text(json.dumps({"model": {"name": str(models / "one" / "model")}}))
    schedule.check_model(str(checkpoint))
    # The other way round: a schedule that was made on the checkpoint fits where its training began.
    made_on = replace(schedule, model=str(checkpoint), fingerprint=fingerprint.of_model(str(checkpoint)))
    made_on.check_model(str(models / "one" / "model"))
    began.write_text(json.dumps({"model": {"name": str(models / "other-weights" / "model")}}))
    with pytest.raises(UserError, match="its weights are others"):
        schedule.check_model(str(checkpoint))


def test_new_weights_in_the_same_folder_are_other_weights(models: Path, schedule: Schedule, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models / "one" / "model", folder)
    here = replace(schedule, model=str(folder), fingerprint=fingerprint.of_model(str(folder)))
    here.check_model(str(folder))
    shutil.copy(models / "other-weights" / "model" / "model.safetensors", folder)
    with pytest.raises(UserError, match="its weights are others"):
        here.check_model(str(folder))


def test_without_files_names_are_compared(schedule: Schedule) -> None:
    replace(schedule, model="me/mine").check_model("elsewhere/Mine")
    with pytest.raises(UserError, match="was made for me/mine, not for me/another"):
        replace(schedule, model="me/mine").check_model("me/another")


def test_a_command_checks_it_and_can_be_forced(
    models: Path, schedule: Schedule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, made = tmp_path / "prompts.txt", schedule.save(tmp_path / "mine.toml")
    prompts.write_text("a b c d\n")
    asked = ["rollout", "--prompts", str(prompts), "--max-new-tokens", "2", "--schedule", str(made)]
    for name, reason in (("two", "the config"), ("other-weights", "its weights are others")):
        model = ["--model", str(models / name / "model"), "--out", str(tmp_path / name)]
        message, hint = error_of([*asked, *model], capsys)
        assert reason in message
        assert "--force-schedule" in hint
        assert main([*asked, *model, "--force-schedule"]) == 0
        capsys.readouterr()
