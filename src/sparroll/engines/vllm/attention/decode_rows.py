"""What decode rows read of their contexts, as a schedule says, from lengths that the host knows. vLLM is not imported."""

# R rows of a step, L layers of the model, dense ones included, P parts of the schedule and before them one of the dense
# layers, U tokens of a context; of 2, rows that leave tokens out and these tokens

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sparroll.schedule import Schedule

Contexts = list[int] | np.ndarray
"""Context lengths of the rows of a step, [R]."""
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
    layers."""

    def __init__(self, schedule: Schedule | None, layers: int) -> None:
        self._parts: list[Schedule] = []
        """What the sparse layers of the schedule read: one for each group of layers."""
        self._part_L = np.zeros(layers, dtype=np.int64)
        """The row of `_left_out_2PU` that is each layer's: 0 for dense layers, then those of the parts."""
        for layers_of_part, part in schedule.parts(layers) if schedule else ():
            self._parts.append(part)
            self._part_L[list(layers_of_part)] = len(self._parts)
        self._left_out_2PU = np.zeros((2, 1 + len(self._parts), 0), dtype=np.int64)
        """Whether a decode row with U tokens of context leaves any out, and how many."""
        self._in_part_U = np.zeros(0, dtype=bool)
        """Whether it leaves any out in some layer."""
        self._whole_tokens = -1
        """None up to this context does, as far as the tables know."""

    def decode_rows(self, contexts_R: np.ndarray, dense_R: np.ndarray | bool | None = None) -> DecodeRows:
        """Decode rows with these contexts. dense_R: which of them belong to dense requests; None: none of them."""
        left_out_2PR, dense = self._left_out(contexts_R), (0, 0)
        if dense_R is not None:
            dense_R = np.broadcast_to(dense_R, contexts_R.shape)
            left_out_2PR = np.where(dense_R, 0, left_out_2PR)
            dense = (int(dense_R.sum()), int(contexts_R[dense_R].sum()))
        left_out_2L = left_out_2PR.sum(axis=2)[:, self._part_L]
        return DecodeRows(len(contexts_R), int(contexts_R.sum()), left_out_2L, *dense)

    def unread_tokens(self, contexts: np.ndarray) -> np.ndarray:
        """[...] tokens that decode rows with these contexts [...] leave out, summed over all layers."""
        layers_P = np.bincount(self._part_L, minlength=1 + len(self._parts))
        return np.tensordot(layers_P, self._left_out(contexts)[1], axes=1)

    def leave_out(self, contexts_R: Contexts, dense_R: np.ndarray | None, most: int) -> bool:
        """Whether any of these rows leaves tokens out in some layer. dense_R: as in `decode_rows`. most: the longest of the
        contexts."""
        if most <= self._whole_tokens:
            return False
        self._look_up_to(most)
        if dense_R is None and self._in_part_U[most]:
            return True
        in_part_R = self._in_part_U[contexts_R]
        return bool(in_part_R.any() if dense_R is None else (in_part_R & ~dense_R).any())

    def _left_out(self, contexts: np.ndarray) -> np.ndarray:
        """[2, P, ...] whether decode rows with these contexts [...], integers from 0 on, leave tokens out, and how many, by
        row of `_left_out_2PU`; in the first one none."""
        self._look_up_to(int(contexts.max(initial=0)))
        return self._left_out_2PU.take(contexts, axis=2)

    def _look_up_to(self, longest: int) -> None:
        """Have contexts up to this one in the tables."""
        known = len(self._in_part_U)
        if longest < known:
            return
        more_U = np.arange(known, 1 << longest.bit_length() if longest else 1)
        unread_PU = more_U - np.stack([more_U, *(part.read_tokens(more_U) for part in self._parts)])
        self._left_out_2PU = np.concatenate([self._left_out_2PU, np.stack([unread_PU > 0, unread_PU])], axis=2)
        self._in_part_U = self._left_out_2PU[0].any(axis=0)
        self._whole_tokens = int(self._in_part_U.argmax() if self._in_part_U.any() else len(self._in_part_U)) - 1
