"""The model folder that `from_pretrained` reads: architecture, tokenizer, how weights are written. No training here."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sparroll.tasks.synthetic.kinds import BOS, EOS, PAD, UNKNOWN, VOCABULARY

WORD_ID = {word: index for index, word in enumerate(VOCABULARY)}
MAX_POSITIONS = 4096


def new_config(layers: int = 6, hidden: int = 192, mlp: int = 512, rope_theta: float = 1e6) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=0.04,
        pad_token_id=WORD_ID[PAD],
        bos_token_id=WORD_ID[BOS],
        eos_token_id=WORD_ID[EOS],
    )


def new_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float()


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, words separated by one space. It adds nothing of its own, so encode and decode are inverses."""
    words = Tokenizer(WordLevel(WORD_ID, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def stored_weights(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """bf16 copies of the weights, the tied output matrix left out."""
    named = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in named.items()}


def load_weights(model: Qwen3ForCausalLM, weights: dict[str, torch.Tensor]) -> Qwen3ForCausalLM:
    """The model in fp32 with exactly the values that the file holds, so that what is measured is what is shipped."""
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    return model.eval()


def write_folder(folder: Path, config: Qwen3Config) -> None:
    """Everything but the weights. The config says float32: `from_pretrained` computes in fp32 from the bf16 file."""
    folder.mkdir(parents=True, exist_ok=True)
    new_tokenizer().save_pretrained(folder)
    described = config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    described.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
