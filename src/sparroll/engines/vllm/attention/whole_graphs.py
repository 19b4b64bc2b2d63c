"""A second set of vLLM's full CUDA graphs, for decode steps in which every row reads its whole context. They have vLLM's own
attention in each layer, and the update of the index, but no scores, no choice and no plan. vLLM is not imported.

The state says of each step whether it is such a one, when its metadata is built, and metadata and graph always agree: the
metadata of a whole step has no plan, which a sparse graph would read.
"""

from __future__ import annotations

import functools
from typing import Any

from sparroll.engines.vllm.attention.state import State


def has_graphs(runner: Any) -> bool:
    """Whether vLLM's model runner keeps its full graphs in a manager of its own. The V2 runner does; the older one keeps
    them inside the compiled model."""
    manager = getattr(runner, "cudagraph_manager", None)
    return all(hasattr(manager, name) for name in ("graphs", "_capture_descs", "capture", "run_fullgraph"))


def capture_both(manager: Any, state: State) -> None:
    """Have a manager capture each of its full graphs twice, and replay the one that the step needs. Must be called before
    it captures. A second call changes nothing."""
    if hasattr(manager.capture, "sparroll_captures_both"):
        return
    capture, run_fullgraph = manager.capture, manager.run_fullgraph
    whole: dict[Any, Any] = {}

    @functools.wraps(capture)
    def capture_sparse_and_whole(*arguments: Any, **named: Any) -> None:
        capture(*arguments, **named)
        graphs, asked = manager.graphs, manager._capture_descs
        manager.graphs = whole
        manager._capture_descs = {mode: each for mode, each in asked.items() if mode.name == "FULL"}
        state.captures_whole = True
        whole.clear()
        try:
            capture(*arguments, **named)
        finally:
            manager.graphs, manager._capture_descs, state.captures_whole = graphs, asked, False

    @functools.wraps(run_fullgraph)
    def run_either(*arguments: Any, **named: Any) -> Any:
        if not state.step_is_whole:
            return run_fullgraph(*arguments, **named)
        graphs, manager.graphs = manager.graphs, whole
        try:
            return run_fullgraph(*arguments, **named)
        finally:
            manager.graphs = graphs

    capture_sparse_and_whole.sparroll_captures_both = True  # type: ignore[attr-defined]
    manager.capture, manager.run_fullgraph = capture_sparse_and_whole, run_either
