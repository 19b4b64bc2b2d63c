"""UserError, the error for what a user can mend. Every other exception is a bug of ours and keeps its traceback."""

from __future__ import annotations

import errno
import re

_DISK_FULL = re.compile(r"No space left on device|StorageFull|Disk quota exceeded")
_FILE_TOO_LARGE = re.compile(r"File too large \(os error 27\)")
_REFUSED_BY_SYSTEM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|not enough memory|[Oo]ut of memory")


class UserError(ValueError):
    """A message that says what was wrong, with the value, and a hint that says how to go on.

    The command line prints both lines without a traceback and exits with code 2.
    """

    def __init__(self, message: str, hint: str | None = None):
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


CHECK_PATH = "check the path; one that is not absolute begins at the current folder"
"""The hint where a file that the user named cannot be read."""


def nearest(name: object, known: list[str]) -> str:
    """A hint that gives the known name closest to a misspelt one, or lists all known names if none is close."""
    import difflib

    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def reason_of(error: BaseException) -> str:
    """The first line of another library's error (two where it ends with a colon), with its type where it is not meant
    for users."""
    first, second = [*str(error).strip().splitlines(), "", ""][:2]
    line = f"{first} {second.strip()}".strip() if first.endswith(":") else first
    plain = line and isinstance(error, (OSError, ValueError))
    return line if plain else f"{type(error).__name__}{': ' if line else ''}{line}"


def of_machine(error: BaseException) -> UserError | None:
    """The UserError for an error that says that the disk is full, that memory has run out, or that the system refuses a
    file; None for any other error.

    Such errors come from torch, safetensors and the system in many types, which are recognised by name and text, so
    that none of these need be loaded.
    """
    if isinstance(error, UserError):
        return None
    text = str(error)
    if (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or _DISK_FULL.search(text):
        named = getattr(error, "filename", None)
        return UserError(f"the disk is full{f', writing {named}' if named else ''}", "free some space")
    if (isinstance(error, OSError) and error.errno == errno.EFBIG) or _FILE_TOO_LARGE.search(text):
        return UserError(
            "a file grew larger than this system lets it", "raise the limit (ulimit -f), or choose another disk"
        )
    if isinstance(error, OSError) and error.errno in _REFUSED_BY_SYSTEM:
        named = f" {error.filename}"[:200] if error.filename else ""
        return UserError(f"the system refuses{named}: {error.strerror}", "choose another folder or name")
    if type(error).__name__ == "OutOfMemoryError":
        return UserError(f"out of memory on the device: {text.partition('. ')[0]}", "lower --max-batch or the lengths")
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or of_system or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text)):
        asked = re.search(r"tried to allocate (\d+) bytes", text)
        size = f": {int(asked[1]) / 2**30:,.1f} GiB more were needed" if asked else ""
        return UserError(
            f"out of memory{size}", "lower --max-batch, the lengths or the counts, or take a smaller model"
        )
    return None
