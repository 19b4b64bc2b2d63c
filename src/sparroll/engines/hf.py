"""HFEngine: rollouts from any transformers decoder, dense or sparse, on CPU or GPU. Simple enough to be the oracle for
every other engine; not the fastest on a GPU. What happens within a `generate` is in hf_run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparroll.engines import sampling
from sparroll.engines.base import EngineReport, LayerReport, Progress
from sparroll.engines.hf_attention import routed
from sparroll.engines.hf_run import Request, Run
from sparroll.engines.support import check_supported, load_model
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.types import Rollout


class HFEngine:
    """An engine (see engines/base.py) on a transformers model.

    model: packaged name, folder, hub name, or a model object, which is then used as it is and not copied.
    schedule: Schedule, preset name, path, or None for dense.  max_batch: rows that decode together.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        schedule: Schedule | str | Path | None = None,
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
        self.set_schedule(schedule)
        self.reset_report()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def set_schedule(self, schedule: Schedule | str | Path | None) -> None:
        """Takes effect with the next `generate`; None is dense. A schedule made for another model is refused."""
        if isinstance(schedule, (str, Path)):
            schedule = Schedule.load(schedule)
        if schedule is not None:
            schedule.check_layers(self.layers)
        self.schedule = schedule

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
        on_progress: Progress | None = None,
    ) -> list[Rollout]:
        """`n` rollouts per prompt, in the prompts' order.

        prompts: strings (needs a tokenizer) or token ids. temperature 0 is greedy. stop_ids: default, the model's
        end-of-sequence ids. seed: one for all (each request derives its own), or one per request. top_k: also return the
        k most likely tokens and their log-probabilities. Raises UserError for empty prompts, prompts that do not leave
        room for `max_new_tokens` in the model's context, and NaN logits.
        """
        if n < 1 or max_new_tokens < 1 or temperature < 0 or top_k < 0:
            raise UserError(
                f"n and max_new_tokens must be at least 1, temperature and top_k not negative; got n={n}, "
                f"max_new_tokens={max_new_tokens}, temperature={temperature}, top_k={top_k}"
            )
        prompt_ids = self._prompt_ids(prompts, max_new_tokens)
        seeds = self._seeds(seed, len(prompt_ids), n)
        requests = [
            Request(ids, index, sample, seeds[index * n + sample], max_new_tokens)
            for index, ids in enumerate(prompt_ids)
            for sample in range(n)
        ]
        stops = frozenset(self._stop_ids() if stop_ids is None else stop_ids)
        with routed(self.model):
            run = Run(self, requests, max_new_tokens, temperature, stops, min(top_k, self.model.config.vocab_size))
            run.all(on_progress)
        return [request.rollout(self, run.sparse_layers) for request in requests]

    def _prompt_ids(self, prompts: Sequence[str] | Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        if isinstance(prompts, str):
            raise UserError("prompts must be a list", "pass [prompt] for a single one")
        if not len(prompts):
            raise UserError("there are no prompts", "give at least one")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        all_ids: list[list[int]] = []
        given: Sequence[str | Sequence[int]] = prompts
        for number, prompt in enumerate(given):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise UserError("string prompts need a tokenizer", "pass tokenizer=, or prompts as token ids")
                ids = list(self.tokenizer(prompt)["input_ids"])
            else:
                ids = [int(token) for token in prompt]
            if not ids:
                raise UserError(f"prompt {number} is empty")
            if min(ids) < 0 or max(ids) >= self.model.config.vocab_size:
                raise UserError(f"prompt {number} has token ids outside 0..{self.model.config.vocab_size - 1}")
            if limit and len(ids) >= limit:
                raise UserError(f"prompt {number} has {len(ids)} tokens, the model's context holds {limit}")
            if limit and len(ids) + max_new_tokens > limit:
                raise UserError(
                    f"prompt {number} ({len(ids)} tokens) + {max_new_tokens} new ones exceed the context of {limit}",
                    f"set max_new_tokens to at most {limit - len(ids)}",
                )
            all_ids.append(ids)
        return all_ids

    def _seeds(self, seed: int | Sequence[int], prompts: int, n: int) -> list[int]:
        if isinstance(seed, int):
            return [sampling.request_seed(seed, index, sample) for index in range(prompts) for sample in range(n)]
        if len(seed) != prompts * n:
            raise UserError(f"one seed per request makes {prompts * n}, got {len(seed)}")
        return [int(one) for one in seed]

    def _stop_ids(self) -> list[int]:
        generation = getattr(self.model, "generation_config", None)
        stops = getattr(generation, "eos_token_id", None)
        if stops is None and self.tokenizer is not None:
            stops = self.tokenizer.eos_token_id
        if stops is None:
            return []
        return [stops] if isinstance(stops, int) else list(stops)
