"""Requests that decode under no schedule or under one of their own, and not under the engine's: how the worker learns of
them, and which rows of a step are theirs. vLLM is not imported; its SamplingParams and model runners are read by name.

That a request is dense is said in its SamplingParams, which a server hands on. Schedules of requests are the business of
whoever owns the engine: it tells the state of them, and whose they are, before the requests run. The worker notes both when
the scheduler first sends a request (preemptions.py), and tells the state about its rows before the metadata of a step is
built. Their numbers are in a tensor, as the ends of prompts are, and the first sparse layer, which may be part of a CUDA
graph, looks up the budgets of each row under its own number.
"""

# R rows of a step (requests)

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparroll.engines.vllm.attention.decode_rows import DENSE, ENGINES
from sparroll.engines.vllm.attention.state import State

DENSE_REQUEST = "sparroll_dense"
"""The key in `SamplingParams.extra_args`; in a request to a server, in `vllm_xargs`."""
CACHE_SALT = "sparroll-dense"
"""`cache_salt` of dense requests beside sparse ones: vLLM then reuses no K and V of one kind for the other."""
OWN_CACHE_SALT = "sparroll-schedule-{}"
"""The same of requests with a schedule of their own, by a digest of it."""


def asks_dense(sampling_params: Any) -> bool:
    """Whether a request asks to decode densely. A server hands on true as it was written, as 1 or as text."""
    asked = (getattr(sampling_params, "extra_args", None) or {}).get(DENSE_REQUEST)
    return asked in (True, "1", "true", "True")


def number_of(name: str, sampling_params: Any, state: State) -> int:
    """Which schedule a request has (see decode_rows.ENGINES), by vLLM's name of it and its SamplingParams."""
    return DENSE if asks_dense(sampling_params) else state.request_numbers.get(name, ENGINES)


def which_rows(names: Sequence[str], numbers: Mapping[str, int]) -> np.ndarray | None:
    """[R] int32 of a step's requests in the order of their rows: whose schedule each has. None where all have the engine's.
    numbers: of those that have another."""
    if not numbers:
        return None
    which_R = np.fromiter((numbers.get(name, ENGINES) for name in names), dtype=np.int32, count=len(names))
    return which_R if which_R.any() else None


def follow_rows(runner: Any, state: State, numbers: Mapping[str, int]) -> None:
    """Let the state know whose the rows of each step of this model runner are, and which schedules they have, from now on.
    numbers: of the requests that have another than the engine's, at any time.

    vLLM's V1 runner keeps the order of its rows in `input_batch`, and builds all metadata in one method, also that of
    drafts. Its V2 runner makes an `input_batch` for each step. Both have done so from 0.26 to 0.33.
    """
    if hasattr(runner, "_build_attention_metadata"):
        build = runner._build_attention_metadata

        @functools.wraps(build)
        def build_metadata(*arguments: Any, **named: Any) -> Any:
            state.row_names = runner.input_batch.req_ids
            state.which_rows = which_rows(state.row_names, numbers)
            return build(*arguments, **named)

        runner._build_attention_metadata = build_metadata
    elif hasattr(runner, "prepare_inputs"):
        prepare = runner.prepare_inputs

        @functools.wraps(prepare)
        def prepare_inputs(*arguments: Any, **named: Any) -> Any:
            batch = prepare(*arguments, **named)
            state.row_names = batch.req_ids
            state.which_rows = which_rows(state.row_names, numbers)
            return batch

        runner.prepare_inputs = prepare_inputs
