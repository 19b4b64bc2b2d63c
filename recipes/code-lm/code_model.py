"""The decoder that is trained: its architecture, its folder, and the weights in it. No training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from sparroll import files
from sparroll.errors import UserError

END_ID = 0
LONGEST_TOKENS = 16_384
WEIGHTS = "model.safetensors"


def new_config(
    vocabulary: int,
    layers: int = 12,
    hidden: int = 768,
    mlp: int = 2048,
    heads: int = 12,
    kv_heads: int = 4,
    head_dim: int = 64,
    longest_tokens: int = LONGEST_TOKENS,
) -> Qwen3Config:
    """88M parameters at a vocabulary of 16,384."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=longest_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )


def small_config(vocabulary: int) -> Qwen3Config:
    """For dry runs on a CPU: four layers of 32."""
    return new_config(vocabulary, 4, 32, 64, heads=6, kv_heads=2, head_dim=16, longest_tokens=512)


def new_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """Random weights in fp32. What a layer adds to the stream starts smaller, the deeper the model is."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    shrink = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(shrink)
            layer.mlp.down_proj.weight.mul_(shrink)
    return model


def weights_of(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """The weights in fp32 on the CPU, the tied output matrix left out."""
    named = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in named.items()}


def write_folder(folder: Path, model: Qwen3ForCausalLM, tokenizer: Path) -> Path:
    """What `from_pretrained` reads: weights in bf16, a config that says float32, because the model computes in fp32 from
    them, and the tokenizer. The weights are written last, each file at once."""
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), clean_up_tokenization_spaces=False, model_max_length=LONGEST_TOKENS
    ).save_pretrained(folder)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    described = model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    described.pop("_name_or_path", None)
    files.write_text(folder / "config.json", json.dumps(described, indent=2, sort_keys=True) + "\n")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(model).items()}
    return files.write_bytes(folder / WEIGHTS, save(weights, metadata={"format": "pt"}))


def load_folder(folder: Path) -> Qwen3ForCausalLM:
    """The model in fp32, with exactly the values in the file."""
    if not (folder / WEIGHTS).exists():
        raise UserError(
            f"there is no trained model in {folder}", "train one: python recipes/code-lm/train_code.py --out ..."
        )
    table = files.read_table(folder / "config.json")
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(table)).float()
    weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    missing, foreign = model.load_state_dict(weights, strict=False)
    if foreign or missing not in ([], ["lm_head.weight"]):
        raise UserError(f"{folder / WEIGHTS} is not of this architecture: {[*missing, *foreign][:3]}", "train it anew")
    model.tie_weights()
    return model.eval()
