"""Model shapes from configs: the built-in ones are rebuilt from the published config values."""

import json

import pytest

from sparroll.errors import UserError
from sparroll.plan.model_shape import BUILT_IN, model_shape

QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
PUBLISHED = {
    "Qwen3-1.7B": (2048, 28, 6144, 16, True),
    "Qwen3-4B": (2560, 36, 9728, 32, True),
    "Qwen3-8B": (4096, 36, 12288, 32, False),
    "Qwen3-14B": (5120, 40, 17408, 40, False),
}


def _config(name):
    hidden, layers, intermediate, heads, tied = PUBLISHED[name]
    return {
        **QWEN3,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        "_name_or_path": name,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_shapes_follow_from_their_configs(name):
    assert model_shape(_config(name)) == BUILT_IN[name]


def test_a_shape_by_name_needs_no_network():
    assert model_shape("Qwen/Qwen3-4B") is model_shape("qwen3-4b") is BUILT_IN["Qwen3-4B"]
    assert model_shape("Qwen3-4B").kv_width == 36 * 8 * 128
    assert model_shape("Qwen3-4B").gqa_ratio == 4


def test_a_folder_a_file_and_a_config_object_agree(tmp_path):
    from transformers import AutoConfig

    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config("Qwen3-1.7B")))
    by_folder, by_file = model_shape(folder), model_shape(str(folder / "config.json"))
    assert by_folder.name == "my-model"
    assert by_folder.parameters == by_file.parameters == BUILT_IN["Qwen3-1.7B"].parameters
    settings = _config("Qwen3-1.7B")
    settings.pop("model_type")
    assert model_shape(AutoConfig.for_model("qwen3", **settings)).layers == 28


def test_experts_are_counted_by_use():
    shape = model_shape(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 100,
        }
    )
    assert shape.expert_parameters == 2 * 8 * 3 * 64 * 32
    assert shape.parameters_used(1) == shape.parameters - shape.expert_parameters * 6 / 8
    assert shape.parameters_used(10_000) == pytest.approx(shape.parameters)


def test_unsupported_attention_is_refused_with_the_reason():
    with pytest.raises(UserError, match="sliding"):
        model_shape({"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "vocab_size": 100})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "nonsense"}, "unknown model_type 'nonsense'"),
        ({"layers": 3}, "unknown model_type None"),
        (17, "cannot read a model's shape from int"),
        ({"model_type": "qwen3", "hidden_size": "wide"}, r"(?s)the config of 'qwen3' describes no model.*hint: give"),
        (
            {"model_type": "qwen3", "num_attention_heads": 0},
            r"(?s)the config of 'qwen3' describes no model.*hint: give",
        ),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(UserError, match=message):
        model_shape(model)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"num_hidden_layers": "28"}, "the config of .* describes no model: .*num_hidden_layers.*hint: give"),
        ({"num_hidden_layers": -2}, "the config of .* describes no model: .*num_hidden_layers.*hint: give"),
        ({"num_hidden_layers": 0}, r"describes no model: num_hidden_layers must be 1 or more, got 0\nhint: give"),
        ({"model_type": "llama", "num_hidden_layers": -2}, "num_hidden_layers must be 1 or more, got -2"),
        ({"hidden_size": 0}, "describes no model: hidden_size must be 1 or more, got 0"),
        ({"vocab_size": 0}, "describes no model: vocab_size must be 1 or more, got 0"),
        ({"torch_dtype": 3}, "the config of .* describes no model: .*hint: give"),
    ],
)  # fmt: skip
def test_a_field_that_no_model_has_is_named_in_every_form(tmp_path, field, message):
    config = _config("Qwen3-1.7B") | field
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(json.dumps(config))
    for model in (config, tmp_path, tmp_path / "config.json", tmp_path / "other.json"):
        with pytest.raises(UserError, match=f"(?s){message}"):
            model_shape(model)


def test_a_missing_folder_is_refused_with_the_built_in_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"(?s)cannot read the config of .*built in: Qwen3-1\.7B"):
        model_shape(str(tmp_path / "nowhere"))


def test_a_broken_config_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        model_shape(path)
