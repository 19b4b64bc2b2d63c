"""A random Qwen3 that can read and write any text, byte by byte, with a chat template that knows thinking; and a script
that says what it answers.

A scripted engine is HFEngine with its own choice of tokens replaced: log-probabilities, top-k lists, attention and lengths
are those of the weights, only the tokens are given. So rewards and accuracies of a whole run are known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sparroll.engines import sampling
from sparroll.engines.hf import run as hf_run

END, PAD = "<end>", "<pad>"
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}"
)
Script = Callable[[str, int, bool], str]
"""(prompt as the model reads it, number of the sample, whether the rollout is sparse) -> response. The end token follows,
and what does not fit is cut."""


_draw = hf_run.Run._draw


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    signs = sorted(ByteLevel.alphabet())
    inner = Tokenizer(BPE({sign: number for number, sign in enumerate([PAD, END, *signs])}, []))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def write_model(folder: Path, context_tokens: int = 8192, name: str = "byte-model", head_dim: int = 8) -> str:
    """Three layers with grouped heads. name: of the folder inside `folder`, which a schedule's model is compared with."""
    torch.manual_seed(0)
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=context_tokens, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / name)
    words.save_pretrained(folder / name)
    return str(folder / name)


def follow(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every HFEngine says what the script has it say."""
    words = tokenizer()
    known: dict[tuple[str, int, bool], list[int]] = {}

    def token(request: hf_run.Request, sparse: bool) -> int:
        key = (words.decode(request.prompt_ids), request.sample_index, sparse)
        if key not in known:
            known[key] = [*words(script(*key))["input_ids"], words.eos_token_id]
        return known[key][len(request.response_ids)]

    def scripted(run: hf_run.Run, logp: Tensor, first_row: int) -> None:
        sparse = run.schedule is not None or run.compression is not None
        wanted = torch.tensor([token(request, sparse) for request in run.active[first_row:]])
        with monkeypatch.context() as during:
            during.setattr(sampling, "sample", lambda *_, **__: wanted)
            _draw(run, logp, first_row)

    monkeypatch.setattr(hf_run.Run, "_draw", scripted)
