"""HFEngine: rollouts from any transformers decoder, dense or sparse, on CPU or GPU. Simple enough to be the oracle for
every other engine; not the fastest on a GPU.

The life of a request: it waits in the queue; it gets a cache row, and its prompt's K and V are computed, or copied from a
row that samples from the same prompt; each decode step appends one token, at the budget of its own context length; when it
ends, a waiting request takes its row, or the last active row moves there, so that rows 0..A-1 are always the active ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparroll.engines import sampling
from sparroll.engines.base import EngineReport, LayerReport, Progress
from sparroll.engines.hf_attention import DecodeStep, PrefillStep, routed, run_step
from sparroll.engines.kv_cache import KVCache
from sparroll.engines.support import check_supported, load_model
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.types import Rollout

_PREFILL_TOKENS = 8192
"""Prompts are prefilled together up to so many tokens, padding included."""
_NO_TOKENS = torch.empty(0, dtype=torch.int64)


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
            _Request(ids, index, sample, seeds[index * n + sample], max_new_tokens)
            for index, ids in enumerate(prompt_ids)
            for sample in range(n)
        ]
        stops = frozenset(self._stop_ids() if stop_ids is None else stop_ids)
        with routed(self.model):
            run = _Run(self, requests, max_new_tokens, temperature, stops, min(top_k, self.model.config.vocab_size))
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


@dataclass
class _Request:
    """One rollout on its way."""

    prompt_ids: list[int]
    prompt_index: int
    sample_index: int
    seed: int
    max_new_tokens: int
    response_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top_k: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    finish_reason: str = ""
    context_tokens: int = 0
    read_tokens: int = 0
    """Sums over this request's decode steps, in a sparse layer."""
    sparse_steps: int = 0
    started: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.uniforms = sampling.uniforms(self.seed, self.max_new_tokens).numpy()

    @property
    def cached_tokens(self) -> int:
        """Tokens whose K and V are in the cache: all but the last one drawn."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    def rollout(self, engine: HFEngine, sparse_layers: frozenset[int]) -> Rollout:
        whole = engine.layers * self.context_tokens
        unread = len(sparse_layers) * (self.context_tokens - self.read_tokens)
        return Rollout(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            sparse_logp=torch.tensor(self.logp, dtype=torch.float32),
            finish_reason="stop" if self.finish_reason == "stop" else "length",
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            seed=self.seed,
            weight_version=engine.weight_version,
            schedule_name=engine.schedule.name if engine.schedule else None,
            attention="sparse" if self.sparse_steps else "dense",
            kv_read_share=(whole - unread) / whole if whole else 1.0,
            wall_seconds=self.ended - self.started,
            top_k_ids=torch.stack([ids for ids, _ in self.top_k]) if self.top_k else None,
            top_k_logp=torch.stack([logp for _, logp in self.top_k]) if self.top_k else None,
        )


class _Run:
    """One `generate` call: the queue, the cache, the active rows."""

    def __init__(
        self,
        engine: HFEngine,
        requests: list[_Request],
        max_new_tokens: int,
        temperature: float,
        stops: frozenset[int],
        top_k: int,
    ):
        self.engine, self.model, self.schedule = engine, engine.model, engine.schedule
        self.temperature, self.stops, self.top_k = temperature, stops, top_k
        self.total = len(requests)
        self.waiting = deque(requests)
        self.active: list[_Request] = []
        self.first_logp: dict[int, Tensor] = {}
        """Log-probabilities of the first token, by prompt, while samples of the prompt still wait."""
        dense = self.schedule.dense_layers if self.schedule else range(engine.layers)
        self.dense_layers = frozenset(dense)
        self.sparse_layers = frozenset(range(engine.layers)) - self.dense_layers
        config = self.model.config
        self.cache = KVCache(
            layers=engine.layers,
            rows=min(engine.max_batch, self.total),
            heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            most_tokens=max(len(request.prompt_ids) for request in requests) + max_new_tokens,
            selector=self.schedule.selector if self.schedule else None,
            sparse_layers=self.sparse_layers,
            dtype=self.model.dtype,
            device=engine.device,
        )
        self.rows = min(engine.max_batch, self.total)

    def all(self, on_progress: Progress | None) -> None:
        started = time.perf_counter()
        report, done = self.engine.report(), 0
        while self.waiting or self.active:
            while self.waiting and len(self.active) < self.rows:
                self._admit()
                self._release()
            if self.active:
                self._decode()
            self._release()
            finished = self.total - len(self.waiting) - len(self.active)
            if on_progress and finished > done:
                on_progress(finished, self.total)
            done = finished
        report.wall_seconds += time.perf_counter() - started

    def _admit(self) -> None:
        """Give free rows to waiting requests: copy the prompt from a row that has it, else compute it."""
        fresh: dict[int, list[int]] = {}
        prompts: dict[int, list[int]] = {}
        first_row = len(self.active)
        while self.waiting and len(self.active) < self.rows:
            request = self.waiting[0]
            sibling = next((r for r, held in enumerate(self.active[:first_row]) if self._shares(held, request)), None)
            if sibling is None and request.prompt_index not in prompts:
                padded = max(len(request.prompt_ids), *(len(ids) for ids in prompts.values()), 0)
                if prompts and padded * (len(prompts) + 1) > _PREFILL_TOKENS:
                    break
                prompts[request.prompt_index] = request.prompt_ids
            row = len(self.active)
            self.cache.reserve(len(request.prompt_ids) + 1)
            if sibling is None:
                fresh.setdefault(request.prompt_index, []).append(row)
            else:
                self.cache.copy_row(sibling, row, len(request.prompt_ids))
            self.waiting.popleft()
            request.started = time.perf_counter()
            self.active.append(request)
        if prompts:
            self._prefill(list(prompts), list(prompts.values()), [fresh[index] for index in prompts])
        self._draw(torch.stack([self.first_logp[r.prompt_index] for r in self.active[first_row:]]), first_row)
        still_needed = {request.prompt_index for request in self.waiting}
        self.first_logp = {index: logp for index, logp in self.first_logp.items() if index in still_needed}

    def _shares(self, held: _Request, request: _Request) -> bool:
        return held.prompt_index == request.prompt_index and request.prompt_index in self.first_logp

    def _prefill(self, indices: list[int], prompts: list[list[int]], rows: list[list[int]]) -> None:
        lengths = [len(ids) for ids in prompts]
        padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for entry, ids in enumerate(prompts):
            padded[entry, : len(ids)] = torch.tensor(ids)
        device = self.engine.device
        positions = torch.arange(padded.shape[1], device=device).expand(len(prompts), -1)
        last = torch.tensor(lengths, device=device) - 1
        # Right padding needs no mask: under causal attention no prompt token sees what comes after it.
        output = run_step(
            self.model.get_decoder(),
            PrefillStep(self.cache, lengths, rows),
            self.engine.layers,
            input_ids=padded.to(device),
            position_ids=positions,
        )
        hidden = output.last_hidden_state[torch.arange(len(prompts), device=device), last]
        logp = sampling.log_probs(self.model.get_output_embeddings()(hidden), self.temperature)
        self.first_logp |= dict(zip(indices, logp, strict=True))
        self.engine.report().prefill_tokens += sum(lengths)

    def _decode(self) -> None:
        """One token for every active row."""
        device = self.engine.device
        contexts = np.array([request.cached_tokens + 1 for request in self.active])
        longest = int(contexts.max())
        self.cache.reserve(longest)
        context_tokens = torch.from_numpy(contexts).to(device)
        completed, budgets = None, None
        if self.schedule is not None:
            full = np.flatnonzero(contexts % self.cache.unit_tokens == 0)
            completed = torch.from_numpy(full).to(device) if len(full) else None
            budgets = self.schedule.kv_budget_tokens(torch.from_numpy(contexts)).numpy()
        sparse = budgets is not None and bool(self.sparse_layers) and bool((budgets < contexts).any())
        step = DecodeStep(
            cache=self.cache,
            context_tokens=context_tokens,
            longest=longest,
            even=bool((contexts == longest).all()),
            completed=completed,
            kv_budget_tokens=torch.from_numpy(budgets).to(device) if sparse and budgets is not None else None,
            dense_layers=self.dense_layers,
        )
        ids = torch.tensor([[request.response_ids[-1]] for request in self.active], device=device)
        output = run_step(
            self.model, step, self.engine.layers, input_ids=ids, position_ids=(context_tokens - 1)[:, None]
        )
        self._draw(sampling.log_probs(output.logits[:, -1], self.temperature), 0)
        self._count(step, contexts, budgets)

    def _draw(self, logp: Tensor, first_row: int) -> None:
        """One token for each row from `first_row` on, from log-probabilities [A, V]."""
        requests = self.active[first_row:]
        uniform = torch.tensor([r.uniforms[len(r.response_ids)] for r in requests], dtype=torch.float64)
        drawn = sampling.sample(logp, uniform.to(logp.device), greedy=self.temperature == 0)
        drawn_logp = logp.gather(-1, drawn[:, None])[:, 0]
        sampling.check_finite(drawn_logp, f"at {len(requests[0].response_ids)} tokens of response")
        if self.top_k:
            best = logp.topk(self.top_k, dim=-1)
            best_ids, best_logp = best.indices.cpu(), best.values.cpu()
        for row, (request, token, token_logp) in enumerate(
            zip(requests, drawn.tolist(), drawn_logp.tolist(), strict=True)
        ):
            request.response_ids.append(token)
            request.logp.append(token_logp)
            if self.top_k:
                request.top_k.append((best_ids[row], best_logp[row]))
            if token in self.stops:
                request.finish_reason = "stop"
            elif len(request.response_ids) == request.max_new_tokens:
                request.finish_reason = "length"
        self.engine.report().generated_tokens += len(requests)

    def _release(self) -> None:
        """Finished requests leave; the last active row moves into each gap."""
        for row in reversed(range(len(self.active))):
            if not self.active[row].finish_reason:
                continue
            self.active[row].ended = time.perf_counter()
            last = self.active.pop()
            if row < len(self.active):
                self.cache.copy_row(len(self.active), row, last.cached_tokens)
                self.active[row] = last

    def _count(self, step: DecodeStep, contexts: np.ndarray, budgets: np.ndarray | None) -> None:
        read = contexts if budgets is None else _read_tokens(contexts, budgets, self.cache.unit_tokens)
        partly = read < contexts
        for request, context, tokens, part in zip(self.active, contexts, read, partly, strict=True):
            request.context_tokens += int(context)
            request.read_tokens += int(tokens)
            request.sparse_steps += int(part)
        for layer, counted in enumerate(self.engine.report().layers):
            sparse_rows = int(partly.sum()) if step.ran[layer] == "sparse" else 0
            counted.sparse_steps += sparse_rows
            counted.dense_steps += len(contexts) - sparse_rows
            counted.context_tokens += int(contexts.sum())
            counted.read_tokens += int((read if step.ran[layer] == "sparse" else contexts).sum())
            counted.index_read_share = self.cache.index_bytes_share(layer)


def _read_tokens(contexts: np.ndarray, budgets: np.ndarray, unit: int) -> np.ndarray:
    """Tokens that a step attends: whole units up to the budget, less what the last, incomplete unit lacks."""
    units = -(-contexts // unit)
    return np.minimum(budgets // unit, units) * unit - (units * unit - contexts)
