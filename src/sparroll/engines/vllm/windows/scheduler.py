"""vLLM's scheduler, for an engine that checks its drafts: a step of a request that decodes is a window of several rows.

To vLLM a window of d rows is the last token and d - 1 speculative ones, whose ids it does not know: placeholders. The
worker drafts d - 1 tokens, or d where the response ends with them, checks, and returns the 1 to d tokens that stand.
What vLLM does with them is what it does after its own speculative decoding: the computed tokens are set back, and stop
ids end the response.

Requests that decode wait while prompts are prefilled, because a step with a window lasts as long as its drafts. A
request's windows therefore do not depend on the requests beside it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from sparroll.engines.vllm.windows.configure import check_of

_PLACEHOLDER = -1
_LIMITS = ("max_num_running_reqs", "max_num_active_reqs")
"""vLLM's attributes for how many requests may run. The second one is younger."""


class WindowScheduler(Scheduler):
    """Named by the plugin as `scheduler_cls`."""

    running: list[Request]

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any):
        super().__init__(vllm_config, *arguments, **named)
        check = check_of(vllm_config)
        assert check is not None, "a scheduler of windows without a check"
        self.window_tokens: int | None = check.window_tokens
        """Rows of a window; None while drafts are not checked, as under dense attention."""
        self._given: dict[str, int] = {}
        """Request -> the number of the step that gave it its last window."""
        self._number = 0
        self._crowded = False
        """Whether a prompt found no room in the cache. Requests that decode then go on, until one has finished."""

    def schedule(self, *arguments: Any, **named: Any) -> SchedulerOutput:
        if self.window_tokens is None:
            return super().schedule(*arguments, **named)
        if self.finished_req_ids:
            self._crowded = False
            for name in self.finished_req_ids:
                self._given.pop(name, None)
        decoding = [request for request in self.running if _decodes(request)]
        chosen = [] if self._prompts_go_first(decoding) else self._windows_that_fit(decoding)
        self._number += 1
        for request in chosen:
            request.spec_token_ids = [_PLACEHOLDER] * (self._rows(request) - 1)
            self._given[request.request_id] = self._number
        waiting = {request.request_id for request in decoding} - {request.request_id for request in chosen}
        output = self._schedule_without(waiting, *arguments, **named)
        if decoding and not chosen and (not output.total_num_scheduled_tokens or output.preempted_req_ids):
            self._crowded = True
        return output

    def _prompts_go_first(self, decoding: list[Request]) -> bool:
        unfinished = len(decoding) < len(self.running)
        may_enter = bool(self.waiting) and all(len(self.running) < getattr(self, each, 1 << 30) for each in _LIMITS)
        return (unfinished or may_enter) and not self._crowded

    def _windows_that_fit(self, decoding: list[Request]) -> list[Request]:
        """Those that have waited longest, as many as one step has room for."""
        left, chosen = self.max_num_scheduled_tokens, []
        for request in sorted(decoding, key=lambda request: self._given.get(request.request_id, 0)):
            left -= self._rows(request)
            if left < 0:
                break
            chosen.append(request)
        return chosen

    def _rows(self, request: Request) -> int:
        assert self.window_tokens is not None, "rows of a window without windows"
        to_end = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens)
        return max(1, min(self.window_tokens, to_end))

    def _schedule_without(self, waiting: set[str], *arguments: Any, **named: Any) -> SchedulerOutput:
        """vLLM's own choice while these running requests keep their blocks and get no rows."""
        before = self.running
        self.running = [request for request in before if request.request_id not in waiting]
        limits = {each: getattr(self, each) for each in _LIMITS if hasattr(self, each)}
        for each, most in limits.items():
            setattr(self, each, most - len(waiting))
        try:
            return super().schedule(*arguments, **named)
        finally:
            for each, most in limits.items():
                setattr(self, each, most)
            still = {request.request_id for request in self.running} | waiting
            known = {request.request_id for request in before}
            self.running = [request for request in before if request.request_id in still] + [
                request for request in self.running if request.request_id not in known
            ]

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *more: Any, **named: Any
    ) -> tuple[list[int], bool]:
        """vLLM's own, which looks at one token after the other. What cannot end the response is added at once: a window
        of a hundred requests has thousands of tokens."""
        sure, last = new_token_ids[:-1], new_token_ids[-1:]
        if not sure or not self._goes_on(request, sure):
            return super()._update_request_with_output(request, new_token_ids, *more, **named)
        request.append_output_token_ids(sure)
        kept, stopped = super()._update_request_with_output(request, last, *more, **named)
        return sure + kept, stopped

    def _goes_on(self, request: Request, token_ids: list[int]) -> bool:
        """Whether the response surely has more tokens than these."""
        parameters, count = request.sampling_params, len(token_ids)
        assert parameters is not None, "a request that samples nothing"
        stops = {parameters.eos_token_id, *(parameters.stop_token_ids or ())}
        return (
            getattr(parameters, "repetition_detection", None) is None
            and stops.isdisjoint(token_ids)
            and request.num_tokens + count < self.max_model_len
            and request.num_output_tokens + count < request.max_tokens
        )

    def make_spec_decoding_stats(self, *arguments: Any, **named: Any) -> None:
        """None: vLLM's statistics are for speculative decoding with a fixed number of tokens. `sparroll_report` has
        those of the checks."""
        return


def _decodes(request: Request) -> bool:
    """Whether all but the request's last token are in the cache, and the last one is of its response."""
    return request.num_output_tokens > 0 and request.num_computed_tokens == request.num_tokens - 1
