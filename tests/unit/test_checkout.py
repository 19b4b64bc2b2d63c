"""Which commit is running: what git says, and what a stamp says where git cannot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sparroll import checkout
from sparroll.errors import UserError


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def committed(folder: Path, **texts: str) -> str:
    """The id of a commit in which these files have these texts."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    folder = tmp_path / "source"
    (folder / checkout.RECORDS).mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / ".gitignore").write_text(f"{checkout.STAMP}\n")
    (folder / checkout.RECORDS / "speed.json").write_text("{}\n")
    git(folder, "init", "-q")
    committed(folder, module="x = 1\n")
    return folder


def copied(source: Path, to: Path) -> Path:
    """Its files without its history."""
    return shutil.copytree(source, to, ignore=shutil.ignore_patterns(".git"))


def test_git_says_the_commit_and_whether_files_were_changed(source: Path) -> None:
    head = git(source, "rev-parse", "HEAD")
    assert checkout.commit(source) == {"id": head, "dirty": False, "said_by": "git"}
    (source / "module.py").write_text("x = 2\n")
    assert checkout.commit(source) == {"id": head, "dirty": True, "said_by": "git"}


def test_a_new_record_is_no_change_of_the_source(source: Path) -> None:
    checkout.write_stamp(source)
    (source / checkout.RECORDS / "speed.json").write_text('{"faster": true}\n')
    assert checkout.commit(source)["dirty"] is False
    assert checkout.commit(copied(source, source.parent / "copy"))["dirty"] is False


def test_a_copy_inside_another_checkout_does_not_take_its_commit(source: Path) -> None:
    inner = copied(source, source / "carried")
    assert checkout.commit(inner) == {"id": None, "dirty": None, "said_by": None}


@pytest.mark.parametrize("history", ["none", "another"])
def test_a_copy_knows_its_commit_from_the_stamp(source: Path, history: str) -> None:
    head = git(source, "rev-parse", "HEAD")
    checkout.write_stamp(source)
    copy = copied(source, source.parent / "copy")
    if history == "another":
        git(copy, "init", "-q")
        assert committed(copy, unrelated="y = 1\n") != head
    assert checkout.commit(copy) == {"id": head, "dirty": False, "said_by": "stamp"}


@pytest.mark.parametrize("change", ["changed", "missing"])
def test_a_copy_that_was_changed_after_the_stamp_is_dirty(source: Path, change: str) -> None:
    head = git(source, "rev-parse", "HEAD")
    checkout.write_stamp(source)
    copy = copied(source, source.parent / "copy")
    if change == "changed":
        (copy / "module.py").write_text("x = 2\n")
    else:
        (copy / "module.py").unlink()
    assert checkout.commit(copy) == {"id": head, "dirty": True, "said_by": "stamp"}


def test_weights_may_stay_behind_but_not_change(source: Path) -> None:
    (source / "model.safetensors").write_bytes(b"weights")
    head = committed(source)
    checkout.write_stamp(source)
    copy = copied(source, source.parent / "copy")
    (copy / "model.safetensors").unlink()
    assert checkout.commit(copy) == {"id": head, "dirty": False, "said_by": "stamp"}
    (copy / "model.safetensors").write_bytes(b"others")
    assert checkout.commit(copy) == {"id": head, "dirty": True, "said_by": "stamp"}
    (source / "model.safetensors").unlink()
    assert checkout.commit(source) == {"id": head, "dirty": False, "said_by": "git"}
    checkout.write_stamp(source)
    assert checkout.commit(copied(source, source.parent / "later"))["dirty"] is False


def test_an_older_stamp_that_travels_with_newer_files_is_dirty(source: Path) -> None:
    old = git(source, "rev-parse", "HEAD")
    checkout.write_stamp(source)
    committed(source, module="x = 3\n")
    assert checkout.commit(copied(source, source.parent / "copy")) == {"id": old, "dirty": True, "said_by": "stamp"}


def test_where_git_knows_the_history_an_older_stamp_says_nothing(source: Path) -> None:
    checkout.write_stamp(source)
    head = committed(source, module="x = 3\n")
    assert checkout.commit(source) == {"id": head, "dirty": False, "said_by": "git"}
    (source / "module.py").write_text("x = 4\n")
    assert checkout.commit(source) == {"id": head, "dirty": True, "said_by": "git"}


def test_changes_that_are_not_committed_travel_as_such(source: Path) -> None:
    (source / "module.py").write_text("x = 2\n")
    checkout.write_stamp(source)
    assert checkout.commit(copied(source, source.parent / "copy"))["dirty"] is True


def test_no_stamp_without_a_history_and_no_answer_from_a_broken_one(source: Path) -> None:
    copy = copied(source, source.parent / "copy")
    with pytest.raises(UserError, match="git knows no commit of"):
        checkout.write_stamp(copy)
    (copy / checkout.STAMP).write_text('{"id": "0123"}')
    with pytest.raises(UserError, match="is not a stamp"):
        checkout.commit(copy)


def test_an_installed_package_has_no_commit(tmp_path: Path) -> None:
    assert checkout.commit(tmp_path) == {"id": None, "dirty": None, "said_by": None}
