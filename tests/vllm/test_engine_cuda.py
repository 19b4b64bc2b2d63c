"""VLLMEngine on a GPU, compiled and in CUDA graphs: right log-probabilities, the same results after sleep, new weights and
other schedules, and memory that is counted. One engine per class, since only one may be open in a process; about five
minutes on an H200:

    SPARROLL_GPU_RECORD=acceptance.json python -m pytest -n0 -q -s tests/vllm/test_engine_cuda.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

import vllm_gpu
from sparroll.attention.selectors import QuantizedMean, Remainder
from sparroll.engines.vllm import outputs
from sparroll.engines.vllm.attention.state import STATE
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.types import Rollout
from vllm_gpu import DRY, FULL, GIB, SELECTOR, SPARSE, Difference, Judge, Watch, note, only_on_gpu, prompts

pytestmark = vllm_gpu.needs_gpu_and_vllm

ROLLOUT_TOKENS = 120 if DRY else 1000
GREEDY_TOKENS = 40 if DRY else 300
LENGTHS = [20, 90] if DRY else [9, 12, 60, 100, 170, 255, 256, 257, 333, 600, 640, 900]
GREEDY: dict[str, Any] = dict(max_new_tokens=GREEDY_TOKENS, temperature=0, stop_ids=[])

GROUPED = dataclasses.replace(
    SPARSE,
    steps=(Step(0, (64, 192)), Step(256, (96, 256)), Step(640, (160, 128))),
    layer_groups=((3, 5), (2, 4)),
    name="grouped",
)
FINE = QuantizedMean(page_tokens=4, bits=4, first_tokens=16, recent_tokens=32)
SUMMING = dataclasses.replace(
    SPARSE, selector=dataclasses.replace(FINE, remainder=Remainder(32, "fp8")), name="with a remainder"
)
ONE_BY_ONE = dataclasses.replace(
    SPARSE, steps=(Step(0, (64, 96, 128, 192)),), layer_groups=((5,), (2,), (4,), (3,)), name="one by one"
)

found: dict[str, Any] = {}
"""What one engine left for the test of another."""


def greedy(engine: Any) -> list[Rollout]:
    vllm_gpu.forget_prefixes(engine)
    return engine.generate(prompts(LENGTHS), **GREEDY)


def sampled(engine: Any, new_tokens: int = ROLLOUT_TOKENS, n: int = 1 if DRY else 2) -> list[Rollout]:
    rollouts = engine.generate(prompts(LENGTHS, 1), n=n, max_new_tokens=new_tokens, seed=5, stop_ids=[])
    assert all(len(rollout.response_ids) == new_tokens for rollout in rollouts)
    return rollouts


# -- vLLM's own attention, as a yardstick ----------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def stock() -> Iterator[Any]:
    with vllm_gpu.engine(sparse=False, max_batch=32, gpu_memory_share=0.3, attention_backend="FLASH_ATTN") as engine:
        yield engine


class TestStock:
    def test_dense_rollouts_of_stock_vllm_are_within_rounding(self, stock: Any) -> None:
        found["stock"] = greedy(stock)
        errors = Judge(vllm_gpu.load(torch.bfloat16)).errors(sampled(stock), None, SPARSE)
        found["stock errors"] = errors
        note("stock FlashAttention, dense", **dataclasses.asdict(errors))
        errors.check()


# -- the sparse engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def started() -> Iterator[Any]:
    with vllm_gpu.engine(schedule=SPARSE, max_batch=32, gpu_memory_share=0.3, sleep_mode=True) as engine:
        yield engine


@pytest.fixture
def engine(started: Any) -> Iterator[Any]:
    yield started
    vllm_gpu.put_back(started, SPARSE)


@pytest.fixture(scope="class")
def judge() -> Judge:
    return Judge(vllm_gpu.load(torch.bfloat16))


@pytest.fixture(scope="class")
def before(started: Any) -> list[Rollout]:
    """What the engine says when nothing has happened to it."""
    return greedy(started)


@pytest.fixture(scope="class")
def noise(started: Any, before: list[Rollout]) -> Difference:
    """Between two runs of the untouched engine: none, unless batches round differently."""
    return Difference.of(before, greedy(started))


class TestSparse:
    @only_on_gpu
    def test_the_v2_runner_ran_with_full_graphs_for_decode_steps(self, engine: Any) -> None:
        from vllm.config import CUDAGraphMode

        runner = vllm_gpu.runner(engine)
        manager = runner.cudagraph_manager
        mode = manager.cudagraph_mode
        full = [each.num_tokens for each in manager.graphs if each.cg_mode == CUDAGraphMode.FULL]
        note("runner", module=type(runner).__module__, graphs=mode.name, full_graph_sizes=sorted(full))
        assert type(runner).__module__ == "vllm.v1.worker.gpu.model_runner"
        assert vllm_gpu.config(engine).use_v2_model_runner
        assert mode.decode_mode() == CUDAGraphMode.FULL
        assert min(full) == 1 and max(full) == 32

    def test_sparse_log_probs_over_1000_tokens_are_transformers_own(self, engine: Any, judge: Judge) -> None:
        rollouts = sampled(engine)
        errors = judge.errors(rollouts, SPARSE, None)
        note("bf16, sparse, 1,000 tokens", tokens=len(vllm_gpu.log_probs(rollouts)), **dataclasses.asdict(errors))
        assert {rollout.attention for rollout in rollouts} == {"sparse"}
        errors.check()

    def test_a_full_budget_is_dense_flash_attention(self, engine: Any, judge: Judge) -> None:
        with vllm_gpu.sparse_graphs_alone():
            engine.set_schedule(None)
            dense, dense_errors = greedy(engine), judge.errors(sampled(engine), None, SPARSE)
            engine.set_schedule(FULL)
            full, full_errors = greedy(engine), judge.errors(sampled(engine), None, SPARSE)
        for name, errors in (("schedule None", dense_errors), ("full budget", full_errors)):
            note(f"bf16, {name}", **dataclasses.asdict(errors))
            errors.check()
        against = {"None": Difference.of(full, dense)}
        if "stock" in found:
            against["stock"] = Difference.of(full, found["stock"])
            assert full_errors.engine <= 1.5 * found["stock errors"].engine + 0.003, "rounds worse than vLLM's own"
        for name, difference in against.items():
            note(f"full budget against {name}, greedy", **dataclasses.asdict(difference))
            assert difference.mean <= 1.5 * full_errors.transformers + 0.005, name
        assert set(STATE.ran) == set(range(engine.layers))

    @only_on_gpu
    def test_graph_replays_run_the_sparse_kernels(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        watch, tokens, asked = Watch(engine, monkeypatch), 120, prompts([100] * 8, 2)
        engine.reset_report()
        engine.generate(asked, max_new_tokens=tokens, temperature=0, stop_ids=[])
        note("graphs", replays=watch.replays, entries_from_python=watch.entries, pages_written_in_replay=watch.written)
        assert watch.replays >= tokens - 4
        assert watch.entries <= 3 * engine.layers
        assert watch.written
        kinds = dict(enumerate(["dense"] * 2 + ["triton"] * (engine.layers - 2)))
        # Replays enter no layer, so what they count is what the layers said at capture.
        assert STATE.captured == STATE.ran == kinds
        assert engine.report().layers[-1].sparse_steps > 0

    @only_on_gpu
    def test_sparse_layers_launch_no_kernel_that_only_stores_keys_and_values(self, engine: Any) -> None:
        from torch.profiler import ProfilerActivity, profile

        asked = prompts([100] * 8, 2)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            engine.generate(asked, max_new_tokens=40, temperature=0, stop_ids=[])
        calls = {event.key: event.count for event in seen.key_averages()}
        stored = sum(count for key, count in calls.items() if "reshape_and_cache" in key)
        attended = calls["_gather"]
        note("kernels", stores=stored, sparse_attention=attended)
        sparse_steps = attended // (engine.layers - 2)
        assert sparse_steps >= 10
        # Dense layers store in all steps, and all layers in those that prefill or leave nothing out.
        assert stored <= 2 * sparse_steps + engine.layers * (40 - sparse_steps + 4)

    @only_on_gpu
    def test_steps_that_read_everything_replay_graphs_that_choose_nothing(
        self, engine: Any, judge: Judge, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert set(STATE.captured_whole.values()) == {"dense"} and len(STATE.captured_whole) == engine.layers
        watch, tokens = Watch(engine, monkeypatch), 120
        engine.set_schedule(FULL)
        engine.reset_report()
        engine.generate(prompts([100] * 8, 2), max_new_tokens=tokens, temperature=0, stop_ids=[])
        assert watch.replays >= tokens - 4 and watch.entries == 0 and watch.written is False
        assert all(layer.dense_steps == 8 * (tokens - 1) for layer in engine.report().layers)
        errors = judge.errors(sampled(engine), None, SPARSE)
        note("bf16, full budget, whole graphs", replays=watch.replays, **dataclasses.asdict(errors))
        errors.check()
        # One request by itself leaves its budget behind: graphs of both kinds, and an index that both kept.
        engine.set_schedule(SPARSE)
        engine.reset_report()
        alone = engine.generate(prompts([9], 1), max_new_tokens=ROLLOUT_TOKENS, seed=5, stop_ids=[])
        layer = engine.report().layers[-1]
        assert (layer.dense_steps, layer.short_dense_steps) == (64 - 9, 0) and layer.sparse_steps > 900
        errors = judge.errors(alone, SPARSE, None)
        note("bf16, one request across its budget", dense_steps=layer.dense_steps, **dataclasses.asdict(errors))
        errors.check(factor=2, slack=0.01)
        # Short steps are dense on purpose.
        monkeypatch.setattr(STATE, "short_step_tokens", 10**6)
        engine.reset_report()
        errors = judge.errors(sampled(engine), None, SPARSE)
        layer = engine.report().layers[-1]
        note("bf16, short steps", short_dense_steps=layer.short_dense_steps, **dataclasses.asdict(errors))
        assert layer.sparse_steps == 0 < layer.short_dense_steps
        errors.check()

    def test_the_counters_are_the_schedules(self, engine: Any) -> None:
        asked = prompts(LENGTHS, 3)
        vllm_gpu.forget_prefixes(engine)
        engine.reset_report()
        engine.generate(asked, max_new_tokens=GREEDY_TOKENS, temperature=0, stop_ids=[])
        report, read, context, sparse = engine.report(), 0, 0, 0
        for prompt in asked:
            contexts = outputs.decode_contexts(len(prompt), GREEDY_TOKENS)
            reads = SPARSE.read_tokens(contexts)
            context, read = context + int(contexts.sum()), read + int(reads.sum())
            sparse += int((reads < contexts).sum())
        steps = len(asked) * (GREEDY_TOKENS - 1)
        last = report.layers[-1]
        note("counters", decode_rows=last.dense_steps + last.sparse_steps, sparse_rows=last.sparse_steps, wanted=sparse)
        assert (last.sparse_steps, last.dense_steps) == (sparse, steps - sparse)
        assert (last.context_tokens, last.read_tokens) == (context, read)
        assert report.layers[0].sparse_steps == 0 and report.layers[0].read_tokens == context
        assert report.prefill_tokens == sum(LENGTHS)

    def test_layers_read_the_budgets_of_their_groups_in_the_graphs_of_a_schedule_without(
        self, engine: Any, judge: Judge, before: list[Rollout], noise: Difference
    ) -> None:
        for name, schedule in (("two groups", GROUPED), ("a group for each layer", ONE_BY_ONE)):
            engine.set_schedule(schedule)
            errors = judge.errors(sampled(engine), schedule, None)
            note(f"bf16, {name}", **dataclasses.asdict(errors))
            errors.check()
            engine.reset_report()
            greedy(engine)
            contexts = np.concatenate([outputs.decode_contexts(tokens, GREEDY_TOKENS) for tokens in LENGTHS])
            for layer, found in enumerate(engine.report().layers):
                dense = layer in schedule.dense_layers
                read = contexts if dense else schedule.of_layer(layer).read_tokens(contexts)
                assert (found.context_tokens, found.read_tokens) == (contexts.sum(), read.sum()), (name, layer)
                assert found.sparse_steps == (read < contexts).sum(), (name, layer)
        # Groups that differ in nothing are no groups, and what was set before leaves no trace.
        engine.set_schedule(dataclasses.replace(SPARSE, layer_groups=GROUPED.layer_groups))
        equal = Difference.of(before, greedy(engine))
        engine.set_schedule(SPARSE)
        back = Difference.of(before, greedy(engine))
        note("equal groups", **dataclasses.asdict(equal))
        equal.check_same(noise)
        back.check_same(noise)

    def test_an_untouched_engine_repeats_itself(self, engine: Any, noise: Difference) -> None:
        note("again", **dataclasses.asdict(noise))
        assert noise.same_rollouts >= noise.rollouts / 2 and noise.mean <= 0.01, noise

    @pytest.mark.parametrize("level", [1, 2])
    def test_results_are_the_same_after_sleep(
        self, engine: Any, before: list[Rollout], noise: Difference, level: int
    ) -> None:
        if DRY:
            pytest.skip("there is no sleep on a CPU")
        vllm_gpu.clean()
        awake = vllm_gpu.used_bytes()
        engine.sleep(level)
        asleep = vllm_gpu.used_bytes()
        with pytest.raises(UserError, match="the engine sleeps"):
            engine.generate([[5]], max_new_tokens=1)
        if level == 1:
            engine.wake()
        else:
            engine.load_weights(vllm_gpu.load(torch.bfloat16), engine.weight_version + 1)
        again = vllm_gpu.used_bytes()
        difference = Difference.of(before, greedy(engine))
        note(
            f"sleep level {level}",
            awake_gib=awake / GIB,
            asleep_gib=asleep / GIB,
            awake_again_gib=again / GIB,
            **dataclasses.asdict(difference),
        )
        difference.check_same(noise)
        assert awake - asleep >= 0.8 * 0.3 * vllm_gpu.total_bytes()

    def test_results_are_the_same_after_the_same_weights(
        self, engine: Any, before: list[Rollout], noise: Difference
    ) -> None:
        engine.load_weights(vllm_gpu.load(torch.bfloat16), engine.weight_version + 1)
        difference = Difference.of(before, greedy(engine))
        note("same weights", **dataclasses.asdict(difference))
        difference.check_same(noise)

    def test_weights_come_from_a_module_on_the_gpu_and_go_back(
        self, engine: Any, before: list[Rollout], noise: Difference
    ) -> None:
        own = vllm_gpu.load(torch.bfloat16)
        other = vllm_gpu.perturbed(own)
        version = engine.weight_version + 1
        engine.load_weights(other, version)
        for wrong in (version, version - 1):
            with pytest.raises(UserError, match="must rise above"):
                engine.load_weights(own, wrong)
        rollouts = sampled(engine)
        assert {rollout.weight_version for rollout in rollouts} == {version}
        judge = Judge(other)
        errors, changed = judge.errors(rollouts, SPARSE, None), Difference.of(before, greedy(engine))
        unlike = Judge(own).errors(rollouts[:6], SPARSE, None)
        note("other weights", **dataclasses.asdict(errors), engine_from_old_weights=unlike.engine)
        assert changed.same_rollouts < changed.rollouts / 2
        errors.check()
        assert errors.engine < 0.2 * unlike.engine
        engine.load_weights(own, version + 1)
        difference = Difference.of(before, greedy(engine))
        note("weights back", **dataclasses.asdict(difference))
        difference.check_same(noise)

    def test_a_schedule_switches_and_back(self, engine: Any, before: list[Rollout], noise: Difference) -> None:
        for schedule in (None, Schedule.fixed(256, SELECTOR)):
            engine.set_schedule(schedule)
            changed = Difference.of(before, greedy(engine))
            assert changed.same_rollouts < changed.rollouts or DRY, schedule
        engine.set_schedule(SPARSE)
        difference = Difference.of(before, greedy(engine))
        note("schedule back", **dataclasses.asdict(difference))
        difference.check_same(noise)


# -- what is not read ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def summing() -> Iterator[Any]:
    with vllm_gpu.engine(schedule=SUMMING, max_batch=32, gpu_memory_share=0.3, block_size=32) as engine:
        yield engine


class TestRemainder:
    def test_log_probs_with_a_remainder_are_transformers_own(self, summing: Any) -> None:
        judge, bare = Judge(vllm_gpu.load(torch.bfloat16)), dataclasses.replace(SUMMING, selector=FINE)
        # What it must be told from is the same selector without a remainder.
        errors = judge.errors(sampled(summing, ROLLOUT_TOKENS // 2), SUMMING, bare)
        note("bf16, with a remainder", **dataclasses.asdict(errors))
        errors.check()

    def test_a_full_budget_leaves_nothing_to_sum_up(self, summing: Any) -> None:
        """In the same graphs, so it is the kernels that find nothing."""
        full = dataclasses.replace(SUMMING, steps=FULL.steps, name="full")
        summing.set_schedule(full)
        with vllm_gpu.sparse_graphs_alone():
            rollouts = sampled(summing, ROLLOUT_TOKENS // 2)
        errors = Judge(vllm_gpu.load(torch.bfloat16)).errors(rollouts, None, SUMMING)
        note("bf16, full budget of a remainder", **dataclasses.asdict(errors))
        errors.check()


# -- contexts so long that the engine keeps peaks of scores --------------------------------------------------------------

SINGLE = QuantizedMean(page_tokens=1, bits=2, first_tokens=16, recent_tokens=32)
LONG = dataclasses.replace(
    SPARSE, steps=(Step(0, (200, 500)),), selector=SINGLE, layer_groups=((3, 5), (2, 4)), name="of single tokens"
)
"""Of 7,000 tokens some layers want so few that candidates are made under peaks, and others so many that they are not."""
LONG_LENGTHS = [300, 900] if DRY else [3000, 5000, 7000, 7900]


@pytest.fixture(scope="class")
def far_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model, whose weights say nothing about positions, for contexts of 16,384 tokens."""
    model = vllm_gpu.load(torch.float32)
    model.config.max_position_embeddings = 16_384
    folder = tmp_path_factory.mktemp("far")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="class")
