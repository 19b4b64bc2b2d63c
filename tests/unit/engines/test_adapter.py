"""The adapter beside a model: it adds nothing at first, never reaches the model, and merges into what it computes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from sparroll.engines.adapter import Adapter, LoraSettings
from sparroll.errors import UserError

IDS = torch.arange(2, 32)[None]


def qwen(tied: bool = True, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype).eval()


def gpt2() -> PreTrainedModel:
    """Its layers keep their matrices transposed."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()


def filled(model: PreTrainedModel, settings: LoraSettings = LoraSettings()) -> Adapter:
    adapter = Adapter(model, settings)
    torch.manual_seed(1)
    for parameter in adapter.parameters:
        nn.init.normal_(parameter, std=0.2)
    return adapter


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def test_a_new_adapter_is_the_model_to_the_bit_and_draws_nothing_from_the_global_generator() -> None:
    model = qwen()
    state = torch.get_rng_state()
    adapter = Adapter(model)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(logits(adapter.adapted), logits(model))
    for name, merged in adapter.merged().items():
        assert torch.equal(merged, model.state_dict()[name]), name


def test_the_same_seed_makes_the_same_adapter_and_another_one_another() -> None:
    one, same, other = (Adapter(qwen(), seed=seed).parameters for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", [qwen, lambda: qwen(tied=False), gpt2], ids=["tied", "untied", "transposed"])
def test_merged_weights_compute_what_the_adapter_computes(make: object) -> None:
    model = make()  # type: ignore[operator]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = logits(model)
    adapter = filled(model)
    merged_model = copy.deepcopy(model)
    merged_model.load_state_dict(adapter.merged())
    difference = (logits(merged_model) - logits(adapter.adapted)).abs().max()
    assert difference < 1e-5 * logits(adapter.adapted).abs().max()
    assert (logits(adapter.adapted) - plain).abs().max() > 0.05
    assert torch.equal(logits(model), plain)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_merged_weights_are_rounded_once_to_the_dtype_asked_for() -> None:
    model = qwen()
    adapter = filled(model)
    exact, rounded = adapter.merged(), adapter.merged(torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(exact[name].bfloat16(), rounded[name])
    # What has no adapter is the model's own memory, in its own dtype.
    for state in (exact, rounded):
        assert state["model.norm.weight"].data_ptr() == model.state_dict()["model.norm.weight"].data_ptr()


def test_what_is_written_into_the_model_is_seen_by_the_adapted_one_and_nothing_comes_back() -> None:
    model = qwen()
    adapter = filled(model)
    before = logits(adapter.adapted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).logits.square().mean().backward()
    assert all(parameter.grad is None for parameter in adapter.parameters)
    optimizer.step()
    adapter.check_shared()
    assert not torch.equal(logits(adapter.adapted), before)

    optimizer.zero_grad(set_to_none=True)
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    inner = torch.optim.SGD(adapter.parameters, lr=10.0)
    adapter.adapted(IDS).logits.square().mean().backward()
    inner.step()
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, frozen[name]) for name, value in model.state_dict().items())
    adapter.adapted.config._attn_implementation = "eager"
    assert model.config._attn_implementation != "eager"


def test_weights_that_were_moved_away_are_noticed() -> None:
    model = qwen()
    adapter = Adapter(model)
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.clone()
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.up_proj\S* no longer shares"):
        adapter.check_shared()


def test_tied_embeddings_stay_tied_and_without_an_adapter() -> None:
    adapted = Adapter(qwen()).adapted
    assert adapted.get_input_embeddings().weight is adapted.get_output_embeddings().weight
    with pytest.raises(UserError, match="output head is not supported"):
        Adapter(qwen(), LoraSettings(target_modules=("lm_head",)))
    with pytest.raises(UserError, match="input embeddings is not supported"):
        Adapter(qwen(), LoraSettings(target_modules=("embed_tokens",)))


def test_only_the_layers_that_were_named_get_an_adapter_and_unknown_ones_are_refused() -> None:
    adapter = Adapter(qwen(), LoraSettings(rank=2, target_modules=("q_proj", "v_proj")))
    assert len(adapter.parameters) == 3 * 2 * 2
    assert {min(parameter.shape) for parameter in adapter.parameters} == {2}
    with pytest.raises(UserError, match=r"the adapter does not fit Qwen3ForCausalLM.*query"):
        Adapter(qwen(), LoraSettings(target_modules=("query",)))


def test_the_folder_is_a_plain_peft_folder_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    model = qwen()
    adapter = filled(model, LoraSettings(rank=3, alpha=5.0))
    adapter.write(tmp_path / "adapter", "some/model")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    expected = logits(adapter.adapted)
    assert torch.equal(logits(Adapter.load(model, tmp_path / "adapter").adapted), expected)
    assert torch.equal(logits(PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")), expected)
    other = Adapter(model, LoraSettings(rank=3, alpha=5.0), seed=9)
    other.read(tmp_path / "adapter")
    assert torch.equal(logits(other.adapted), expected)
    other.write(tmp_path / "again", "some/model")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = qwen()
    with pytest.raises(UserError, match="there is no adapter in"):
        Adapter.load(model, tmp_path)
    Adapter(model, LoraSettings(rank=3)).write(tmp_path / "three", "")
    with pytest.raises(UserError, match=r"must have shape \[2, 48\], got \[3, 48\]"):
        Adapter(model, LoraSettings(rank=2)).read(tmp_path / "three")
    Adapter(model, LoraSettings(target_modules=("q_proj",))).write(tmp_path / "few", "")
    with pytest.raises(UserError, match="is only in one of them"):
        Adapter(model).read(tmp_path / "few")
    weights = tmp_path / "three" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"(?s)cannot read .*adapter_model.*copy or train"):
        Adapter(model, LoraSettings(rank=3)).read(tmp_path / "three")
    config = tmp_path / "few" / "adapter_config.json"
    plain = config.read_text()
    config.write_text(plain.replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(UserError, match="an adapter with use_dora"):
        Adapter.load(model, tmp_path / "few")


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_belongs_to_a_changed_base_is_refused_and_changes_nothing(start: str, tmp_path: Path) -> None:
    """peft would take a part out of the weights that the policy and the adapter share."""
    model = qwen()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Adapter(model).write(tmp_path / "adapter", "")
    config = tmp_path / "adapter" / "adapter_config.json"
    plain = config.read_text()
    assert '"init_lora_weights": true' in plain
    config.write_text(plain.replace('"init_lora_weights": true', f'"init_lora_weights": "{start}"'))
    with pytest.raises(UserError, match=f"(?s)init_lora_weights = '{start}'.*convert it to a plain LoRA adapter"):
        Adapter.load(model, tmp_path / "adapter")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    config.write_text(plain.replace('"init_lora_weights": true', '"init_lora_weights": "gaussian"'))
    Adapter.load(model, tmp_path / "adapter")


def test_a_bf16_model_has_a_bf16_view_and_an_fp32_adapter() -> None:
    model = qwen(dtype=torch.bfloat16)
    adapter = filled(model)
    assert {parameter.dtype for parameter in adapter.parameters} == {torch.float32}
    adapter.check_shared()
    assert adapter.merged()["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    merged_model = copy.deepcopy(model)
    merged_model.load_state_dict(adapter.merged())
    assert (logits(merged_model) - logits(adapter.adapted)).abs().max() < 0.1
