"""The Python files that this machine has: which of them are text to learn from, and which are held out. Tokenizes nothing.

A file belongs to the corpus by its content, not by its place: the same file in two packages is taken once, and whether
it is held out is a property of its bytes. So two machines with the same packages have the same split.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparroll.errors import UserError

HELD_OUT_PER_MILLE = 30
"""Of 1,000 contents, so many are held out."""
LEAST_BYTES, MOST_BYTES = 300, 400_000
MOST_LINE = 400
"""Longest line of a file that people wrote; data and minified code have longer ones."""
MOST_FOREIGN_SHARE = 0.03
"""Share of characters outside of ASCII, above which a file is a table of characters or words."""
MOST_DIGIT_SHARE = 0.2
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "_vendor", "vendored", "_vendored", "vendor", "third_party", "extern", "node_modules"}
)
GENERATED = re.compile(
    r"@generated|auto-?generated|automatically generated|generated (automatically|by|from|with)|do not (edit|modify)",
    re.IGNORECASE,
)
"""What generators write into the first lines."""
HEAD_CHARACTERS = 1_000


@dataclass(frozen=True)
class Source:
    """One file of the corpus.

    >>> Source("json/decoder.py", "9f86d0...", b"...", held_out=False)
    """

    name: str
    """Path below its root, with slashes."""
    digest: str
    """SHA-256 of the bytes, in hex digits."""
    data: bytes
    held_out: bool

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]


def default_roots() -> list[Path]:
    """The standard library and the installed packages of the running Python."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")))


def collect(roots: Iterable[Path], most_bytes: int | None = None) -> list[Source]:
    """The corpus, in the order of names, so that a package's files are neighbours. Each content is taken once, under the
    first of its names. most_bytes: of training text. Files above it are left out by their digest, so that what stays is
    spread over all packages; held-out files always stay."""
    found: dict[str, Source] = {}
    for root in roots:
        for path in sorted(files_below(root)):
            data = _read(path)
            if data is None or not is_worth_learning(data):
                continue
            digest = hashlib.sha256(data).hexdigest()
            if digest not in found:
                name = path.relative_to(root).as_posix()
                found[digest] = Source(name, digest, data, is_held_out(digest))
    sources = sorted(found.values(), key=lambda source: (source.name, source.digest))
    if not sources:
        raise UserError(
            f"no Python sources to train on below {', '.join(map(str, roots))}", "name other folders with --roots"
        )
    return sources if most_bytes is None else _within(sources, most_bytes)


def files_below(root: Path) -> Iterator[Path]:
    """Python files, without folders of copies from elsewhere. A standard library's own site-packages is another root."""
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        nested = any(folder in ("site-packages", "dist-packages") for folder in folders)
        if not nested and SKIPPED_FOLDERS.isdisjoint(folders):
            yield path


def is_worth_learning(data: bytes) -> bool:
    """Whether this looks like code that somebody wrote: UTF-8 of a fair length, no generated, minified or tabulated
    text."""
    if not LEAST_BYTES <= len(data) <= MOST_BYTES:
        return False
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if GENERATED.search(text[:HEAD_CHARACTERS]) or max(map(len, text.splitlines()), default=0) > MOST_LINE:
        return False
    foreign = sum(character > "\x7f" for character in text) if not text.isascii() else 0
    digits = sum(data.count(digit) for digit in b"0123456789")
    return foreign <= MOST_FOREIGN_SHARE * len(text) and digits <= MOST_DIGIT_SHARE * len(data)


def is_held_out(digest: str) -> bool:
    return int(digest[:8], 16) % 1_000 < HELD_OUT_PER_MILLE


def digest_of(sources: Iterable[Source]) -> str:
    """One digest for a corpus: of the digests of its files, in their order."""
    whole = hashlib.sha256()
    for source in sources:
        whole.update(bytes.fromhex(source.digest))
    return whole.hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        # A dangling link, or a file of another user.
        return None


def _within(sources: list[Source], most_bytes: int) -> list[Source]:
    kept, total = set(), 0
    for source in sorted((each for each in sources if not each.held_out), key=lambda each: each.digest[::-1]):
        total += len(source.data)
        if total > most_bytes:
            break
        kept.add(source.digest)
    return [source for source in sources if source.held_out or source.digest in kept]
