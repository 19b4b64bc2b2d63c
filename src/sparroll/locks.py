"""One process at a time in a folder: a lock that ends with its process, however the process dies. Knows no command.

The lock is a POSIX lock on FOLDER/.lock, which the system drops when the process ends. The file's text says who holds
it. Children of the process do not inherit the lock, so a child that outlives a killed run holds nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from sparroll import files
from sparroll.errors import UserError

NAME = ".lock"

_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_held: dict[tuple[int, Path], int] = {}
"""How often a process holds a folder. A forked child finds the entries of its parent, which have another process id."""


@contextmanager
def locked(folder: Path | str, who: str) -> Iterator[Path]:
    """Hold the folder while the block runs; it is created if it is missing, and removed again if the block left it empty.
    Raises UserError if another process has it.

    who: what to tell other processes, such as "sparroll train". A process may take a folder again that it holds
    already, so a command and the function that it calls can both ask for it.
    """
    made = not Path(folder).exists()
    path = files.output_folder(folder).resolve() / NAME
    place = os.getpid(), path
    handle = None if place in _held else _take(path, who, Path(folder))
    _held[place] = _held.get(place, 0) + 1
    try:
        yield path.parent
    finally:
        _held[place] -= 1
        if not _held[place]:
            del _held[place]
        if handle is not None:
            # Whoever waits for this file finds that it is gone, and makes another one.
            path.unlink(missing_ok=True)
            os.close(handle)
            if made:
                _remove_empty(path.parent)


def _take(path: Path, who: str, folder: Path) -> int:
    """The handle of the locked file. folder: as the user wrote it."""
    while True:
        # Whoever held the folder before may just have removed it.
        files.output_folder(folder)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 1000).decode(errors="replace").strip() or "another process"
            if error.errno in _HELD_BY_ANOTHER:
                os.close(handle)
                raise UserError(
                    f"{folder} is in use by {holder}", "wait until it ends, or choose another folder with --out"
                ) from None
            print(
                f"warning: {folder} cannot be locked ({error.strerror}); let no other command write into it",
                file=sys.stderr,
                flush=True,
            )
        if _still_there(handle, path):
            break
        os.close(handle)
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    os.ftruncate(handle, 0)
    os.write(handle, f"{who} (process {os.getpid()} on {socket.gethostname()}, since {now})\n".encode())
    return handle


def _remove_empty(folder: Path) -> None:
    """A command that was refused leaves no folder behind."""
    with suppress(OSError):
        folder.rmdir()


def _still_there(handle: int, path: Path) -> bool:
    """Whether the path still leads to this file. The process that had it before removes it when it ends."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
