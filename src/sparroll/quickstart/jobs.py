"""Runs jobs in processes of one thread each, as many at a time as there are cores. It does not know what the jobs do.

A small model gains nothing from a second thread, but two processes do nearly twice the work of one.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparroll.errors import UserError, of_machine
from sparroll.progress import OnProgress

# A fork server imports torch and transformers once for all jobs.
_SERVER = "forkserver" in multiprocessing.get_all_start_methods()
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _SERVER else "spawn")


@dataclass(frozen=True)
class Job:
    """A call of `work(*arguments, on_progress=...)` in a separate process. What it prints goes to the file `log`."""

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...]
    log: Path
    after: tuple[str, ...] = ()
    """Names of the jobs that must have ended before this one starts."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(jobs: Sequence[Job], bars: dict[str, OnProgress], at_once: int | None = None) -> None:
    """Run all jobs, starting them in their order. The first failure stops the others. On Ctrl-C every job is
    interrupted, and the call waits for all of them."""
    assert {name for job in jobs for name in job.after} <= {job.name for job in jobs}, "a job waits for one not here"
    if _SERVER:
        _CONTEXT.set_forkserver_preload([*{job.work.__module__ for job in jobs}])
    messages: Any = _CONTEXT.Queue()
    waiting: list[Job] = list(jobs)
    running: dict[str, Any] = {}
    try:
        while waiting or running:
            unfinished = {job.name for job in waiting} | running.keys()
            for job in [job for job in waiting if unfinished.isdisjoint(job.after)]:
                if len(running) < (at_once or cores()):
                    waiting.remove(job)
                    running[job.name] = _start(job, messages)
            _listen(messages, bars)
            for name, process in list(running.items()):
                if process.exitcode is not None:
                    _listen(messages, bars)
                    if process.exitcode:
                        raise RuntimeError(f"the job {name} ended with exit code {process.exitcode}")
                    del running[name]
    finally:
        _stop(running)


def _start(job: Job, messages: Any) -> Any:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    process = _CONTEXT.Process(target=_child, args=(job, messages), daemon=True)
    process.start()
    return process


def _listen(messages: Any, bars: dict[str, OnProgress]) -> None:
    """Pass on the messages of the jobs. Waits a fifth of a second for the first message, and returns when none is
    left."""
    wait = 0.2
    while True:
        try:
            name, kind, content = messages.get(timeout=wait)
        except queue.Empty:
            return
        wait = 0.001
        if kind == "progress":
            bars[name](*content)
        elif kind == "user_error":
            raise UserError(f"{name}: {content[0]}", content[1])
        else:
            raise RuntimeError(f"the job {name} failed:\n{content}")


def _stop(running: dict[str, Any]) -> None:
    for process in running.values():
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGINT)
    for process in running.values():
        process.join(timeout=60)
        if process.is_alive():
            process.kill()


def _child(job: Job, messages: Any) -> None:
    import torch

    from sparroll.progress import quiet_transformers

    # It stays open: the interpreter may have something to say while it ends.
    sys.stdout = sys.stderr = job.log.open("a", encoding="utf-8", buffering=1)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    quiet_transformers()

    def on_progress(done: int, total: int, text: str = "") -> None:
        messages.put((job.name, "progress", (done, total, text)))

    try:
        job.work(*job.arguments, on_progress=on_progress)
    except UserError as error:
        messages.put((job.name, "user_error", (error.message, error.hint)))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if known := of_machine(error):
            messages.put((job.name, "user_error", (known.message, known.hint)))
        else:
            messages.put((job.name, "failure", traceback.format_exc()))


def _end_with_parent() -> None:
    """End this job when its parent is gone. A killed parent cannot stop its jobs, and they may end at any moment,
    because every file that they write is complete at any moment."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a job runs in a child process"
    parent.join()
    os._exit(1)
