"""What decode rows leave out, looked up by their contexts. Needs no vLLM."""

from __future__ import annotations

import numpy as np

from sparroll import Schedule
from sparroll.engines.vllm.attention.decode_rows import ReadTables
from sparroll.schedule import Step


def test_what_rows_read_is_looked_up_however_long_their_contexts_grow() -> None:
    grouped = Schedule((Step(0, (64, 256)), Step(1000, (512, 256))), dense_layers=(0, 1), layer_groups=((2, 3), (4, 5)))
    tables = ReadTables(grouped, 6)
    dense_R = np.array([False, True])
    for context in (5, 63, 64, 65, 999, 1000, 70_000, 5):
        contexts_R = np.array([context, context + 1])
        reads = [int(grouped.of_layer(layer).read_tokens(context)) for layer in (2, 3, 4, 5)]
        rows = tables.decode_rows(contexts_R, dense_R)
        sparse_L, unread_L = np.broadcast_to(rows.left_out_2L, (2, 6)).tolist()
        assert unread_L == [0] * 2 + [context - read for read in reads]
        assert sparse_L == [0, 0] + [int(read < context) for read in reads]
        assert (rows.context_tokens, rows.dense_rows, rows.dense_context_tokens) == (2 * context + 1, 1, context + 1)
        both = np.array([[context], [7]])
        assert (tables.unread_tokens(both) == grouped.unread_tokens(both, 6)).all()
    none = tables.decode_rows(np.zeros(0, dtype=np.int64))
    assert none.rows == none.context_tokens == 0 and not none.sparse_L.any()
