"""Which rows of a step decode, and what they may read, from lengths that the host knows; also counts both. There are no
kernels here."""

# R rows of a step (requests, padding rows included), M blocks per request, L layers of the model

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.state import State


@dataclass
class StepPlan:
    """What the sparse layers do in a step. It is the attribute `sparroll` of the metadata that vLLM hands to every
    layer; None there means that each row reads everything."""

    decodes: int
    """Number of rows, from the first one on, that sparroll's attention serves: R of the tensors below."""
    prefills: Any
    """The parent backend's metadata of the rows behind them, which prefill; None where no row does."""
    context_tokens_R: Tensor
    kv_budget_tokens_LR: Tensor
    """A layer finds its own by its number."""
    block_table_RM: Tensor


@dataclass
class Rows:
    """The rows of a step. Those with one new token stand first; a row of a captured graph may be padding."""

    decodes: int
    """Number of rows in front with at most one new token each: rows that decode, one-token ends of chunked prompts, and
    padding."""
    prefills: int
    contexts_R: np.ndarray
    """Context lengths of the `decodes` rows, the new token included; 0 for padding."""
    whole_R: np.ndarray
    """Which of these rows must read everything because they are the end of a prompt."""
    dense_R: np.ndarray
    """Which of them read everything because their request is dense. They decode like the others."""
    prefill_tokens: int

    @staticmethod
    def of(common: Any, dense_rows: np.ndarray | None = None) -> Rows:
        """From vLLM's CommonAttentionMetadata, whose rows are ordered by a reorder threshold of 1. dense_rows: see
        State."""
        count = common.num_reqs
        starts = compat.as_array(common.query_start_loc_cpu)
        new_tokens = starts[1 : count + 1] - starts[:count]
        longer = np.flatnonzero(new_tokens > 1)
        decodes = int(longer[0]) if len(longer) else count
        contexts = np.where(new_tokens == 0, 0, _of_rows(compat.host_lengths(common), count, np.int64))
        # A prompt of one token has no context before it and is prefill, too.
        prefilling = (new_tokens == 1) & (contexts == 1)
        if common.is_prefilling is not None:
            prefilling |= _of_rows(compat.as_array(common.is_prefilling), count, bool)
        dense = np.zeros(count, dtype=bool) if dense_rows is None else _of_rows(dense_rows, count, bool)
        return Rows(
            decodes=decodes,
            prefills=count - decodes,
            contexts_R=contexts[:decodes],
            whole_R=prefilling[:decodes],
            dense_R=dense[:decodes],
            prefill_tokens=int(new_tokens[decodes:].sum()),
        )

    def checked(self, state: State) -> Rows:
        """The rows as they are attended: where drafts are checked, only draft steps are sparse."""
        if not state.checks_drafts or state.drafting:
            return self
        return dataclasses.replace(self, whole_R=np.ones_like(self.whole_R))

    @property
    def reads_all_R(self) -> np.ndarray:
        """Which of the `decodes` rows read everything, whatever their budget."""
        return self.whole_R | self.dense_R

    def count(self, state: State, may_replay: bool = False) -> None:
        """Tell the state about the step; from here on it says whether the step has a plan. may_replay: whether a full CUDA
        graph may run it."""
        there = self.contexts_R > 0
        decoding = ~self.whole_R & there
        tail = int(np.count_nonzero(self.whole_R & there))
        contexts = self.contexts_R[decoding]
        state.counters.prefill_tokens += self.prefill_tokens + tail
        if state.checks_drafts and not state.drafting:
            state.counters.prefill_tokens -= state.check_rows
        else:
            state.counters.tail_tokens += tail
        state.begin_step(state.decode_rows(contexts, self.dense_R[decoding]), may_replay)
        state.note_short_reads(self.contexts_R, decoding & ~self.dense_R)


def _of_rows(known: np.ndarray, rows: int, dtype: type) -> np.ndarray:
    """Of so many rows, what is known of the first ones; 0 of those behind them, which are padding. It may be the caller's
    memory, which the next step overwrites: to be read at once, and not to be written."""
    if len(known) >= rows:
        return known[:rows].astype(dtype, copy=False)
    padded: np.ndarray = np.zeros(rows, dtype=dtype)
    padded[: len(known)] = known
    return padded
