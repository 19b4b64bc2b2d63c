"""VLLMEngine: rollouts from vLLM in this process, dense or sparse, behind the same protocol as HFEngine.

The life of a `generate`: Each of the n samples of a prompt becomes a separate request with its own seed. vLLM batches,
prefills and decodes these requests as it sees fit. The results are checked against what the backend counted, and become
rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from sparroll.compression import Compression
from sparroll.engines import generate_arguments
from sparroll.engines.base import Engine
from sparroll.engines.load_model import check_checkpoint
from sparroll.engines.make import check_samples_at
from sparroll.engines.prompt_encoder import response_text
from sparroll.engines.report import EngineReport, LayerReport
from sparroll.engines.vllm import launch, model_files, outputs, requests, rescoring
from sparroll.engines.vllm.arguments import check_short_steps, llm_arguments, settings_of, whole_prompts, widest
from sparroll.engines.vllm.capacity import MOST_REQUEST_SCHEDULES, check_fits_engine
from sparroll.engines.vllm.step_check import check_ran
from sparroll.engines.weights import check_version, checked, expected_shapes
from sparroll.errors import UserError
from sparroll.models import fingerprint, whole_model
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule, check_is_schedule
from sparroll.types import Rollout, TokenScores

_open: list[VLLMEngine] = []
"""The open engine of this process. There can be only one, because the backend has one state per process."""


class VLLMEngine(Engine):
    """An engine (see engines/base.py) on `vllm.LLM`, in this process.

    model: packaged name, folder or hub name.  schedule: Schedule, preset name, path, or None for dense.
    capacity: a schedule whose selector and dense layers later ones will have; default: `schedule`'s, or those
    published. max_batch: requests that decode together.  max_context_tokens: default, the model's.
    gpu_memory_share: of the GPU, for weights, cache and workspace.  kv_cache_gib: the cache's size, instead of what a
    measurement leaves of that share.  sleep_mode: make `sleep` possible; GPU only.
    sparse: False runs vLLM's own attention, and refuses every schedule.
    short_step_tokens: steps whose contexts add up to at most so many tokens are decoded densely; what is sampled then
    depends on the other requests of the batch (docs/vllm.md).  vllm_arguments: further ones of `vllm.LLM`.

    The same seed gives the same rollouts as long as vLLM gives the same logits. Each request draws from its own
    generator, but a batch of other requests may be rounded differently, and a token near a tie may then differ.
    """

    kind = "vllm"
    most_schedules = MOST_REQUEST_SCHEDULES

    def __init__(
        self,
        model: str | Path,
        *,
        schedule: Schedule | str | Path | None = None,
        capacity: Schedule | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        max_batch: int = 64,
        max_context_tokens: int | None = None,
        gpu_memory_share: float = 0.85,
        kv_cache_gib: float | None = None,
        sleep_mode: bool = False,
        sparse: bool = True,
        short_step_tokens: int = 0,
        **vllm_arguments: Any,
    ):
        if not isinstance(model, (str, Path)):
            raise UserError(
                f"VLLMEngine loads the model itself, got a {type(model).__name__}", "give a name or a folder"
            )
        if max_batch < 1:
            raise UserError(f"max_batch must be at least 1, got {max_batch}")
        check_short_steps(short_step_tokens, sparse, vllm_arguments)
        launch.prepare_process()
        folder = whole_model(str(model))
        self.model_name = str(model)
        self.config, self.tokenizer = model_files.described(folder, tokenizer)
        self.layers = int(self.config.num_hidden_layers)
        self.max_batch, self.sparse = max_batch, sparse
        self.vocabulary = int(self.config.vocab_size)
        self.context_limit = model_files.context_limit(self.config, max_context_tokens)
        self.weight_version = 0
        self.schedule: Schedule | None = None
        self.compression: Compression | None = None
        self._weights: Literal["whole", "gone"] = "whole"
        self._asleep = False
        self.cache_tokens: int | None = None
        self._own_schedules: list[Schedule] = []
        """Schedules of requests that the workers hold."""
        self._llm: Any = None
        self._end_ids = generate_arguments.end_ids(
            model_files.generation_config(folder), self.tokenizer, self.vocabulary
        )
        chosen = _loaded(schedule)
        self._capacity = widest(capacity or chosen or Schedule.fixed(512), self.context_limit, self.layers)
        if chosen is not None:
            self.check_schedule(chosen)
        arguments = llm_arguments(
            self.config,
            dtype=dtype,
            context_limit=self.context_limit,
            max_batch=max_batch,
            capacity=self._capacity if sparse else None,
            gpu_memory_share=gpu_memory_share,
            kv_cache_gib=kv_cache_gib,
            sleep_mode=sleep_mode,
            short_step_tokens=short_step_tokens,
        )
        on_cpu, checks = not torch.cuda.is_available(), sparse and self._capacity.check is not None
        if on_cpu and not checks and not vllm_arguments.keys() & whole_prompts(0).keys():
            arguments |= whole_prompts(self.context_limit)
        arguments |= vllm_arguments
        if _open:
            raise UserError("another VLLMEngine is open in this process", "close() it first")
        settings = settings_of(arguments, sparse)
        # They may be the caller's own, in additional_config.
        self.short_step_tokens = 0 if settings is None else settings.short_step_tokens
        self._parallel = int(arguments.get("tensor_parallel_size", 1))
        self._sleep_mode = bool(arguments.get("enable_sleep_mode", False))
        if sparse:
            from sparroll.engines.vllm import plugin

            plugin.register()
        if "load_format" not in arguments and getattr(self.config, "quantization_config", None) is None:
            # vLLM passes over tensors that it does not know, and over a missing one that is tied to another.
            check_checkpoint(str(model))
        _open.append(self)
        try:
            launch.choose_runner(v1=sparse and self.checks_drafts)
            launch.allow_graphs()
            self._llm = launch.start(folder, arguments)
            cache = self._llm.llm_engine.vllm_config.cache_config
            self.cache_tokens = int(cache.num_gpu_blocks) * int(cache.block_size)
            self.set_schedule(chosen)
            self.reset_report()
            self._take_said()
        except BaseException:
            self.close()
            raise

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`. Raises UserError once the engine is closed."""
        self._check_open()
        return self._llm

    def _check_open(self) -> None:
        if self._llm is None:
            raise UserError("the engine is closed", "make another one")

    # -- what is read ----------------------------------------------------------------------------------------------------

    def set_schedule(self, schedule: Schedule | str | Path | None) -> None:
        """Takes effect with the next `generate`; None is dense. The schedule's selector and dense layers must be the
        engine's."""
        schedule = _loaded(schedule)
        if schedule is not None:
            self.check_schedule(schedule)
        if self.sparse:
            self.llm.collective_rpc(
                "sparroll_set_schedule",
                # The scheduler follows below.
                args=(schedule.table() if schedule else None, schedule.name if schedule else "dense", True),
            )
        if schedule != self.schedule:
            # Cached responses were computed under the old one.
            self._empty_cache()
        self.schedule, self._own_schedules = schedule, []
        if self.checks_drafts:
            scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
            scheduler.window_tokens = schedule.check.window_tokens if schedule and schedule.check else None

    @property
    def checks_drafts(self) -> bool:
        """Whether the engine was started with a schedule that checks its drafts. It then runs no unchecked ones."""
        return self._capacity.check is not None

    def set_compression(self, compression: Compression | str | None) -> None:
        """Accepts only None, because vLLM's cache has no way to drop tokens."""
        if compression is not None:
            raise UserError("the engine vllm cannot drop tokens from its cache", "compressions run in the engine hf")

    def check_schedule(self, schedule: Schedule, capacity: Schedule | None = None) -> None:
        """Raise UserError where the engine could not run this schedule. Its index and its dense layers are fixed at start:
        by `capacity`, if that is given, for another engine of this model."""
        if not self.sparse:
            raise UserError(
                "the engine was started with vLLM's own attention, which has no schedule", "start it with sparse=True"
            )
        schedule.check_model(self.model_name, fingerprint.of_config(self.config))
        schedule.check_layers(self.layers)
        started = self._capacity if capacity is None else widest(capacity, self.context_limit, self.layers)
        check_fits_engine(schedule, started)

    # -- weights and memory ----------------------------------------------------------------------------------------------

    def load_weights(self, weights: nn.Module | dict[str, Tensor], version: int) -> None:
        """Copy the weights in, from this process's memory; names and shapes must match exactly. A sleeping engine
        wakes.

        Raises UserError unless the version rises. The cache is emptied, because its K, V and index belong to the old
        weights.
        """
        check_version(version, self.weight_version)
        if self._parallel > 1:
            raise UserError(
                f"weights cannot be loaded into {self._parallel} processes of tensor parallelism yet",
                "use tensor_parallel_size=1",
            )
        tied = bool(getattr(self.config, "tie_word_embeddings", False))
        named = checked(weights, expected_shapes(self.config), tied)
        self.wake()
        self._weights = "gone"
        self.llm.collective_rpc("sparroll_load_weights", args=(named,))
        self._empty_cache()
        self._weights = "whole"
        self.weight_version = version

    def shared_model(self) -> None:
        """Returns None: the model is vLLM's own, with its own names and shapes, and belongs to its workers."""

    def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """Free GPU memory. 0: nothing is freed. 1: weights wait in host memory. 2: they are dropped, and must be loaded
        again."""
        if level not in (0, 1, 2):
            raise UserError(f"the sleep level must be 0, 1 or 2, got {level}")
        if level == 0 or self._asleep:
            return
        if not self._sleep_mode:
            raise UserError(
                "the engine was not started with sleep_mode", "use VLLMEngine(..., sleep_mode=True), on a GPU"
            )
        self._empty_cache()
        self.llm.sleep(level)
        self._asleep = True
        if level == 2:
            self._weights = "gone"

    def wake(self) -> None:
        """Take the memory back. Does nothing where the engine is awake."""
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False
            self._empty_cache()

    def close(self) -> None:
        """Free everything, so that another VLLMEngine may start in this process. This also resets the state of
        torch.distributed and torch.compile in this process."""
        if self not in _open:
            return
        _open.remove(self)
        try:
            if self._llm is not None:
                launch.stop(self._llm)
        finally:
            self._llm = None
            launch.choose_runner(v1=False)
            launch.release()

    def _empty_cache(self) -> None:
        # The call must not be inside the assertion: `python -O` drops assertions, and K and V of old weights would be
        # served.
        emptied = self.llm.reset_prefix_cache()
        assert emptied, "vLLM kept its prefix cache: requests are still running"

    # -- what ran --------------------------------------------------------------------------------------------------------

    def report(self) -> EngineReport:
        """Which attention ran, layer by layer, as the workers' layers say. With sparse=False they are vLLM's own and say
        nothing, so the layers' steps are those that the rollouts needed. Raises RuntimeError where workers disagree."""
        ran, *others = map(EngineReport.from_table, self.llm.collective_rpc("sparroll_report"))
        for rank, other in enumerate(others, 1):
            for layer, (first, this) in enumerate(zip(ran.layers, other.layers, strict=True)):
                if first != this:
                    raise RuntimeError(f"layer {layer} ran {first} in the first worker, {this} in worker {rank}")
        if not self.sparse:
            ran = replace(
                self._needed,
                prefill_tokens=self._needed.prefill_tokens + ran.recomputed_tokens,
                preemptions=ran.preemptions,
                recomputed_tokens=ran.recomputed_tokens,
            )
        return replace(
            ran,
            model=self.model_name,
            schedule_name=self.schedule.name if self.schedule else None,
            weight_version=self.weight_version,
            generated_tokens=self._generated_tokens,
            wall_seconds=self._wall_seconds,
        )

    def reset_report(self) -> None:
        self._generated_tokens, self._wall_seconds = 0, 0.0
        self._needed = EngineReport(
            engine="vllm",
            model=self.model_name,
            schedule_name=None,
            weight_version=self.weight_version,
            layers=[LayerReport() for _ in range(self.layers)],
        )
        self.llm.collective_rpc("sparroll_reset_report")

    # -- generating ------------------------------------------------------------------------------------------------------

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
        """`n` rollouts per prompt, in the prompts' order; arguments and refusals are HFEngine's.

        Dense requests and those with schedules of their own decode beside the others; there may be `most_schedules`
        different ones. They have a `cache_salt`, so vLLM's prefix cache keeps their K and V apart from those that
        other schedules wrote. Raises RuntimeError where the backend did not count every step that the rollouts needed.
        """
        self._check_ready()
        generate_arguments.check_counts(n, max_new_tokens, temperature, top_k, top_p)
        check_samples_at(self.kind, temperature)
        ids = generate_arguments.prompt_ids(self, prompts, max_new_tokens)
        seeds = generate_arguments.seeds(seed, len(ids), n)
        stops = generate_arguments.stop_ids(self, self._end_ids if stop_ids is None else stop_ids)
        flags = generate_arguments.dense_flags(self, dense, len(seeds))
        read_by = generate_arguments.schedules_read(self, schedules, flags)
        top_k = min(top_k, self.vocabulary)
        asked = [prompt for prompt in ids for _ in range(n)]
        before = self.report()
        began = time.perf_counter()
        finished = requests.run(
            self.llm,
            [
                requests.tokens_prompt(ids, requests.cache_salt(own, self.schedule))
                for ids, own in zip(asked, read_by, strict=True)
            ],
            requests.parameters(max_new_tokens, temperature, top_p, stops, seeds, top_k, flags),
            self._take_said,
            on_progress,
            partial(self._give_schedules, read_by),
        )
        self._wall_seconds += time.perf_counter() - began
        rollouts = [
            self._rollout(prompt, *finished[place], top_k, place // n, place % n, seeds[place], read_by[place])
            for place, prompt in enumerate(asked)
        ]
        self._generated_tokens += sum(len(rollout.response_ids) for rollout in rollouts)
        if self.sparse:
            check_ran(self.report().since(before), rollouts, flags, read_by, self._own_rows())
        else:
            self._count_dense(rollouts)
        return rollouts

    def _give_schedules(self, read_by: Sequence[Schedule | None], names: Sequence[str]) -> None:
        """Tell the workers which of these requests have schedules of their own. vLLM counts its requests, so a name that a
        worker keeps beyond the request's end is never another's."""
        own, numbers = requests.own_schedules(read_by, self.schedule, names)
        if not own and not self._own_schedules:
            return
        self._own_schedules, tables = own, [(each.table(), each.name) for each in own]
        self.llm.collective_rpc("sparroll_set_request_schedules", args=(tables, numbers))

    def _own_rows(self) -> list[tuple[Schedule, int]]:
        """How many decode rows the first worker read by each of these schedules in the last `generate`."""
        if not self._own_schedules:
            return []
        counts: list[int] = self.llm.collective_rpc("sparroll_rows_of_own_schedules")[0]
        return list(zip(self._own_schedules, counts, strict=True))

    def dense_scores(
        self,
        rollouts: Sequence[Rollout],
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        on_progress: OnProgress | None = None,
    ) -> list[TokenScores]:
        """What the dense policy says of each response token, as `Scorer.dense` does, but from this engine: prompt and
        response go through a dense prefill once more (see rescoring.py), whatever the schedule. Where checks of drafts
        scored the rollouts already, these scores are returned.

        A rollout that fills the engine's context has no score of its last token, so its tensors are one entry shorter.
        Raises UserError for rollouts of other weights, and for a temperature or top_p that vLLM's lists cannot give.
        """
        self._check_ready()
        top_k = min(top_k, self.vocabulary)
        stale = sorted({each.weight_version for each in rollouts} - {self.weight_version})
        if stale:
            raise UserError(
                f"rollouts of weight version {stale[0]} cannot be scored with version {self.weight_version}",
                "score them before the next load_weights",
            )
        if self.checks_drafts:
            return rescoring.already_scored(rollouts)
        rescoring.check_sampling(temperature, top_p, top_k, self.vocabulary)
        asked = [rescoring.request_of(each, top_k, self.context_limit) for each in rollouts]
        prompts, parameters = [requests.tokens_prompt(ids) for ids, _ in asked], [each for _, each in asked]
        finished = requests.run(self.llm, prompts, parameters, self._take_said, on_progress)
        return [
            rescoring.scores_of(
                output.prompt_logprobs,
                rollout,
                len(ids),
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                vocabulary=self.vocabulary,
            )
            for rollout, (ids, _), (output, _, _) in zip(rollouts, asked, finished, strict=True)
        ]

    def _check_ready(self) -> None:
        self._check_open()
        if self._asleep:
            raise UserError("the engine sleeps", "wake() it first")
        if self._weights == "gone":
            raise UserError("the engine has no whole weights", "load_weights(...) first")

    def _take_said(self) -> dict[str, dict[str, Any]]:
        """What the first worker kept about the requests that ended: what checks said of their drafts, or what they read in
        short steps. The others kept the same."""
        if self.checks_drafts and self.sparse:
            taken: dict[str, dict[str, Any]] = self.llm.collective_rpc("sparroll_take_checked")[0]
            return taken
        if self.short_step_tokens:
            reads: dict[str, int] = self.llm.collective_rpc("sparroll_take_short_reads")[0]
            return {name: {"short_reads": tokens} for name, tokens in reads.items()}
        return {}

    def _rollout(
        self,
        prompt: list[int],
        finished: Any,
        seconds: float,
        said: dict[str, Any] | None,
        top_k: int,
        index: int,
        sample: int,
        seed: int,
        schedule: Schedule | None,
    ) -> Rollout:
        output = finished.outputs[0]
        tokens = list(output.token_ids)
        logp, lists = outputs.log_probs(output.logprobs, tokens, top_k)
        assert output.finish_reason in ("stop", "length"), f"vLLM ended a request with {output.finish_reason!r}"
        contexts = outputs.decode_contexts(len(prompt), len(tokens))
        unread_T = schedule.unread_tokens(contexts, self.layers) if schedule else np.zeros_like(contexts)
        whole, unread = self.layers * int(contexts.sum()), int(unread_T.sum())
        checked: dict[str, Any] = {}
        if said is not None and not self.checks_drafts:
            # A request that meets a stop id may have run one row more, whose token is thrown away.
            unread -= min(unread, said["short_reads"])
        share = (whole - unread) / whole if whole else 1.0
        if said is not None and self.checks_drafts and self.schedule is not None:
            checked = outputs.checked(said, len(tokens))
            read_all = self.layers * (said["draft_context_tokens"] + said["check_read_tokens"])
            read_all -= said["draft_unread_tokens"]
            share = read_all / whole if whole else 1.0
        return Rollout(
            prompt_ids=prompt,
            response_ids=tokens,
            sparse_logp=logp,
            finish_reason=output.finish_reason,
            prompt_index=index,
            sample_index=sample,
            seed=seed,
            weight_version=self.weight_version,
            schedule_name=schedule.name if schedule else None,
            attention="sparse" if unread else "dense",
            kv_read_share=share,
            wall_seconds=seconds,
            top_k=lists,
            **checked,
            text=response_text(self.tokenizer, tokens),
        )

    def _count_dense(self, rollouts: list[Rollout]) -> None:
        """Count the steps that vLLM's own attention must have run for these rollouts."""
        for rollout in rollouts:
            contexts = outputs.decode_contexts(len(rollout.prompt_ids), len(rollout.response_ids))
            self._needed.prefill_tokens += len(rollout.prompt_ids)
            for layer in self._needed.layers:
                layer.dense_steps += len(contexts)
                layer.context_tokens += int(contexts.sum())
                layer.read_tokens += int(contexts.sum())


def _loaded(schedule: Schedule | str | Path | None) -> Schedule | None:
    if isinstance(schedule, (str, Path)):
        return Schedule.load(schedule)
    if schedule is not None:
        check_is_schedule(schedule)
    return schedule
