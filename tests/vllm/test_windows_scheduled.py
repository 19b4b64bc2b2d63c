"""What the scheduler of windows does with the tokens of a step, beside vLLM's own, which takes them one by one."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_runs import needs_vllm

pytestmark = needs_vllm
STOP, EOS = 900, 901


def _request(**parameters: Any) -> Any:
    from vllm.v1.request import Request

    from vllm import SamplingParams

    asked = SamplingParams(**({"max_tokens": 200, "stop_token_ids": [STOP]} | parameters))
    asked.update_from_generation_config({}, EOS)
    return Request(request_id="one", prompt_token_ids=[1, 2, 3], sampling_params=asked, pooling_params=None)


def _after(scheduler: type[Any], new_ids: list[int], most: int = 300, **parameters: Any) -> tuple[Any, ...]:
    made = scheduler.__new__(scheduler)
    made.max_model_len = most
    request = _request(**parameters)
    kept, stopped = made._update_request_with_output(request, list(new_ids))
    return (
        kept,
        stopped,
        list(request.output_token_ids),
        list(request.all_token_ids),
        request.status,
        request.stop_reason,
    )


@pytest.mark.parametrize(
    "case",
    [
        {"new_ids": [5, 6, 7, 8]},
        {"new_ids": [5]},
        {"new_ids": []},
        {"new_ids": [5, STOP, 7, 8]},
        {"new_ids": [5, 6, 7, STOP]},
        {"new_ids": [EOS, 6, 7, 8]},
        {"new_ids": [5, 6, 7, EOS]},
        {"new_ids": [5, EOS, 7], "ignore_eos": True},
        {"new_ids": [5, STOP, 7, STOP, 9], "min_tokens": 3},
        {"new_ids": [5, 6, 7, 8], "max_tokens": 4},
        {"new_ids": [5, 6, 7, 8], "max_tokens": 2},
        {"new_ids": [5, 6, 7, 8], "most": 7},
        {"new_ids": [5, 6, 7, 8], "most": 5},
    ],
    ids=str,
)
def test_tokens_that_are_added_at_once_end_a_response_where_single_ones_do(case: dict[str, Any]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from sparroll.engines.vllm.windows.scheduler import WindowScheduler

    assert _after(WindowScheduler, **case) == _after(Scheduler, **case)
