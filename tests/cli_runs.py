"""Running a command line in this process, and a small random model with a tokenizer to run it on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sparroll.cli import main

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789"]
CONTEXT_TOKENS = 128


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Message and hint of a command that must fail as a user's error does: exit code 2, nothing else printed."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    first, _, rest = output.err.partition("\n")
    assert first.startswith("error: "), output.err
    assert rest.count("\n") <= 1, output.err
    assert "Traceback" not in output.err
    return first.removeprefix("error: "), rest.strip().removeprefix("hint: ")


def save_model(folder: Path, torch_seed: int = 0, **changes: object) -> Path:
    """A random Qwen3 of three layers with a word tokenizer, as a folder for transformers."""
    torch.manual_seed(torch_seed)
    settings = {
        "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True,
    } | changes  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
