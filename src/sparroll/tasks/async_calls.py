"""Calls async functions: on one event loop for a whole run, a limited number at a time, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from sparroll.errors import UserError

AT_ONCE, SECONDS = 16, 60.0
"""The limits in an evaluation, and the defaults of the section [reward] in training."""
Limit = Callable[[Awaitable[Any]], Coroutine[Any, Any, Any]]
"""Awaits something under the time limit. Raises Expired when the time is over."""
Call = Callable[[Limit], Coroutine[Any, Any, Any]]


class Expired(Exception):
    """A call took longer than its time limit."""


class AsyncCalls:
    """Runs async calls on one event loop. The loop stays the same, so that what a module keeps open, such as an HTTP
    client, continues to work.

    at_once: how many calls may be in flight.  seconds: the time limit of each call, from its own start.
    """

    def __init__(self, at_once: int = AT_ONCE, seconds: float = SECONDS):
        self.at_once, self.seconds = at_once, seconds
        self._runner: asyncio.Runner | None = None

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The result of each call, in their order. The first error cancels the other calls and is raised."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise UserError(
                "async rewards need their own event loop, but one is already running in this thread",
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
            # A TimeoutError that the function raised itself is an error like any other.
            if scope.expired():
                raise Expired(f"took more than {self.seconds:g} seconds") from None
            raise


def is_being_cancelled() -> bool:
    """Whether the running task was asked to end. If not, a CancelledError in it comes from the function itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
