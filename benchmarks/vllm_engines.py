"""vLLM engines for the speed benchmarks: any Qwen3 size with random weights, KV caches filled without a prefill, and the
time of single decode steps. Stock dense (FlashAttention) and sparse engines get the same settings.

The cache is filled by vLLM's own DecodeBenchConnector: a request of n prompt tokens starts decoding at once on n - 1
tokens of random keys and values. Speed depends neither on weights nor on what the cache holds, as long as the pages that
are chosen lie as scattered as real ones do; random keys see to that.
"""

# B requests in a batch

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

QWEN3: dict[str, dict[str, int | bool]] = {
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
}
"""What differs between the sizes; all have 8 KV heads of 128 and a vocabulary of 151,936."""
UNTIED = ("qwen3-8b", "qwen3-14b")
VOCABULARY = 151_936


def model_folder(name: str, root: Path) -> Path:
    """A folder with nothing but the config."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "attention_bias": False,
        "tie_word_embeddings": name not in UNTIED,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        **QWEN3[name],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def start(name: str, root: Path, sparroll: dict[str, Any] | None, **settings: Any) -> Any:
    """A vllm.LLM. sparroll: what goes into additional_config (schedule, attention), or None for stock FlashAttention."""
    from vllm import LLM

    settings = {"max_model_len": 40_960, "max_num_seqs": 64, "gpu_memory_utilization": 0.92} | settings
    chosen: dict[str, Any] = {"attention_backend": "FLASH_ATTN"}
    if sparroll is not None:
        from sparroll.engines.vllm import plugin

        # Also where sparroll is on the path but not installed, so that vLLM finds no entry point.
        plugin.register()
        chosen = {"attention_backend": "CUSTOM", "additional_config": {"sparroll": sparroll}}
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


def stop(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def step_seconds(llm: Any, context_tokens_B: list[int], steps: int = 24, warm: int = 6) -> list[float]:
    """Seconds of each of `steps` decode steps of exactly these requests, the host's work included."""
    import torch

    from vllm import SamplingParams

    engine = llm.llm_engine
    for number, context in enumerate(context_tokens_B):
        prompt = {"prompt_token_ids": [(7 * number + i) % VOCABULARY for i in range(context)]}
        # Enough tokens that nobody ends within the measurement.
        sampling = SamplingParams(max_tokens=steps + warm + 64, ignore_eos=True, temperature=1.0, detokenize=False)
        engine.add_request(f"r{number}-{time.perf_counter_ns()}", prompt, sampling)
    waiting = len(context_tokens_B)
    produced: dict[str, int] = {}
    while len(produced) < waiting:
        for output in engine.step():
            produced[output.request_id] = len(output.outputs[0].token_ids)
    for _ in range(warm):
        engine.step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        done = engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        assert len(done) == waiting, f"{len(done)} of {waiting} requests decoded in a step: the cache is too small"
    engine.abort_request(list(produced))
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)
