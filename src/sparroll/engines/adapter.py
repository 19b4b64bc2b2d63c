"""A LoRA adapter beside a model: a second module reads the model's own weights and adds the adapter's, so that nothing
done with the adapter can change the model. Nothing here knows training or schedules. The folder format is peft's.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparroll import files
from sparroll.engines.base import Engine
from sparroll.engines.load_model import load_model
from sparroll.errors import UserError
from sparroll.schedule import Schedule

_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"
_FILES_HINT = "an adapter's folder has adapter_config.json and adapter_model.safetensors"
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights alone. Others mean that some part was taken out of them
before training, and peft takes it out again whenever such an adapter is loaded."""
BESIDE = "../model"
"""Base model of an adapter that was trained together with a policy: the policy's folder, beside the adapter's. The
adapter fits no other model."""


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """The settings of an adapter. There is no dropout, because the trained policy would then differ from the one that
    samples."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()
    """Names of linear layers; empty: all but the output head."""


class Adapter:
    """`model` with a LoRA adapter, as a separate module (`adapted`).

    The weights of `adapted` are frozen views of the model's storage. It sees at once what an optimizer writes into the
    model in place, and the two modules share no gradient, flag or hook.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSettings = LoraSettings(), seed: int = 0):
        """A new adapter, which does not change the model's output yet. The same seed gives the same adapter."""
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,
            target_modules=list(settings.target_modules) or "all-linear",
        )
        self._wrap(model, config, seed)

    @classmethod
    def load(cls, model: PreTrainedModel, folder: Path) -> Adapter:
        """The adapter of a peft folder. Raises UserError where it is not a plain LoRA adapter for such a model."""
        config = _read_config(folder)
        config.inference_mode = False
        config.base_model_name_or_path = None
        made = cls.__new__(cls)
        made._wrap(model, config, seed=0)
        made.read(folder)
        return made

    def _wrap(self, model: PreTrainedModel, config: PeftConfig, seed: int) -> None:
        self.model = model
        self.adapted = _sharing(model)
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            try:
                self._peft = get_peft_model(self.adapted, config, adapter_name=_NAME)
            except ValueError as error:
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"the adapter does not fit {type(model).__name__}: {reason}") from None
        self.adapted.eval()
        self._check_places()

    def _check_places(self) -> None:
        """Raise UserError for an adapter on the input embeddings or the output head: the two may be one tensor, and
        scoring applies the head by itself."""
        for kind, module in (
            ("input embeddings", self.adapted.get_input_embeddings()),
            ("output head", self.adapted.get_output_embeddings()),
        ):
            if isinstance(module, LoraLayer):
                raise UserError(f"an adapter on the {kind} is not supported", "leave them out of target_modules")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The adapter's own parameters, which are the trainable ones."""
        return [parameter for parameter in self.adapted.parameters() if parameter.requires_grad]

    def check_shared(self) -> None:
        """Assert that `adapted` still reads the model's own storage, which nothing may replace."""
        own = {parameter.data_ptr() for parameter in self.model.parameters()}
        strangers = [
            name
            for name, parameter in self.adapted.named_parameters()
            if not parameter.requires_grad and parameter.data_ptr() not in own
        ]
        assert not strangers, f"{strangers[0]} no longer shares the policy's storage"

    @torch.no_grad()
    def merged(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The model's state_dict with the adapter added to its matrices. These are new tensors, added up in fp32; the
        others are the model's own. dtype: that of the new tensors; default, the model's."""
        state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        for path, layer in self.adapted.named_modules(remove_duplicate=False):
            if isinstance(layer, LoraLayer):
                weight = state[f"{path}.weight"]
                change = layer.get_delta_weight(_NAME)
                state[f"{path}.weight"] = (weight.float() + change.float()).to(dtype or weight.dtype)
        return state

    def write(self, folder: Path, base_model: str) -> None:
        """A plain peft folder: adapter_config.json and adapter_model.safetensors."""
        folder.mkdir(parents=True)
        tensors = get_peft_model_state_dict(self._peft, adapter_name=_NAME, save_embedding_layers=False)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS, {"format": "pt"})
        config = copy.deepcopy(self._peft.peft_config[_NAME])
        assert isinstance(config, LoraConfig)
        config.inference_mode = True
        config.base_model_name_or_path = base_model
        # peft keeps a set, whose order differs from process to process.
        config.target_modules = sorted(config.target_modules or ())
        config.save_pretrained(str(folder))

    def read(self, folder: Path) -> None:
        """Copy in what `write` wrote."""
        try:
            tensors = load_file(folder / _WEIGHTS)
        except OSError as error:
            raise UserError(f"there is no adapter in {folder}: {error}") from None
        except SafetensorError as error:
            raise UserError(f"cannot read {folder / _WEIGHTS}: {error}", "copy or train the adapter again") from None
        own = get_peft_model_state_dict(self._peft, adapter_name=_NAME, save_embedding_layers=False)
        for name in sorted(own.keys() ^ tensors.keys()):
            raise UserError(f"{folder} does not fit the model: {name} is only in one of them")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise UserError(f"{folder}: {name} must have shape {list(own[name].shape)}, got {list(tensor.shape)}")
        set_peft_model_state_dict(self._peft, tensors, adapter_name=_NAME)


def load_adapter(engine: Engine, model: str, folder: Path) -> None:
    """Merge the adapter of a peft folder into an engine that was made for `model` and has loaded no other weights
    since. Raises UserError under dense attention, because the adapter was trained for sparse rollouts, and where drafts
    are checked."""
    if engine.schedule is None:
        raise UserError("an adapter is for sparse rollouts, and these are dense", "give a schedule or a budget")
    refuse_check(engine.schedule)
    check_base(folder, model)
    own = engine.shared_model()
    if own is None:
        own, _ = load_model(model, None, "cpu")
    engine.load_weights(Adapter.load(own, folder).merged(), engine.weight_version + 1)


def refuse_check(schedule: Schedule) -> None:
    """Raise UserError for a schedule that checks its drafts: the engine's one set of weights has the adapter merged in,
    so its dense pass is not the dense policy."""
    if schedule.check is not None:
        raise UserError(
            f"the schedule {schedule.name!r} checks its drafts against the dense policy, which has no adapter, and an "
            "engine with an adapter has no other weights",
            "leave the adapter or the check out",
        )


def weights_digest(folder: Path) -> str:
    """SHA-256 of an adapter's weights. With it, samples of two adapters that had the same folder are not mixed."""
    if not (folder / _WEIGHTS).is_file():
        raise UserError(f"there is no adapter in {folder}", _FILES_HINT)
    return files.sha256(folder / _WEIGHTS)


def described(folder: Path) -> dict[str, Any]:
    """What a record keeps of an adapter: its folder, and the digest of its weights."""
    return {"folder": str(folder), "weights": weights_digest(folder)}


def check_base(folder: Path, model: str) -> None:
    """Raise UserError where the adapter names another model as its base. Names are compared without folder and case."""
    base = _read_config(folder).base_model_name_or_path
    if base == BESIDE:
        same, base = Path(model).resolve() == (folder / BESIDE).resolve(), str(folder.parent / "model")
    else:
        same = base is None or Path(base).name.lower() == Path(model).name.lower()
    if not same:
        raise UserError(
            f"the adapter in {folder} was trained on {base}, not on {model}",
            f"give that model, or correct base_model_name_or_path in {folder}/adapter_config.json",
        )


def _sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A second module with its own config, whose parameters are frozen views of the model's. Tied parameters stay
    tied."""
    views: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    views |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, views)


def _read_config(folder: Path) -> LoraConfig:
    if not (folder / "adapter_config.json").is_file():
        # peft would look for a repository of that name.
        raise UserError(f"there is no adapter in {folder}", _FILES_HINT)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"there is no adapter in {folder}: {str(error).strip().splitlines()[0]}") from None
    if not isinstance(config, LoraConfig):
        raise UserError(f"{folder} holds an adapter of type {config.peft_type}", "LoRA adapters are supported")
    for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias"):
        if getattr(config, name, None):
            raise UserError(f"{folder} holds an adapter with {name}", "only plain LoRA adapters can be merged")
    if config.init_lora_weights not in _PLAIN_STARTS:
        raise UserError(
            f"{folder} holds an adapter with init_lora_weights = {config.init_lora_weights!r}, which belongs to a changed "
            "base model",
            "convert it to a plain LoRA adapter: peft's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    if config.bias != "none":
        raise UserError(f"{folder} holds an adapter that trains biases", "only plain LoRA adapters can be merged")
    return config
