"""What decode rows read of their contexts, as schedules say, from lengths that the host knows. vLLM is not imported."""

# R rows of a step, L layers of the model, dense ones included, V schedules, P parts of all schedules and before them one
# of the dense layers, U tokens of a context; of 2, rows that leave tokens out and these tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sparroll.schedule import Schedule

Contexts = list[int] | np.ndarray
"""Context lengths of the rows of a step, [R]."""
ENGINES, DENSE = 0, -1
"""Of numbers that say which schedule a request has: the one that is in force in the engine, and none. Those from 1 on are
schedules that requests have of their own. `which_R` are the numbers of a step's rows, or None where all have ENGINES."""
FEW_ROWS = 128
"""Of so few rows a tensor gives a list sooner than a view as an array, and its numbers are searched and added up sooner.
That counts where a step of a small model waits for the host."""
NOTHING = np.zeros((2, 1), dtype=np.int64)
"""A count of nothing, which can be added to the counts of any number of layers."""
NOTHING.flags.writeable = False


def most_and_total(contexts_R: Contexts) -> tuple[int, int]:
    """The largest and the sum; 0 of none."""
    if isinstance(contexts_R, list):
        return max(contexts_R, default=0), sum(contexts_R)
    return int(contexts_R.max(initial=0)), int(contexts_R.sum())


@dataclass(frozen=True)
class DecodeRows:
    """Decode rows of a step, or of several. A decode row is one new token of one request."""

    rows: int = 0
    context_tokens: int = 0
    left_out_2L: np.ndarray = field(default_factory=lambda: NOTHING)
    """In each layer, how many rows read a part of their context, and how many tokens these leave out."""
    dense_rows: int = 0
    """Those of the rows that belong to dense requests. They read everything in every layer."""
    dense_context_tokens: int = 0

    @property
    def sparse_L(self) -> np.ndarray:
        """Rows that read a part of their context, in each layer."""
        return self.left_out_2L[0]

    @property
    def unread_tokens_L(self) -> np.ndarray:
        """Tokens that these rows leave out, in each layer."""
        return self.left_out_2L[1]

    def __add__(self, other: DecodeRows) -> DecodeRows:
        return DecodeRows(
            self.rows + other.rows,
            self.context_tokens + other.context_tokens,
            self.left_out_2L + other.left_out_2L,
            self.dense_rows + other.dense_rows,
            self.dense_context_tokens + other.dense_context_tokens,
        )

    def __neg__(self) -> DecodeRows:
        return DecodeRows(
            -self.rows, -self.context_tokens, -self.left_out_2L, -self.dense_rows, -self.dense_context_tokens
        )


NO_ROWS = DecodeRows()


class ReadTables:
    """What a decode row leaves out, by its context: looked up, because that takes a fraction of what the schedule's formula
    takes. The tables grow with the contexts, to at most twice the longest: 16 bytes for each of its tokens and groups of
    layers.

    schedules: by number, from ENGINES on; None: everything is read."""

    def __init__(self, schedules: Sequence[Schedule | None], layers: int) -> None:
        self._parts: list[Schedule] = []
        """What the sparse layers of the schedules read: one for each group of layers."""
        self._part_VL = np.zeros((len(schedules) + 1, layers), dtype=np.int64)
        """The row of `_left_out_2PU` that is each layer's: 0 for dense layers, then those of the parts. DENSE is the last
        schedule here."""
        for number, schedule in enumerate(schedules):
            for layers_of_part, part in schedule.parts(layers) if schedule else ():
                self._parts.append(part)
                self._part_VL[number, list(layers_of_part)] = len(self._parts)
        self._parts_V = [np.unique(part_L, return_inverse=True) for part_L in self._part_VL]
        """The rows that each schedule has, and which of these is each layer's."""
        self._layers_VP = np.stack([np.bincount(part_L, minlength=1 + len(self._parts)) for part_L in self._part_VL])
        """How many layers each of these rows has under each schedule."""
        self._left_out_2PU = np.zeros((2, 1 + len(self._parts), 0), dtype=np.int64)
        """Whether a decode row with U tokens of context leaves any out, and how many."""
        self._somewhere_VU = np.zeros((len(self._part_VL), 0), dtype=bool)
        """Whether it leaves any out in some layer."""
        self._whole_tokens = -1
        """None up to this context does, as far as the tables know."""

    def decode_rows(self, contexts_R: np.ndarray, which_R: np.ndarray | int | None = None) -> DecodeRows:
        """Decode rows with these contexts."""
        self._look_up_to(int(contexts_R.max(initial=0)))
        rows, total = len(contexts_R), int(contexts_R.sum())
        if which_R is None:
            return DecodeRows(rows, total, self._left_out_2L(contexts_R, ENGINES))
        which_R = np.broadcast_to(which_R, contexts_R.shape)
        dense_R = which_R == DENSE
        left_out_2L = NOTHING
        for number in np.unique(which_R[~dense_R]).tolist():
            left_out_2L = left_out_2L + self._left_out_2L(contexts_R[which_R == number], number)
        return DecodeRows(rows, total, left_out_2L, int(dense_R.sum()), int(contexts_R[dense_R].sum()))

    def unread_tokens(self, contexts: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
        """[...] tokens that decode rows with these contexts [...] leave out, summed over all layers. which: of the same
        shape, or None."""
        self._look_up_to(int(contexts.max(initial=0)))
        unread_P = np.moveaxis(self._left_out_2PU[1].take(contexts, axis=1), 0, -1)
        return (unread_P * self._layers_VP[ENGINES if which is None else which]).sum(-1)

    def leave_out(self, contexts_R: Contexts, which_R: np.ndarray | None, most: int) -> bool:
        """Whether any of these rows leaves tokens out in some layer. most: the longest of the contexts."""
        if most <= self._whole_tokens:
            return False
        self._look_up_to(most)
        if which_R is not None:
            return bool(self._somewhere_VU[which_R, contexts_R].any())
        return bool(self._somewhere_VU[ENGINES, most]) or bool(self._somewhere_VU[ENGINES][contexts_R].any())

    def _left_out_2L(self, contexts_R: np.ndarray, number: int) -> np.ndarray:
        """[2, L] how many rows with these contexts, which are in the tables, leave tokens out, and how many tokens."""
        parts, of_L = self._parts_V[number]
        # Taken in one piece where no other schedule has parts of its own, which is sooner.
        only = len(parts) == self._left_out_2PU.shape[1]
        read = (
            self._left_out_2PU.take(contexts_R, axis=2) if only else self._left_out_2PU[:, parts[:, None], contexts_R]
        )
        left_out_2P = read.sum(axis=2)
        found: np.ndarray = left_out_2P[:, of_L]
        return found

    def _look_up_to(self, longest: int) -> None:
        """Have contexts up to this one in the tables."""
        known = self._somewhere_VU.shape[1]
        if longest < known:
            return
        more_U = np.arange(known, 1 << longest.bit_length() if longest else 1)
        unread_PU = more_U - np.stack([more_U, *(part.read_tokens(more_U) for part in self._parts)])
        self._left_out_2PU = np.concatenate([self._left_out_2PU, np.stack([unread_PU > 0, unread_PU])], axis=2)
        self._somewhere_VU = np.stack([self._left_out_2PU[0, part_L].any(axis=0) for part_L in self._part_VL])
        some = np.flatnonzero(self._somewhere_VU.any(axis=0))
        self._whole_tokens = int(some[0] if len(some) else len(more_U) + known) - 1
