"""One process imports what the processes of a run import, and forks into each of those that Ray or vLLM start.

python imported_ahead.py FILE    # until it is killed; FILE is the number of a socket that listens

A process of a run takes five to ten seconds to import torch, vLLM and verl, and a run has a dozen of them.
`hand_over`, which sitecustomize.py calls, sends to the socket what such a process was started with: arguments,
environment, folder, open files. A fork goes on from there. The process that was started stays as the fork's face towards
its parent: it passes signals on, ends as the fork does, and when it is killed, the fork is killed. The command of a run
and Ray's own services start as ever. Nothing of ours is imported ahead, so a process that forgets to import one of our
modules still goes without it. What the forks share, unlike processes that start anew: the seed of Python's hashes, and
vLLM, datasets and peft in `sys.modules`, so that a forgotten import of these does not show here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "SPARROLL_TEST_IMPORTED_AHEAD"
"""Names the socket, in the environment of a run."""
AHEAD = ("vllm.v1.worker.cpu_worker", "vllm.entrypoints.openai.api_server", "datasets", "hydra", "peft")
"""Without Ray, which reads its environment when it is imported, and so without verl."""
BEYOND = 400
"""No open file of a process has a number from here on."""


def is_handed_over(arguments: list[str]) -> bool:
    """Whether these start a worker of Ray or a process of vLLM's."""
    return arguments[-1:] == ["--multiprocessing-fork"] or "".join(arguments[:1]).endswith(
        "/ray/_private/workers/default_worker.py"
    )


def hand_over(socket_path: str) -> None:
    """Let a fork go on, and end as it does."""
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")]
    given = {
        "arguments": sys.orig_argv[1:],
        "path": sys.path,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "nice": os.nice(0),
        "files": files,
    }
    try:
        face = socket.socket(socket.AF_UNIX)
        face.connect(socket_path)
        socket.send_fds(face, [b"\n"], files)
        face.sendall(json.dumps(given).encode() + b"\n")
        # Who waits for the other end of a pipe to be closed waits for the fork alone.
        for number in files:
            if number > 2:
                os.close(number)
        answers = face.makefile()
        fork = int(answers.readline())

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(fork, number)

        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, pass_on)
        code = os.waitstatus_to_exitcode(int(answers.readline()))
        if code < 0:
            # Nobody handles SIGKILL, and Python refuses to say so.
            with contextlib.suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    except BaseException as error:
        # Python would go on after a sitecustomize.py that raises.
        print(f"{__file__}: {error!r}", file=sys.stderr, flush=True)
        os._exit(70)


class Started(NamedTuple):
    """What a process was started with, and its open files as they were received."""

    given: dict[str, Any]
    received: list[int]


class Fork(NamedTuple):
    number: int
    ended: int
    """A file that is readable once the fork has ended."""
    face: socket.socket


def serve(listener: socket.socket) -> Started:
    """Import, then fork for each process that is handed over. Returns in the forks alone."""
    before = dict(os.environ)
    for name in AHEAD:
        importlib.import_module(name)
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert not {"ray", "verl", "sparroll"} & sys.modules.keys(), "each process imports these for itself"
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork has only the thread that forks, and another may hold a lock"
    # What stays is neither looked at again nor written to, so the forks share it.
    gc.freeze()
    forks: dict[Any, Fork] = {}
    """By each file that tells of them."""
    while True:
        for ready in select.select([listener, *forks], [], [])[0]:
            if ready is listener:
                face, _ = listener.accept()
                started = _received(face)
                if started is None:
                    continue
                number = os.fork()
                if number == 0:
                    started.given["environment"] = changed | started.given["environment"]
                    return started
                for file in started.received:
                    os.close(file)
                _answer(face, number)
                fork = Fork(number, os.pidfd_open(number), face)
                forks[fork.ended] = forks[face] = fork
            elif ready not in forks:
                continue
            elif ready is forks[ready].face:
                # Its face was killed.
                os.kill(forks.pop(ready).number, signal.SIGKILL)
            else:
                fork = forks.pop(ready)
                forks.pop(fork.face, None)
                _, status = os.waitpid(fork.number, 0)
                _answer(fork.face, status)
                fork.face.close()
                os.close(fork.ended)


def _received(face: socket.socket) -> Started | None:
    """None: whoever was to send it was killed meanwhile."""
    _, received, *_ = socket.recv_fds(face, 1, 250)
    with face.makefile() as lines:
        line = lines.readline()
    if line.endswith("\n"):
        return Started(json.loads(line), received)
    for file in received:
        os.close(file)
    face.close()
    return None


def _answer(face: socket.socket, number: int) -> None:
    # It may have been killed meanwhile, and then its connection says so.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        face.sendall(b"%d\n" % number)


def become(started: Started) -> tuple[Any, dict[str, Any]]:
    """Take on what the process was started with. -> the code that it runs, and the names of its main module"""
    given, received = started
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, BEYOND) for file in received]
    os.closerange(3, BEYOND)
    for file, number in zip(moved, given["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    os.nice(given["nice"] - os.nice(0))
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    import numpy

    # All forks would draw the same.
    numpy.random.seed()  # noqa: NPY002
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    first, *rest = given["arguments"]
    if first == "-c":
        text, place, folder, sys.argv = rest[0], "<string>", "", ["-c", *rest[1:]]
    else:
        text, place, folder, sys.argv = Path(first).read_text(), first, str(Path(first).parent), [first, *rest]
        main.__file__ = first
    sys.path[:] = [folder, *given["path"]]
    return compile(text, place, "exec", dont_inherit=True), main.__dict__


if __name__ == "__main__":
    exec(*become(serve(socket.socket(fileno=int(sys.argv[1])))))
