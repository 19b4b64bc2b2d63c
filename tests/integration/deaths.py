"""A fork that kills itself with SIGKILL at a given call, in a script of its own. What the tests of resuming share; knows
nothing of what is run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Death:
    """The `call`-th call (from 1) of `owner`.`name`: the process dies right before it."""

    owner: Any
    name: str
    call: int
    last_act: Callable[..., object] | None = None
    """Done before that, with the arguments of the call: half a line that reaches the disk, say."""

    def await_it(self) -> None:
        original: Callable[..., Any] = getattr(self.owner, self.name)
        left = self.call

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if self.last_act is not None:
                    self.last_act(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(self.owner, self.name, counted)


def run_until(death: Death, run: Callable[[], object]) -> None:
    """Fails where the run ends in another way."""
    child = os.fork()
    if child == 0:
        # Whatever happens, the fork must not go on in its caller's place.
        try:
            death.await_it()
            run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the run outlived call {death.call} of {death.name}"
    assert os.WTERMSIG(status) == signal.SIGKILL, death


def run_script(name: str, *arguments: str) -> None:
    """killed_runs.py or killed_evaluations.py, in a process without threads, which a fork would lose."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
