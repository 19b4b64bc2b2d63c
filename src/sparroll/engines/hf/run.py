"""One `generate` call of HFEngine: its requests, their cache rows, and the loop that gives each active row a token.
Under a compression, the call's dense requests are a run of their own.

The life of a request: It waits in the queue. It gets a cache row, and its prompt's K and V are computed, or copied from
a row that samples from the same prompt. Each decode step appends one token, under the budget for the request's own
context length; a dense request reads everything. Where drafts are checked, such a token is a draft, and the check of
its window may take it back (windows.py). Under a compression, tokens above the budget leave the cache during the
prefill and after every `every_tokens` of its decode steps. When it ends, the last active row moves into its row, so
that rows 0..A-1 are always the active ones, and a waiting request takes the free row.
"""

# A active rows, M rows to compress, W observed queries, H kv heads, V vocabulary

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparroll.compression import Compression
from sparroll.draft_check import DraftCheck
from sparroll.engines import sampling
from sparroll.engines.hf.attention import CheckStep, DecodeStep, Evicting, PrefillStep, run_step
from sparroll.engines.hf.kv_cache import DenseFootprint, KVCache
from sparroll.engines.hf.windows import Drafts
from sparroll.engines.report import EngineReport
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TopK

_PREFILL_TOKENS = 8192
"""Prompts are prefilled together up to this many tokens, padding included."""


