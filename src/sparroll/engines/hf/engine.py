"""HFEngine: rollouts from any transformers decoder, dense or sparse, on CPU or GPU. Simple enough to be the oracle for
every other engine; not the fastest on a GPU. What happens within a `generate` is in run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparroll.compression import Compression, make_compression
from sparroll.engines import requests
from sparroll.engines.base import EngineReport, LayerReport
from sparroll.engines.hf.attention import routed
from sparroll.engines.hf.run import Request, Run
from sparroll.engines.supported_models import check_supported, load_model
from sparroll.errors import UserError
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule
from sparroll.types import Rollout


class HFEngine:
    """An engine (see engines/base.py) on a transformers model.

    model: packaged name, folder, hub name, or a model object, which is then used as it is and not copied.
    schedule: Schedule, preset name, path, or None for dense.  compression: a policy, the kind of one with its defaults, or
    None to keep every token; excludes a schedule.  max_batch: rows that decode together.
    """

    kind = "hf"

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        schedule: Schedule | str | Path | None = None,
        compression: Compression | str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_batch: int = 64,
    ):
        if max_batch < 1:
            raise UserError(f"max_batch must be at least 1, got {max_batch}")
        if isinstance(model, PreTrainedModel):
            self.model, self.tokenizer = model, tokenizer
            if dtype is not None or device is not None:
                raise UserError("dtype and device belong to the model object", "move it with model.to(...) before")
        else:
            self.model, loaded = load_model(model, dtype, device)
            self.tokenizer = tokenizer or loaded
        check_supported(self.model)
        config = self.model.config
        self.model_name = str(getattr(config, "_name_or_path", "") or model)
        self.layers = int(config.num_hidden_layers)
        self.max_batch = max_batch
        self.weight_version = 0
        self.schedule: Schedule | None = None
        self.compression: Compression | None = None
        self.set_compression(compression)
        self.set_schedule(schedule)
        self.reset_report()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def set_schedule(self, schedule: Schedule | str | Path | None) -> None:
        """Takes effect with the next `generate`; None reads the whole cache and leaves a compression in force. A schedule
        made for another model is refused."""
        if isinstance(schedule, (str, Path)):
            schedule = Schedule.load(schedule)
        if schedule is not None:
            self.check_schedule(schedule)
            _exclude(schedule, self.compression)
        self.schedule = schedule

    def set_compression(self, compression: Compression | str | None) -> None:
        """Takes effect with the next `generate`; None keeps every token."""
        if isinstance(compression, str):
            compression = make_compression(compression)
        _exclude(self.schedule, compression)
        self.compression = compression

    def check_schedule(self, schedule: Schedule) -> None:
        """Raise UserError where the engine could not run it."""
        schedule.check_layers(self.layers)

    def load_weights(self, weights: nn.Module | dict[str, Tensor], version: int) -> None:
        """Copy the weights in (names and shapes must match exactly). Raises UserError unless the version rises."""
        if version <= self.weight_version:
            raise UserError(f"weight version must rise above {self.weight_version}, got {version}")
        if weights is not self.model:
            state = weights.state_dict() if isinstance(weights, nn.Module) else weights
            try:
                self.model.load_state_dict(state, strict=True)
            except RuntimeError as error:
                raise UserError(f"the weights do not fit the engine's model: {error}") from None
        self.weight_version = version

    def report(self) -> EngineReport:
        return self._report

    def reset_report(self) -> None:
        self._report = EngineReport(
            engine="hf",
            model=self.model_name,
            schedule_name=self.schedule.name if self.schedule else None,
            compression_name=self.compression.name if self.compression else None,
            weight_version=self.weight_version,
            layers=[LayerReport() for _ in range(self.layers)],
        )

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        n: int = 1,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_ids: Sequence[int] | None = None,
        seed: int | Sequence[int] = 0,
        top_k: int = 0,
        on_progress: OnProgress | None = None,
    ) -> list[Rollout]:
        """`n` rollouts per prompt, in the prompts' order.

        prompts: strings (needs a tokenizer) or token ids. temperature 0 is greedy. stop_ids: default, the model's
        end-of-sequence ids. seed: one for all (each request derives its own), or one per request. top_k: also return the
        k most likely tokens and their log-probabilities. Raises UserError for empty prompts, prompts that do not leave
        room for `max_new_tokens` in the model's context, and NaN logits.
        """
        requests.check_counts(n, max_new_tokens, temperature, top_k)
        config = self.model.config
        limit = getattr(config, "max_position_embeddings", None)
        prompt_ids = requests.token_ids(prompts, self.tokenizer, config.vocab_size, limit, max_new_tokens)
        seeds = requests.seeds(seed, len(prompt_ids), n)
        asked = [
            Request(ids, index, sample, seeds[index * n + sample], max_new_tokens)
            for index, ids in enumerate(prompt_ids)
            for sample in range(n)
        ]
        if stop_ids is None:
            stop_ids = requests.end_ids(getattr(self.model, "generation_config", None), self.tokenizer)
        with routed(self.model):
            run = Run(self, asked, max_new_tokens, temperature, frozenset(stop_ids), min(top_k, config.vocab_size))
            run.all(on_progress)
        return [request.rollout(self, run.partial_layers) for request in asked]


def _exclude(schedule: Schedule | None, compression: Compression | None) -> None:
    if schedule is not None and compression is not None:
        raise UserError(
            f"a schedule ({schedule.name}) and a compression ({compression.name}) exclude each other",
            "set the other to None first",
        )
