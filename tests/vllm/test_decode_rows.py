"""What decode rows leave out, looked up by their contexts. Needs no vLLM."""

from __future__ import annotations

import numpy as np

from sparroll import Schedule
from sparroll.engines.vllm.attention.decode_rows import DENSE, ENGINES, ReadTables
from sparroll.schedule import Step


def test_what_rows_read_is_looked_up_however_long_their_contexts_grow() -> None:
    grouped = Schedule((Step(0, (64, 256)), Step(1000, (512, 256))), dense_layers=(0, 1), layer_groups=((2, 3), (4, 5)))
    tables = ReadTables([grouped], 6)
    which_R = np.array([ENGINES, DENSE])
    for context in (5, 63, 64, 65, 999, 1000, 70_000, 5):
        contexts_R = np.array([context, context + 1])
        reads = [int(grouped.of_layer(layer).read_tokens(context)) for layer in (2, 3, 4, 5)]
        rows = tables.decode_rows(contexts_R, which_R)
        sparse_L, unread_L = np.broadcast_to(rows.left_out_2L, (2, 6)).tolist()
        assert unread_L == [0] * 2 + [context - read for read in reads]
        assert sparse_L == [0, 0] + [int(read < context) for read in reads]
        assert (rows.context_tokens, rows.dense_rows, rows.dense_context_tokens) == (2 * context + 1, 1, context + 1)
        both = np.array([[context], [7]])
        assert (tables.unread_tokens(both) == grouped.unread_tokens(both, 6)).all()
    several = ReadTables([grouped, None, Schedule.fixed(96)], 6)
    contexts_R, which_R = np.array([1000, 50, 1000, 700, 90, 400]), np.array([ENGINES, 2, 1, 2, DENSE, ENGINES])
    alone = [tables.decode_rows(np.array([tokens])) for tokens in (1000, 400)]
    alone += [ReadTables([Schedule.fixed(96)], 6).decode_rows(np.array([tokens])) for tokens in (50, 700)]
    rows = several.decode_rows(contexts_R, which_R)
    assert rows.unread_tokens_L.tolist() == sum(each.unread_tokens_L for each in alone).tolist()
    assert rows.sparse_L.tolist() == sum(each.sparse_L for each in alone).tolist()
    unread = [0] * 6
    unread[0], unread[5], unread[3] = (int(alone[place].unread_tokens_L.sum()) for place in (0, 1, 3))
    assert several.unread_tokens(contexts_R, which_R).tolist() == unread
    assert not several.leave_out(contexts_R[[1, 2, 4]], which_R[[1, 2, 4]], 1000)
    assert several.leave_out(contexts_R, which_R, 1000) and several.leave_out(contexts_R[:2], None, 1000)
    none = tables.decode_rows(np.zeros(0, dtype=np.int64))
    assert none.rows == none.context_tokens == 0 and not none.sparse_L.any()
