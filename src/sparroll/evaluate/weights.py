"""Which weights were evaluated. A folder's name does not tell, because a training run may write new weights into it."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

SLICE = 1 << 16
SLICES = 64


def fingerprint(model: str) -> str | None:
    """A digest of the config and the weights in a local folder; None for a name on the hub. Of big files it covers
    SLICES slices.

    A training step changes every tensor, so slices are enough to tell two checkpoints apart. They do not prove that two
    are equal.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = blake2b(digest_size=8)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}/{size}".encode())
        with path.open("rb") as source:
            for place in range(SLICES if size > SLICES * SLICE else 1):
                source.seek(place * (size // SLICES))
                digest.update(source.read(SLICE if size > SLICES * SLICE else -1))
    return digest.hexdigest()
