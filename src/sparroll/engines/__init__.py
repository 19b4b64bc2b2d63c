"""Who runs the rollouts. `HFEngine` (hf/) runs any transformers decoder with plain attention and is the reference for
every other engine. `VLLMEngine` (vllm/) runs vLLM, for speed.

base.py is the protocol of both, and make.py makes either by its name. prompt_encoder.py turns prompts into token ids,
generate_arguments.py checks the arguments of `generate`, sampling.py draws tokens, and report.py says which attention
ran. load_model.py loads models, supported_models.py says which ones fit, adapter.py holds LoRA adapters, and scoring.py
gives the log-probabilities of tokens that an engine sampled.

Not here: what a step reads (attention/, schedule/) and training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparroll.engines.hf.engine import HFEngine
    from sparroll.engines.vllm.engine import VLLMEngine

__all__ = ["HFEngine", "VLLMEngine"]


def __getattr__(name: str) -> Any:
    # transformers is heavy, so it loads with the first engine and not with `import sparroll`.
    if name == "HFEngine":
        from sparroll.engines.hf.engine import HFEngine

        return HFEngine
    if name == "VLLMEngine":
        from sparroll.engines.vllm.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
