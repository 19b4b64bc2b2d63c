"""Checks of drafts on a GPU, compiled and in CUDA graphs: right log-probabilities of both policies, drafts that replay
graphs, the same results after sleep, and memory that is counted. A few minutes on an H200:

    SPARROLL_GPU_RECORD=windows.json python -m pytest -n0 -q -s tests/vllm/test_windows_cuda.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import vllm_gpu
from sparroll.engines import HFEngine
from sparroll.engines.vllm.attention.state import STATE
from sparroll.schedule import Schedule
from sparroll.types import Rollout
from vllm_gpu import DRY, GIB, SPARSE, Difference, Judge, Watch, note, only_on_gpu, prompts

pytestmark = vllm_gpu.needs_gpu_and_vllm

CHECKED = SPARSE.checked(window_tokens=8 if DRY else 32, floor=0.05)
LENGTHS = [20, 90] if DRY else [9, 12, 60, 100, 170, 255, 256, 257, 333, 600, 640, 900]
GREEDY: dict[str, Any] = dict(max_new_tokens=40 if DRY else 300, temperature=0, stop_ids=[])
SAMPLED: dict[str, Any] = dict(n=1 if DRY else 2, max_new_tokens=60 if DRY else 600, seed=5, stop_ids=[])


@pytest.fixture(scope="class")
def started() -> Iterator[Any]:
    with vllm_gpu.engine(schedule=CHECKED, max_batch=32, gpu_memory_share=0.3, sleep_mode=True) as engine:
        yield engine


@pytest.fixture
def engine(started: Any) -> Iterator[Any]:
    yield started
    vllm_gpu.put_back(started, CHECKED)


def greedy(engine: Any) -> list[Rollout]:
    vllm_gpu.forget_prefixes(engine)
    return engine.generate(prompts(LENGTHS), **GREEDY)


@pytest.fixture(scope="class")
def sampled(started: Any) -> list[Rollout]:
    return started.generate(prompts(LENGTHS, 1), **SAMPLED)


@pytest.fixture(scope="class")
def before(started: Any) -> list[Rollout]:
    """What the engine says when nothing has happened to it."""
    return greedy(started)


@pytest.fixture(scope="class")
def noise(started: Any, before: list[Rollout]) -> Difference:
    """Between two runs of the untouched engine: none, unless batches round differently."""
    return Difference.of(before, greedy(started))


class TestChecked:
    @only_on_gpu
    def test_our_runner_scheduler_and_full_graphs_for_drafts_are_in_place(self, engine: Any) -> None:
        runner, scheduler = vllm_gpu.runner(engine), vllm_gpu.core(engine).scheduler
        modes = vllm_gpu.config(engine).compilation_config.cudagraph_mode
        note("parts", runner=type(runner).__name__, scheduler=type(scheduler).__name__, graphs=modes.name)
        assert type(runner).__name__ == "WindowGPUModelRunner" and type(scheduler).__name__ == "WindowScheduler"
        assert "FULL" in modes.name and not vllm_gpu.config(engine).use_v2_model_runner

    def test_dense_log_probs_are_transformers_own(self, sampled: list[Rollout]) -> None:
        """Dense in spite of the sparse drafts before each check: their keys and values are gone."""
        dense = [dataclasses.replace(rollout, sparse_logp=rollout.dense_logp) for rollout in sampled]
        errors = Judge(vllm_gpu.load(torch.bfloat16)).errors(dense, None, SPARSE)
        note("bf16, log p of checks", **dataclasses.asdict(errors))
        assert {rollout.attention for rollout in sampled} == {"sparse"}
        errors.check()

    def test_no_token_is_likelier_when_sampled_than_the_floor_allows(self, sampled: list[Rollout]) -> None:
        nats = torch.cat([rollout.sparse_logp - rollout.dense_logp for rollout in sampled])
        note("nats off", most=nats.max().item(), mean=nats.mean().item(), allowed=CHECKED.check.most_nats)
        assert nats.max() <= CHECKED.check.most_nats + 0.01

    def test_windows_are_cut_about_as_often_as_hfengine_cuts_them(self, sampled: list[Rollout]) -> None:
        oracle = HFEngine(vllm_gpu.load(torch.bfloat16), schedule=CHECKED, max_batch=32)
        others = oracle.generate(prompts(LENGTHS, 1), **SAMPLED)
        (acceptance, cut), (other_acceptance, other_cut) = (
            (
                torch.cat([rollout.draft_acceptance for rollout in some]).mean().item(),
                sum(rollout.checks.cut_windows for rollout in some) / sum(rollout.checks.windows for rollout in some),
            )
            for some in (sampled, others)
        )
        note("drafts", acceptance=acceptance, hf_acceptance=other_acceptance, cut_share=cut, hf_cut_share=other_cut)
        assert acceptance == pytest.approx(other_acceptance, abs=0.04)
        assert cut == pytest.approx(other_cut, abs=0.1)

    @only_on_gpu
    def test_drafts_replay_graphs_with_the_sparse_kernels(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        watch = Watch(engine, monkeypatch)
        engine.reset_report()
        engine.generate(prompts([100] * 8, 2), max_new_tokens=120, temperature=0, stop_ids=[])
        report = engine.report()
        note("graphs", entries_from_python=watch.entries, sparse_steps=report.layers[-1].sparse_steps)
        assert watch.entries <= 3 * engine.layers
        kinds = dict(enumerate(["dense"] * 2 + ["triton"] * (engine.layers - 2)))
        assert STATE.captured == kinds
        assert report.layers[-1].sparse_steps > 0 and report.checks.windows > 8

    def test_at_floor_1_greedy_tokens_are_those_of_dense_decoding(self, engine: Any) -> None:
        engine.set_schedule(SPARSE.checked(window_tokens=8, floor=1))
        lossless = greedy(engine)
        engine.set_schedule(None)
        difference = Difference.of(
            [dataclasses.replace(rollout, sparse_logp=rollout.dense_logp) for rollout in lossless], greedy(engine)
        )
        note("greedy at floor 1 against dense", **dataclasses.asdict(difference))
        # A dense step and a dense window round differently, so that a tie may end what two responses have in common.
        assert difference.mean <= 0.03 and difference.common_share > 0.2

    def test_an_untouched_engine_repeats_itself(self, engine: Any, noise: Difference) -> None:
        note("again", **dataclasses.asdict(noise))
        assert noise.same_rollouts >= noise.rollouts / 2 and noise.mean <= 0.01, noise

    @only_on_gpu
    @pytest.mark.parametrize("level", [1, 2])
    def test_results_are_the_same_after_sleep(
        self, engine: Any, before: list[Rollout], noise: Difference, level: int
    ) -> None:
        engine.sleep(level)
        if level == 1:
            engine.wake()
        else:
            engine.load_weights(vllm_gpu.load(torch.bfloat16), engine.weight_version + 1)
        difference = Difference.of(before, greedy(engine))
        note(f"sleep level {level}", **dataclasses.asdict(difference))
        difference.check_same(noise)


# -- memory ----------------------------------------------------------------------------------------------------------------

SHARE = 0.6


@pytest.fixture(scope="class")
def used_before() -> int:
    """Of the GPU, before the class's engine starts."""
    vllm_gpu.clean()
    return vllm_gpu.used_bytes()


