"""Triton's interpreter without work that it repeats: the search through the whole language for what to replace, at each
call of one `@triton.jit` function by another, and the types and shapes that it builds anew for every number. That is two
thirds of the time of interpreted tests, and changes nothing of what they compute."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Does nothing where triton is missing, or built in another way than expected."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.language import core, semantic
    from triton.runtime import interpreter

    wanted = {
        interpreter: ("GridExecutor", "InterpretedFunction", "InterpreterError", "_patch_lang", "_get_np_dtype"),
        core: ("dtype", "block_type", "tensor", "tuple", "constexpr", "_unwrap_if_constexpr"),
        semantic.TritonSemantic: ("binary_op_sanitize_overflow_impl",),
    }
    if not all(hasattr(owner, name) for owner, names in wanted.items() for name in names):
        return
    _replace_the_language_once_a_launch(interpreter)
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    _keep_shapes(core)
    _compare_names(core.dtype)
    _check_overflow_only_to_report_it(semantic.TritonSemantic)


def _replace_the_language_once_a_launch(interpreter: Any) -> None:
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


def _kept_by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype(dtype)
        return known[name]

    return looked_up


def _keep_shapes(core: Any) -> None:
    """One tuple of constants for each shape, shared by all types and tensors of it: nothing changes one."""
    block_of_any_shape = core.block_type.__init__
    blocks: dict[tuple[int, ...], tuple[Any, int]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        known = blocks.get(sizes)
        if known is None:
            block_of_any_shape(self, element_ty, shape)
            blocks[tuple(self.shape)] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = known
        self.name = f"<{sizes}, {element_ty.name}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in tensors:
            tensors[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor


def _compare_names(dtype: Any) -> None:
    compare = dtype.__eq__

    def equal(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is dtype else compare(self, other)

    dtype.__eq__ = equal


def _check_overflow_only_to_report_it(semantic: Any) -> None:
    """The interpreter computes every sum and product of integers a second time, in 64 bits, for an assertion that it then
    leaves out, unless it debugs."""
    check = semantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    semantic.binary_op_sanitize_overflow_impl = checked
