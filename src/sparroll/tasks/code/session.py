"""One running sandbox: messages to and from the runner, with limits on time, memory and files. Knows no tests or
verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparroll.tasks.code.boundaries import Boundary
from sparroll.tasks.code.limits import SandboxError, SandboxLimits, Status

START_SECONDS = 30.0
_GAUGE_SECONDS = 0.05
_HEAD_BYTES = 4096


@dataclass
class Ended(Exception):
    """The program ended, or a limit ended it."""

    status: Status
    detail: str

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}"


@dataclass(frozen=True)
class Frame:
    head: dict[str, Any]
    body: bytes


class Session:
    """A running sandbox, as a context manager. What goes wrong before the runner says that it is ready is a fault of
    the sandbox. What goes wrong afterwards counts as the program's fault, because the program could have caused it.
    """

    def __init__(self, boundary: Boundary, limits: SandboxLimits, mode: str, body: str, **start: Any):
        self.limits = limits
        self._boundary = boundary
        self._nonce = secrets.token_hex(16).encode()
        self._ahead = bytearray()
        self._alive, sync = os.pipe()
        self._launch = boundary.launch(limits, sync)
        try:
            self._process = subprocess.Popen(
                self._launch.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._launch.environment,
                pass_fds=[sync, *self._launch.pass_fds],
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._alive)
            self._launch.clean()
            raise SandboxError(f"{self._launch.command[0]} does not start: {error}") from None
        finally:
            os.close(sync)
        self._launch.close()
        assert self._process.stdin and self._process.stdout and self._process.stderr
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(pipe.fileno(), False)
        about = {
            "mode": mode,
            "limits": asdict(limits),
            "packages": self._launch.packages,
            "uid": self._launch.user_id,
            "own_processes": boundary.own_processes,
            "new_folder": self._launch.folder,
            **start,
        }
        try:
            self._begin(about, body.encode("utf-8", "surrogatepass"))
        except BaseException:
            self.close()
            raise

    def _begin(self, about: dict[str, Any], body: bytes) -> None:
        try:
            ready = self.exchange(about, body, wall_seconds=START_SECONDS)
        except Ended as ended:
            said = self._complaint()
            raise SandboxError(f"{self._boundary.name} did not start: {ended.detail}; {said}") from None
        if ready.head.get("kind") != "ready":
            raise SandboxError(f"{self._boundary.name} did not start: it said {ready.head}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exchange(self, head: dict[str, Any], body: bytes = b"", wall_seconds: float | None = None) -> Frame:
        """Send a message, and wait for the answer. Raises Ended; after that, only `close` may be called."""
        assert self._process.stdin and self._process.stdout
        began = time.monotonic()
        allowed = self.limits.wall_seconds if wall_seconds is None else wall_seconds
        ending = began + allowed
        message = memoryview(b"%s %s %d\n" % (self._nonce, json.dumps(head).encode(), len(body)) + body)
        source, sink = self._process.stdout.fileno(), self._process.stdin.fileno()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(sink, select.POLLOUT)
        gauged = time.monotonic()
        while True:
            frame = self._frame()
            if frame is not None:
                return frame
            now = time.monotonic()
            if now >= ending:
                raise Ended("timeout", f"no answer in {allowed:g} s")
            if now - gauged >= _GAUGE_SECONDS:
                self._gauge()
                gauged = now
            for place, event in poll.poll(1000 * min(_GAUGE_SECONDS, ending - now)):
                if place == sink:
                    try:
                        message = message[os.write(sink, message[: 1 << 16]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        message = message[:0]
                    if not message or event & select.POLLERR:
                        poll.unregister(sink)
                else:
                    self._read(source, began)

    def _read(self, source: int, began: float) -> None:
        block = os.read(source, 1 << 16)
        if not block:
            # If a function never returns, the kernel's limit of processor time ends the runner.
            if time.monotonic() - began >= self.limits.cpu_seconds:
                raise Ended("timeout", f"ended after {self.limits.cpu_seconds} s")
            raise Ended("crash", "the runner was ended")
        self._ahead += block
        if len(self._ahead) > self.limits.output_bytes + _HEAD_BYTES:
            raise Ended("output limit", f"more than {self.limits.output_bytes} bytes")

    def _frame(self) -> Frame | None:
        """The next message, if it has arrived completely. A message without the right nonce is not from the runner."""
        place = self._ahead.find(b"\n", 0, _HEAD_BYTES)
        if place < 0:
            if len(self._ahead) >= _HEAD_BYTES:
                raise Ended("crash", "a message without a head")
            return None
        try:
            nonce, rest = bytes(self._ahead[:place]).split(b" ", 1)
            text, size = rest.rsplit(b" ", 1)
            head, length = json.loads(text), int(size)
            if nonce != self._nonce or not isinstance(head, dict) or length < 0:
                raise ValueError
        except (ValueError, RecursionError):
            raise Ended("crash", "the runner's messages were tampered with") from None
        if length > self.limits.output_bytes:
            raise Ended("output limit", f"more than {self.limits.output_bytes} bytes")
        if len(self._ahead) < place + 1 + length:
            return None
        body = bytes(self._ahead[place + 1 : place + 1 + length])
        del self._ahead[: place + 1 + length]
        return Frame(head, body)

    def _gauge(self) -> None:
        """Check the memory of all processes inside, and the number of files in /tmp. It looks from outside, so no
        program can prevent it."""
        inside = _descendants(self._process.pid)
        if _bytes_of(inside, self.limits.memory_bytes) > self.limits.memory_bytes:
            raise Ended("memory", f"more than {self.limits.memory_bytes >> 20} MiB in all")
        if len(inside) > 2 * self.limits.processes + 8:
            raise Ended("crash", f"more than {self.limits.processes} processes")
        for place in ("tmp", "dev/shm"):
            self._gauge_folder(inside, place)

    def _gauge_folder(self, inside: Sequence[int], place: str) -> None:
        if self._boundary.name != "bubblewrap" or not inside:
            return
        try:
            space = os.statvfs(f"/proc/{inside[-1]}/root/{place}")
        except OSError:
            return
        # Before the sandbox has mounted its own /tmp, this is the machine's.
        ours = space.f_blocks * space.f_frsize <= 2 * self.limits.folder_bytes
        if ours and space.f_files - space.f_ffree > self.limits.files:
            raise Ended("output limit", f"more than {self.limits.files} files")

    def _complaint(self) -> str:
        assert self._process.stderr
        with contextlib.suppress(OSError):
            return (os.read(self._process.stderr.fileno(), 2000) or b"").decode("utf-8", "replace").strip()[-500:]
        return ""

    def close(self) -> None:
        """Kill all processes inside, and wait until they are gone. Raises SandboxError if one survives."""
        inside = _descendants(self._process.pid)
        if self._boundary.own_processes:
            self._end_first_process(inside[:1])
            inside = []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        survivors = False
        if self._boundary.own_processes:
            poll = select.poll()
            poll.register(self._alive, select.POLLIN)
            survivors = not poll.poll(10_000)
        os.close(self._alive)
        self._launch.clean()
        if survivors:
            raise SandboxError("processes of a sandbox were still there ten seconds after it was ended")

    def _end_first_process(self, first: list[int]) -> None:
        """Kill the first process of a process namespace. The kernel then ends all its other processes, and bwrap, which
        runs outside, ends after them.
        """
        for pid in first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    queue = [pid]
    while queue and len(found) < 4096:
        parent = queue.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    children = [int(word) for word in file.read().split()]
                queue += children
                found += children
    return found


def _bytes_of(pids: Sequence[int], allowed: int) -> int:
    """Resident memory of processes, without pages of files. What they share counts for each of them at first, and in parts
    only where the sum is over what is allowed, because that takes the kernel longer."""
    total = sum(_resident_bytes(pid, "status", ("RssAnon", "RssShmem")) for pid in pids)
    if total <= allowed:
        return total
    return sum(_resident_bytes(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem")) for pid in pids) or total


def _resident_bytes(pid: int, file: str, fields: Sequence[str]) -> int:
    """The sum of these fields of a file in /proc; 0 for a process that has ended."""
    try:
        with open(f"/proc/{pid}/{file}", encoding="ascii", errors="replace") as lines:
            found = dict(line.split(":", 1) for line in lines if ":" in line)
    except OSError:
        return 0
    return sum(int(found[name].split()[0]) << 10 for name in fields if name in found)
