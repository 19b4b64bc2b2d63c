"""Your own rewards: a Python function, named by its import path. This file finds the function, checks before any work
starts that it can be called, and calls it. What its numbers are used for is decided elsewhere.

    def reward(prompt: Prompt, response_text: str, rollout: Rollout, **settings) -> float | Verdict | None

An `async def` works in the same way, with many calls at a time. With `@batch_reward` the first three arguments are
lists, and the function returns a list. It returns None, or a Verdict without a reward, for a response that it cannot
judge.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import math
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

from sparroll import files
from sparroll.errors import UserError
from sparroll.tasks.async_calls import SECONDS, AsyncCalls, Expired, is_being_cancelled
from sparroll.tasks.containment import contained, signals_noted
from sparroll.tasks.last_words import last_words
from sparroll.tasks.verdicts import Verdict
from sparroll.types import Prompt, Rollout

LARGEST = 1e6
"""Largest reward, up or down. Rewards are compared in fp32, in which differences between larger numbers are lost."""
_BATCH = "takes_batches"
_CALL = "function(prompt, response_text, rollout{settings})"
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
"""Signals that may interrupt a run. Every other exception in a function is reported as its failure, whatever its kind:
sys.exit() would look like success, and within `contained` os._exit() raises SystemExit as well."""
_GOES_ON = "finished work is kept, so fix the function and continue"

Function = TypeVar("Function", bound=Callable[..., Any])


def batch_reward(function: Function) -> Function:
    """Mark a function that judges many responses at a time: (prompts, response_texts, rollouts, **settings) -> list."""
    setattr(function, _BATCH, True)
    return function


def look_in(*folders: Path) -> None:
    """Make the modules in these folders importable. Installed modules with the same name come first."""
    for folder in folders:
        place = str(folder.resolve())
        if place not in sys.path:
            sys.path.append(place)


class RewardFunction:
    """One function with its settings.

    >>> RewardFunction("my_rewards:brevity", {"target_tokens": 200})
    """

    def __init__(self, path: str, settings: dict[str, Any] | None = None):
        """Raises UserError if the path names no function, or one that cannot be called like a reward."""
        self.path = path
        self.settings = dict(settings or {})
        self.function = _find(path)
        self.takes_batches = bool(getattr(self.function, _BATCH, False))
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004
        )
        self.source = _source(self.function)
        """The file that defines the function; None if there is none."""
        self.digest = files.sha256(self.source) if self.source else ""
        """SHA-256 of that file as it was found; empty if there is none. Modules that it imports are not covered."""
        self._check_signature()
        self._check_settings()

    def table(self) -> dict[str, Any]:
        """Plain data for a record."""
        file = self.source.name if self.source else None
        settings = to_jsonable_python(self.settings)
        return {"use": self.path, "settings": settings, "file": file, "sha256": self.digest}

    def __call__(
        self, prompts: Sequence[Prompt], texts: Sequence[str], rollouts: Sequence[Rollout], calls: AsyncCalls
    ) -> list[float]:
        """The reward of each response to the prompt at the same place; NaN for a response that cannot be judged.

        What the function prints goes to standard error. Raises UserError if it raises, ends the process, takes too long,
        or returns something that is not a reward, and if it changes a rollout, which training would then be on.
        """
        if not prompts:
            return []
        before = [(list(each.prompt_ids), list(each.response_ids)) for each in rollouts]
        with contained():
            values = self._rewards(prompts, texts, rollouts, calls)
        for prompt, rollout, ids in zip(prompts, rollouts, before, strict=True):
            if (list(rollout.prompt_ids), list(rollout.response_ids)) != ids:
                raise self._refused(prompt.prompt_id, "changed the tokens of a rollout", "change a copy: list(...)")
        return values

    def _rewards(
        self, prompts: Sequence[Prompt], texts: Sequence[str], rollouts: Sequence[Rollout], calls: AsyncCalls
    ) -> list[float]:
        if self.takes_batches:
            return self._batch(prompts, texts, rollouts, calls)
        rows = list(zip(prompts, texts, rollouts, strict=True))
        if self.is_async:
            values = self._run(calls, [(row, row[0].prompt_id) for row in rows])
        else:
            values = [self._called(row, row[0].prompt_id) for row in rows]
        return [self._number(value, row[0].prompt_id) for value, row in zip(values, rows, strict=True)]

    def _batch(
        self, prompts: Sequence[Prompt], texts: Sequence[str], rollouts: Sequence[Rollout], calls: AsyncCalls
    ) -> list[float]:
        arguments = (list(prompts), list(texts), list(rollouts))
        where = f"{prompts[0].prompt_id} ... {prompts[-1].prompt_id}"
        if self.is_async:
            (values,) = self._run(calls, [(arguments, where)])
        else:
            values = self._called(arguments, where)
        values = self._listed(values, where)
        if len(values) != len(prompts):
            raise self._refused(where, f"gave {len(values)} rewards for {len(prompts)} responses")
        return [self._number(value, prompt.prompt_id) for value, prompt in zip(values, prompts, strict=True)]

    def _listed(self, values: Any, where: str) -> list[Any]:
        try:
            # Iterating over a dict's keys or a set's order would not give what was meant.
            rows = None if isinstance(values, str | bytes | Mapping | Set) else iter(values)
        except TypeError:
            rows = None
        if rows is None:
            raise self._refused(where, f"gave {_shown(values)} instead of a list")
        return list(self._kept(lambda: list(rows), where))

    def _called(self, arguments: tuple[Any, ...], where: str) -> Any:
        return self._kept(lambda: self.function(*arguments, **self.settings), where)

    def _kept(self, call: Callable[[], Any], where: str) -> Any:
        """What the call returns. Whatever it raises is a failure of the function, except for Ctrl-C."""
        with signals_noted(*_INTERRUPTS) as interrupted, self._last_words(where):
            try:
                return call()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and interrupted():
                    raise
                raise self._failed(where, error) from error

    def _run(self, calls: AsyncCalls, rows: list[tuple[tuple[Any, ...], str]]) -> list[Any]:
        """What the function returns for each row of arguments, which belong to the prompt beside them."""
        where = rows[0][1] if len(rows) == 1 else f"{rows[0][1]} ... {rows[-1][1]}"
        # The event loop has its own way with SIGINT: it cancels what runs.
        with signals_noted(signal.SIGTERM) as interrupted, self._last_words(where):
            return calls.run([functools.partial(self._awaited, *row, interrupted) for row in rows])

    def _last_words(self, where: str) -> AbstractContextManager[None]:
        return last_words(
            f"this process died while the reward {self.path} judged, for the prompt {where}: a crash in C code, "
            "os.abort() or a kill",
            f"{_GOES_ON}: `sparroll train --resume` begins at the last checkpoint, other commands where they were",
        )

    async def _awaited(
        self,
        arguments: tuple[Any, ...],
        where: str,
        interrupted: Callable[[], bool],
        limit: Callable[[Awaitable[Any]], Any],
    ) -> Any:
        try:
            return await limit(self.function(*arguments, **self.settings))
        except Expired as error:
            hint = f"reward.async_seconds is the limit in training; evaluation has {SECONDS:g} seconds"
            raise self._refused(where, str(error), hint) from None
        except GeneratorExit:
            # The event loop is being closed.
            raise
        except BaseException as error:
            stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            if stopped and (is_being_cancelled() or interrupted()):
                raise
            raise self._failed(where, error) from error

    def _number(self, value: Any, where: str) -> float:
        if isinstance(value, Verdict):
            value = value.reward
        if value is None:
            return math.nan
        if inspect.isawaitable(value):
            raise self._refused(where, "returned an awaitable", "define the function with `async def`")
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
        except Exception:
            raise self._refused(where, f"gave {_shown(value)} instead of a number") from None
        if not abs(number) <= LARGEST:
            raise self._refused(where, f"gave {number}", f"rewards are numbers from -{LARGEST:.0e} to {LARGEST:.0e}")
        return number

    def _failed(self, where: str, error: BaseException) -> UserError:
        return self._refused(where, f"raised {_told(error)} ({_place(error, self.source)})")

    def _refused(self, where: str, what: str, hint: str | None = None) -> UserError:
        ungraded = "it may return None when it cannot judge a response"
        return UserError(
            f"the reward {self.path} {what}, for the prompt {where}",
            f"{_GOES_ON}; {hint or ungraded}",
        )

    def _check_signature(self) -> None:
        shown = "".join(f", {name}=..." for name in self.settings)
        call = _CALL.format(settings=shown)
        try:
            inspect.signature(self.function).bind(None, None, None, **self.settings)
        except TypeError as error:
            raise UserError(
                f"the reward {self.path} cannot be called as {call}: {error}",
                "all further arguments come from `settings`, by name",
            ) from None
        except ValueError:
            raise UserError(
                f"the reward {self.path} has no signature", f"wrap it in a `def` called as {call}"
            ) from None

    def _check_settings(self) -> None:
        try:
            json.dumps(to_jsonable_python(self.settings), allow_nan=False)
        except ValueError:
            raise UserError(
                f"the reward {self.path} has the settings {self.settings}, but a record cannot hold NaN or infinity",
                "leave the setting out, and give its parameter a default",
            ) from None


class FunctionJudge:
    """A reward function as the judge of an evaluation. Its rewards are from 0 to 1, and 1 means right.

    >>> FunctionJudge(RewardFunction("my_rewards:brevity"), AsyncCalls())
    """

    def __init__(self, function: RewardFunction, calls: AsyncCalls):
        self.function, self.calls = function, calls

    def verdicts(self, prompts: Sequence[Prompt], texts: Sequence[str], rollouts: Sequence[Rollout]) -> list[Verdict]:
        """A verdict for each response to the prompt at the same place. Raises UserError if the function does, and for
        rewards outside of 0 to 1."""
        values = self.function(prompts, texts, rollouts, self.calls)
        for prompt, value in zip(prompts, values, strict=True):
            if value < 0 or value > 1:
                raise UserError(
                    f"the reward {self.function.path} gave {value}, for the prompt {prompt.prompt_id}",
                    "evaluation takes rewards from 0 to 1",
                )
        return [Verdict(None, "ungraded") if math.isnan(value) else Verdict(value) for value in values]


def _find(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        with contained(), signals_noted(*_INTERRUPTS) as interrupted:
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(
                f"the module {error.name} of the reward {path} was not found",
                "a module must be installed, or lie beside the configuration file or in the current folder",
            ) from None
        raise _broken(module_name, path, error) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and interrupted():
            raise
        raise _broken(module_name, path, error) from error
    module = found
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UserError(
                f"the reward {path} was not found: {module.__name__} ({_file(module)}) has no {name}",
                "an import path is package.module:function",
            ) from None
    if not callable(found):
        raise UserError(f"the reward {path} is not a function, but {_shown(found)}")
    return found


def _source(function: Any) -> Path | None:
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    try:
        known = inspect.isroutine(function) or inspect.isclass(function)
        found = inspect.getsourcefile(function if known else type(function))
    except TypeError:
        return None
    return Path(found) if found and Path(found).is_file() else None


def _broken(module: str, path: str, error: BaseException) -> UserError:
    return UserError(
        f"the module {module} of the reward {path} cannot be imported: {_told(error)}",
        f"`python -c 'import {module}'` shows where the error is",
    )


def _file(module: Any) -> str:
    return str(getattr(module, "__file__", None) or "a folder without __init__.py")


def _place(error: BaseException, source: Path | None) -> str:
    """The last line of the function's own file that the error passed through; without such a line, the deepest one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if source is not None and Path(frame.filename) == source]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def _told(error: BaseException) -> str:
    """The error on one line."""
    message = " ".join(str(error).split())
    return type(error).__name__ + (f": {_cut(message, 400)}" if message else "")


def _shown(value: Any) -> str:
    try:
        found = repr(value)
    except Exception:
        # An integer with more than 4300 digits has no repr.
        found = "that cannot be shown"
    return f"{type(value).__name__} {_cut(found, 60)}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
