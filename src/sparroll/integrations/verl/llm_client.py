"""verl's client of a run whose weights change while a rollout is under way. It also says which weights each part of the
rollout was sampled with, where verl itself keeps the first and the last version alone."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from sparroll.integrations.verl.loss_fields import PARTS

_parts: ContextVar[list[tuple[int, int]]] = ContextVar("parts")


class _SaysItsParts(LLMServerClient):
    """verl's client of one request to a server; each is one part of a rollout."""

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        output = await super().generate(*arguments, **named)
        _parts.get().append((int(output.extra_fields["global_steps"]), len(output.token_ids)))
        return output


class SparrollLLMClient(FullyAsyncLLMServerClient, _SaysItsParts):
    """An aborted request is sent again by verl's class, which calls the one above once for each part."""

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        """verl's call for a whole rollout. Its `extra_fields` get PARTS: (version of the weights, tokens) of each part."""
        parts: list[tuple[int, int]] = []
        token = _parts.set(parts)
        try:
            output = await super().generate(*arguments, **named)
        finally:
            _parts.reset(token)
        output.extra_fields[PARTS] = parts
        return output
