"""Requests that decode densely under a schedule: how a request asks for it, and which rows of a step are theirs. vLLM is
not imported; its SamplingParams and model runners are read by name.

The flag travels in a request's SamplingParams. The worker notes it when the scheduler first sends the request
(preemptions.py), and tells the state about its rows before the metadata of a step is built. They are marked in a tensor,
as the ends of prompts are, and the first sparse layer, which may be part of a CUDA graph, gives marked rows a budget above
every context.
"""

# R rows of a step (requests)

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from sparroll.engines.vllm.attention.state import State

DENSE_REQUEST = "sparroll_dense"
"""The key in `SamplingParams.extra_args`; in a request to a server, in `vllm_xargs`."""
CACHE_SALT = "sparroll-dense"
"""`cache_salt` of dense requests beside sparse ones: vLLM then reuses no K and V of one kind for the other."""


def asks_dense(sampling_params: Any) -> bool:
    """Whether a request asks to decode densely. A server hands on true as it was written, as 1 or as text."""
    asked = (getattr(sampling_params, "extra_args", None) or {}).get(DENSE_REQUEST)
    return asked in (True, "1", "true", "True")


def dense_rows(names: Sequence[str], dense: Set[str]) -> np.ndarray | None:
    """[R] bool of a step's requests in the order of their rows; None where none of them is dense."""
    if not dense:
        return None
    dense_R = np.fromiter((name in dense for name in names), dtype=bool, count=len(names))
    return dense_R if dense_R.any() else None


def follow_rows(runner: Any, state: State, dense: Set[str]) -> None:
    """Let the state know whose the rows of each step of this model runner are, and which are dense, from now on.

    vLLM's V1 runner keeps the order of its rows in `input_batch`, and builds all metadata in one method, also that of
    drafts. Its V2 runner makes an `input_batch` for each step. Both have done so from 0.26 to 0.33.
    """
    if hasattr(runner, "_build_attention_metadata"):
        build = runner._build_attention_metadata

        @functools.wraps(build)
        def build_metadata(*arguments: Any, **named: Any) -> Any:
            state.row_names = runner.input_batch.req_ids
            state.dense_rows = dense_rows(state.row_names, dense)
            return build(*arguments, **named)

        runner._build_attention_metadata = build_metadata
    elif hasattr(runner, "prepare_inputs"):
        prepare = runner.prepare_inputs

        @functools.wraps(prepare)
        def prepare_inputs(*arguments: Any, **named: Any) -> Any:
            batch = prepare(*arguments, **named)
            state.row_names = batch.req_ids
            state.dense_rows = dense_rows(state.row_names, dense)
            return batch

        runner.prepare_inputs = prepare_inputs