@dataclass
class Request:
    """One rollout while it is being sampled."""

    prompt_ids: list[int]
    prompt_index: int
    sample_index: int
    seed: int
    max_new_tokens: int
    dense: bool = False
    """Whether its decode steps read everything, whatever the schedule. A run under a compression has no such request."""
    response_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top_k: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    finish_reason: str = ""
    context_tokens: int = 0
    """Sum over the request's decode steps."""
    unread_tokens: int = 0
    """What all layers together left out of it."""
    sparse_steps: int = 0
    """Steps in which a layer read a part of the context."""
    evicted_tokens: int = 0
    """Tokens that have left the cache, the same number in every layer and head."""
    drafts: Drafts | None = None
    """What the checks of drafts keep about this request; None where no drafts are checked."""
    prompt_is_whole: bool = True
    """Whether the request's row still begins with what the prefill left of the prompt."""
    started: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.uniforms = sampling.uniforms(self.seed, self.max_new_tokens).numpy()

    @property
    def cached_tokens(self) -> int:
        """Tokens whose K and V have been in the cache: all but the last one drawn."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def held_tokens(self) -> int:
        """Tokens whose K and V are in the cache now."""
        return self.cached_tokens - self.evicted_tokens

    @property
    def attention(self) -> Literal["dense", "sparse", "evicted"]:
        if self.evicted_tokens:
            return "evicted"
        return "sparse" if self.sparse_steps else "dense"


@dataclass(frozen=True)
class GenerateSettings:
    """What every request of a `generate` call shares."""

    model: PreTrainedModel
    schedule: Schedule | None
    compression: Compression | None
    weight_version: int
    max_batch: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    top_k: int


class Run:
    """One `generate` call, or its requests of one schedule: the queue, the cache, the active rows.

    report: takes the counts of what runs.
    """

    def __init__(self, settings: GenerateSettings, requests: list[Request], report: EngineReport):
        self.settings, self.report = settings, report
        self.model, self.schedule, self.compression = settings.model, settings.schedule, settings.compression
        self.temperature, self.stops, self.top_k = settings.temperature, settings.stop_ids, settings.top_k
        self.top_p = settings.top_p
        self.device = self.model.device
        self.layers = int(self.model.config.num_hidden_layers)
        self.check = self.schedule.check if self.schedule else None
        if self.check is not None:
            for request in requests:
                request.drafts = Drafts(sampling.CheckDraws(request.seed, request.max_new_tokens))
        self.total = len(requests)
        self.waiting = deque(requests)
        self.active: list[Request] = []
        self.first_logp: dict[int, Tensor] = {}
        """Log-probabilities of the first token, by prompt, while samples of the prompt still wait."""
        self.parts = self.schedule.parts(self.layers) if self.schedule else ()
        """Sparse layers and what each of them reads."""
        self.sparse_layers = frozenset(layer for layers, _ in self.parts for layer in layers)
        self.rows = min(settings.max_batch, self.total)
        self._allocate(max(len(request.prompt_ids) + request.max_new_tokens for request in requests))

    def _allocate(self, longest_tokens: int) -> None:
        """Make the cache, and the calculation of the cache size that dense rollouts of the same requests would have
        had."""
        config, policy, layers = self.model.config, self.compression, self.layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = KVCache(
            layers=layers,
            rows=self.rows,
            heads=heads,
            head_dim=head_dim,
            most_tokens=min(longest_tokens, policy.most_tokens) if policy else longest_tokens,
            selector=self.schedule.selector if self.schedule else None,
            sparse_layers=self.sparse_layers,
            dtype=self.model.dtype,
            device=self.device,
            recent_queries=policy.query_tokens if policy else 0,
            group=config.num_attention_heads // heads,
        )
        token_bytes = self.rows * heads * head_dim * self.model.dtype.itemsize
        self.dense = DenseFootprint(token_bytes, 2 * layers, longest_tokens)

    def all(self, on_progress: OnProgress | None) -> None:
        started = time.perf_counter()
        done = 0
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
        self.report.wall_seconds += time.perf_counter() - started
        self.report.peak_kv_bytes = max(self.report.peak_kv_bytes, self.cache.peak_bytes)
        self.report.peak_dense_kv_bytes = max(self.report.peak_dense_kv_bytes, self.dense.peak_bytes)

    def rollout(self, request: Request) -> Rollout:
        """The rollout of a request that has ended."""
        settings, drafts = self.settings, request.drafts
        whole = self.layers * request.context_tokens
        read = whole - request.unread_tokens
        checked: dict[str, Any] = {}
        if drafts is not None:
            checked = drafts.results()
            read += self.layers * drafts.read_tokens
            steps = len(request.response_ids) - 1
            whole = self.layers * (steps * len(request.prompt_ids) + steps * (steps + 1) // 2)
        elif request.top_k:
            checked = {"top_k": TopK(*(torch.stack(part) for part in zip(*request.top_k, strict=True)))}
        return Rollout(
            prompt_ids=request.prompt_ids,
            response_ids=request.response_ids,
            sparse_logp=torch.tensor(request.logp, dtype=torch.float32),
            finish_reason="stop" if request.finish_reason == "stop" else "length",
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            seed=request.seed,
            weight_version=settings.weight_version,
            schedule_name=settings.schedule.name if settings.schedule and not request.dense else None,
            compression_name=settings.compression.name if settings.compression else None,
            attention=request.attention,
            kv_read_share=read / whole if whole else 1.0,
            wall_seconds=request.ended - request.started,
            **checked,
        )

    def _admit(self) -> None:
        """Give free rows to waiting requests. The prompt is copied from a row that has it, or else computed."""
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
            if self.compression is not None:
                request.evicted_tokens = max(0, len(request.prompt_ids) - self.compression.budget_tokens)
            held = len(request.prompt_ids) - request.evicted_tokens
            self._reserve(held + 1, len(request.prompt_ids) + 1)
            if sibling is None:
                fresh.setdefault(request.prompt_index, []).append(row)
            else:
                self.cache.copy_row(sibling, row, held)
            self.waiting.popleft()
            request.started = time.perf_counter()
            self.active.append(request)
        if prompts:
            self._prefill(list(prompts), list(prompts.values()), [fresh[index] for index in prompts])
        self._draw(torch.stack([self.first_logp[r.prompt_index] for r in self.active[first_row:]]), first_row)
        still_needed = {request.prompt_index for request in self.waiting}
        self.first_logp = {index: logp for index, logp in self.first_logp.items() if index in still_needed}

    def _shares(self, held: Request, request: Request) -> bool:
        same = held.prompt_index == request.prompt_index and request.prompt_index in self.first_logp
        return same and held.prompt_is_whole

    def _reserve(self, held_tokens: int, context_tokens: int) -> None:
        self.cache.reserve(held_tokens)
        self.dense.reserve(context_tokens)

    def _prefill(self, indices: list[int], prompts: list[list[int]], rows: list[list[int]]) -> None:
        lengths = [len(ids) for ids in prompts]
        padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for entry, ids in enumerate(prompts):
            padded[entry, : len(ids)] = torch.tensor(ids)
        device = self.device
        positions = torch.arange(padded.shape[1], device=device).expand(len(prompts), -1)
        last = torch.tensor(lengths, device=device) - 1
        # Right padding needs no mask: under causal attention no prompt token sees what comes after it.
        output = run_step(
            self.model.get_decoder(),
            PrefillStep(self.cache, lengths, rows, self.compression),
            self.layers,
            input_ids=padded.to(device),
            position_ids=positions,
        )
        hidden = output.last_hidden_state[torch.arange(len(prompts), device=device), last]
        logp = sampling.log_probs(self.model.get_output_embeddings()(hidden), self.temperature, self.top_p)
        self.first_logp |= dict(zip(indices, logp, strict=True))
        self.report.prefill_tokens += sum(lengths)

    def _decode(self) -> None:
        """One token for every active row."""
        device = self.device
        contexts = np.array([request.cached_tokens + 1 for request in self.active])
        held = contexts - np.array([request.evicted_tokens for request in self.active])
        longest = int(held.max())
        self._reserve(longest, int(contexts.max()))
        context_tokens = torch.from_numpy(contexts).to(device)
        completed = None
        budgets: dict[int, Tensor] = {}
        read = dict.fromkeys(range(self.layers), held) if self.compression else {}
        if self.schedule is not None:
            full = np.flatnonzero(contexts % self.cache.unit_tokens == 0)
            completed = torch.from_numpy(full).to(device) if len(full) else None
        dense = np.array([request.dense for request in self.active])
        for layers, schedule in self.parts:
            read_tokens = np.where(dense, contexts, schedule.read_tokens(contexts))
            if bool((read_tokens < contexts).any()):
                read |= dict.fromkeys(layers, read_tokens)
                budgets |= dict.fromkeys(layers, torch.from_numpy(schedule.kv_budget_tokens(contexts)).to(device))
        step = DecodeStep(
            cache=self.cache,
            context_tokens=torch.from_numpy(held).to(device) if self.compression else context_tokens,
            longest=longest,
            even=bool((held == longest).all()),
            completed=completed,
            kv_budget_tokens=budgets,
            dense_rows=torch.from_numpy(np.flatnonzero(dense)).to(device) if dense.any() else None,
            evicting=self._evicting(self.compression, held) if self.compression else None,
        )
        ids = torch.tensor([[request.response_ids[-1]] for request in self.active], device=device)
        output = run_step(self.model, step, self.layers, input_ids=ids, position_ids=(context_tokens - 1)[:, None])
        self._draw(sampling.log_probs(output.logits[:, -1], self.temperature, self.top_p), 0)
        self._count(step, contexts, read)
        if step.evicting is not None:
            self._evicted(step.evicting)
        if self.check is not None:
            self._check_windows(self.check)

    def _check_windows(self, check: DraftCheck) -> None:
        """Check the rows whose window is full, or whose drafts reached an end."""
        started = time.perf_counter()
        due = [
            row
            for row, request in enumerate(self.active)
            if request.drafts is not None
            and (len(request.drafts.logp) == check.drafts or (request.drafts.logp and self._end(request)))
        ]
        at_once = max(1, _PREFILL_TOKENS // check.window_tokens)
        for first in range(0, len(due), at_once):
            self._check_rows(check, due[first : first + at_once])
        if due:
            self.report.check_seconds += time.perf_counter() - started

    def _check_rows(self, check: DraftCheck, rows: list[int]) -> None:
        """One dense pass over the windows of these rows; then the rule, row by row."""
        requests = [self.active[row] for row in rows]
        drafted = [len(request.drafts.logp) for request in requests if request.drafts is not None]
        starts = [request.cached_tokens - count for request, count in zip(requests, drafted, strict=True)]
        # The last token that stands and the drafts; the last draft only where the response may go on behind it.
        tokens = [count + (not self._end(request)) for request, count in zip(requests, drafted, strict=True)]
        longest = max(start + count for start, count in zip(starts, tokens, strict=True))
        self._reserve(longest, longest)
        padded = torch.zeros(len(rows), max(tokens), dtype=torch.int64)
        for entry, (request, start, count) in enumerate(zip(requests, starts, tokens, strict=True)):
            first = start - len(request.prompt_ids)
            padded[entry, :count] = torch.tensor(request.response_ids[first : first + count])
        offsets = torch.arange(padded.shape[1])
        hidden = run_step(
            self.model.get_decoder(),
            CheckStep(self.cache, rows, starts, tokens),
            self.layers,
            input_ids=padded.to(self.device),
            position_ids=(torch.tensor(starts)[:, None] + offsets).to(self.device),
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        for entry, (request, count, start) in enumerate(zip(requests, tokens, starts, strict=True)):
            dense_logp = sampling.log_probs(head(hidden[entry, :count]), self.temperature, self.top_p)
            self._settle(check, request, dense_logp)
            assert request.drafts is not None
            request.drafts.read_tokens += start + count
            self.report.check_read_tokens += start + count

    def _settle(self, check: DraftCheck, request: Request, dense_logp: Tensor) -> None:
        """Take the rule's verdict on a request's window into its response, and the token behind it where it stands
        whole. dense_logp: [N, V] for its N drafts, and one row more where the response goes on behind them."""
        assert request.drafts is not None
        drafted, greedy = len(request.drafts.logp), self.temperature == 0
        position = len(request.response_ids) - drafted
        outcome = request.drafts.settle(
            check, dense_logp[:drafted], request.response_ids[position:], position, greedy=greedy, top_k=self.top_k
        )
        stand = len(outcome.token_ids)
        request.response_ids[position:] = outcome.token_ids
        request.logp += outcome.sparse_logp
        if len(dense_logp) > drafted and not outcome.checks.cut_windows:
            self._draw_behind(request, dense_logp[drafted])
            outcome.checks.extra_tokens = 1
        request.finish_reason = self._end(request)
        # The step that drafts response token t has a context of prompt + t tokens.
        again = range(len(request.prompt_ids) + position + stand, len(request.prompt_ids) + position + drafted)
        self.report.taken_back_context_tokens += sum(again)
        request.drafts.checks.add(outcome.checks)
        if outcome.checks.extra_tokens:
            context = np.array([request.cached_tokens])
            self.report.extra_context_tokens += int(context[0])
            for layers, schedule in self.parts if not request.dense else ():
                sparse = int((schedule.read_tokens(context) < context)[0])
                for layer in layers:
                    self.report.layers[layer].extra_sparse_tokens += sparse
        self.report.checks.add(outcome.checks)
        self.report.generated_tokens += stand + outcome.checks.extra_tokens

    def _draw_behind(self, request: Request, logp: Tensor) -> None:
        """The token behind a window that stands whole, from the dense log-probabilities [V] there."""
        assert request.drafts is not None
        uniform = torch.tensor(request.uniforms[len(request.response_ids)], dtype=torch.float64, device=logp.device)
        token = int(sampling.sample(logp[None], uniform[None], greedy=self.temperature == 0)[0])
        sampling.check_finite(logp[token], f"at {len(request.response_ids)} tokens of response")
        request.response_ids.append(token)
        request.logp.append(float(logp[token]))
        request.drafts.stands_undrafted(logp, float(logp[token]), self.top_k)

    def _end(self, request: Request) -> str:
        """Why the response ends with its present last token; empty if it goes on."""
        if request.response_ids[-1] in self.stops:
            return "stop"
        return "length" if len(request.response_ids) == request.max_new_tokens else ""

    def _evicting(self, policy: Compression, held: np.ndarray) -> Evicting:
        """Which rows are compressed after this step: those over the budget, after every `every_tokens` of their own
        steps, so that a request is treated alike in any batch. Requests that end with this step are not compressed."""
        steps = np.array([len(request.response_ids) for request in self.active])
        ends = np.array([request.max_new_tokens for request in self.active]) == steps + 1
        due = np.flatnonzero((steps % policy.every_tokens == 0) & (held > policy.budget_tokens) & ~ends)
        device, window = self.device, policy.query_tokens
        near = window > 0 and bool((-steps % policy.every_tokens < window).any())
        evicting = Evicting(policy, torch.from_numpy(steps % window).to(device) if near else None, due.tolist())
        if len(due):
            evicting.rows = torch.from_numpy(due).to(device)
            evicting.tokens = torch.from_numpy(held[due]).to(device)
            recent = steps[due][:, None] + 1 + np.arange(window)
            evicting.recent_slots = torch.from_numpy(recent % max(window, 1)).to(device)
        return evicting

    def _evicted(self, evicting: Evicting) -> None:
        for row in evicting.due:
            request = self.active[row]
            request.evicted_tokens += request.held_tokens - evicting.policy.budget_tokens
            request.prompt_is_whole = False

    def _draw(self, logp: Tensor, first_row: int) -> None:
        """One token for each row from `first_row` on, from log-probabilities [A, V]."""
        requests = self.active[first_row:]
        uniform = torch.tensor([r.uniforms[len(r.response_ids)] for r in requests], dtype=torch.float64)
        drawn = sampling.sample(logp, uniform.to(logp.device), greedy=self.temperature == 0)
        drawn_logp = logp.gather(-1, drawn[:, None])[:, 0]
        sampling.check_finite(drawn_logp, f"at {len(requests[0].response_ids)} tokens of response")
        lists = None
        if self.top_k and self.check is None:
            lists = [part.cpu() for part in logp.topk(self.top_k, dim=-1)]
        for row, (request, token, token_logp) in enumerate(
            zip(requests, drawn.tolist(), drawn_logp.tolist(), strict=True)
        ):
            request.response_ids.append(token)
            if request.drafts is not None and len(request.response_ids) > 1:
                request.drafts.logp.append(logp[row])
                continue
            request.logp.append(token_logp)
            if request.drafts is not None:
                request.drafts.stands_undrafted(logp[row], token_logp, self.top_k)
            elif lists is not None:
                request.top_k.append((lists[1][row], lists[0][row]))
            request.finish_reason = self._end(request)
            self.report.generated_tokens += 1

    def _release(self) -> None:
        """Remove finished requests. The last active row moves into each gap."""
        for row in reversed(range(len(self.active))):
            if not self.active[row].finish_reason:
                continue
            self.active[row].ended = time.perf_counter()
            last = self.active.pop()
            if row < len(self.active):
                self.cache.copy_row(len(self.active), row, last.held_tokens)
                self.active[row] = last

    def _count(self, step: DecodeStep, contexts: np.ndarray, read: dict[int, np.ndarray]) -> None:
        """Add the step to the report. read: tokens that each row attends to, in each layer that does not read
        everything."""
        unread = np.zeros_like(contexts)
        for layer, counted in enumerate(self.report.layers):
            attended = read[layer] if step.ran[layer] != "dense" else contexts
            sparse_rows = int((attended < contexts).sum())
            counted.sparse_steps += sparse_rows
            counted.dense_steps += len(contexts) - sparse_rows
            counted.context_tokens += int(contexts.sum())
            counted.read_tokens += int(attended.sum())
            counted.index_read_share = self.cache.index_read_share(layer)
            unread += contexts - attended
        for request, context, tokens in zip(self.active, contexts, unread, strict=True):
            if request.dense:
                self.report.dense_request_steps += 1
                self.report.dense_request_context_tokens += int(context)
            request.context_tokens += int(context)
            request.unread_tokens += int(tokens)
            request.sparse_steps += int(tokens > 0)
