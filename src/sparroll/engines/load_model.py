"""Loads models and tokenizers from a packaged name, a folder or the hub. Weights must be safetensors, and no code from
the hub is run."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sparroll.engines.devices import take_device
from sparroll.errors import UserError
from sparroll.models import resolve


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer, without the model."""
    try:
        return AutoTokenizer.from_pretrained(resolve(str(name)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot load the tokenizer of {str(name)!r}: {reason}", "give a hub name or a folder"
        ) from None


def load_model(
    name: str | Path, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer. dtype: default, as stored. device: default, CUDA where there is a GPU, else the CPU."""
    folder, where = resolve(str(name)), take_device(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot load the model {str(name)!r}: {reason}", "give a hub name or a folder") from None
    return model.to(where), tokenizer
