"""LiveCodeBench's private tests: JSON, or base64 of zlib of a pickled JSON text. No pickle may name a class or function."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
from typing import Any

from sparroll.errors import UserError
from sparroll.tasks.data.code_tests import unpacked

_HINT = "private_test_cases must be JSON, or base64 of zlib of a pickled text"


def decode(text: str) -> list[dict[str, str]]:
    """The list of {"input", "output", "testtype"}. Raises UserError for anything else; never runs what a pickle asks for."""
    content: Any = text
    if not text.lstrip().startswith("["):
        try:
            content = _NoObjects(io.BytesIO(unpacked(base64.b64decode(text, validate=True)))).load()
        except (binascii.Error, pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError) as error:
            raise UserError(f"cannot read private tests: {error}", _HINT) from None
    try:
        tests = json.loads(content) if isinstance(content, (str, bytes)) else content
    except ValueError as error:
        raise UserError(f"private tests are not JSON: {error}", _HINT) from None
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise UserError(f"private tests are a {type(tests).__name__}, not a list of tests", _HINT)
    return tests


class _NoObjects(pickle.Unpickler):
    """Texts, numbers and lists only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which is refused")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("the pickle refers to something outside itself, which is refused")
