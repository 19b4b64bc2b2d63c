"""Finds the files of a data set on the hub: in a local mirror, in the hub's cache, or by a download into the cache.
Runs no loading script.

Only data files are downloaded. They are downloaded completely and then streamed from disk, because every start and
every resumed run reads them again. Offline (HF_HUB_OFFLINE=1) the cache must hold them.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from sparroll.errors import UserError
from sparroll.tasks.data.read import FORMATS

_SPLITS = ("train", "test", "validation", "valid", "dev")
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "state.json", "package.json"}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.[a-z]+$)")


def split_files(
    repository: str,
    split: str,
    *,
    config: str | None = None,
    names: tuple[str, ...] = (),
    mirror: Path | None = None,
    revision: str | None = None,
) -> list[Path]:
    """The files of one split, in order.

    repository: "org/name". config: the folder of a configuration. names: exactly these files; by default they are found
    by the split's name. mirror: a folder with org/name/..., or in the layout of the hub's cache
    (datasets--org--name/...). Raises UserError with the files that are there, if no file fits or if a file of several
    is missing.
    """
    folder = _mirrored(mirror, repository, revision) if mirror is not None else _offline(repository, revision)
    there = _listing(folder) if folder is not None else _remote_listing(repository, revision)
    wanted = list(names) if names else choose(there, split, config)
    missing = [name for name in wanted if name not in there] + _missing_shards(wanted)
    if missing or not wanted:
        what = f"the files {', '.join(missing)}" if missing else f"no data files of the split {split!r}"
        lacks = f"{repository} lacks {what}" if missing else f"{repository} has {what}"
        raise UserError(lacks, f"found in {folder or 'the hub'}: {', '.join(there[:12]) or 'no data files'}")
    return [folder / name for name in wanted] if folder is not None else _download(repository, wanted, revision)


def choose(there: list[str], split: str, config: str | None = None) -> list[str]:
    """The files of a split among all files of a repository. They have one format, and the split's name in the name of
    the file or its folder. Files that name no split at all are "train"."""
    inside = [name for name in there if config is None or PurePosixPath(name).parts[0] == config]
    named = [name for name in inside if split in _splits_in(name)]
    if not named and split == "train":
        named = [name for name in inside if not _splits_in(name)]
    for suffix in FORMATS:
        if found := [name for name in named if name.endswith(suffix)]:
            return sorted(found)
    return []


def _splits_in(name: str) -> set[str]:
    return {word for word in re.split(r"[^a-z]+", name.lower()) if word in _SPLITS}


def _missing_shards(names: list[str]) -> list[str]:
    missing = []
    for name in names:
        if shard := _SHARD.search(name):
            every = (
                f"{name[: shard.start()]}-{number:05d}-of-{shard[2]}{name[shard.end() :]}"
                for number in range(int(shard[2]))
            )
            missing += [each for each in every if each not in names and each not in missing]
    return missing


def _data_files(names: list[str]) -> list[str]:
    return sorted(
        name
        for name in names
        if PurePosixPath(name).suffix in FORMATS
        and PurePosixPath(name).name not in _NOT_DATA
        and not any(part.startswith(".") for part in PurePosixPath(name).parts)
    )


def _listing(folder: Path) -> list[str]:
    return _data_files([path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()])


def _mirrored(mirror: Path, repository: str, revision: str | None) -> Path:
    plain = mirror / repository
    cache = mirror / f"datasets--{repository.replace('/', '--')}"
    if plain.is_dir():
        return plain
    if cache.is_dir():
        return _snapshot(cache, revision)
    raise UserError(
        f"the mirror {mirror} has no {repository}", f"it needs {plain.name} under {plain.parent} or {cache.name}"
    )


def _snapshot(cache: Path, revision: str | None) -> Path:
    """The folder of the snapshot that a branch or a commit names, in the layout of the hub's cache."""
    named = cache / "refs" / (revision or "main")
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    snapshots = sorted(path.name for path in (cache / "snapshots").glob("*") if path.is_dir())
    if commit is None and len(snapshots) == 1:
        commit = snapshots[0]
    if commit not in snapshots:
        raise UserError(f"{cache} has no snapshot of {revision or 'main'}", f"it has {', '.join(snapshots) or 'none'}")
    return cache / "snapshots" / str(commit)


def _offline(repository: str, revision: str | None) -> Path | None:
    """The cached snapshot if the hub must not be asked; None if it may."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return None
    cache = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}"
    if not cache.is_dir():
        raise UserError(
            f"{repository} is not in the hub's cache, and HF_HUB_OFFLINE forbids to download it",
            "download it once online, or name a folder with a copy: data.mirror, --mirror",
        )
    return _snapshot(cache, revision)


def _remote_listing(repository: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return _data_files(HfApi().list_repo_files(repository, repo_type="dataset", revision=revision))
    except Exception as error:
        raise _unreachable(repository, error) from None


def _download(repository: str, names: list[str], revision: str | None) -> list[Path]:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=names)
    except Exception as error:
        raise _unreachable(repository, error) from None
    return [Path(folder) / name for name in names]


def _unreachable(repository: str, error: Exception) -> UserError:
    """The error for what the hub's client raised. Any other error than one of the network is raised as it is."""
    from huggingface_hub.errors import HfHubHTTPError

    # The client's HTTP library is its own affair: which one it is, and under which name, differs between versions.
    of_network = type(error).__module__.partition(".")[0].rstrip("2") in ("httpx", "httpcore", "requests", "urllib3")
    if not of_network and not isinstance(error, HfHubHTTPError | OSError):
        raise error
    first = str(error).strip().partition("\n")[0]
    return UserError(
        f"cannot get {repository} from the hub: {first or type(error).__name__}",
        "HF_HUB_OFFLINE=1 reads only the cache; data.mirror or --mirror names a folder with a copy",
    )
