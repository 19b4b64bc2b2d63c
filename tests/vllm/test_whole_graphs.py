"""Which of two CUDA graphs a step replays. Needs no vLLM, but for the names that are read of it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_runs
from sparroll import Schedule
from sparroll.engines.vllm.attention import whole_graphs
from sparroll.engines.vllm.attention.state import State
from sparroll.errors import UserError


class Mode(str):
    """One of vLLM's modes of CUDA graphs."""

    @property
    def name(self) -> str:
        return str(self)


class Manager:
    """As vLLM's: captures a graph for each size, and replays that of a size."""

    def __init__(self, state: State, fails: bool = False):
        self.state, self.fails = state, fails
        self.graphs: dict[int, str] = {}
        self._capture_descs = {Mode("PIECEWISE"): [2], Mode("FULL"): [1, 2]}
        self.captured: list[tuple[str, bool]] = []

    def capture(self, model: str, *, has_lora: bool = False) -> None:
        for mode, sizes in self._capture_descs.items():
            self.captured.append((mode.name, self.state.captures_whole))
            for size in sizes if mode.name == "FULL" else ():
                assert size not in self.graphs
                if self.state.captures_whole and self.fails:
                    raise RuntimeError("out of memory")
                self.graphs[size] = f"{model} whole" if self.state.captures_whole else model

    def run_fullgraph(self, size: int) -> str:
        return self.graphs[size]


@pytest.fixture
def state() -> State:
    made = State()
    made.configure(Schedule.fixed(64, dense_layers=()), 2, "cpu")
    return made


def test_a_graph_of_each_kind_is_captured_and_the_step_says_which_is_replayed(state: State) -> None:
    manager = Manager(state)
    whole_graphs.capture_both(manager, state)
    manager.capture("model", has_lora=False)
    assert manager.captured == [("PIECEWISE", False), ("FULL", False), ("FULL", True)]
    assert not state.captures_whole and set(manager._capture_descs) == {"PIECEWISE", "FULL"}
    assert manager.graphs == {1: "model", 2: "model"}
    assert manager.run_fullgraph(2) == "model"
    state.step_is_whole = True
    assert manager.run_fullgraph(2) == "model whole"
    assert manager.graphs == {1: "model", 2: "model"}
    with pytest.raises(KeyError):
        manager.run_fullgraph(3)
    state.step_is_whole = False
    assert manager.run_fullgraph(1) == "model"


def test_graphs_may_be_captured_again(state: State) -> None:
    manager = Manager(state)
    whole_graphs.capture_both(manager, state)
    for model in ("old", "new"):
        manager.graphs.clear()
        manager.capture(model)
    state.step_is_whole = True
    assert manager.run_fullgraph(1) == "new whole"


def test_a_manager_is_asked_for_both_kinds_once(state: State) -> None:
    manager = Manager(state)
    for _ in range(2):
        whole_graphs.capture_both(manager, state)
    manager.capture("model")
    assert manager.captured == [("PIECEWISE", False), ("FULL", False), ("FULL", True)]


def test_a_capture_that_fails_leaves_the_manager_as_it_was(state: State) -> None:
    manager = Manager(state, fails=True)
    whole_graphs.capture_both(manager, state)
    with pytest.raises(RuntimeError, match="out of memory"):
        manager.capture("model")
    assert not state.captures_whole and manager.graphs == {1: "model", 2: "model"}
    assert set(manager._capture_descs) == {"PIECEWISE", "FULL"}


def test_only_a_runner_with_a_manager_of_graphs_has_them(state: State) -> None:
    assert whole_graphs.has_graphs(SimpleNamespace(cudagraph_manager=Manager(state)))
    older = Manager(state)
    del older._capture_descs
    for runner in (SimpleNamespace(), *(SimpleNamespace(cudagraph_manager=each) for each in (None, older))):
        assert not whole_graphs.has_graphs(runner)


@vllm_runs.needs_vllm
@pytest.mark.parametrize("short_step_tokens", [0, 9])
@pytest.mark.parametrize("graphs", ["captured", "none captured", "none asked for", "of another runner"])
def test_the_worker_captures_both_kinds_or_says_that_short_steps_cannot_be_dense(
    monkeypatch: pytest.MonkeyPatch, graphs: str, short_step_tokens: int
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from sparroll.engines.vllm.attention import cuda_worker, landmarks

    monkeypatch.setattr(cuda_worker.STATE, "captured_whole", {})
    monkeypatch.setattr(cuda_worker.STATE, "short_step_tokens", short_step_tokens)
    monkeypatch.setattr(cuda_worker.STATE, "has_index", True)
    manager = Manager(cuda_worker.STATE)
    worker = object.__new__(cuda_worker.SparseWorker)
    attends, holds_rows = SimpleNamespace(backend=object), SimpleNamespace(backend=landmarks.GroupsBackend)
    groups = [[attends, holds_rows], [holds_rows]]
    worker.model_runner = SimpleNamespace(
        cudagraph_manager=None if graphs == "of another runner" else manager, attn_groups=groups
    )
    worker.use_v2_model_runner = False
    mode = SimpleNamespace(has_full_cudagraphs=lambda: graphs != "none asked for")
    worker.vllm_config = SimpleNamespace(model_config=None, compilation_config=SimpleNamespace(cudagraph_mode=mode))
    monkeypatch.setattr(worker, "sparroll_reset_report", lambda: None, raising=False)

    def warm_up(self: Any) -> str:
        if graphs == "captured":
            manager.capture("model")
            cuda_worker.STATE.captures_whole = True
            cuda_worker.STATE.layer_captured(0, "dense")
            cuda_worker.STATE.captures_whole = False
        return "done"

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    if short_step_tokens and graphs in ("none captured", "of another runner"):
        with pytest.raises(UserError, match="captured no full CUDA graphs for decode steps"):
            worker.compile_or_warm_up_model()
    else:
        assert worker.compile_or_warm_up_model() == "done"
    # Layers of rows have no metadata.
    assert groups == [[attends], []]
    both = [("PIECEWISE", False), ("FULL", False), ("FULL", True)]
    assert manager.captured == (both if graphs == "captured" else [])


@vllm_runs.needs_vllm
def test_vllms_manager_has_the_names_that_are_read() -> None:
    from vllm.v1.worker.gpu import cudagraph_utils

    manager: Any = cudagraph_utils.ModelCudaGraphManager
    source = inspect.getsource(cudagraph_utils.CudaGraphManager)
    assert callable(manager.capture) and callable(manager.run_fullgraph)
    for line in ("self._capture_descs[mode]", "self.graphs[desc] = graph", "self.graphs[desc].replay()"):
        assert line in source
