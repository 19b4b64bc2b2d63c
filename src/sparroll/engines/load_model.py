"""Loads models and tokenizers from a packaged name, a folder or the hub. Weights must be safetensors that hold every
tensor of the model and no other, and no code from the hub is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sparroll.engines.devices import take_device
from sparroll.errors import UserError, of_machine, reason_of
from sparroll.models import find, whole_model

_NAMED = 3
"""So many tensors are named in an error, and the others counted."""


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer, without the model."""
    where = find(str(name))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        if of_machine(error):
            raise
        _refuse_without_tokenizer(str(name), Path(where))
        raise UserError(
            f"cannot load the tokenizer of {str(name)!r}: {reason_of(error)}", "give a hub name or a folder"
        ) from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_tokens):
        # For some architectures transformers makes an empty tokenizer where there are no files of one.
        _refuse_without_tokenizer(str(name), Path(where))
        raise UserError(f"the tokenizer of {str(name)!r} is empty: it knows no tokens but special ones")
    return tokenizer


def _refuse_without_tokenizer(name: str, folder: Path) -> None:
    if folder.is_dir() and not any(folder.glob("tok*")) and not any(folder.glob("*vocab*")):
        raise UserError(
            f"there are no files of a tokenizer in {name!r}", "save it there, too: tokenizer.save_pretrained(folder)"
        )


def load_model(
    name: str | Path, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer. dtype: default, as stored. device: default, CUDA where there is a GPU, else the CPU.

    Raises UserError where the checkpoint lacks a tensor of the model, has one that the model does not have, or has one
    of another shape. An output head that the model shares with its embeddings may be missing.
    """
    if not isinstance(name, (str, Path)):
        raise UserError(f"a model is a name or a folder, got {name!r}", "give a name, a folder or a transformers model")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"dtype must be one of torch's, got {dtype!r}", "dtype=torch.bfloat16")
    where = take_device(device)
    model = _from_checkpoint(name, dtype=dtype or "auto")
    tokenizer = load_tokenizer(name)
    return model.to(where), tokenizer


def check_checkpoint(name: str | Path) -> None:
    """Raise UserError for the checkpoints that `load_model` refuses. Reads names and shapes. Weights are read, on the
    CPU, only where an older transformers compares a head that the checkpoint holds although it is shared."""
    try:
        _from_checkpoint(name, device_map="meta")
    except UserError as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        # transformers 5.6 to 5.10 asks whether the two are equal, which tensors without values cannot say.
        _from_checkpoint(name, dtype="auto", device_map="cpu")


def _from_checkpoint(name: str | Path, **options: Any) -> PreTrainedModel:
    folder = whole_model(str(name))
    try:
        # With ignore_mismatched_sizes the loading goes on to its end, and what was wrong is told as a whole below.
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            use_safetensors=True,
            # Without this line transformers asks on a terminal whether code of the model may run.
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except SafetensorError as error:
        raise UserError(
            f"cannot load the model {str(name)!r}: a file of weights is damaged or cut off ({error})",
            "copy or download the checkpoint again",
        ) from None
    except Exception as error:
        if of_machine(error):
            raise
        # A config can make transformers fail in any way.
        raise UserError(
            f"cannot load the model {str(name)!r}: {reason_of(error)}", "give a hub name or a folder"
        ) from error
    _check_tensors(str(name), found)
    loaded: PreTrainedModel = model
    return loaded


def _check_tensors(name: str, found: dict[str, Any]) -> None:
    """Raise UserError unless the checkpoint filled every tensor of the model. found: transformers' loading info."""
    shapes = [
        f"{key} has shape {list(stored)} instead of {list(needed)}"
        for key, stored, needed in sorted(found["mismatched_keys"])
    ]
    problems = [
        f"it lacks {_some(sorted(found['missing_keys']))}" if found["missing_keys"] else "",
        f"it holds {_some(sorted(found['unexpected_keys']))}, which the model does not have"
        if found["unexpected_keys"]
        else "",
        _some(shapes) if shapes else "",
    ]
    told = "; ".join(problem for problem in problems if problem)
    if told:
        raise UserError(
            f"the checkpoint of {name!r} does not fit its config: {told}",
            "the weights belong to another config.json, or a part of them was not saved",
        )


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
