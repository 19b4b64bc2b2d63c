"""Triton's interpreter without the work that it repeats at each call of one `@triton.jit` function by another: it searches
the whole language for what to replace, though the launch around the call has done so. That is a third of the time of
interpreted tests, and changes nothing of what they compute."""

from __future__ import annotations

import importlib.util
from typing import Any


def install() -> None:
    """Does nothing where triton is missing, or built in another way than expected."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    wanted = ("GridExecutor", "InterpretedFunction", "InterpreterError", "_patch_lang")
    if not all(hasattr(interpreter, name) for name in wanted):
        return
    launch = interpreter.GridExecutor.__call__
    replaced: set[frozenset[int]] = set()
    """Which of the language's modules a function of this launch sees, for each such choice that was replaced."""

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = _modules(self.fn)
        if seen not in replaced:
            interpreter._patch_lang(self.fn)
            replaced.add(seen)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called


_seen: dict[Any, frozenset[int]] = {}


def _modules(function: Any) -> frozenset[int]:
    """The modules of the language among a function's globals, by identity."""
    import triton.language as tl

    if function not in _seen:
        mine = {id(value) for value in function.__globals__.values()}
        _seen[function] = frozenset(mine & {id(tl), id(tl.core)})
    return _seen[function]
