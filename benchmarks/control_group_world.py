"""Simulated rollouts whose reward gap is known, many runs at once: what benchmarks/control_group_simulation.py judges.
Judges nothing itself.

Rewards are 0 and 1. A prompt has a probability of being solved by a dense rollout, and sparse decoding takes the same share
of it away on every prompt, so that the mean over all prompts is the gap. In the world "uneven" it takes from half of the
prompts what it gives to the other half: the gap is 0 in the mean and on no prompt.
"""

# R runs, E prompts with rollouts of both kinds in one step, of all runs together

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

POOL = 64
"""Different prompts of a run in which prompts come again. 16 of them make a step."""


@dataclass(frozen=True)
class World:
    name: str
    """How difficult its prompts are."""
    said: str
    """The same in words, for readers."""
    beta: tuple[float, float] | None = (1.0, 1.0)
    """Their solve rates are Beta(a, b). None: they drift from mostly unsolved to mostly solved over the run."""
    never: float = 0.0
    """Share of prompts that nobody ever solves."""
    always: float = 0.0
    repeats: bool = False
    """Whether a run has POOL prompts that come again and again."""
    uneven: float = 0.0
    """What sparse decoding adds to or takes from the solve rate of a prompt."""

    def rates(self, rng: np.random.Generator, count: int, passed: float) -> np.ndarray:
        """Solve rates of some prompts. passed: which share of the run is over."""
        a, b = (0.4 + 1.2 * passed, 1.6 - 1.2 * passed) if self.beta is None else self.beta
        kind, rates = rng.random(count), rng.beta(a, b, count)
        if self.uneven:
            rates = self.uneven + (1 - 2 * self.uneven) * rates
        return np.where(kind < self.never, 0.0, np.where(kind > 1 - self.always, 1.0, rates))

    def mean(self, passed: float) -> float:
        a, b = (0.4 + 1.2 * passed, 1.6 - 1.2 * passed) if self.beta is None else self.beta
        return self.always + (1 - self.always - self.never) * a / (a + b)


WORLDS = (
    World("all", "all difficulties"),
    World("extremes", "mostly easy or hard", (0.5, 0.5)),
    World("hard", "mostly hard", (0.5, 2.0)),
    World("decided", "60 % always or never solved", never=0.35, always=0.25),
    World("drift", "from hard to easy over the run", None),
    World("repeated", "64 prompts again and again", repeats=True),
    World("uneven", "64 prompts; sparse solves half of them .2 more often, half .2 less", repeats=True, uneven=0.2),
)
"""Of which only "uneven" breaks what the test for a gap assumes: that no prompt's rollouts differ."""


@dataclass(frozen=True)
class Entries:
    """The prompts with both kinds of one step, of all runs in turn."""

    run_E: np.ndarray
    prompt_E: np.ndarray
    """In a world that repeats: its number in the run's pool."""
    dense_E: np.ndarray
    """Dense rollouts of the prompt."""
    right_E: np.ndarray
    """Right rollouts of the prompt, of both kinds."""
    dense_right_E: np.ndarray


class Runs:
    """So many runs of one world at once. prompts and samples: of one step."""

    def __init__(self, world: World, runs: int, prompts: int, samples: int, seed: tuple[int, ...]):
        self.world, self.runs, self.prompts, self.samples = world, runs, prompts, samples
        self.rng = np.random.default_rng(seed)
        self.moved_R = self.rng.random(runs)
        """The draw of each run's seed that control_group.dense_count moves its counts by."""
        pool = world.rates(self.rng, runs * POOL, 0.0) if world.repeats else np.zeros(0)
        self.pool_RP = pool.reshape(runs, -1)

    def counts(self, step: int, share_R: np.ndarray) -> np.ndarray:
        """Dense rollouts of this step (from 1) in each run: control_group.dense_count."""
        each_R = share_R * self.prompts * self.samples
        after, before = np.floor(each_R * step + self.moved_R), np.floor(each_R * (step - 1) + self.moved_R)
        return (after - before).astype(int)

    def step(self, step: int, steps: int, share_R: np.ndarray, gap: float) -> Entries:
        """Draw one step. steps: of the whole run, for the drift."""
        each_R, more_R = np.divmod(self.counts(step, share_R), self.prompts)
        dense_RG = each_R[:, None] + (np.arange(self.prompts) < more_R[:, None])
        run_E, place_E = np.nonzero(dense_RG)
        dense_E, passed = dense_RG[run_E, place_E], step / steps
        prompt_E = place_E
        if self.world.repeats:
            order_RP = self.rng.random((self.runs, POOL)).argsort(1)
            prompt_E = order_RP[run_E, place_E]
            rate_E = self.pool_RP[run_E, prompt_E]
        else:
            rate_E = self.world.rates(self.rng, len(run_E), passed)
        sparse_rate_E = rate_E * (1 - gap / self.world.mean(passed))
        if self.world.uneven:
            sparse_rate_E = sparse_rate_E + np.where(prompt_E % 2, self.world.uneven, -self.world.uneven)
        dense_right_E = self.rng.binomial(dense_E, rate_E)
        sparse_right_E = self.rng.binomial(self.samples - dense_E, np.clip(sparse_rate_E, 0, 1))
        return Entries(run_E, prompt_E, dense_E, dense_right_E + sparse_right_E, dense_right_E)
