"""The boundaries that a program can be run in: the command line of each, by name. Starting them and testing whether
they hold is elsewhere.

bubblewrap   separate namespaces (processes, network, mounts, IPC); of the file system only the interpreter and the
system
             libraries, read-only; an empty /tmp in memory that vanishes with the sandbox; seccomp
firejail     the same kinds of namespaces; the whole file system read-only, with home folders hidden
unsafe       rlimits and a process group, but no boundary; used only if it is asked for by name
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sparroll.tasks.code import seccomp
from sparroll.tasks.code.limits import SandboxLimits

Name = Literal["bubblewrap", "firejail", "unsafe"]
RUNNER = Path(__file__).with_name("runner.py")
PYTHON = os.path.realpath(sys.executable)
_INSIDE, _PACKAGES = "/sandbox/runner.py", "/sandbox/packages"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
PYTHON_ALONE = (PYTHON, "-P", "-s", "-S", "-B")
"""Python without the folders of the user, of the program and of installed packages. Not -I, which would ignore
PYTHONHASHSEED: programs that walk over a set would end differently each time."""
_USER_IDS = itertools.count()


@dataclass
class Launch:
    """A sandbox that is about to start: its command, what it inherits, and what must be removed when it has ended."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=lambda: dict(_ENVIRONMENT))
    pass_fds: list[int] = field(default_factory=list)
    folder: str | None = None
    """A folder on this machine that is removed afterwards."""
    packages: list[str] = field(default_factory=lambda: packages())
    """The folders in which the program finds installed packages."""
    user_id: int | None = None
    """The user id that the runner changes to before the program starts; None: it changes nothing."""

    def close(self) -> None:
        """Close this process's copies of the inherited pipe ends, after the sandbox has started."""
        for place in self.pass_fds:
            os.close(place)
        self.pass_fds = []

    def clean(self) -> None:
        self.close()
        if self.folder is not None:
            _remove(self.folder)


class Boundary(Protocol):
    name: Name
    own_processes: bool
    """Whether the sandbox has its own process namespace, so that the runner may kill every process that it sees."""

    def why_not(self) -> str:
        """Why this boundary cannot be tried on this machine; empty if it can."""
        ...

    def launch(self, limits: SandboxLimits, sync_fd: int) -> Launch:
        """The sandbox to start. `sync_fd` stays open as long as a process in the sandbox is alive."""
        ...


def packages() -> list[str]:
    """Folders of installed packages, which evalplus needs for numpy. The .pth files in them are not followed."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


class Bubblewrap:
    name: Name = "bubblewrap"
    own_processes = True

    def why_not(self) -> str:
        return "" if shutil.which("bwrap") else "bwrap is not installed"

    def launch(self, limits: SandboxLimits, sync_fd: int) -> Launch:
        launch = Launch([])
        # As root, every sandbox gets a different user id, which nobody else has and which is not root.
        # Any other user becomes the only user of a user namespace.
        if os.geteuid() == 0:
            launch.user_id = 1_500_000_000 + (os.getpid() % 100_000) * 1_000 + next(_USER_IDS) % 1_000
            walls = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
            walls += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            walls = ["--unshare-all", "--cap-drop", "ALL"]
        folder = ["--size", str(limits.folder_bytes), "--perms", "1777", "--tmpfs"]
        command = ["bwrap", *walls, "--die-with-parent", "--new-session", "--hostname", "sandbox"]
        command += [*self._system(), "--proc", "/proc", "--dev", "/dev", *folder, "/dev/shm", *folder, "/tmp"]
        command += self._python(launch)
        command += ["--ro-bind", str(RUNNER), _INSIDE, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
        command += ["--clearenv"]
        for name, value in _ENVIRONMENT.items():
            command += ["--setenv", name, value]
        command += ["--sync-fd", str(sync_fd)]
        rules = seccomp.program()
        if rules is not None:
            source, sink = os.pipe()
            os.write(sink, rules)
            os.close(sink)
            launch.pass_fds.append(source)
            command += ["--seccomp", str(source)]
        launch.command = [*command, *PYTHON_ALONE, _INSIDE]
        return launch

    def _system(self) -> list[str]:
        command = ["--ro-bind", "/usr", "/usr"]
        for place in ("/lib", "/lib32", "/lib64", "/bin"):
            if os.path.islink(place):
                command += ["--symlink", os.readlink(place), place]
            elif os.path.isdir(place):
                command += ["--ro-bind", place, place]
        return [*command, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]

    def _python(self, launch: Launch) -> list[str]:
        """Mounts the interpreter at its own path, and the packages in a separate folder. This must come after the empty
        /tmp, which would otherwise hide an interpreter that is installed in /tmp."""
        command = ["--perms", "0755", "--dir", str(Path(_PACKAGES).parent), "--perms", "0755", "--dir", _PACKAGES]
        if not sys.base_prefix.startswith("/usr/"):
            # The parent folders are made here, because bwrap would copy the permissions of a private home folder.
            for parent in reversed(list(Path(sys.base_prefix).parents)[:-1]):
                command += ["--perms", "0755", "--dir", str(parent)]
            command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        for number, place in enumerate(launch.packages):
            command += ["--ro-bind-try", place, f"{_PACKAGES}/{number}"]
        launch.packages = [f"{_PACKAGES}/{number}" for number in range(len(launch.packages))]
        return command


class Firejail:
    name: Name = "firejail"
    own_processes = False

    def why_not(self) -> str:
        return "" if shutil.which("firejail") else "firejail is not installed"

    def launch(self, limits: SandboxLimits, sync_fd: int) -> Launch:
        # Home folders are hidden, so the runner must be installed outside of them.
        command = [
            "firejail",
            "--quiet",
            "--noprofile",
            "--net=none",
            "--private-tmp",
            "--private-dev",
            "--ipc-namespace",
        ]
        command += ["--caps.drop=all", "--nonewprivs", "--seccomp", "--nogroups", "--noroot", "--read-only=/"]
        command += ["--read-write=/tmp", "--blacklist=/home", "--blacklist=/etc/passwd", "--blacklist=/etc/shadow"]
        command += ["--deterministic-shutdown", f"--rlimit-fsize={limits.file_bytes}"]
        return Launch([*command, *PYTHON_ALONE, str(RUNNER)])


class Unsafe:
    name: Name = "unsafe"
    own_processes = False

    def why_not(self) -> str:
        return ""

    def launch(self, limits: SandboxLimits, sync_fd: int) -> Launch:
        folder = tempfile.mkdtemp(prefix=f"sparroll-unsafe-{os.getpid()}-")
        launch = Launch([*PYTHON_ALONE, str(RUNNER)], folder=folder)
        launch.environment |= {"HOME": folder, "TMPDIR": folder}
        return launch


BOUNDARIES: dict[Name, Boundary] = {"bubblewrap": Bubblewrap(), "firejail": Firejail(), "unsafe": Unsafe()}


def _remove(folder: str) -> None:
    """Remove a folder in which a program may have taken away permissions from its own folders."""

    def again(_function: Any, path: str, _error: Any) -> None:
        parent = os.path.dirname(path)
        for place in (parent, path):
            if place.startswith(folder) and not os.path.islink(place):
                os.chmod(place, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)

    shutil.rmtree(folder, onerror=again)
