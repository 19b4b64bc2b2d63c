"""vLLM's V1 model runner, with drafts before a step and their check after it. Between the two vLLM runs the step itself:
the rows of windows are rows that prefill, so they are dense, and their K, V and index take the drafts' place.

Drafts are one-token steps of the same requests (drafting.py). vLLM's methods that are overridden here have kept their
meaning from 0.24 to 0.33; what they return differs, and is passed on.
"""

# R requests of a step, D drafts of the longest window, W rows of the longest window that the engine may have, V vocabulary

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.windows.configure import check_of
from sparroll.engines.vllm.windows.drafting import draft
from sparroll.engines.vllm.windows.draws import Tempers
from sparroll.engines.vllm.windows.requests import CheckedTokens, WindowRequest
from sparroll.engines.vllm.windows.settling import EXACT_ROWS, KERNEL_ROWS, Policies, Settled, Windows, settle
from sparroll.engines.vllm.windows.step_record import WindowCounters, record_step
from sparroll.errors import UserError

MOST_SHARE = 0.25
"""Of a GPU's memory, for the logits of drafts."""
_logger = logging.getLogger("vllm.sparroll")


def with_windows(runner: Any) -> None:
    """Make a runner of vLLM's one that drafts and checks."""
    theirs = type(runner)
    runner.__class__ = type(f"Window{theirs.__name__}", (WindowRunner, theirs), {})
    runner.start_windows()


def check_memory(shape_RKV: tuple[int, int, int], dtype: torch.dtype, device_bytes: int) -> None:
    """Raise UserError where the logits of drafts would take more of the device than anyone can want."""
    needed = math.prod(shape_RKV) * dtype.itemsize
    requests, drafts, vocabulary = shape_RKV
    if needed > MOST_SHARE * device_bytes:
        raise UserError(
            f"the logits of drafts would take {needed / 2**30:.1f} GiB: {requests} requests, {drafts} drafts a window, "
            f"{vocabulary} logits of {dtype.itemsize} bytes; the GPU has {device_bytes / 2**30:.0f} GiB",
            "lower max_num_seqs (max_batch in VLLMEngine) or the check's window_tokens",
        )
    _logger.info("sparroll: the logits of drafts take %.2f GiB", needed / 2**30)


@dataclass
class _Step:
    """A step from its drafts to its outputs."""

    windows: Windows
    tokens_R: np.ndarray
    """Tokens of each request before the step."""
    requests: list[WindowRequest]
    rows: Tensor | None = None
    """Which of the step's rows the windows are, on the device, once vLLM has laid them out."""
    settled: Settled | None = None
    began: Any = None
    """When the drafts were complete; a CUDA event, or seconds."""


