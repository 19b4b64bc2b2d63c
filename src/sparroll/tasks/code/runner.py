"""The script that runs inside the sandbox. It limits itself, and then runs programs or calls functions on request.

It is started by its path with a bare interpreter, so it imports nothing of sparroll. It is not trusted, because the
program that it runs may change it in any way. What it sends is only the program's answer. Expected answers never come
here.

Messages in both directions have a line `<nonce> <JSON> <bytes>`, and then that many bytes.
"""

# ruff: noqa: SIM105, SIM115
from __future__ import annotations

import json
import os
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Star imports, then imports, in the order of LiveCodeBench's testing_util.py, so that names have the same meaning.
_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json",
)  # fmt: skip
MEMORY_EXIT = 97
NODES = 2_000_000
STACK_BYTES = 512 << 20


class Channel:
    """The pipe to the outside. It is moved away from the standard streams before anything else runs."""

    def __init__(self) -> None:
        self.source, self.sink = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)
        self.nonce, self.ahead = b"", b""

    def close(self) -> None:
        os.close(self.source)
        os.close(self.sink)

    def ready(self, with_errors: bool) -> None:
        """Say that the program may be run. Until then somebody reads what stands in stderr. with_errors: whether it still
        leads there afterwards; nobody reads it, and a program that has filled the pipe would wait forever."""
        self.write({"kind": "ready"})
        if not with_errors:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 2)
            os.close(nothing)

    def _more(self) -> None:
        block = os.read(self.source, 1 << 16)
        if not block:
            os._exit(0)
        self.ahead += block

    def read(self) -> tuple[dict, bytes]:
        while b"\n" not in self.ahead:
            self._more()
        line, _, self.ahead = self.ahead.partition(b"\n")
        nonce, rest = line.split(b" ", 1)
        head, size = rest.rsplit(b" ", 1)
        self.nonce = nonce
        while len(self.ahead) < int(size):
            self._more()
        body, self.ahead = self.ahead[: int(size)], self.ahead[int(size) :]
        return json.loads(head), body

    def write(self, head: dict, body: bytes = b"") -> None:
        block = b"%s %s %d\n" % (self.nonce, json.dumps(head).encode(), len(body)) + body
        while block:
            block = block[os.write(self.sink, block) :]


def encode(value: Any) -> bytes:
    """Plain values as JSON with their types, so that a tuple stays a tuple. Any other value is opaque, and equal to
    nothing."""
    left = [NODES]

    def one(item: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return ["o", "too large"]
        kind = type(item)
        if kind.__module__ == "numpy" and hasattr(item, "item") and getattr(item, "shape", None) == ():
            item = item.item()
        if item is None or item is True or item is False:
            return item
        if isinstance(item, str):
            return ["s", str.__str__(item).encode("utf-8", "surrogatepass").hex()] if _odd(item) else str.__str__(item)
        if isinstance(item, int):
            return ["i", hex(int.__int__(item))]
        if isinstance(item, float):
            return ["f", float.hex(item)]
        if isinstance(item, complex):
            return ["c", float.hex(item.real), float.hex(item.imag)]
        if isinstance(item, (bytes, bytearray)):
            return ["b", bytes(item).hex()]
        for letter, container in (("l", list), ("t", tuple), ("S", (set, frozenset))):
            if isinstance(item, container):
                return [letter, [one(part) for part in item]]
        if isinstance(item, dict):
            return ["d", [[one(key), one(part)] for key, part in dict.items(item)]]
        return ["o", kind.__name__[:80]]

    return json.dumps(one(value)).encode()


def _odd(text: str) -> bool:
    try:
        str.encode(text, "utf-8")
    except UnicodeEncodeError:
        return True
    return False


class Opaque:
    """Stands for a value that could not be sent."""


class NumberKeys:
    """A dictionary with whole numbers as keys, as pairs that are only compared: it is equal to a dictionary of the same
    items. It is not built, because the program chose its keys (see `decode_json`)."""

    def __init__(self, pairs: list[tuple[int, Any]]) -> None:
        self.pairs = pairs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict) or len(other) != len(self.pairs):
            return False
        seen = {key for key, value in self.pairs if key in other and other[key] == value}
        return len(seen) == len(other)

    __hash__ = None  # type: ignore[assignment]


def decode_json(item: Any) -> Any:
    """`decode` for values that are compared with JSON data. That has no sets, and strings as keys, or whole numbers that a
    data set has written as strings, so others are not built.

    Outside of the sandbox nothing may be hashed that the program chose: a dictionary of colliding numbers takes hours
    to build.
    """
    if isinstance(item, list) and item:
        if item[0] in ("l", "t"):
            parts = [decode_json(part) for part in item[1]]
            return parts if item[0] == "l" else tuple(parts)
        if item[0] == "d":
            pairs = [(decode_json(key), decode_json(part)) for key, part in item[1]]
            if pairs and all(type(key) is int for key, _ in pairs):
                return NumberKeys(pairs)
            return dict(pairs) if all(type(key) is str for key, _ in pairs) else Opaque()
        if item[0] == "S":
            return Opaque()
    return decode(item)


