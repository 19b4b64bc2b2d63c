"""Which weights were evaluated: a folder's name does not say, since a training run may write new ones into it."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

SLICE = 1 << 16
SLICES = 64


def fingerprint(model: str) -> str | None:
    """Digest of a local folder's config and weights, of big files SLICES slices; None for a name, which is not local.

    Training steps move every tensor, so slices are enough to tell two checkpoints apart; they are no proof of equality.
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