@pytest.fixture(scope="class")
def large(tmp_path_factory: pytest.TempPathFactory, used_before: int) -> Iterator[Any]:
    """An engine on Qwen3-1.7B's config without weights."""
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
    folder: Path = tmp_path_factory.mktemp("qwen3-1.7b")
    config.save_pretrained(folder)
    with vllm_gpu.engine(
        model=str(folder),
        schedule=Schedule.fixed(512).checked(),
        load_format="dummy",
        max_batch=4 if DRY else 64,
        max_context_tokens=512 if DRY else 40_960,
        gpu_memory_share=SHARE,
    ) as engine:
        yield engine


class TestMemory:
    def test_the_logits_of_drafts_are_counted(self, large: Any, used_before: int) -> None:
        large.generate(prompts([40] * 6 if DRY else [1500] * 64, 4), max_new_tokens=140, stop_ids=[])
        held = vllm_gpu.used_bytes() - used_before
        beyond = held - SHARE * vllm_gpu.total_bytes()
        draft_logits = vllm_gpu.runner(large)._draft_logits_RKV
        note(
            "memory with checks",
            held_gib=held / GIB,
            beyond_share_gib=beyond / GIB,
            draft_logits_gib=draft_logits.untyped_storage().nbytes() / GIB,
            capacity_tokens=vllm_gpu.capacity_tokens(large),
        )
        assert DRY or beyond <= 4 * GIB
