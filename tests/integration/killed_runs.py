"""Starts a training run per named moment, each in a fork of its own that kills itself with SIGKILL at that moment.

python killed_runs.py MODEL FOLDER MOMENT...
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

from integration.train_runs import short_config
from sparroll.engines import HFEngine
from sparroll.train import checkpoint, loop, sinks, update

MOMENTS: dict[str, tuple[Any, str, int]] = {
    "first-rollouts": (HFEngine, "generate", 3),
    "later-rollouts": (HFEngine, "generate", 7),
    "forward": (update, "response_logp", 8),
    "optimizer-step": (torch.optim.AdamW, "step", 3),
    "weights-to-engine": (HFEngine, "load_weights", 4),
    "log-line": (sinks.JsonLines, "write", 5),
    "state": (loop, "generator_state", 3),
    "save-model": (checkpoint, "_write_model", 2),
    "save-flush": (checkpoint, "_flush", 20),
    "save-point": (checkpoint, "_point", 2),
    "save-prune": (checkpoint, "_remove", 4),
    "summary": (loop, "summarise", 1),
}
"""What is called, and at which call the process dies, right before it."""


def die_at(owner: Any, name: str, call: int) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    left = call

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            if name == "write":
                # Half a line reaches the disk first.
                os.write(args[0]._handle, b'{"step": 4, "rew')
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
            loop.train(short_config(model, checkpoint={"every_steps": 1, "keep": 1}), folder / moment)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the run outlived {moment}"
        assert os.WTERMSIG(status) == signal.SIGKILL, moment


if __name__ == "__main__":
    main()
