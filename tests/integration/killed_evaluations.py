"""Starts an evaluation per named moment, each in a fork of its own that kills itself with SIGKILL at that moment.

python killed_evaluations.py MODEL FOLDER MOMENT...
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.evaluation_runs import evaluate
from sparroll import files
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.evaluate import log, parquet, run, summary

MOMENTS: dict[str, tuple[Any, str, int]] = {
    "first-samples": (HFEngine, "generate", 1),
    "later-samples": (HFEngine, "generate", 5),
    "scores": (Scorer, "dense", 3),
    "verdicts": (run, "judge", 8),
    "half-a-line": (log, "_write", 6),
    "between-lines": (log, "_write", 8),
    "before-commit": (log, "_write", 9),
    "last-commit": (log, "_write", 32),
    "summary": (summary, "_policy_table", 2),
    "parquet": (parquet, "_rename", 1),
    "record": (files, "write_json", 2),
}
"""What is called, and at which call the process dies, right before it."""


def die_at(owner: Any, name: str, call: int) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    left = call

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            if call == 6 and name == "_write":
                os.write(args[0], b'{"kind": "commit", "task": "fir')
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def main() -> None:
    torch.set_num_threads(1)
    model, folder, moments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    for moment in moments:
        child = os.fork()
        if child == 0:
            die_at(*MOMENTS[moment])
            evaluate(model, folder / moment)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the evaluation outlived {moment}"
        assert os.WTERMSIG(status) == signal.SIGKILL, moment


if __name__ == "__main__":
    main()
