"""LiveCodeBench's private tests load as data; whatever else a pickle holds is refused unrun."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path

import pytest

from sparroll.errors import UserError
from sparroll.tasks.code.private_tests import load_private_tests

TESTS = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]


def _packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_json_and_both_packed_forms_load() -> None:
    for text in (json.dumps(TESTS), _packed(json.dumps(TESTS)), _packed(TESTS)):
        assert load_private_tests(text) == TESTS


class _Command:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_a_command_is_refused_unrun(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mkdir"):
        load_private_tests(_packed(_Command(tmp_path / "made")))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("value", [{1, 2}, 5, {"a": 1}, [5], [{"input": "1"}], [{"input": "1", "output": 2}], 1j])
def test_other_shapes_are_refused(value: object) -> None:
    with pytest.raises(UserError):
        load_private_tests(_packed(value))


@pytest.mark.parametrize("text", ["", "%%%", "AAAA", base64.b64encode(zlib.compress(b"\x80\x04")).decode()])
def test_damaged_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        load_private_tests(text)


def test_a_bomb_is_not_unpacked_whole() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(10_000_000))).decode()
    with pytest.raises(UserError, match="at most 1000 bytes"):
        load_private_tests(bomb, max_bytes=1000)
