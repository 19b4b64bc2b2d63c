"""Preemptions as a worker sees them in what the scheduler sends. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparroll import Schedule
from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.attention import preemptions as steps
from sparroll.engines.vllm.attention.decode_rows import DENSE, ENGINES
from sparroll.engines.vllm.attention.preemptions import Follower
from sparroll.engines.vllm.attention.request_schedules import DENSE_REQUEST, asks_dense
from sparroll.engines.vllm.attention.state import State
from sparroll.errors import UserError
from sparroll.schedule import Step


def step(
    new: list[tuple[str, int, int, int]] = (),  # type: ignore[assignment]
    cached: list[tuple[str, int, int]] = (),  # type: ignore[assignment]
    resumed: set[str] = frozenset(),  # type: ignore[assignment]
    preempted: set[str] | None = None,
    finished: set[str] = frozenset(),  # type: ignore[assignment]
    tokens: dict[str, int] | None = None,
    runner: int = 1,
    dense: set[str] = frozenset(),  # type: ignore[assignment]
) -> Any:
    """The part of vLLM's SchedulerOutput that is looked at.

    new: (name, prompt, known, computed tokens).  cached: (name, computed, sampled tokens).
    """
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name,
                prompt_token_ids=[5] * prompt,
                prefill_token_ids=[5] * known if runner == 2 else None,
                num_computed_tokens=computed,
                sampling_params=SimpleNamespace(extra_args={DENSE_REQUEST: True} if name in dense else None),
            )
            for name, prompt, known, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            num_output_tokens=[sampled for _, _, sampled in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=tokens or {},
        preempted_req_ids=preempted,
        finished_req_ids=set(finished),
    )


@pytest.fixture
def state() -> State:
    state = State()
    state.configure(Schedule.fixed(64, dense_layers=(0,)), 2, "cpu")
    return state


def counted(state: State) -> tuple[int, int, int, int]:
    found = state.counters
    return found.preemptions, found.recomputed_tokens, found.resumed_tokens, int(found.resumed_sparse_L.max())


def came_back(runner: int, name: str, prompt: int, sampled: int, computed: int, tokens: int) -> Any:
    if runner == 2:
        return step(new=[(name, prompt, prompt + sampled, computed)], tokens={name: tokens}, runner=2)
    return step(cached=[(name, computed, sampled)], resumed={name}, tokens={name: tokens})


@pytest.mark.parametrize("runner", [1, 2])
def test_a_preempted_request_prefills_its_response_and_samples_once(state: State, runner: int) -> None:
    follower = Follower()
    follower.follow(step(new=[("a", 100, 100, 0)], tokens={"a": 100}, runner=runner), state)
    follower.follow(step(cached=[("a", 100, 1)], tokens={"a": 1}), state)
    follower.follow(step(preempted={"a"}), state)
    assert counted(state) == (1, 0, 0, 0)
    # 48 of its 120 tokens are still cached; the rest comes in two chunks.
    follower.follow(came_back(runner, "a", 100, 20, 48, 60), state)
    assert counted(state) == (1, 8, 0, 0)
    follower.follow(step(cached=[("a", 108, 20)], tokens={"a": 12}), state)
    assert counted(state) == (1, 20, 1, 1)
    follower.follow(step(cached=[("a", 120, 21)], tokens={"a": 1}), state)
    assert counted(state) == (1, 20, 1, 1)
    assert not follower.resumed


@pytest.mark.parametrize("runner", [1, 2])
def test_a_request_preempted_again_on_its_way_counts_what_it_ran(state: State, runner: int) -> None:
    follower = Follower()
    follower.follow(step(new=[("a", 30, 30, 0)], tokens={"a": 30}, runner=runner), state)
    follower.follow(step(preempted={"a"}), state)
    follower.follow(came_back(runner, "a", 30, 10, 0, 35), state)
    follower.follow(step(preempted={"a"}), state)
    follower.follow(came_back(runner, "a", 30, 10, 0, 40), state)
    # Contexts of 40 are within the budget of 64.
    assert counted(state) == (2, 15, 1, 0)


@pytest.mark.parametrize("runner", [1, 2])
def test_a_request_preempted_in_its_prompt_costs_no_decode_row(state: State, runner: int) -> None:
    follower = Follower()
    follower.follow(step(new=[("a", 100, 100, 0)], tokens={"a": 50}, runner=runner), state)
    follower.follow(step(preempted={"a"}), state)
    follower.follow(came_back(runner, "a", 100, 0, 0, 100), state)
    assert counted(state) == (1, 0, 0, 0)


def test_a_last_token_alone_is_a_decode_row_to_the_v1_runner_and_prefill_to_v2(state: State) -> None:
    follower = Follower()
    follower.prompts["a"] = 100
    follower.follow(came_back(1, "a", 100, 20, 119, 1), state)
    assert counted(state) == (0, 0, 0, 0)
    follower.follow(came_back(2, "b", 100, 20, 119, 1), state)
    assert counted(state) == (0, 1, 1, 1)


def test_a_row_of_the_v1_runner_that_only_repeats_a_token_is_no_decode_row(state: State) -> None:
    follower = Follower()
    follower.prompts["a"] = 100
    follower.follow(came_back(1, "a", 100, 20, 112, 1), state)
    state.begin_step([100] * 7, None, may_replay=False)
    assert (state.decoded.rows, state.counters.recomputed_tokens) == (6, 1)
    assert state.decoded.sparse_L.max() == 6
    assert follower.resumed


def test_what_a_decode_row_would_have_read_is_counted_for_each_layer(state: State) -> None:
    grouped = Schedule((Step(0, (64, 256)),), dense_layers=(0,), layer_groups=((2,), (1,)))
    state.configure(grouped, 3, "cpu")
    follower = Follower()
    for name, known in (("a", 20), ("b", 120), ("c", 300)):
        follower.follow(came_back(2, name, known - 10, 10, 0, known), state)
    assert state.report().resumed_tokens == 3
    assert [layer.resumed_sparse_tokens for layer in state.report().layers] == [0, 1, 2]


@pytest.mark.parametrize("runner", [1, 2])
def test_a_dense_request_stays_dense_and_is_never_resumed_sparsely(state: State, runner: int) -> None:
    follower = Follower()
    both = [("a", 100, 100, 0), ("b", 100, 100, 0)]
    follower.follow(step(new=both, tokens={"a": 100, "b": 100}, runner=runner, dense={"a"}), state)
    follower.follow(step(preempted={"a", "b"}), state)
    assert follower.numbers == {"a": DENSE}
    for name in ("a", "b"):
        again = came_back(runner, name, 100, 20, 0, 120)
        for new in again.scheduled_new_reqs:
            new.sampling_params.extra_args = {DENSE_REQUEST: True} if name == "a" else {"other": 1}
        follower.follow(again, state)
        assert counted(state) == ((2, 20, 1, 0) if name == "a" else (2, 40, 2, 1))
    assert follower.numbers == {"a": DENSE}
    follower.follow(step(finished={"a", "b"}), state)
    assert not follower.numbers


def test_a_flag_may_come_as_true_one_or_text_and_nothing_else_is_one() -> None:
    for value, expected in ((True, True), (1, True), ("true", True), (False, False), ("no", False), ([], False)):
        assert asks_dense(SimpleNamespace(extra_args={DENSE_REQUEST: value})) is expected
    assert not asks_dense(SimpleNamespace(extra_args=None)) and not asks_dense(None)


class Rows:
    """A model runner of vLLM as far as it is looked at. Its metadata is `state.which_rows` when it is built."""

    def __init__(self, state: State, names: list[str]):
        self.state, self.names, self.seen = state, names, []

    def execute_model(self, output: Any, dummy_run: bool = False) -> list[Any]:
        self.seen = []
        self.run(dummy_run)
        return self.seen

    def build(self, *what: Any) -> None:
        rows = self.state.which_rows
        self.seen.append(None if rows is None else rows.tolist())


class V1Rows(Rows):
    def run(self, dummy_run: bool) -> None:
        self.input_batch = SimpleNamespace(req_ids=[] if dummy_run else self.names)
        # Of a draft step, and of the step.
        self._build_attention_metadata(1, logits_indices=None)
        self._build_attention_metadata(2)

    def _build_attention_metadata(self, *what: Any, **named: Any) -> None:
        self.build()


class V2Rows(Rows):
    def run(self, dummy_run: bool) -> None:
        batch = SimpleNamespace(req_ids=["req_0_1"]) if dummy_run else self.prepare_inputs("output", "descriptor")
        self.build(batch)

    def prepare_inputs(self, *what: Any) -> Any:
        return SimpleNamespace(req_ids=self.names)


@pytest.mark.parametrize(("kind", "builds"), [(V1Rows, 2), (V2Rows, 1)])
def test_which_schedule_each_row_has_is_known_when_metadata_is_built(state: State, kind: Any, builds: int) -> None:
    runner = kind(state, ["b", "a", "c"])
    steps.watch(runner, state)
    plain = [(name, 10, 10, 0) for name in "abc"]
    assert runner.execute_model(step(new=plain, tokens=dict.fromkeys("abc", 10))) == [None] * builds
    assert runner.execute_model(step(new=[("a", 10, 10, 0)], dense={"a"})) == [[ENGINES, DENSE, ENGINES]] * builds
    state.set_request_schedules(
        [Schedule.fixed(128, dense_layers=(0,)), Schedule.fixed(96, dense_layers=(0,))], {"d": 2}
    )
    runner.names = ["a", "d", "b"]
    assert runner.execute_model(step(new=[("d", 10, 10, 0)])) == [[DENSE, 2, ENGINES]] * builds
    # A dense request is dense, whatever else was said of it, and one that has begun keeps what it has.
    state.set_request_schedules([Schedule.fixed(128, dense_layers=(0,))], {"e": 1})
    runner.names = ["a", "d", "e"]
    assert runner.execute_model(step(new=[("e", 10, 10, 0)], dense={"e"})) == [[DENSE, 2, DENSE]] * builds
    runner.execute_model(step(finished={"d", "e"}))
    runner.names = ["a", "b"]
    assert runner.execute_model(step()) == [[DENSE, ENGINES]] * builds
    assert runner.execute_model(step(), dummy_run=True) == [None] * builds
    runner.names = ["b"]
    assert runner.execute_model(step(finished={"a"})) == [None] * builds
    assert state.which_rows is None


@pytest.mark.parametrize("kind", [V1Rows, V2Rows])
def test_what_requests_read_in_short_steps_is_kept_by_their_names(state: State, kind: Any) -> None:
    runner = kind(state, ["b", "a", "c"])
    steps.watch(runner, state)
    state.short_step_tokens = 500
    noted: list[Any] = []

    def build(*what: Any) -> None:
        # Three requests, of which c is dense, and a row of padding.
        state.begin_step([100, 300, 90, 0], np.array([ENGINES, ENGINES, DENSE, ENGINES]), may_replay=False)
        noted.append(state.row_names)

    runner.build = build
    run = lambda: runner.execute_model(step(new=[("a", 10, 10, 0)], tokens={"a": 10}))  # noqa: E731
    run()
    assert state.short_reads is None and noted and noted[0] == ["b", "a", "c"] and state.row_names is None
    assert state.take_short_reads() == {}
    run()
    builds = len(noted) // 2
    beyond = {name: int(state.reads.unread_tokens(np.array([tokens]))[0]) for name, tokens in (("b", 100), ("a", 300))}
    assert all(beyond.values())
    assert state.take_short_reads() == {name: builds * tokens for name, tokens in beyond.items()}
    state.short_step_tokens = 0
    run()
    assert state.take_short_reads() == {}


def test_a_finished_request_is_forgotten(state: State) -> None:
    follower = Follower()
    follower.follow(step(new=[("a", 30, 30, 0)], tokens={"a": 30}), state)
    follower.follow(step(preempted={"a"}), state)
    follower.follow(step(finished={"a"}), state)
    assert not follower.prompts and not follower.resumed


def test_a_runner_is_watched_once_and_its_warm_ups_are_not_counted(state: State) -> None:
    runner = SimpleNamespace(execute_model=lambda output, intermediate=None, dummy_run=False: (output, dummy_run))
    assert not steps.watched(runner)
    steps.watch(runner, state)
    watching = runner.execute_model
    steps.watch(runner, state)
    assert steps.watched(runner) and runner.execute_model is watching
    dummy = step(preempted={"a"})
    assert runner.execute_model(dummy, dummy_run=True) == (dummy, True)
    assert counted(state) == (0, 0, 0, 0)
    runner.execute_model(dummy)
    assert counted(state) == (1, 0, 0, 0)


def test_a_worker_reports_plain_data_and_nothing_before_it_counts(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    from sparroll.engines.vllm.attention import state as module
    from sparroll.engines.vllm.worker import WorkerExtension

    monkeypatch.setattr(module, "STATE", state)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(execute_model=lambda output: None)
    with pytest.raises(UserError, match="sparroll_reset_report first"):
        worker.sparroll_report()
    worker.sparroll_reset_report()
    worker.model_runner.execute_model(step(preempted={"a"}))
    read = json.loads(json.dumps(worker.sparroll_report()))
    assert EngineReport.from_table(read) == state.report()
    assert read["preemptions"] == 1
