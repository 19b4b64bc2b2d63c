"""Which rows of a step decode, and what they may read, from lengths that the host knows; also counts both. There are no
kernels here."""

# R rows of a step (requests, padding rows included), M blocks per request, L layers of the model

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.decode_rows import DENSE, ENGINES, FEW_ROWS, Contexts
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
    """The rows of a step. Those with one new token stand first; a row of a captured graph may be padding.

    A step of a small model waits for the host, so what no row needs is None and is not computed."""

    decodes: int
    """Number of rows in front with at most one new token each: rows that decode, one-token ends of chunked prompts, and
    padding."""
    prefills: int
    contexts_R: Contexts
    """Context lengths of the `decodes` rows, the new token included; 0 for padding. An array may be vLLM's memory, which
    the next step overwrites."""
    whole_R: np.ndarray | None
    """Which of these rows must read everything because they are the end of a prompt; None where none must."""
    which_R: np.ndarray | None
    """The number of the schedule of each (see decode_rows.ENGINES); None where all have the engine's."""
    prefill_tokens: int

    @staticmethod
    def of(common: Any, which_rows: np.ndarray | None = None, names: Sequence[str] | None = None) -> Rows:
        """From vLLM's CommonAttentionMetadata, whose rows are ordered by a reorder threshold of 1. which_rows, names: see
        State.which_rows and row_names. Rows behind the names are padding. A dummy step may have fewer rows than names; the
        lengths are 0 there."""
        count, lengths = common.num_reqs, compat.host_lengths(common)
        if names and common.max_query_len == 1:
            return Rows._of_one_token_each(common, _of_names(lengths, len(names), count), which_rows)
        starts = compat.as_array(common.query_start_loc_cpu)
        new_tokens = starts[1 : count + 1] - starts[:count]
        longer = np.flatnonzero(new_tokens > 1)
        decodes = int(longer[0]) if len(longer) else count
        contexts = np.where(new_tokens == 0, 0, _of_rows(compat.as_array(lengths), count, np.int64))
        alone = ((new_tokens == 1) & (contexts == 1))[:decodes]
        whole = _ends_of_prompts(alone, common.is_prefilling)
        return Rows(
            decodes=decodes,
            prefills=count - decodes,
            contexts_R=contexts[:decodes],
            whole_R=whole,
            which_R=None if which_rows is None else _of_rows(which_rows, count, np.int32)[:decodes],
            prefill_tokens=int(new_tokens[decodes:].sum()),
        )

    @staticmethod
    def _of_one_token_each(common: Any, contexts_R: Contexts, which_rows: np.ndarray | None) -> Rows:
        """The same where every row that is no padding has exactly one new token, as nearly all steps have it: a few
        operations. Requests that take no part in a draft step look like padding, with a context of 0."""
        count, prefilling = len(contexts_R), common.is_prefilling
        some_end = 1 in contexts_R or (prefilling is not None and _any(prefilling))
        return Rows(
            decodes=count,
            prefills=0,
            contexts_R=contexts_R,
            whole_R=_ends_of_prompts(np.array(contexts_R) == 1, prefilling) if some_end else None,
            which_R=None if which_rows is None else _of_rows(which_rows, count, np.int32),
            prefill_tokens=0,
        )

    def checked(self, state: State) -> Rows:
        """The rows as they are attended: where drafts are checked, only draft steps are sparse."""
        if not state.checks_drafts or state.drafting:
            return self
        return dataclasses.replace(self, whole_R=np.ones(self.decodes, dtype=bool))

    @property
    def read_by_R(self) -> np.ndarray | None:
        """The number of the schedule that each of the `decodes` rows is read by; ends of prompts have none. None where all
        are read by the engine's."""
        if self.whole_R is None:
            return self.which_R
        return np.where(self.whole_R, DENSE, ENGINES if self.which_R is None else self.which_R).astype(np.int32)

    def count(self, state: State, may_replay: bool = False) -> None:
        """Tell the state about the step; from here on it says whether the step has a plan. may_replay: whether a full CUDA
        graph may run it."""
        contexts_R, tail = self.contexts_R, 0
        if self.whole_R is not None:
            contexts = np.array(contexts_R, dtype=np.int64)
            tail = int(np.count_nonzero(contexts[self.whole_R]))
            contexts_R = np.where(self.whole_R, 0, contexts)
        state.counters.prefill_tokens += self.prefill_tokens + tail
        if state.checks_drafts and not state.drafting:
            state.counters.prefill_tokens -= state.check_rows
        else:
            state.counters.tail_tokens += tail
        state.begin_step(contexts_R, self.which_R, may_replay)


def _ends_of_prompts(alone_R: np.ndarray, prefilling: Any) -> np.ndarray | None:
    """Which rows of one new token end a prompt; None where none does. alone_R: those that have no context before it, which
    are prefill, too. prefilling: vLLM's tensor of the rows whose prompt is not computed yet, or None."""
    if prefilling is not None:
        alone_R = alone_R | _of_rows(compat.as_array(prefilling), len(alone_R), bool)
    return alone_R if alone_R.any() else None


def _of_names(lengths: Any, names: int, rows: int) -> Contexts:
    """Context lengths of so many rows, of which the first have names; 0 of those behind them."""
    if rows > FEW_ROWS:
        return _of_rows(compat.as_array(lengths)[:names], rows, np.int64)
    few: list[int] = lengths.tolist()[: min(names, rows)]
    return few + [0] * (rows - len(few))


def _any(flags: Any) -> bool:
    """Whether any flag of a tensor or an array is set. The bytes of an array of bool are searched sooner than itself."""
    return True in flags.tolist() if len(flags) <= FEW_ROWS else 1 in compat.as_array(flags).tobytes()


def _of_rows(known: np.ndarray, rows: int, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Of so many rows, what is known of the first ones; 0 of those behind them, which are padding. It may be the caller's
    memory, which the next step overwrites: to be read at once, and not to be written."""
    if len(known) >= rows:
        return known[:rows].astype(dtype, copy=False)
    padded: np.ndarray = np.zeros(rows, dtype=dtype)
    padded[: len(known)] = known
    return padded
