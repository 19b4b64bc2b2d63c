"""Forks that kill themselves with SIGKILL at given calls, in a script of their own. What the tests of resuming share; knows
nothing of what is run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Death:
    """The `call`-th call (from 1) of `owner`.`name`: the process dies right before it."""

    owner: Any
    name: str
    call: int
    last_act: Callable[..., object] | None = None
    """Done before that, with the arguments of the call: half a line that reaches the disk, say."""

    def await_it(self, before: Callable[..., object]) -> None:
        """Call `before`, with the arguments of the call, when it has come."""
        original: Callable[..., Any] = getattr(self.owner, self.name)
        left = self.call

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                before(*args)
            return original(*args, **kwargs)

        setattr(self.owner, self.name, counted)


def run_until(death: Death, run: Callable[[], object]) -> None:
    """Run it in a fork, which dies this death. Fails where the run ends in another way."""

    def die(*args: Any) -> None:
        if death.last_act is not None:
            death.last_act(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        death.await_it(die)
        run()

    _in_fork(act, signal.SIGKILL)


def run_and_die(deaths: dict[str, Death], run: Callable[[Path], object], folder: Path) -> None:
    """For each death a folder of its name as `run`, which writes into the folder that it is given, left it.

    One run serves all deaths that touch no file: a fork of it dies when the time has come, and the run waits, keeps a copy
    of its folder, and goes on. A death with a last act has a run of its own, since its file is open in the run as well.
    """
    for name, death in deaths.items():
        if death.last_act is not None:
            run_until(death, lambda name=name: run(folder / name))
    _in_fork(lambda: _run_through({n: d for n, d in deaths.items() if d.last_act is None}, run, folder), 0)


def _run_through(deaths: dict[str, Death], run: Callable[[Path], object], folder: Path) -> None:
    out = folder / "run"

    def die_as(name: str) -> Callable[..., None]:
        def die(*args: Any) -> None:
            _in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), signal.SIGKILL)
            out.mkdir(parents=True, exist_ok=True)
            shutil.copytree(out, folder / name, symlinks=True)

        return die

    for name, death in deaths.items():
        death.await_it(die_as(name))
    run(out)
    outlived = [name for name in deaths if not (folder / name).exists()]
    assert not outlived, f"the run outlived {outlived}"


def _in_fork(act: Callable[[], object], ends_by: int) -> None:
    """Do it in a fork, which must end by this signal; by itself and without an error where that is 0."""
    child = os.fork()
    if child == 0:
        # Whatever happens, the fork must not go on in its caller's place.
        status = 1
        try:
            # torch replaces the pool that a fork has lost when it is next asked for it, and of two threads that ask at the
            # same time one may find none ("Invalid thread pool!"). Here there is one thread.
            torch.set_num_threads(torch.get_num_threads())
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -ends_by, f"a fork ended with {os.waitstatus_to_exitcode(status)}"


def run_script(name: str, *arguments: str) -> None:
    """killed_runs.py or killed_evaluations.py, in a process without threads, which a fork would lose."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