class WindowRunner:
    """Mixed into vLLM's runner, before it. `self` is the runner."""

    def start_windows(self: Any) -> None:
        """Called once, when vLLM has made the runner."""
        check = check_of(self.vllm_config)
        assert check is not None, "a runner of windows without a check"
        self.most_drafts = check.drafts
        self.window_requests: dict[str, WindowRequest] = {}
        self.window_counters = WindowCounters()
        self.keeps_checked = False
        """Whether `ended` is filled. Someone must then empty it."""
        self.ended: dict[str, CheckedTokens] = {}
        self._draft_logits_RKV: Tensor | None = None
        self._step: _Step | None = None
        self._hidden: Tensor | None = None

    def load_model(self: Any, *arguments: Any, **named: Any) -> None:
        super().load_model(*arguments, **named)  # type: ignore[misc]
        # Allocated with the weights, so that vLLM counts it before it sizes the cache.
        rows, vocabulary = self.vllm_config.scheduler_config.max_num_seqs, self.model_config.get_vocab_size()
        shape, dtype = (rows, self.most_drafts, vocabulary), self.model_config.dtype
        if self.device.type == "cuda":
            check_memory(shape, dtype, torch.cuda.mem_get_info(self.device)[1])
        self._draft_logits_RKV = torch.zeros(shape, dtype=dtype, device=self.device)

    def _dummy_sampler_run(self: Any, hidden_states: Tensor) -> Any:
        """vLLM measures here what memory sampling needs; a check needs more."""
        result = super()._dummy_sampler_run(hidden_states)  # type: ignore[misc]
        most, rows = self.vllm_config.scheduler_config.max_num_seqs, self.most_drafts + 1
        hidden = torch.rand_like(hidden_states[:1])
        for top_k, at_once in ((0, KERNEL_ROWS), (1, EXACT_ROWS)):
            requests = min(most, -(-at_once // rows))
            windows = Windows(
                np.full(requests, rows),
                np.full(requests, rows - 1),
                torch.zeros(requests, rows, dtype=torch.int64, device=self.device),
                torch.zeros(3, requests, rows, dtype=torch.float64, device=self.device),
                Tempers.of([0.5] * requests, [1.0] * requests, self._to_device),
            )
            policies = self._policies(
                lambda numbers: self.model.compute_logits(hidden.expand(len(numbers), -1).contiguous())
            )
            settle(windows, policies, 0.5, top_k)
        return result

    def take_checked(self: Any) -> dict[str, dict[str, Any]]:
        """See `sparroll_take_checked`. vLLM names a request that ended only with the next step, so requests that it has
        not named yet are among these."""
        self.keeps_checked = True
        taken, self.ended = self.ended, {}
        for name, request in self.window_requests.items():
            taken[name], request.said = request.said, CheckedTokens()
        return {name: said.table() for name, said in taken.items()}

    # -- before a step -----------------------------------------------------------------------------------------------------

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        later = super()._update_states(scheduler_output)  # type: ignore[misc]
        # Draws come from the requests' own uniforms. vLLM would set these generators back after a prompt's chunk.
        self.input_batch.generators.clear()
        for name in scheduler_output.finished_req_ids:
            request = self.window_requests.pop(name, None)
            if request is not None and self.keeps_checked:
                self.ended[name] = request.said
        for new in scheduler_output.scheduled_new_reqs:
            most = self.max_model_len - len(new.prompt_token_ids)
            self.window_requests[new.req_id] = WindowRequest.of(new.req_id, new.sampling_params, most)
        self._step = self._drafted_step(scheduler_output) if scheduler_output.total_num_scheduled_tokens else None
        return later

    def _drafted_step(self: Any, scheduler_output: Any) -> _Step:
        names = self.input_batch.req_ids
        states = [self.requests[name] for name in names]
        requests = [self.window_requests[name] for name in names]
        scheduled_R = np.array([scheduler_output.num_scheduled_tokens[name] for name in names])
        tokens_R = np.array([state.num_tokens for state in states])
        decoding_R = np.array(
            [bool(state.output_token_ids) and state.num_computed_tokens == state.num_tokens - 1 for state in states]
        )
        # Under a schedule that checks nothing, as under dense attention, a request decodes one token in a step. A window
        # that does not end its response has a row behind its last draft.
        windows_R = decoding_R & (STATE.checks_drafts | (scheduled_R > 1))
        rows_R = np.where(windows_R, scheduled_R, 1)
        drafts_R = np.where(windows_R, np.clip(self._drafts(), scheduled_R - 1, scheduled_R), 0)
        STATE.check_rows = int(rows_R[windows_R].sum())
        longest = int(rows_R.max())
        draws_3RD = np.zeros((3, len(names), longest))
        for row, (request, state) in enumerate(zip(requests, states, strict=True)):
            first = len(state.output_token_ids)
            drawn = request.draws_3T[:, first : first + int(rows_R[row])].numpy()
            draws_3RD[:, row, : drawn.shape[1]] = drawn
        draws = self._to_device(draws_3RD)
        tempers = Tempers.of(
            [request.temperature for request in requests], [request.top_p for request in requests], self._to_device
        )
        if drafts_R.any():
            ids = draft(self, drafts_R, tokens_R, draws[0], tempers, self._draft_logits_RKV, self._to_device)
            ids = torch.nn.functional.pad(ids, (0, longest - ids.shape[1]))
        else:
            ids = torch.zeros(len(names), longest, dtype=torch.int64, device=self.device)
        return _Step(Windows(rows_R, drafts_R, ids, draws, tempers), tokens_R, requests, began=self._stamp())

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        step: _Step = self._step
        windows = step.windows
        ends_R = np.cumsum(num_scheduled_tokens)
        request_N, place_N = windows.request_N, windows.place_N
        rows_N = (ends_R - windows.rows_R)[request_N] + place_N
        step.rows = self._to_device(rows_N)
        if windows.drafts_R.any():
            # A window's rows are the last token and its drafts; a window that ends its response has no row for the last.
            later = (place_N > 0) & (windows.drafts_R[request_N] > 0)
            request, place = self._to_device(request_N[later]), self._to_device(place_N[later] - 1)
            self.input_ids.gpu[self._to_device(rows_N[later])] = windows.draft_ids_RD[request, place].int()
        # vLLM computes the logits of one row each. Those of windows are computed later, a few at a time.
        return (self._to_device(ends_R - 1), step, *prepared[2:])

    # -- after a step ------------------------------------------------------------------------------------------------------

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        step, state = self._step, self.execute_model_state
        if step is None or state is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._hidden = state.hidden_states
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._hidden = self._step = None
        self._record(step)
        return output

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> SamplerOutput:
        step: _Step = spec_decode_metadata
        schedule = STATE.schedule
        check = schedule.check if schedule is not None else None
        top_k = self.input_batch.sampling_metadata.max_num_logprobs

        def dense_logits(numbers: Tensor) -> Tensor:
            assert step.rows is not None and self._hidden is not None, "a check before its step"
            if not step.windows.drafts_R.any():
                return logits[numbers]
            return self.model.compute_logits(self._hidden[step.rows[numbers]])

        floor = check.floor if check is not None else 1.0
        settled = settle(step.windows, self._policies(dense_logits), floor, max(top_k or 0, 0))
        step.settled = settled
        ids_RD = torch.where(settled.stands_RD, settled.token_ids_RD, -1)
        lists = None
        if top_k is not None:
            own_ids, own_logp = settled.token_ids_RD[:, :, None], settled.sparse_logp_RD[:, :, None]
            if settled.top_ids_RDK is not None and settled.top_logp_RDK is not None:
                own_ids = torch.cat([own_ids, settled.top_ids_RDK], -1)
                own_logp = torch.cat([own_logp, settled.top_logp_RDK], -1)
            # The rank of the token itself is not computed.
            ranks = torch.zeros_like(settled.token_ids_RD, dtype=torch.int32)
            lists = LogprobsTensors(own_ids.flatten(0, 1).int(), own_logp.flatten(0, 1), ranks.flatten())
        return SamplerOutput(sampled_token_ids=ids_RD.int(), logprobs_tensors=lists)

    def _policies(self: Any, dense: Callable[[Tensor], Tensor]) -> Policies:
        assert self._draft_logits_RKV is not None, "drafts before the model was loaded"
        return Policies(dense, self._draft_logits_RKV, self._to_device)

    def _record(self: Any, step: _Step) -> None:
        """Keep what the checks said about the tokens that stand. The host has waited for the step already."""
        assert step.settled is not None, "a step without a check"
        counted_R = ~self.discard_request_mask.np[: len(step.requests)]
        record_step(step.windows, step.settled, step.tokens_R, step.requests, counted_R, self.window_counters)
        if step.windows.drafts_R.any():
            self.window_counters.check_seconds += self._seconds_since(step.began)

    def _drafts(self: Any) -> int:
        check = STATE.schedule.check if STATE.schedule is not None else None
        return check.drafts if check is not None else self.most_drafts

    # -- the device --------------------------------------------------------------------------------------------------------

    def _to_device(self: Any, values: np.ndarray) -> Tensor:
        return compat.on_device(values, self.device)

    def _stamp(self: Any) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_since(self: Any, began: Any) -> float:
        if self.device.type != "cuda":
            return time.perf_counter() - began
        ended = self._stamp()
        ended.synchronize()
        return began.elapsed_time(ended) / 1000
