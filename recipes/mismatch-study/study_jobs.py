"""Many jobs in processes of their own, so many at a time on each GPU, until they are done or the time is up. Knows
nothing of what they do, but that SIGINT makes them save and end."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sparroll.errors import UserError

GRACE_SECONDS = 45
"""What an interrupted job gets to save."""
LEAST_SECONDS = 45.0
"""No job is begun with less time before the deadline."""
FIRST_PORT, PORTS_OF_A_CALL, PORTS_OF_A_JOB = 20_000, 2048, 32
"""Where a job's engine looks for free ports. Engines that start in the same moment would else choose the same one; below
the ports that a system gives away by itself, nobody else takes them. Calls that run at the same time have ports of their
own."""
MOST_CALLS = 6


@dataclass
class Job:
    name: str
    command: list[str]
    log: Path
    blocked: Callable[[], bool] = lambda: False
    """True while the job has to wait for another one."""
    hopeless: Callable[[], str] = lambda: ""
    """Why it can never run; empty while it may."""


@dataclass
class Outcome:
    """How a job ended in this call: finished, cut, failed."""

    state: str
    reason: str = ""
    seconds: float = 0.0


@dataclass
class _Running:
    job: Job
    gpu: int | None
    process: subprocess.Popen
    number: int
    """No two jobs that run at a time have the same."""
    began: float = field(default_factory=time.time)
    killed: bool = False
    """Took longer than its grace."""


def check_minutes(minutes: float, began: float) -> None:
    """Raise UserError if no job can be begun in a call that began at `began` and is to end after so many minutes."""
    least = (time.time() - began + LEAST_SECONDS + GRACE_SECONDS) / 60
    if not minutes > least:
        raise UserError(
            f"--minutes must be at least {math.ceil(10 * least) / 10:g}, got {minutes:g}: a job gets at least "
            f"{LEAST_SECONDS:.0f} s to run, and {GRACE_SECONDS} s to save when it is cut",
            "give more --minutes, or leave the option out",
        )


def visible_device(index: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process that shall have one of the GPUs that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return str(index)
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if index >= len(names):
        raise UserError(f"there is no GPU {index}: CUDA_VISIBLE_DEVICES is {seen!r}", "GPUs count from 0 within it")
    return names[index]


def run_jobs(
    jobs: list[Job],
    *,
    gpus: list[int],
    at_once: int,
    deadline: float,
    threads: int = 1,
    least_seconds: float = LEAST_SECONDS,
    on_change: Callable[[dict[str, Outcome]], None] = lambda outcomes: None,
    on_poll: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.time,
) -> dict[str, Outcome]:
    """Outcome per job that ran or can never run. `at_once` jobs share each GPU (or the CPU, without GPUs).

    At `deadline` (of `clock`), and on Ctrl-C, running jobs are interrupted and waited for. No job is begun with less
    than `least_seconds` left. A job that fails is reported and stops no other, and neither does an error of `on_change`:
    it is printed, and raised only by the last call, after all jobs. `on_poll` is called every fifth of a second.
    """
    places: list[int | None] = list(gpus) or [None]
    waiting, running, outcomes = list(jobs), [], {}
    interrupted = False
    ports = None if "VLLM_PORT" in os.environ else _claim_ports(at_once * len(places))
    try:
        while waiting or running:
            now = clock()
            on_poll()
            changed = _reap(running, outcomes, interrupted=False)
            for job in [job for job in waiting if job.hopeless()]:
                waiting.remove(job)
                outcomes[job.name] = Outcome("failed", job.hopeless())
                changed = True
            if changed:
                try:
                    on_change(outcomes)
                except Exception:
                    traceback.print_exc()
            if now >= deadline or (not running and now >= deadline - least_seconds):
                break
            if now < deadline - least_seconds:
                _start(waiting, running, places, at_once, threads, ports)
            if waiting and not running and all(job.blocked() for job in waiting):
                for job in waiting:
                    outcomes[job.name] = Outcome("failed", "what it waits for did not come")
                break
            time.sleep(0.2)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _interrupt(running)
        _reap(running, outcomes, interrupted=True)
        if ports is not None:
            ports.close()
        on_change(outcomes)
    if interrupted:
        raise KeyboardInterrupt
    return outcomes


def _claim_ports(jobs: int) -> socket.socket:
    """Holds the first port of those that this call's jobs may take, of which so many run at a time: as long as it is open,
    no other call takes them. Raises UserError where too many jobs or calls run."""
    if PORTS_OF_A_JOB * (1 + jobs) > PORTS_OF_A_CALL:
        most = PORTS_OF_A_CALL // PORTS_OF_A_JOB - 1
        raise UserError(
            f"{jobs} jobs at a time have no ports for their engines: there are some for {most}", "lower --at-once"
        )
    for call in range(MOST_CALLS):
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", FIRST_PORT + PORTS_OF_A_CALL * call))
            return held
        except OSError:
            held.close()
    raise UserError(f"{MOST_CALLS} calls run on this machine already, and each needs ports", "wait until one has ended")


def _start(
    waiting: list[Job],
    running: list[_Running],
    places: list[int | None],
    at_once: int,
    threads: int,
    ports: socket.socket | None,
) -> None:
    """The next jobs that may run, each on the GPU with the fewest."""
    for job in [job for job in waiting if not job.blocked()]:
        load = {place: sum(each.gpu == place for each in running) for place in places}
        place = min(places, key=lambda each: load[each])
        if load[place] >= at_once:
            return
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment["CUDA_VISIBLE_DEVICES"] = "" if place is None else visible_device(place)
        number = min(set(range(len(running) + 1)) - {each.number for each in running})
        if ports is not None:
            environment["VLLM_PORT"] = str(ports.getsockname()[1] + PORTS_OF_A_JOB * (1 + number))
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log, _interrupts_later():
            # A session of its own: Ctrl-C reaches this process, which passes it on once.
            process = subprocess.Popen(
                job.command,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )
            waiting.remove(job)
            running.append(_Running(job, place, process, number))


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """SIGINT and SIGTERM that arrive in here take effect at the end. Otherwise a job that has begun and is not yet among
    those that run would be forgotten, and go on without a deadline."""
    if threading.current_thread() is not threading.main_thread():
        # Signals interrupt no other thread.
        yield
        return
    arrived: list[int] = []
    try:
        with ExitStack() as restored:
            for number in (signal.SIGINT, signal.SIGTERM):
                restored.callback(signal.signal, number, signal.getsignal(number))
                signal.signal(number, lambda number, _: arrived.append(number))
            yield
    finally:
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


def _heed_interrupts() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _reap(running: list[_Running], outcomes: dict[str, Outcome], *, interrupted: bool) -> bool:
    ended = [each for each in running if each.process.poll() is not None]
    for each in ended:
        running.remove(each)
        code, seconds = each.process.returncode, round(time.time() - each.began, 1)
        if code == 0:
            outcomes[each.job.name] = Outcome("finished", seconds=seconds)
        elif each.killed or (interrupted and code in (130, -signal.SIGINT)):
            outcomes[each.job.name] = Outcome("cut", seconds=seconds)
        else:
            outcomes[each.job.name] = Outcome("failed", _last_words(each.job.log, code), seconds)
    return bool(ended)


def _interrupt(running: list[_Running]) -> None:
    for each in running:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGINT)
    patience = time.time() + GRACE_SECONDS
    while time.time() < patience and any(each.process.poll() is None for each in running):
        time.sleep(0.1)
    for each in running:
        if each.process.poll() is None:
            # The group, so that an engine's own processes end, too.
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
            each.killed = True


def _last_words(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: " + " | ".join(lines[-3:])[-500:]
