"""Which weights were evaluated. A folder's name does not tell, because a training run may write new weights into it."""

from __future__ import annotations

from pathlib import Path

from sparroll.models.fingerprint import digest_of


def fingerprint(model: str) -> str | None:
    """A digest of the config and the weights in a local folder; None for a name on the hub."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    files = sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")])
    return digest_of(path for path in files if path.is_file())
