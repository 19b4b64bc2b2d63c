"""The prefix cache holds states of old weights and schedules, so it is emptied whatever Python drops. Needs no vLLM."""

from __future__ import annotations

import inspect
import textwrap
from types import SimpleNamespace


def test_the_prefix_cache_is_emptied_without_assertions_too() -> None:
    """As `python -O` compiles it."""
    from sparroll.engines.vllm import engine as module

    source = textwrap.dedent(inspect.getsource(module.VLLMEngine._empty_cache))
    within = dict(vars(module))
    exec(compile(source, "without assertions", "exec", optimize=1), within)
    called: list[int] = []
    engine = object.__new__(module.VLLMEngine)
    engine._llm = SimpleNamespace(reset_prefix_cache=lambda: called.append(1) or True)
    within["_empty_cache"](engine)
    assert called == [1]