def far(far_model: str) -> Iterator[Any]:
    with vllm_gpu.engine(model=far_model, schedule=LONG, max_batch=8, gpu_memory_share=0.3) as engine:
        yield engine


class TestPeaks:
    def test_log_probs_of_long_contexts_are_transformers_own(self, far: Any, far_model: str) -> None:
        from sparroll.engines.vllm.attention import cuda_backend

        if not DRY:
            assert cuda_backend._workspace is not None and cuda_backend._workspace.peaks_RHK is not None
        rollouts = far.generate(prompts(LONG_LENGTHS, 1), n=2, max_new_tokens=60, seed=5, stop_ids=[])
        errors = Judge(vllm_gpu.load(torch.bfloat16, far_model)).errors(rollouts, LONG, None)
        note("bf16, contexts of 3,000 to 8,000 tokens, peaks", **dataclasses.asdict(errors))
        errors.check()


# -- other precisions and runners ------------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def half() -> Iterator[Any]:
    with vllm_gpu.engine(torch.float16, schedule=SPARSE, max_batch=32, gpu_memory_share=0.3) as engine:
        yield engine


class TestHalf:
    def test_sparse_log_probs_in_fp16_are_transformers_own(self, half: Any) -> None:
        errors = Judge(vllm_gpu.load(torch.float16)).errors(sampled(half, ROLLOUT_TOKENS // 2), SPARSE, None)
        note("fp16, sparse", **dataclasses.asdict(errors))
        # Rounding is rare enough here that single pages chosen otherwise make up most of both errors.
        errors.check(factor=2, slack=0.01)


@only_on_gpu
def test_the_v1_runner_gives_the_same_log_probs() -> None:
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(vllm_gpu.__file__).parent), *sys.path]),
    }
    run = subprocess.run(
        [sys.executable, vllm_gpu.__file__], env=environment, capture_output=True, text=True, timeout=200
    )
    lines = [line.removeprefix("REPORT ") for line in run.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, run.stdout[-2000:] + run.stderr[-6000:]
    report = json.loads(lines[0])
    note("V1 runner", **report)
    assert report["runner"] == "vllm.v1.worker.gpu_model_runner"
    names = [field.name for field in dataclasses.fields(vllm_gpu.Errors)]
    vllm_gpu.Errors(**{name: report[name] for name in names}).check(factor=2, slack=0.01)
    assert "FULL" in report["graphs"] and report["entries"] < report["steps"]


# -- memory ----------------------------------------------------------------------------------------------------------------

SHARE = 0.6
MEMORY: dict[str, Any] = dict(
    load_format="dummy",
    max_batch=4 if DRY else 256,
    max_context_tokens=512 if DRY else 40_960,
    gpu_memory_share=SHARE,
    compilation_config={"cudagraph_capture_sizes": [1, 8, 64, 256]},
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config of Qwen3-1.7B, and no weights."""
    config = AutoConfig.for_model(
        "qwen3",
        architectures=["Qwen3ForCausalLM"],
        vocab_size=256 if DRY else 151_936,
        hidden_size=64 if DRY else 2048,
        intermediate_size=64 if DRY else 6144,
        num_hidden_layers=3 if DRY else 28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=32 if DRY else 128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    folder = tmp_path_factory.mktemp("qwen3-1.7b")
    config.save_pretrained(folder)
    return str(folder)


def fill(engine: Any, before: int, name: str) -> dict[str, Any]:
    """A full batch; what the GPU holds since the engine was started, beyond the share that vLLM was given."""
    lengths = [40] * 6 if DRY else [1500] * 256
    engine.generate(prompts(lengths, 4), max_new_tokens=24, stop_ids=[])
    held = vllm_gpu.used_bytes() - before
    beyond = held - SHARE * vllm_gpu.total_bytes()
    figures = {
        "capacity_tokens": vllm_gpu.capacity_tokens(engine),
        "block_tokens": vllm_gpu.config(engine).cache_config.block_size,
        "held_gib": held / GIB,
        "beyond_share_gib": beyond / GIB,
    }
    note(f"memory, {name}", **figures)
    return figures


@pytest.fixture(scope="class")
def used_before() -> int:
    """Of the GPU, before the class's engine starts."""
    vllm_gpu.clean()
    return vllm_gpu.used_bytes()


@pytest.fixture(scope="class")
def large_dense(used_before: int, large: str) -> Iterator[Any]:
    with vllm_gpu.engine(model=large, sparse=False, attention_backend="FLASH_ATTN", block_size=16, **MEMORY) as engine:
        yield engine


@pytest.fixture(scope="class")
def large_sparse(used_before: int, large: str) -> Iterator[Any]:
    with vllm_gpu.engine(model=large, schedule=Schedule.fixed(512), **MEMORY) as engine:
        yield engine


class TestMemoryDense:
    def test_the_dense_engine_is_measured(self, large_dense: Any, used_before: int) -> None:
        found["dense memory"] = fill(large_dense, used_before, "dense")
        assert found["dense memory"]["beyond_share_gib"] <= 4


class TestMemorySparse:
    def test_landmarks_and_workspace_are_counted_and_small(self, large_sparse: Any, used_before: int) -> None:
        sparse = fill(large_sparse, used_before, "sparse")
        if "dense memory" not in found:
            pytest.skip("needs the dense engine's figures: run the whole file")
        dense = found["dense memory"]
        share = sparse["capacity_tokens"] / dense["capacity_tokens"]
        extra = sparse["beyond_share_gib"] - dense["beyond_share_gib"]
        note("capacity", of_dense=share, least=1 - 1 / 32 - 0.01, held_beyond_dense_gib=extra)
        assert DRY or share >= 1 - 1 / 32 - 0.01
        # As full as the dense engine is, so nothing of ours escaped vLLM's profiling.
        assert extra <= 0.5
        assert sparse["beyond_share_gib"] <= 4

    @only_on_gpu
    def test_a_workspace_for_256_requests_of_40k_is_under_a_gibibyte(self, large_sparse: Any) -> None:
        from sparroll.engines.vllm.attention import cuda_backend as backend

        work = backend._workspace
        assert work is not None
        note("workspace", requests=MEMORY["max_batch"], gib=tensor_bytes(work) / GIB)
        assert tensor_bytes(work) < GIB


def tensor_bytes(held: Any) -> int:
    """Of all tensors in a dataclass and in those within it."""
    total = 0
    for field in dataclasses.fields(held):
        value = getattr(held, field.name)
        if isinstance(value, Tensor):
            total += value.untyped_storage().nbytes()
        elif dataclasses.is_dataclass(value):
            total += tensor_bytes(value)
    return total
