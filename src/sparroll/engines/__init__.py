"""Who runs the rollouts. `HFEngine` runs any transformers decoder and is the oracle for every other engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparroll.engines.hf import HFEngine

__all__ = ["HFEngine"]


def __getattr__(name: str) -> Any:
    # transformers is heavy, so it loads with the first engine and not with `import sparroll`.
    if name == "HFEngine":
        from sparroll.engines.hf import HFEngine

        return HFEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
