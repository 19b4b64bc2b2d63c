"""Seeds derived from the run's one seed, and the state of the process-wide generators for checkpoints. A rollout's seed
depends on its purpose, step, prompt and sample, so it is the same on any number of processes."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparroll.engines.sampling import request_seed, uniforms
from sparroll.types import Rollout

Purpose = Literal["rollout", "evaluate", "ceiling", "correction"]
_NUMBER = {"rollout": 0, "evaluate": 1, "ceiling": 2, "correction": 3}


def rollout_seeds(seed: int, purpose: Purpose, step: int, prompts: list[int], n: int) -> list[int]:
    """One seed per request, in the engine's order; prompts: their numbers within the step."""
    base = _step_seed(seed, purpose, step)
    return [request_seed(base, prompt, sample) for prompt in prompts for sample in range(n)]


def correction_uniforms(seed: int, step: int, rollout: Rollout) -> Tensor:
    """[T] float64 in [0, 1): a correction's draws for this rollout's tokens. They do not depend on the rest of the
    batch."""
    own = request_seed(_step_seed(seed, "correction", step), rollout.prompt_index, rollout.sample_index)
    return uniforms(own, len(rollout.response_ids))


def _step_seed(seed: int, purpose: Purpose, step: int) -> int:
    return request_seed(request_seed(seed, _NUMBER[purpose], 0), step, 0)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def generator_state() -> dict[str, Any]:
    """Python's, numpy's and torch's global generators as plain data."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
    }


def restore_generators(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
