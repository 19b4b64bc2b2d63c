"""Seeds that do not depend on the number of processes, and generators that come back."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from sparroll.engines.sampling import uniforms
from sparroll.train.runtime.randomness import (
    correction_uniforms,
    generator_state,
    restore_generators,
    rollout_seeds,
    seed_everything,
)
from sparroll.types import Rollout


def test_a_prompts_seeds_are_the_same_on_any_process() -> None:
    whole = rollout_seeds(7, "rollout", 3, list(range(6)), 4)
    assert len(set(whole)) == 24
    ours = rollout_seeds(7, "rollout", 3, [1, 3, 5], 4)
    assert ours == [*whole[4:8], *whole[12:16], *whole[20:24]]


def test_steps_purposes_and_runs_draw_differently() -> None:
    drawn = [
        rollout_seeds(seed, purpose, step, [0], 1)[0]  # type: ignore[arg-type]
        for seed in (0, 1)
        for purpose in ("rollout", "evaluate", "ceiling", "correction")
        for step in (0, 1)
    ]
    assert len(set(drawn)) == len(drawn)


def test_a_rollouts_draws_for_the_correction_are_its_own() -> None:
    def draws(seed: int, step: int, prompt: int, sample: int, tokens: int = 40) -> list[float]:
        ids = list(range(tokens))
        rollout = Rollout([1], ids, torch.zeros(tokens), "stop", prompt_index=prompt, sample_index=sample)
        return correction_uniforms(seed, step, rollout).tolist()

    known = draws(7, 3, 2, 1)
    assert known == draws(7, 3, 2, 1)
    assert all(0 <= value < 1 for value in known)
    others = [draws(8, 3, 2, 1), draws(7, 4, 2, 1), draws(7, 3, 1, 1), draws(7, 3, 2, 0)]
    (seed,) = rollout_seeds(7, "rollout", 3, [2], 2)[1:]
    others.append(uniforms(seed, 40).tolist())
    assert all(set(known).isdisjoint(other) for other in others)


def test_generators_come_back_through_json() -> None:
    seed_everything(3)
    random.gauss(0, 1), np.random.standard_normal(), torch.rand(3)  # noqa: NPY002
    state = json.loads(json.dumps(generator_state()))
    first = (random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(2).tolist())  # noqa: NPY002
    restore_generators(state)
    assert first == (random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(2).tolist())  # noqa: NPY002
