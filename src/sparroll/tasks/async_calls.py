"""Calls of async functions: on one event loop for a whole run, a bounded number at a time, each within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from sparroll.errors import UserError

AT_ONCE, SECONDS = 16, 60.0
"""The limits of evaluation, and of training where the section [reward] names no others."""
Limit = Callable[[Awaitable[Any]], Coroutine[Any, Any, Any]]
"""Awaits one thing under the time limit; raises Expired."""
Call = Callable[[Limit], Coroutine[Any, Any, Any]]


class Expired(Exception):
    """The time limit of one call is over."""


class AsyncCalls:
    """The loop stays the same from call to call, so what a module keeps open (an HTTP client) goes on working.

    at_once: most calls in flight.  seconds: time limit of each, counted from its own start.
    """

    def __init__(self, at_once: int = AT_ONCE, seconds: float = SECONDS):
        self.at_once, self.seconds = at_once, seconds
        self._runner: asyncio.Runner | None = None

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """What each call gives, in their order. The first error ends the others and is raised."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise UserError(
                "async rewards need an event loop of their own, and one is running in this thread",
                "start the run from a script or in another thread",
            )
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(self._all(calls))

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    async def _all(self, calls: Sequence[Call]) -> list[Any]:
        room = asyncio.Semaphore(self.at_once)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(call, room)) for call in calls]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several.exceptions[0].__cause__
        return [task.result() for task in tasks]

    async def _one(self, call: Call, room: asyncio.Semaphore) -> Any:
        async with room:
            return await call(self._limited)

    async def _limited(self, what: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self.seconds) as scope:
                return await what
        except TimeoutError:
            # The function's own TimeoutError is an error like any other.
            if scope.expired():
                raise Expired(f"took more than {self.seconds:g} seconds") from None
            raise


def is_being_cancelled() -> bool:
    """Whether somebody asked the running task to end; if not, a CancelledError in it is an error of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
