"""Worker processes that answer one question at a time. A worker that passes a limit is killed and replaced.

Knows processes and lines of text, but no mathematics. Each worker belongs to one thread of this process, which starts
it, asks it and kills it. The pool can be used from any thread and together with CUDA, because a worker is a new program
(fork and exec) and never a copy of this process.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparroll.errors import UserError

FOLDER = Path(__file__).parent
WORKER = FOLDER / "worker.py"
START_SECONDS = 300.0
REPLY_BYTES = 4096

End = Literal["answered", "timeout", "crashed"]


@dataclass(frozen=True)
class PoolLimits:
    """The limits of one question, and of a worker's life."""

    cpu_seconds: float = 5.0
    """Processor time for one question. This limit ends hard questions, so that verdicts do not depend on the machine's
    load."""
    wall_seconds: float = 60.0
    """A worker that has not answered after this time is killed."""
    memory_mib: int = 1024
    """Address space of a worker (Linux)."""
    questions_per_worker: int = 5000
    """A worker is replaced after so many questions, so that the memory of a library's caches cannot grow without
    end."""


@dataclass(frozen=True)
class Reply:
    """A worker's reply: all its lines, of which the last is the verdict if it answered, and how the question ended."""

    lines: tuple[str, ...]
    end: End


@dataclass
class _Batch:
    questions: Sequence[dict[str, Any]]
    replies: list[Reply | None]
    done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    cancelled: bool = False
    error: BaseException | None = None


class Pool:
    """Up to `workers` processes. They start when they are first needed, and end with `close` or at exit."""

    def __init__(self, workers: int | None = None, limits: PoolLimits | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = cores if workers is None else workers
        if self.workers < 1:
            raise UserError(f"workers must be at least 1, got {workers}")
        self.limits = limits or PoolLimits()
        self._reset()
        close, after_fork = weakref.WeakMethod(self.close), weakref.WeakMethod(self._after_fork)
        atexit.register(lambda: (method := close()) and method())
        os.register_at_fork(after_in_child=lambda: (method := after_fork()) and method())

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[_Batch, int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: list[_Worker] = []
        self._closed = False

    def ask(self, questions: Sequence[dict[str, Any]]) -> list[Reply]:
        """A reply to each question, in order. Any thread may ask. An interrupted call drops the questions that are
        left."""
        if not questions:
            return []
        batch = _Batch(questions, [None] * len(questions))
        self._queue(batch)
        try:
            for _ in questions:
                batch.done.acquire()
        except BaseException:
            batch.cancelled = True
            raise
        if batch.error is not None:
            raise batch.error
        return [reply for reply in batch.replies if reply is not None]

    def process_ids(self) -> list[int]:
        """Process ids of the workers that are running now."""
        return [worker.process.pid for worker in list(self._running) if worker.process.poll() is None]

    def close(self) -> None:
        """Kill and reap every worker. The next question starts new ones."""
        with self._lock:
            self._closed = True
            threads = self._threads
            for _ in threads:
                self._jobs.put(None)
            for worker in list(self._running):
                worker.kill()
            for thread in threads:
                thread.join()
            self._jobs, self._threads, self._closed = queue.SimpleQueue(), [], False

    def _queue(self, batch: _Batch) -> None:
        with self._lock:
            while len(self._threads) < self.workers:
                thread = threading.Thread(target=self._serve, name="math verdicts", daemon=True)
                self._threads.append(thread)
                thread.start()
            for place in range(len(batch.questions)):
                self._jobs.put((batch, place))

    def _after_fork(self) -> None:
        """Start anew in a forked copy of this process. The workers belong to the original, so only the copied pipe ends
        are closed."""
        for worker in self._running:
            worker.forget()
        self._reset()

    def _serve(self) -> None:
        jobs = self._jobs
        worker: _Worker | None = None
        while (job := jobs.get()) is not None:
            batch, place = job
            if not (batch.cancelled or self._closed or batch.error):
                try:
                    batch.replies[place], worker = self._answer(worker, batch.questions[place])
                except BaseException as error:
                    batch.error = error
            elif self._closed and batch.error is None:
                batch.error = RuntimeError("the pool was closed while questions were asked")
            batch.done.release()
        if worker is not None:
            self._drop(worker)

    def _answer(self, worker: _Worker | None, question: dict[str, Any]) -> tuple[Reply, _Worker | None]:
        for attempt in range(2):
            if worker is None:
                worker = _Worker(self.limits)
                self._running.append(worker)
                if not worker.ready():
                    self._drop(worker)
                    raise UserError("a worker for math verdicts does not start", "pip install -e '.[math]'")
            reply = worker.ask(question)
            if reply.end != "answered" or worker.asked >= self.limits.questions_per_worker:
                self._drop(worker)
                worker = None
            # A worker may have been killed from outside, for want of memory. A question that crashes two workers is to
            # blame.
            if reply.end != "crashed" or attempt == 1 or self._closed:
                break
        return reply, worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        worker.forget()
        self._running.remove(worker)


class _Worker:
    """One worker process, and the lines of text to and from it."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.asked = 0
        numbers = (os.getpid(), limits.cpu_seconds, limits.wall_seconds, limits.memory_mib * 2**20)
        self.process = subprocess.Popen(
            # -P, because the program's folder may hold files with the names of standard modules.
            [sys.executable, "-P", str(WORKER), *map(str, numbers), str(FOLDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # sympy's order of symbols depends on the hash seed, and with it the verdict on an answer near a limit.
            env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            # Ctrl-C in a terminal is meant for the run, which may have to finish its step.
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)

    def ready(self) -> bool:
        return self._lines(START_SECONDS, last=lambda line: line == "ready").end == "answered"

    def ask(self, question: dict[str, Any]) -> Reply:
        self.asked += 1
        try:
            os.write(self._in, (json.dumps(question) + "\n").encode("ascii"))
        except BrokenPipeError:
            return Reply((), "crashed")
        return self._lines(self.limits.wall_seconds, last=lambda line: line.startswith("="))

    def _lines(self, seconds: float, last: Any) -> Reply:
        data, until = b"", time.monotonic() + seconds
        while True:
            lines = tuple(data.decode("ascii", "replace").split("\n")[:-1])
            if lines and last(lines[-1]):
                return Reply(lines, "answered")
            if len(data) > REPLY_BYTES:
                return Reply(lines, "crashed")
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return Reply(lines, "timeout")
            more = os.read(self._out, REPLY_BYTES)
            if not more:
                code = self.process.wait()
                return Reply(lines, "timeout" if code in (-signal.SIGPROF, -signal.SIGALRM) else "crashed")
            data += more

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Close this process's ends of the pipes."""
        self._selector.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