def decode(item: Any) -> Any:
    """The inverse of `encode`. It builds plain values only."""
    if item is None or isinstance(item, (bool, str)):
        return item
    letter, *rest = item
    if letter == "s":
        return bytes.fromhex(rest[0]).decode("utf-8", "surrogatepass")
    if letter == "i":
        return int(rest[0], 16)
    if letter == "f":
        return float.fromhex(rest[0])
    if letter == "c":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if letter == "b":
        return bytes.fromhex(rest[0])
    if letter == "l":
        return [decode(part) for part in rest[0]]
    if letter == "t":
        return tuple(decode(part) for part in rest[0])
    if letter == "S":
        return {decode(part) for part in rest[0]}
    if letter == "d":
        return {decode(key): decode(part) for key, part in rest[0]}
    return Opaque()


def set_limits(limits: dict, cpu_seconds: int) -> None:
    import resource

    def lower(what: int, soft: int, hard: int) -> None:
        top = resource.getrlimit(what)[1]
        if top != resource.RLIM_INFINITY:
            soft, hard = min(soft, top), min(hard, top)
        resource.setrlimit(what, (soft, hard))

    lower(resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"])
    lower(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
    lower(resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"])
    lower(resource.RLIMIT_NPROC, limits["processes"], limits["processes"])
    lower(resource.RLIMIT_NOFILE, 256, 256)
    lower(resource.RLIMIT_CORE, 0, 0)
    # Recursion through C, as in functools.cache, takes some hundred bytes of stack for each level. The limit of memory
    # holds for the stack, too.
    stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
    lower(resource.RLIMIT_STACK, STACK_BYTES, stack if stack != resource.RLIM_INFINITY else STACK_BYTES)


def become(uid: int) -> None:
    """Change from root to a user id that nobody has, because limits on the number of processes do not apply to root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def names(official: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    if official:
        for module in (*_MODULES, "builtins", "typing"):
            exec(f"from {module} import *", found)
        for module in _MODULES:
            exec(f"import {module}", found)
        sys.setrecursionlimit(50000)
    return found


def problem(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text[:300]


def child(code: Any, found: dict, source: int, sink: int, errors: int, limits: dict) -> None:
    """One run of a program on one input. Never returns."""
    exit_code = 1
    try:
        for place, target in ((source, 0), (sink, 1), (errors, 2)):
            os.dup2(place, target)
        os.closerange(3, 256)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        found.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)
        set_limits(limits, limits["cpu_seconds"])
        try:
            exec(code, found)
        except SystemExit:
            # For the official checker sys.exit(n) is a normal end.
            pass
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__):
            # A closed stream has written all that it had.
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        exit_code = 0
    except MemoryError:
        exit_code = MEMORY_EXIT
    except BaseException as error:
        try:
            os.write(2, problem(error).encode("utf-8", "replace"))
        except BaseException:
            # The program has failed already. It may have closed its stderr, or raised an error that cannot be printed.
            # Then only the message is lost; the exit code still says that it failed.
            pass
    finally:
        os._exit(exit_code)


def run_program(code: Any, found: dict, text: bytes, channel: Channel, limits: dict, own_processes: bool) -> None:
    """Run the program in a fork on one input, read its output up to the limit, and report. The clock runs outside."""
    # The file has no name, so that nothing of one test is left for the next.
    source = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    view = memoryview(text)
    while view:
        view = view[os.write(source, view) :]
    os.lseek(source, 0, os.SEEK_SET)
    (out, sink), (log, errors) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        channel.close()
        child(code, found, source, sink, errors, limits)
    for place in (source, sink, errors):
        os.close(place)
    output, complaint, over, ended = bytearray(), bytearray(), False, None
    for place in (out, log):
        os.set_blocking(place, False)
    poll, still = select.poll(), {out, log}
    for place in still:
        poll.register(place, select.POLLIN)
    last_looks = 32
    while still and not over and last_looks:
        # A daemon may keep the pipes open, and continue to write, after the program itself has ended.
        if ended is None:
            found_pid, code_now = os.waitpid(pid, os.WNOHANG)
            ended = code_now if found_pid else None
        else:
            last_looks -= 1
        events = poll.poll(20 if ended is None else 0)
        if not events and ended is not None:
            break
        for place, _ in events:
            block = os.read(place, 1 << 16)
            if not block:
                poll.unregister(place)
                still.discard(place)
            elif place == out:
                output += block
                over = len(output) > limits["output_bytes"]
            elif len(complaint) < 2000:
                complaint += block[:2000]
    if over:
        os.kill(pid, signal.SIGKILL)
    if ended is None:
        ended = os.waitpid(pid, 0)[1]
    if own_processes:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            while os.waitpid(-1, 0):
                pass
        except ChildProcessError:
            pass
    os.close(out)
    os.close(log)
    exit_code = os.waitstatus_to_exitcode(ended)
    head = {"kind": "program", "exit": exit_code, "over": over}
    head["problem"] = complaint[-300:].decode("utf-8", "replace")
    channel.write(head, b"" if over else bytes(output))


def programs(start: dict, body: bytes, channel: Channel) -> None:
    found = names(True)
    channel.ready(with_errors=True)
    try:
        code = compile(body.decode("utf-8", "surrogatepass"), "solution.py", "exec", dont_inherit=True)
    except BaseException as error:
        channel.read()
        channel.write({"kind": "program", "exit": 1, "over": False, "problem": problem(error)})
        return
    while True:
        _, text = channel.read()
        run_program(code, found, text, channel, start["limits"], start["own_processes"])


def calls(start: dict, body: bytes, channel: Channel) -> None:
    """Run the program in this process, and then call its function on each pair of arguments by place and by name."""
    found = names(start["official"])
    found["__name__"] = "solution"
    channel.ready(with_errors=False)
    set_limits(start["limits"], start["limits"]["cpu_seconds"] * (start["calls"] + 1))
    function: Any = None
    refused: dict | None = None
    try:
        text = body.decode("utf-8", "surrogatepass")
        # A function called `add` or `gcd` must come from the program, and not from a star import.
        found.pop(start["function"], None)
        exec(compile(text, "solution.py", "exec", dont_inherit=True), found)
        home = found["Solution"]() if start["in_class"] and "class Solution" in text else None
        function = getattr(home, start["function"]) if home is not None else found[start["function"]]
    except MemoryError:
        refused = {"kind": "memory"}
    except BaseException as error:
        refused = {"kind": "raised", "problem": problem(error)}
    while True:
        _, arguments = channel.read()
        if refused is not None:
            channel.write(refused)
            continue
        try:
            by_place, by_name = decode(json.loads(arguments))
            result = encode(function(*by_place, **by_name))
            head = {"kind": "value"} if len(result) <= start["limits"]["output_bytes"] else {"kind": "over"}
            channel.write(head, result if head["kind"] == "value" else b"")
        except MemoryError:
            channel.write({"kind": "memory"})
        except BaseException as error:
            channel.write({"kind": "raised", "problem": problem(error), "error": type(error).__name__[:80]})


def grade(start: dict, body: bytes, channel: Channel) -> None:
    """Run the data set's test code. The program is in another sandbox, and the function under test sends each call
    there."""
    asked: list[bool] = []

    def messenger(*by_place: Any, **by_name: Any) -> Any:
        asked.append(True)
        channel.write({"kind": "call"}, encode([by_place, by_name]))
        head, answer = channel.read()
        if head["kind"] == "raised":
            raise _builtin_error(head.get("error"), str(head.get("problem")))
        if head["kind"] != "value":
            raise RuntimeError(f"the program ended with {head['kind']}")
        return decode(json.loads(answer))

    channel.ready(with_errors=False)
    set_limits(start["limits"], start["limits"]["cpu_seconds"] * 10)
    channel.read()
    found: dict[str, Any] = {"__name__": "tests", start["function"]: messenger, "candidate": messenger}
    try:
        exec(compile(body.decode(), "tests.py", "exec", dont_inherit=True), found)
        if not asked and "check" in found:
            found["check"](messenger)
        channel.write({"kind": "held" if asked else "broken", "problem": "the tests call nothing"})
    except Exception as error:
        channel.write({"kind": "failed" if asked else "broken", "problem": problem(error)})
    channel.read()


def _builtin_error(name: Any, text: str) -> Exception:
    """Python's own error of that name, which the tests may expect; RuntimeError for the program's own kinds, and for those
    that are not made of a text alone."""
    import builtins

    found = getattr(builtins, name, None) if isinstance(name, str) else None
    try:
        return found(text) if isinstance(found, type) and issubclass(found, Exception) else RuntimeError(text)
    except TypeError:
        return RuntimeError(text)


def main() -> None:
    channel = Channel()
    start, body = channel.read()
    if start["uid"] is not None:
        become(start["uid"])
    if start["new_folder"]:
        os.chdir(start["new_folder"])
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    sys.path += start["packages"]
    sys.argv[:] = ["solution.py"]
    {"programs": programs, "calls": calls, "grade": grade}[start["mode"]](start, body, channel)


if __name__ == "__main__":
    main()
