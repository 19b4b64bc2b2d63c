"""What benchmarks/verl_watch.py writes in verl's processes, and what is made of it. No verl."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark_scripts import benchmark
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TokenScores, TopK


@pytest.fixture
def seen() -> ModuleType:
    return benchmark("verl_seen")


@pytest.fixture
def watch() -> ModuleType:
    return benchmark("verl_watch")


@pytest.fixture
def ceilings() -> ModuleType:
    return benchmark("trainer_ceiling")


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# -- hooks -----------------------------------------------------------------------------------------------------------------


def test_a_hook_is_called_once_with_the_whole_module(
    watch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watched_module.py").write_text("first = 1\nlast = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks, called = watch._Hooks(), []
    monkeypatch.setattr(sys, "meta_path", [hooks, *sys.meta_path])
    hooks.add("watched_module", lambda module: called.append(module.last))
    import watched_module  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "watched_module")
    assert called == [2] and watched_module.first == 1


def test_a_module_that_is_there_already_is_hooked_at_once(watch: ModuleType) -> None:
    called: list[str] = []
    watch._Hooks().add("json", lambda module: called.append(module.__name__))
    assert called == ["json"]


def test_without_a_folder_nothing_is_hooked(watch: ModuleType) -> None:
    assert not any(type(finder).__name__ == "_Hooks" for finder in sys.meta_path)


def test_a_distance_is_the_mean_over_the_tokens_that_both_have(watch: ModuleType) -> None:
    assert watch.distance([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0, -9.0], [-2.5]]) == pytest.approx(1 / 3)


def test_a_layer_that_is_always_dense_does_not_hide_sparse_steps(watch: ModuleType) -> None:
    layers = [SimpleNamespace(sparse_steps=0, dense_steps=9), SimpleNamespace(sparse_steps=6, dense_steps=3)]
    assert watch.counts_of(layers) == {"sparse_steps": 6, "dense_steps": 3}
    assert watch.counts_of([]) == {"sparse_steps": 0, "dense_steps": 0}


def test_a_steps_sampling_lasts_from_its_first_request_to_the_end_of_its_last_one_on_any_replica(
    seen: ModuleType, tmp_path: Path
) -> None:
    def request(weights: int | None, began: float, ended: float) -> dict[str, Any]:
        return {"weights": weights, "began": began, "ended": ended}

    write_lines(tmp_path / "requests-0.jsonl", [request(0, 10.0, 40.0), request(0, 11.0, 30.0), request(1, 90.0, 95.0)])
    write_lines(tmp_path / "requests-1.jsonl", [request(0, 9.5, 41.0)])
    assert seen.sampled_seconds(tmp_path) == {1: 31.5, 2: 5.0}


# -- what the replicas counted ---------------------------------------------------------------------------------------------


def test_sparse_steps_are_those_with_a_context_above_the_budget(seen: ModuleType) -> None:
    # Contexts of 49 to 143; and the published schedule's, which a run of verl on two H200s has counted: 50,656 / 32.
    assert seen.sparse_steps_of(Schedule.fixed(64), 48, 96) == 143 - 64
    assert seen.sparse_steps_of(Schedule.load("qwen3-1.7b-0.86"), 48, 2048) == 1583


def taken(weights: int | None, schedule: str, sparse: int, dense: int, *workers: tuple[int, int], **more: Any) -> Any:
    said = [{"sparse_steps": each[0], "dense_steps": each[1]} for each in workers]
    line = {"weights": weights, "schedule": schedule, "sparse_steps": sparse, "dense_steps": dense, "workers": said}
    return line | {"measures": True, "measured": 4} | more


def test_counts_are_sorted_by_step_without_ceilings_and_what_came_before(seen: ModuleType, tmp_path: Path) -> None:
    lines = [
        taken(None, "narrow", 0, 0, (0, 0)),
        taken(0, "narrow", 79, 16, (79, 16)),
        taken(1, "dense", 0, 95, (79, 111), measures=False),
        taken(1, "wider", 47, 48, (126, 159)),
    ]
    write_lines(tmp_path / "counts-0.jsonl", lines)
    write_lines(tmp_path / "counts-1.jsonl", lines[:2])
    first, second = seen.counts_by_step(tmp_path)
    assert (first["step"], first["schedule"], len(first["replicas"])) == (1, "narrow", 2)
    assert (second["step"], second["schedule"], len(second["replicas"])) == (2, "wider", 1)
    assert second["replicas"][0]["workers"] == [{"sparse_steps": 47, "dense_steps": 48}]


def steps_of(*replicas: tuple[int, int]) -> list[dict[str, Any]]:
    counts = [{"sparse_steps": each[0], "dense_steps": each[1]} for each in replicas]
    return [{"step": 1, "schedule": "fixed-64", "replicas": [count | {"workers": [count]} for count in counts]}]


@pytest.mark.parametrize(
    ("replicas", "follows"),
    [(((79, 16), (158, 32)), True), (((79, 16), (0, 190)), False), (((79, 16), (157, 33)), False)],
)
def test_every_replica_has_to_follow_the_schedule(seen: ModuleType, replicas: Any, follows: bool) -> None:
    (step,) = seen.followed(steps_of(*replicas), {"fixed-64": Schedule.fixed(64)}, 48, 96)
    assert step["follows"] is follows and step["sparse_of_rollout"] == 79 and step["decode_of_rollout"] == 95


def test_a_worker_that_lags_behind_is_seen_and_so_are_two_schedules_in_one_step(
    seen: ModuleType, tmp_path: Path
) -> None:
    steps = steps_of((79, 16))
    steps[0]["replicas"][0]["workers"].append({"sparse_steps": 0, "dense_steps": 95})
    assert not seen.followed(steps, {"fixed-64": Schedule.fixed(64)}, 48, 96)[0]["follows"]
    for replica, name in enumerate(("narrow", "wider")):
        write_lines(tmp_path / f"counts-{replica}.jsonl", [taken(0, name, 79, 16, (79, 16))])
    found = seen.followed(seen.counts_by_step(tmp_path), {"narrow": Schedule.fixed(64)}, 48, 96)
    assert found[0]["schedule"] == "narrow and wider" and not found[0]["follows"]


# -- whether the weights arrived -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "first", "updates", "arrived"),
    [(0.05, 2.0, 4, True), (2.0, 0.05, 4, False), (0.05, 0.06, 4, False), (0.05, 2.0, 0, False)],
)
def test_weights_have_arrived_where_the_engine_is_near_them_and_far_from_the_first_ones(
    seen: ModuleType, tmp_path: Path, trained: float, first: float, updates: int, arrived: bool
) -> None:
    begun = {"step": 1, "updates": 0, "from_trained": 0.04, "from_first": 0.04}
    last = {"step": 5, "updates": updates, "from_trained": trained, "from_first": first}
    write_lines(tmp_path / "arrived.jsonl", [begun, last])
    found = seen.arrived(tmp_path)
    assert found["arrived"] is arrived and found["at_once"] == 0.04 and len(found["all_steps"]) == 2


def test_where_nothing_was_compared_nothing_is_said(seen: ModuleType, tmp_path: Path) -> None:
    assert seen.arrived(tmp_path) == {} and seen.in_force(tmp_path) == {} and seen.ceilings(tmp_path) == {}


# -- what is in force ------------------------------------------------------------------------------------------------------


def test_settings_are_those_of_the_first_replica_and_what_differs_in_others(seen: ModuleType, tmp_path: Path) -> None:
    for replica, cache in enumerate((100, 90)):
        engine = {"dtype": "bfloat16", "cache_tokens": cache}
        (tmp_path / f"engine-{replica}.json").write_text(json.dumps(engine))
    write_lines(tmp_path / "sleeps-0.jsonl", [{"level": 2}, {"level": 2}])
    found = seen.in_force(tmp_path)
    assert found["engine"] == {"dtype": "bfloat16", "cache_tokens": 100} and found["replicas"] == 2
    assert found["engines_differ"] == [{"cache_tokens": 90}]
    assert found["sleep_levels"] == [2] and found["sleeps"] == 2


def test_an_engines_settings_are_read_from_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_facts = benchmark("engine_facts")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.0"))
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, enforce_eager=False, enable_sleep_mode=True, max_model_len=352
        ),
        cache_config=SimpleNamespace(
            gpu_memory_utilization=0.45,
            num_gpu_blocks=10,
            block_size=16,
            cache_dtype="auto",
            enable_prefix_caching=True,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=8192, async_scheduling=True),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=[1, 32]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    found = engine_facts.of_engine(config)
    assert found["dtype"] == "bfloat16" and found["cuda_graphs"] == "FULL" and not found["enforce_eager"]
    assert found["cache_tokens"] == 160 and found["largest_graph_requests"] == 32 and found["vllm"] == "0.0"


# -- the trainer's ceiling -------------------------------------------------------------------------------------------------


def test_the_trainers_lists_are_the_likeliest_tokens_of_its_logits(ceilings: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_SD = torch.randn(600, 4, generator=generator)
    head_VD = torch.randn(50, 4, generator=generator)
    labels_S = torch.randint(0, 50, (600,), generator=generator)
    logp, ids, top = ceilings.lists_of(hidden_SD, head_VD, labels_S, top_k=3)
    expected = (hidden_SD @ head_VD.t()).log_softmax(-1)
    torch.testing.assert_close(logp, expected.gather(-1, labels_S[:, None])[:, 0])
    torch.testing.assert_close(top, expected.topk(3).values)
    assert torch.equal(ids, expected.topk(3).indices)


def dense_rollout(shift: float = 0.0) -> Rollout:
    """Two tokens between two ids: the first at .5 and .5, the second at .9 and .1."""
    logp = torch.tensor([[0.5 + shift, 0.5 - shift], [0.9, 0.1]]).log()
    return Rollout([5, 6], [0, 1], logp[:, 0], "length", top_k=TopK(torch.tensor([[0, 1], [0, 1]]), logp))


def test_the_ceilings_compare_the_engines_lists_with_the_trainers_and_with_its_own(
    ceilings: ModuleType, tmp_path: Path
) -> None:
    rollout, shifted = dense_rollout(), dense_rollout(0.2)
    ceilings.keep_rollout(tmp_path, rollout, TokenScores(rollout.sparse_logp, rollout.top_k))
    ((name, ids, prompt_tokens),) = ceilings.waiting(tmp_path)
    assert ids.tolist() == [5, 6, 0, 1] and prompt_tokens == 2
    # Positions of a row are those of its tokens; the first response token's scores stand at the prompt's last one.
    lists = shifted.top_k
    assert lists is not None
    nothing = torch.zeros(1, 2)
    rows = torch.cat([nothing.long(), lists.ids]), torch.cat([nothing, lists.logp])
    ceilings.keep_scores(tmp_path, name, prompt_tokens, torch.cat([torch.zeros(1), shifted.sparse_logp]), *rows)
    assert ceilings.waiting(tmp_path) == []
    found = ceilings.ceilings(tmp_path)
    # min(.5, .7) + min(.5, .3) = .8 at the first token, and 1 at the second one.
    assert found["trainer_ceiling_mean"] == pytest.approx(0.9, abs=1e-3) and found["tokens"] == 2
    assert found["trainer_ceiling_q05"] == pytest.approx(0.8, abs=0.02)
    assert found["engine_ceiling_mean"] == pytest.approx(1, abs=1e-3)
    assert found["trainer_off_nats_max"] == pytest.approx(0.336, abs=1e-3)


def test_a_padded_row_is_found_among_the_rollouts(ceilings: ModuleType) -> None:
    known = [("other", torch.tensor([1, 2, 3]), 1), ("mine", torch.tensor([1, 2, 4]), 2)]
    assert ceilings.row_of(torch.tensor([1, 2, 4, 0, 0]), known) == ("mine", 3, 2)
    assert ceilings.row_of(torch.tensor([1, 2]), known) is None
