"""A decoder's shape, from its config alone: the sizes that say what a decode step reads and computes. No weights are
loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparroll.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide what a decode step costs.

    >>> ModelShape("Qwen3-1.7B", 1_720_574_976, layers=28, query_heads=16, kv_heads=8, head_dim=128, vocabulary=151_936)
    """

    name: str
    parameters: int
    """Distinct parameters, embeddings included; tied embeddings count once."""
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    """Logits of a token."""
    expert_parameters: int = 0
    """Parameters in routed experts, of which a token uses `experts_per_token / experts`."""
    experts: int = 1
    experts_per_token: int = 1

    @property
    def kv_width(self) -> int:
        """Numbers per token in K (or in V), over all layers, which sparroll.cost calls `kv_width` too."""
        return self.layers * self.kv_heads * self.head_dim

    @property
    def gqa_ratio(self) -> float:
        """Query heads per KV head."""
        return self.query_heads / self.kv_heads

    def parameters_used(self, tokens: int) -> float:
        """Parameters that at least one of `tokens` tokens is expected to use, if each picks its experts at random."""
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return self.parameters - self.expert_parameters * missed


# From the published configs; tests compute the parameter counts again. Plans for these models need no network.
BUILT_IN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("Qwen3-1.7B", 1_720_574_976, 28, query_heads=16, kv_heads=8, head_dim=128, vocabulary=151_936),
        ModelShape("Qwen3-4B", 4_022_468_096, 36, query_heads=32, kv_heads=8, head_dim=128, vocabulary=151_936),
        ModelShape("Qwen3-8B", 8_190_735_360, 36, query_heads=32, kv_heads=8, head_dim=128, vocabulary=151_936),
        ModelShape("Qwen3-14B", 14_768_307_200, 40, query_heads=40, kv_heads=8, head_dim=128, vocabulary=151_936),
    )
}


def built_in(name: str) -> ModelShape | None:
    """The built-in shape of that name, in any case and with or without its owner on the hub; None if there is none."""
    short = name.removeprefix("Qwen/").lower()
    return next((shape for known, shape in BUILT_IN.items() if known.lower() == short), None)


def model_shape(model: Any) -> ModelShape:
    """The shape of a model. It can be given as a built-in or packaged name, a folder or JSON file with its config, a
    hub name, a dict, a transformers config, or a ModelShape.

    For a hub name that is not built in, the config is downloaded, and nothing else. Raises UserError if sparse decoding
    does not support the model's attention.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, (str, Path)):
        shape = built_in(str(model))
        return shape if shape is not None else _from_config(_read_config(str(model)), Path(str(model)).name)
    if isinstance(model, dict):
        return _from_config(_config_of(model), str(model.get("_name_or_path") or model.get("model_type") or "model"))
    if hasattr(model, "num_hidden_layers") or hasattr(model, "get_text_config"):
        return _from_config(model, str(getattr(model, "_name_or_path", "") or model.model_type))
    raise UserError(f"cannot read a model's shape from {type(model).__name__}", "give a name, a folder or its config")


def name_to_check(model: Any, shape: ModelShape) -> str:
    """What tells whether a schedule was made for the model: the folder that the shape was read from, whose files tell more
    than its name, or else the name of the shape."""
    if not isinstance(model, (str, Path)) or built_in(str(model)) is not None:
        return shape.name
    place = Path(model)
    if place.name == "config.json" and place.is_file():
        # In full, because the bare name of a folder may be that of a packaged model.
        return str(place.absolute().parent)
    return str(model) if place.is_dir() else shape.name


def _read_config(name: str) -> Any:
    from transformers import AutoConfig

    from sparroll.models import resolve

    path = Path(resolve(name))
    path = path.parent if path.name == "config.json" else path
    if path.suffix == ".json" and path.is_file():
        return _config_of(_read_json(path))
    try:
        return AutoConfig.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        hint = f"built in: {', '.join(BUILT_IN)}; or give a folder that holds the model's config.json"
        raise UserError(f"cannot read the config of {name!r}: {str(error).strip().splitlines()[0]}", hint) from None
    except Exception as error:
        raise _bad_config(name, error) from None


def _read_json(path: Path) -> dict[str, Any]:
    import json

    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} must hold a config table, got {type(table).__name__}")
    return table


def _config_of(table: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = dict(table)
    kind = settings.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **settings)
    except ValueError:
        raise UserError(f"the config has an unknown model_type {kind!r}", "give the model's own config.json") from None
    except Exception as error:
        raise _bad_config(kind, error) from None


def _bad_config(name: Any, error: Exception) -> UserError:
    """For what transformers makes of a field that no model has: it checks fields in many ways, each with an error of its
    own."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"the config of {name!r} describes no model: {reason}", "give the model's own config.json")


def _from_config(config: Any, name: str) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    config = config.get_text_config()
    _check_attention(config, name)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        size = getattr(config, field, None)
        if isinstance(size, int) and size < 1:
            raise _bad_config(name, ValueError(f"{field} must be 1 or more, got {size}"))
    try:
        # On the meta device a model has shapes but no storage.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{name} is not a causal language model: {reason}") from None
    except Exception as error:
        raise _bad_config(name, error) from None
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 1
    return ModelShape(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=int(config.num_hidden_layers),
        query_heads=int(config.num_attention_heads),
        kv_heads=int(_first(config, "num_key_value_heads") or config.num_attention_heads),
        head_dim=int(_first(config, "head_dim") or config.hidden_size // config.num_attention_heads),
        vocabulary=int(config.vocab_size),
        expert_parameters=sum(p.numel() for key, p in model.named_parameters() if ".experts." in key),
        experts=int(experts),
        experts_per_token=int(_first(config, "num_experts_per_tok") or 1),
    )


def _check_attention(config: Any, name: str) -> None:
    # This import loads transformers, which plans for built-in shapes do not need.
    from sparroll.engines.supported_models import unsupported_config

    reason = unsupported_config(config)
    if reason:
        raise UserError(
            f"cannot plan for {name}: {reason}", "plain multi-head and grouped-query attention can be planned"
        )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
