"""Finds out which boundary works on this machine, by running a program in it that tries to get out.

`choose` is called at the start of a run. It returns a boundary that holds, or says what to install. Not here: the
boundaries themselves (boundaries.py), and verdicts (reward.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sparroll.errors import UserError
from sparroll.tasks.code.boundaries import BOUNDARIES, Boundary, Name
from sparroll.tasks.code.limits import SandboxError, SandboxLimits
from sparroll.tasks.code.session import Ended, Session

INSTALL = (
    "install bubblewrap (apt-get install bubblewrap), or run without a boundary: --allow-unsafe-sandbox, in a configuration "
    "data.allow_unsafe_sandbox = true, in Python CodeReward(allow_unsafe_sandbox=True)"
)

_ESCAPES = """
import json, os, socket, sys
found = {}
def tries(name, what):
    try:
        found[name] = bool(what())
    except BaseException:
        found[name] = False
secret, folder, port, parent, forbidden = json.loads(sys.stdin.read())
def write():
    with open(os.path.join(folder, "written"), "w") as file:
        file.write("here")
    return True
tries("reads files of the user", lambda: open(secret).read())
tries("sees the environment", lambda: forbidden in os.environ.values())
tries("writes outside", write)
tries("reaches the network", lambda: socket.create_connection(("127.0.0.1", port), 2))
tries("sees other processes", lambda: os.path.exists("/proc/%d/fd" % parent))
tries("forks without end", lambda: [os.fork() or os._exit(0) for _ in range(200)])
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Probe:
    """What happened when the probing program ran in a boundary."""

    name: Name
    holds: bool
    detail: str


def probe(name: Name) -> Probe:
    """Start a sandbox, and let a program try to get out of it."""
    boundary = BOUNDARIES[name]
    missing = boundary.why_not()
    if missing:
        return Probe(name, False, missing)
    folder = Path(tempfile.mkdtemp(prefix=f"sparroll-probe-{os.getpid()}-"))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return _probed(boundary, folder, listener.getsockname()[1])
    except (SandboxError, Ended, ValueError, KeyError) as error:
        return Probe(name, False, f"it does not run: {error}"[:400])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _probed(boundary: Boundary, folder: Path, port: int) -> Probe:
    folder.chmod(0o777)
    (folder / "secret").write_text("secret")
    mark = f"sparroll-{os.getpid()}"
    os.environ["SPARROLL_PROBE"] = mark
    question = json.dumps([str(folder / "secret"), str(folder), port, os.getpid(), mark]).encode()
    try:
        with Session(boundary, SandboxLimits(), "programs", _ESCAPES) as session:
            answer = session.exchange({}, question)
    finally:
        with contextlib.suppress(KeyError):
            del os.environ["SPARROLL_PROBE"]
    if answer.head.get("exit") != 0:
        return Probe(boundary.name, False, f"the probing program failed: {answer.head.get('problem')}")
    escapes = [what for what, done in json.loads(answer.body).items() if done]
    if (folder / "written").exists() and "writes outside" not in escapes:
        escapes.append("writes outside")
    holds = not escapes
    return Probe(boundary.name, holds, "contained a program that tried to get out" if holds else ", ".join(escapes))


@cache
def probes() -> dict[Name, Probe]:
    """Probes of the real boundaries. They run once per process."""
    return {name: probe(name) for name in BOUNDARIES if name != "unsafe"}


def choose(sandbox: Name | None = None, *, allow_unsafe_sandbox: bool = False) -> Boundary:
    """The boundary to use: the one that is asked for by name, or the first one that holds on this machine.

    Raises UserError if there is none and `allow_unsafe_sandbox` is not set. A boundary that is asked for by name is
    never replaced by another.
    """
    if sandbox is not None and sandbox not in BOUNDARIES:
        raise UserError(f"unknown sandbox {sandbox!r}", f"known: {', '.join(BOUNDARIES)}")
    if sandbox == "unsafe":
        if not allow_unsafe_sandbox:
            raise UserError(
                "the sandbox 'unsafe' does not contain programs", "allow it: CodeReward(allow_unsafe_sandbox=True)"
            )
        return BOUNDARIES["unsafe"]
    if sandbox is not None:
        found = probes()[sandbox]
        if not found.holds:
            raise UserError(f"the sandbox {sandbox} does not hold on this machine: {found.detail}", INSTALL)
        return BOUNDARIES[sandbox]
    for found in probes().values():
        if found.holds:
            return BOUNDARIES[found.name]
    if allow_unsafe_sandbox:
        return BOUNDARIES["unsafe"]
    why = "; ".join(f"{found.name}: {found.detail}" for found in probes().values())
    raise UserError(f"no sandbox works on this machine ({why})", INSTALL)
