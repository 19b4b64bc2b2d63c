"""What tells two models apart: the sizes of their architecture, a digest of the config, and a digest of the weights.

It is read from files on this machine. Nothing is downloaded, and no weights are loaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sparroll.errors import UserError, nearest
from sparroll.models import resolve

SLICE = 1 << 16
SLICES = 64

_IN_WORDS = {
    "architecture": "the architecture",
    "layers": "the number of layers",
    "hidden_size": "the hidden size",
    "query_heads": "the number of query heads",
    "kv_heads": "the number of KV heads",
    "head_dim": "the dimension of a head",
    "vocabulary": "the vocabulary's size",
    "config": "the config (RoPE, norms, feed-forward layers) with the digest",
    "weights": "the digest of the weights",
}

_COMPUTED_WITH = (
    "intermediate_size",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_parameters",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "no_rope_layers",
    "mlp_only_layers",
    "clip_qkv",
)
"""Fields of a config, beside the sizes, that decide what the model computes. A list, because a config also holds names,
dtypes and versions, which may differ. One that is None or an empty list leaves the digest as it is."""


@dataclass(frozen=True)
class ModelFingerprint:
    """Each field is None where it is not known, and is then not compared.

    >>> ModelFingerprint(architecture="qwen3", layers=28, hidden_size=2048, query_heads=16, kv_heads=8, head_dim=128)
    """

    architecture: str | None = None
    """The config's model_type."""
    layers: int | None = None
    hidden_size: int | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int | None = None
    config: str | None = None
    """Digest of the sizes and of what else in the config decides what most models compute (`_COMPUTED_WITH`)."""
    weights: str | None = None
    """Digest of slices of the files of weights, see `digest_of`."""

    def difference(self, other: ModelFingerprint) -> str | None:
        """The first thing that both know and that differs, in words; None where nothing does."""
        for field, words in _IN_WORDS.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine is not None and theirs is not None and mine != theirs:
                return f"{words} is {theirs} instead of {mine}"
        return None

    def table(self) -> dict[str, Any]:
        """What is known, as plain data; `from_table` gives the fingerprint back."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @staticmethod
    def from_table(table: dict[str, Any]) -> ModelFingerprint:
        """Raises UserError for unknown keys and for values of another kind."""
        for key, value in table.items():
            if key not in _IN_WORDS:
                raise UserError(f"unknown key {key!r} in the fingerprint", nearest(key, list(_IN_WORDS)))
            kind = str if key in ("architecture", "config", "weights") else int
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UserError(
                    f"fingerprint.{key} must be {'text' if kind is str else 'a whole number'}, got {value!r}"
                )
        return ModelFingerprint(**table)


def of_config(config: Any) -> ModelFingerprint:
    """The fingerprint of a transformers config, which says nothing about the weights."""
    config = config.get_text_config()
    query_heads = getattr(config, "num_attention_heads", None)
    hidden_size = getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and query_heads and hidden_size:
        head_dim = hidden_size // query_heads
    sizes = ModelFingerprint(
        architecture=config.model_type,
        layers=getattr(config, "num_hidden_layers", None),
        hidden_size=hidden_size,
        query_heads=query_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        head_dim=head_dim,
        vocabulary=getattr(config, "vocab_size", None),
    )
    computed = {name: value for name in _COMPUTED_WITH if (value := getattr(config, name, None)) not in (None, [])}
    text = json.dumps(sizes.table() | computed, sort_keys=True, default=str)
    return dataclasses.replace(sizes, config=blake2b(text.encode(), digest_size=8).hexdigest())


def of_model(name: str) -> ModelFingerprint | None:
    """The fingerprint of a packaged name, a folder, or a hub name whose files are in the cache. None where the model's
    config is not on this machine."""
    folder = _folder(name)
    if folder is None:
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception:
        # Whoever loads the model says what is wrong with its config.
        return None
    return dataclasses.replace(of_config(config), weights=_weights(folder))


def weights_of(name: str) -> str | None:
    """The digest of a model's weights; None where they are not on this machine."""
    folder = _folder(name)
    return None if folder is None else _weights(folder)


def digest_of(paths: Iterable[Path]) -> str:
    """A digest of the files, by name, size and contents. Of big files it covers SLICES slices.

    A training step changes every tensor, so slices are enough to tell two checkpoints apart. They do not prove that two
    are equal.
    """
    digest = blake2b(digest_size=8)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}/{size}".encode())
        with path.open("rb") as source:
            for place in range(SLICES if size > SLICES * SLICE else 1):
                source.seek(place * (size // SLICES))
                digest.update(source.read(SLICE if size > SLICES * SLICE else -1))
    return digest.hexdigest()


def _weights(folder: Path) -> str | None:
    files = sorted(folder.glob("*.safetensors"))
    return digest_of(files) if files else None


def _folder(name: str) -> Path | None:
    """The folder with the model's config on this machine."""
    folder = Path(resolve(name))
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
