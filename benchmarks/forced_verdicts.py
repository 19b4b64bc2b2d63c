"""Verdicts on drafts by chance instead of by the rule, for benchmarks with random weights, whose dense policy would take
back nearly every draft. The rule is computed as always, and takes as long.

In verl the rule runs in processes that verl starts. There, VERL_USE_EXTERNAL_MODULES=forced_verdicts has every process
import this file, and SPARROLL_KEPT_SHARE is the probability.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "SPARROLL_KEPT_SHARE"


@contextmanager
def verdicts_forced(kept_share: float) -> Iterator[None]:
    """Keep each draft with this probability. Everything else is computed as before, and takes as long."""
    from sparroll.engines.vllm.windows import settling

    judge = settling._judge_lean

    def forced(windows: Any, rows: Any, policies: Any, *arguments: Any) -> Any:
        ids, _, *others = judge(windows, rows, policies, *arguments)
        kept = windows.draws_3RD[1, rows.request, rows.place] < kept_share
        # Tokens behind the drafts always stand. Nothing may wait for the device here, because the rule does not.
        return (ids, kept | policies.to_device(~rows.drafted_n), *others)

    settling._judge_lean = forced
    try:
        yield
    finally:
        settling._judge_lean = judge


if VARIABLE in os.environ:
    _all_the_time = verdicts_forced(float(os.environ[VARIABLE]))
    _all_the_time.__enter__()
