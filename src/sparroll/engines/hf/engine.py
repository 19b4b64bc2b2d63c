"""HFEngine: rollouts from any transformers decoder with plain attention, dense or sparse, on CPU or GPU. It is simple
enough to be the reference for every other engine, and not the fastest on a GPU. run.py has what happens within a
`generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparroll.compression import Compression, make_compression
from sparroll.engines import generate_arguments
from sparroll.engines.base import Engine
from sparroll.engines.hf.attention import routed
from sparroll.engines.hf.run import GenerateSettings, Request, Run
from sparroll.engines.load_model import load_model
from sparroll.engines.prompt_encoder import response_text
from sparroll.engines.report import EngineReport, LayerReport
from sparroll.engines.supported_models import check_supported
from sparroll.engines.weights import check_version, checked
from sparroll.errors import UserError
from sparroll.models import fingerprint
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule, check_is_schedule
from sparroll.types import Rollout


class HFEngine(Engine):
    """An engine (see engines/base.py) on a transformers model.

    model: packaged name, folder, hub name, or a model object, which is then used as it is and not copied.
    schedule: Schedule, preset name, path, or None for dense.  compression: a policy, the kind of one with its defaults,
    or None to keep every token; excludes a schedule.  max_batch: rows that decode together.
    """

    kind = "hf"
    most_schedules = 1
    cache_tokens = None

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
        if not isinstance(max_batch, int) or max_batch < 1:
            raise UserError(f"max_batch must be at least 1, got {max_batch}")
        self.tokenizer = tokenizer
        if isinstance(model, PreTrainedModel):
            loaded = model
            if dtype is not None or device is not None:
                raise UserError("dtype and device belong to the model object", "move it with model.to(...) before")
        else:
            loaded, own_tokenizer = load_model(model, dtype, device)
            self.tokenizer = tokenizer or own_tokenizer
        check_supported(loaded)
        self._model: PreTrainedModel | None = loaded
        config = loaded.config
        self.model_name = str(getattr(config, "_name_or_path", "") or model)
        self._asked_for = str(getattr(config, "_name_or_path", "") if isinstance(model, PreTrainedModel) else model)
        self._fingerprint = fingerprint.of_config(config)
        self.layers = int(config.num_hidden_layers)
        self.vocabulary = int(config.vocab_size)
        self.context_limit = getattr(config, "max_position_embeddings", None)
        self.max_batch = max_batch
        self.weight_version = 0
        self.schedule: Schedule | None = None
        self.compression: Compression | None = None
        self.set_compression(compression)
        self.set_schedule(schedule)
        self.reset_report()

    @property
    def model(self) -> PreTrainedModel:
        """The model that is sampled from. Raises UserError once the engine is closed."""
        if self._model is None:
            raise UserError("the engine is closed", "make another one")
        return self._model

    @property
    def device(self) -> torch.device:
        return self.model.device

    # -- what is read ----------------------------------------------------------------------------------------------------

    def set_schedule(self, schedule: Schedule | str | Path | None) -> None:
        """Takes effect with the next `generate`. None reads the whole cache, and leaves a compression in force. Raises
        UserError for a schedule of another model, unless it was loaded with force=True, for one with layers that the
        model does not have, and while a compression is set."""
        if isinstance(schedule, (str, Path)):
            schedule = Schedule.load(schedule)
        if schedule is not None:
            check_is_schedule(schedule)
            self.check_schedule(schedule)
            _exclude(schedule, self.compression)
        self.schedule = schedule

    def set_compression(self, compression: Compression | str | None) -> None:
        """Takes effect with the next `generate`; None keeps every token."""
        if isinstance(compression, str):
            compression = make_compression(compression)
        if compression is not None and not isinstance(compression, Compression):
            raise UserError(
                f"a compression is the kind of one or a Compression, got {compression!r}",
                'for example "r_kv", or RKV()',
            )
        _exclude(self.schedule, compression)
        self.compression = compression

    def check_schedule(self, schedule: Schedule, capacity: Schedule | None = None) -> None:
        """Raise UserError where the engine could not run this schedule, whatever the capacity."""
        schedule.check_model(self._asked_for, self._fingerprint)
        schedule.check_layers(self.layers)

    # -- weights and memory ----------------------------------------------------------------------------------------------

    def load_weights(self, weights: nn.Module | dict[str, Tensor], version: int) -> None:
        """Copy the weights in; names and shapes must match exactly. Raises UserError where they do not, before a tensor is
        copied, and unless the version rises."""
        check_version(version, self.weight_version)
        if weights is not self.model:
            shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
            tied = bool(getattr(self.model.config, "tie_word_embeddings", False))
            # A head that is the embedding is not among the checked ones, and moves with it.
            self.model.load_state_dict(dict(checked(weights, shapes, tied)), strict=False)
        self.weight_version = version

    def shared_model(self) -> PreTrainedModel:
        return self.model

    def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """Does nothing. The cache exists only within `generate`, and the weights may belong to a model that others go
        on using."""

    def wake(self) -> None:
        """Does nothing, like `sleep`."""

    def close(self) -> None:
        """Drop the reference to the model. A module that was passed in stays alive with whoever passed it."""
        self._model = None

    # -- generating ------------------------------------------------------------------------------------------------------

    def report(self) -> EngineReport:
        return replace(
            copy.deepcopy(self._report),
            schedule_name=self.schedule.name if self.schedule else None,
            compression_name=self.compression.name if self.compression else None,
            weight_version=self.weight_version,
        )

    def reset_report(self) -> None:
        layers = [LayerReport() for _ in range(self.layers)]
        self._report = EngineReport("hf", self.model_name, schedule_name=None, weight_version=0, layers=layers)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        n: int = 1,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_ids: Sequence[int] | None = None,
        seed: int | Sequence[int] = 0,
        top_k: int = 0,
        dense: Sequence[bool] | None = None,
        schedules: Sequence[Schedule] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Rollout]:
        """`n` rollouts per prompt, in the prompts' order.

        prompts: strings (needs a tokenizer) or token ids. temperature 0 is greedy. top_p: below 1, each token is drawn
        from the fewest most likely ones with at least this mass, and log-probabilities are those of what was drawn
        from. stop_ids: default, the model's end-of-sequence ids. seed: one for all (each request derives its own), or
        one per request. top_k: also return the k most likely tokens and their log-probabilities. dense: one flag per
        request, prompt by prompt; True reads everything in each step, whatever the schedule, and keeps every token,
        whatever the compression. Where drafts are checked, such a request is drafted and checked like the others, with
        drafts of the dense policy. schedules: one per request, in place of the engine's; those of one schedule decode after
        those of another. Raises UserError for empty prompts, prompts that do not leave room for
        `max_new_tokens` in the model's context, and NaN logits.
        """
        model = self.model
        generate_arguments.check_counts(n, max_new_tokens, temperature, top_k, top_p)
        prompt_ids = generate_arguments.prompt_ids(self, prompts, max_new_tokens)
        seeds = generate_arguments.seeds(seed, len(prompt_ids), n)
        flags = generate_arguments.dense_flags(self, dense, len(seeds))
        read_by = generate_arguments.schedules_read(self, schedules, flags)
        asked = [
            Request(ids, index, sample, seeds[index * n + sample], max_new_tokens, flags[index * n + sample])
            for index, ids in enumerate(prompt_ids)
            for sample in range(n)
        ]
        if stop_ids is None:
            config = getattr(model, "generation_config", None)
            stop_ids = generate_arguments.end_ids(config, self.tokenizer, self.vocabulary)
        settings = GenerateSettings(
            model=model,
            schedule=self.schedule,
            compression=self.compression,
            weight_version=self.weight_version,
            max_batch=self.max_batch,
            temperature=temperature,
            top_p=top_p,
            stop_ids=frozenset(generate_arguments.stop_ids(self, stop_ids)),
            top_k=min(top_k, self.vocabulary),
        )
        with routed(model):
            rollouts = _sampled(settings, asked, read_by, self._report, on_progress)
        for rollout in rollouts:
            rollout.text = response_text(self.tokenizer, rollout.response_ids)
        return rollouts


def _sampled(
    settings: GenerateSettings,
    asked: list[Request],
    schedules: Sequence[Schedule | None],
    report: EngineReport,
    on_progress: OnProgress | None,
) -> list[Rollout]:
    """The rollouts of all requests. Those of each schedule decode in a cache of their own, and under a compression dense
    requests do, because a cache of compressed rows has no room for whole contexts."""
    runs: list[tuple[GenerateSettings, list[int]]] = []
    for place, request in enumerate(asked):
        # A dense request decodes in the cache of those that read by the engine's schedule.
        own = replace(settings, compression=None) if request.dense else replace(settings, schedule=schedules[place])
        places = next((places for known, places in runs if known == own), None)
        if places is None:
            runs.append((own, places := []))
        places.append(place)
    found, begun = dict[int, Rollout](), 0

    def of_all(done: int, _total: int, _text: str = "", /) -> None:
        if on_progress is not None:
            on_progress(begun + done, len(asked))

    for own, places in runs:
        # The cache before is gone when the next one is made.
        found |= zip(places, _one_run(own, [asked[place] for place in places], report, of_all), strict=True)
        begun += len(places)
    return [found[place] for place in range(len(asked))]


def _one_run(
    settings: GenerateSettings, requests: list[Request], report: EngineReport, on_progress: OnProgress | None
) -> list[Rollout]:
    run = Run(settings, requests, report)
    run.all(on_progress)
    return [run.rollout(request) for request in requests]


def _exclude(schedule: Schedule | None, compression: Compression | None) -> None:
    if schedule is not None and compression is not None:
        raise UserError(
            f"a schedule ({schedule.name}) and a compression ({compression.name}) exclude each other",
            "set the other to None first",
        )
