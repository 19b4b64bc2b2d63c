"""What VLLMEngine reads of a model's files before vLLM does: config, tokenizer, end ids, context length."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from sparroll.engines.supported_models import changing_positions, unsupported_config
from sparroll.errors import UserError, reason_of


def described(folder: str, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Config and tokenizer; a folder without a tokenizer has none, and takes prompts as ids."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            f"cannot load the model {folder!r}: {reason_of(error)}", "give a hub name or a folder"
        ) from error
    # Log-probabilities of such a model are compared with those of transformers.
    unsupported = unsupported_config(config) or changing_positions(config)
    if unsupported:
        raise UserError(f"{folder} is not supported: {unsupported}", "docs/engines.md lists the architectures that are")
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError):
            tokenizer = None
    return config, tokenizer


def generation_config(folder: str) -> Any:
    """None where the folder has none."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return None


def context_limit(config: Any, asked: int | None) -> int:
    """Largest number of tokens of a prompt and its response together."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    if asked is not None and own is not None and asked > own:
        raise UserError(f"max_context_tokens is {asked}, the model's context holds {own}")
    limit = own if asked is None else asked
    if limit is None:
        raise UserError("the model's config names no context length", "give max_context_tokens")
    return limit
