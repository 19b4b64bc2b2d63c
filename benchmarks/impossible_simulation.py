"""How often the guard cries wolf over impossible tokens, and how fast it finds too many, over simulated runs whose share is
known.

    python benchmarks/impossible_simulation.py --seed 0 --out benchmarks/results/impossible-simulation.json

A step has 64 rollouts with 100 tokens each in each of 18 bins of context lengths; a thin one 8 rollouts with 20 tokens each.
Impossible tokens come in bursts of geometric length, at a rate that varies between rollouts (a gamma of mean 1). Cases, for
each limit and each law of the bursts:
  - half: the true share is half of the limit in every bin for 1,000 steps. An alarm is false.
  - at: it is at the limit exactly. Nobody asks for silence here; the share of runs says how close to the edge the guard
    works.
  - risen: half of the limit everywhere, until one bin rises to five times the limit and stays. An alarm should come within
    the window; where bins are merged to have enough tokens, only a part of it is that bin.
  - thin half, thin risen: the same with thin steps; risen means that all bins rise to thirty times the limit.

The limit and its test are the real ones. What cannot end in an alarm is left out: the lower bound is over the limit only if
the window has more events than the bound for independent tokens asks for, so only such windows are tested; and windows
with the same counts have one answer, which is kept. Some runs of each case are shown to the real guard step by step, which
must say the same. All draws follow from --seed, the case and the number of the run. An upper bound of 1 % for the share of
runs with a false alarm takes 368 runs without any, or 720 with two.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from scipy import special, stats

from sparroll import records
from sparroll.control.guard import FALSE_ALARM_ABOVE, Guard, confidence_of
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import StepEvidence
from sparroll.mismatch import TailStatistics
from sparroll.mismatch.histogram import CELLS
from sparroll.mismatch.impossible import ImpossibleTokens
from sparroll.mismatch.tail import FORMAT
from sparroll.schedule import Schedule

BIN, BINS, WINDOW_STEPS, LEAST_TOKENS, NATS = 2000, 18, 10, 200, 10
THICK, THIN = (64, 100), (8, 20)
"""Rollouts of a step, and tokens of each in each bin."""
LIMITS = (1e-3, 1e-4)
LAWS = ((1.0, 0.0), (3.0, 0.0), (1.0, 1.0), (3.0, 1.0), (8.0, 1.0))
"""(Mean length of a burst, variance of the rate between rollouts)."""
RISEN, THIN_RISEN = 5.0, 30.0
SCHEDULE = Schedule.fixed(512)
FAR = 12.0


@dataclass
class Run:
    """One simulated run."""

    limit: ImpossibleLimit
    tokens: int
    """Of each rollout in each bin."""
    events_SUB: np.ndarray
    """Impossible tokens of each step, rollout and bin."""

    def alarms(self) -> int | None:
        """The first step (from 0) with an alarm; None without one."""
        for step, group, tests in self._candidates():
            window_SUB = self.events_SUB[max(0, step + 1 - WINDOW_STEPS) : step + 1, :, list(group)]
            events_SU = window_SUB.sum(2, dtype=np.int64)
            counts = events_SU.size, self.tokens * len(group), int(events_SU.sum()), int((events_SU**2).sum())
            if surely_exceeded(self.limit, *counts, tests):
                return step
        return None

    def alarms_by_guard(self) -> int | None:
        """The same, every step shown to the guard."""
        guard = Guard("stop", None, WINDOW_STEPS, least_tokens=LEAST_TOKENS, impossible=self.limit)
        for step in range(len(self.events_SUB)):
            if guard.watch(StepEvidence(step + 1, SCHEDULE, False, self._statistics(step), {})).action == "stop":
                return step
        return None

    def _statistics(self, step: int) -> TailStatistics:
        """What `TailStatistics.add` makes of a step's rollouts, with acceptances of 1."""
        rollouts, bins = self.events_SUB.shape[1:]
        return _all_ones(rollouts, bins, self.tokens, _impossible(self.events_SUB[step].astype(np.int64), self.tokens))

    def _candidates(self) -> list[tuple[int, tuple[int, ...], int]]:
        """(step, bins that are tested together, tests of that step) wherever the window has more events than the bound
        for independent tokens asks for, in the order of the steps."""
        steps, rollouts, bins = self.events_SUB.shape
        window_SB = self.events_SUB.sum(1, dtype=np.int64).cumsum(0)
        window_SB[WINDOW_STEPS:] -= window_SB[:-WINDOW_STEPS].copy()
        found = []
        for seen in range(1, min(WINDOW_STEPS, steps) + 1):
            last = steps if seen == WINDOW_STEPS else seen
            groups = groups_of(self.limit, rollouts, bins, self.tokens, seen)
            for group in groups:
                tokens = len(group) * rollouts * self.tokens * seen
                events_S = window_SB[seen - 1 : last, list(group)].sum(1)
                over_S = np.nonzero(events_S >= least_events(self.limit.at_most, tokens, len(groups)))[0]
                found += [(seen - 1 + int(at), group, len(groups)) for at in over_S]
        return sorted(found)


@cache
def least_events(at_most: float, tokens: int, tests: int) -> int:
    """Fewest events among so many independent tokens whose lower bound is over the limit."""
    events_E = np.arange(1, tokens + 1)
    bound_E = special.betaincinv(events_E, tokens - events_E + 1, (1 - confidence_of(tests)) / 2)
    return int(events_E[bound_E > at_most][0])


@cache
def surely_exceeded(
    limit: ImpossibleLimit, rollouts: int, tokens: int, events: int, squared_events: int, tests: int
) -> bool:
    """The real test of a window with so many rollouts, of so many tokens each. squared_events: the sum of the squares of
    their events. Nothing else of a window of alike rollouts goes into the test."""
    counted = _of_sums(rollouts, tokens, np.array([events]), np.array([[squared_events]]))
    window = cast(TailWindow, SimpleNamespace(impossible=lambda _: counted))
    sure = confidence_of(tests), confidence_of(tests, FALSE_ALARM_ABOVE)
    return limit.surely_exceeded(window, [0], *sure) is not None


def _impossible(events_UB: np.ndarray, tokens: int) -> ImpossibleTokens:
    """Counts of rollouts with so many tokens in each bin. Events are beyond NATS, not beyond 20 nats."""
    return _of_sums(len(events_UB), tokens, events_UB.sum(0), events_UB.T @ events_UB)


def _of_sums(rollouts: int, tokens: int, counts_B: np.ndarray, counts_BB: np.ndarray) -> ImpossibleTokens:
    """counts_B: events over all rollouts; counts_BB: sums over rollouts of the products of their events."""
    events_B, products_BB, bins = torch.from_numpy(counts_B), torch.from_numpy(counts_BB), len(counts_B)
    sums_BS = torch.zeros(bins, 5, dtype=torch.int64)
    sums_BS[:, 0], sums_BS[:, 1:4] = rollouts * tokens, events_B[:, None]
    products_BBP = torch.zeros(bins, bins, 9, dtype=torch.int64)
    products_BBP[..., 0] = rollouts * tokens**2
    products_BBP[..., 1:4] = (events_B * tokens)[:, None, None]
    products_BBP[..., 5:8] = products_BB[..., None]
    state = {
        "settings": torch.tensor([FORMAT, CELLS, BIN, 20, 0]),
        "impossible_bins": torch.arange(bins),
        "impossible_sums": sums_BS,
        "impossible_products": products_BBP,
    }
    return ImpossibleTokens.from_state(state)


def _all_ones(rollouts: int, bins: int, tokens: int, impossible: ImpossibleTokens) -> TailStatistics:
    counts_BC = torch.zeros(bins, CELLS, dtype=torch.int64)
    counts_BC[:, -1] = rollouts * tokens
    sums = torch.tensor([[rollouts, rollouts * tokens**2, rollouts * tokens * 2**26, 0, 0]]).expand(bins, -1)
    state = TailStatistics(BIN, replicates=20).state() | {
        "bins": torch.arange(bins),
        "counts": counts_BC,
        "replicates": counts_BC[:, None].to(torch.int32).expand(-1, 20, -1).clone(),
        "sums": sums.clone(),
        "overall": torch.tensor([rollouts, rollouts * (bins * tokens) ** 2]),
    }
    return TailStatistics.from_state(state | impossible.state())


@cache
def groups_of(limit: ImpossibleLimit, rollouts: int, bins: int, tokens: int, steps: int) -> list[tuple[int, ...]]:
    """Which bins the guard tests together once its window holds so many steps. Depends on the amount of data alone."""
    window = TailWindow(steps)
    for step in range(steps):
        none = _impossible(np.zeros((rollouts, bins), dtype=np.int64), tokens)
        window.add(step + 1, _all_ones(rollouts, bins, tokens, none))
    return [tuple(start // BIN for start in group) for group in limit.groups(window, LEAST_TOKENS)]


def simulated(
    limit: float,
    law: tuple[float, float],
    size: tuple[int, int],
    times_SB: np.ndarray,
    name: str,
    number: int,
    seed: int,
) -> Run:
    """times_SB: the true share of each step and bin, as a multiple of the limit."""
    (mean, spread), (rollouts, tokens) = law, size
    stream = zlib.crc32(f"{name} {limit} {law} {size}".encode())
    rng = np.random.default_rng((seed, number, stream))
    steps, bins = times_SB.shape
    rate_SU1 = rng.gamma(1 / spread, spread, (steps, rollouts, 1)) if spread else 1.0
    bursts_SUB = rng.poisson(limit / mean * tokens * times_SB[:, None] * rate_SU1, (steps, rollouts, bins))
    # A sum of n geometric lengths is n and a negative binomial number more.
    events_SUB = bursts_SUB.astype(np.int64)
    more = bursts_SUB > 0
    if mean > 1:
        events_SUB[more] += rng.negative_binomial(bursts_SUB[more], 1 / mean)
    return Run(ImpossibleLimit(NATS, limit), tokens, np.minimum(events_SUB, tokens).astype(np.int16))


def share(hits: int, runs: int) -> dict[str, Any]:
    """With its exact 95 % interval (Clopper and Pearson)."""
    interval = stats.binomtest(hits, runs).proportion_ci(method="exact")
    return {"runs": runs, "alarms": hits, "share": hits / runs, "low": interval.low, "high": interval.high}


def found_in_time(firsts: Sequence[int | None], before: int) -> dict[str, Any]:
    """How many rises behind step `before` were found, and after how many steps."""
    delays = [first + 1 - before for first in firsts if first is not None and first >= before]
    return share(len(delays), len(firsts)) | {"median_steps": float(np.median(delays)) if delays else None}


def case(job: tuple[float, tuple[float, float], argparse.Namespace]) -> dict[str, Any]:
    """All figures of one limit and one law."""
    limit, law, options = job
    half, at = np.full((options.steps, BINS), 0.5), np.full((options.steps, BINS), 1.0)
    one, all_bins = (np.full((2 * WINDOW_STEPS, BINS), 0.5) for _ in range(2))
    one[WINDOW_STEPS:, 0], all_bins[WINDOW_STEPS:] = RISEN, THIN_RISEN

    def runs(name: str, times_SB: np.ndarray, size: tuple[int, int], count: int) -> list[int | None]:
        found = []
        for number in range(count):
            run = simulated(limit, law, size, times_SB, name, number, options.seed)
            found.append(run.alarms())
            if number < options.confirm and len(times_SB) <= 2 * WINDOW_STEPS:
                assert run.alarms_by_guard() == found[-1], "the short cut and the guard disagree"
        return found

    def alarmed(name: str, times_SB: np.ndarray, size: tuple[int, int], count: int) -> dict[str, Any]:
        return share(sum(first is not None for first in runs(name, times_SB, size, count)), count)

    return {
        "at_most": limit,
        "burst_tokens_mean": law[0],
        "rate_variance": law[1],
        "groups": len(groups_of(ImpossibleLimit(NATS, limit), THICK[0], BINS, THICK[1], WINDOW_STEPS)),
        "half": alarmed("half", half, THICK, options.runs),
        "at": alarmed("at", at, THICK, options.at_runs),
        "risen": found_in_time(runs("risen", one, THICK, options.risen_runs), WINDOW_STEPS),
        "thin_half": alarmed("thin half", half, THIN, options.runs),
        "thin_risen": found_in_time(runs("thin risen", all_bins, THIN, options.risen_runs), WINDOW_STEPS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0, help="all draws follow from it and the number of the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=1000, help="with half of the limit")
    parser.add_argument("--at-runs", type=int, default=100, help="at the limit")
    parser.add_argument("--risen-runs", type=int, default=200)
    parser.add_argument(
        "--confirm", type=int, default=2, help="risen runs of each case that the guard sees step by step"
    )
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    options = parser.parse_args()
    began = time.perf_counter()
    jobs = [(limit, law, options) for limit in LIMITS for law in LAWS]
    with multiprocessing.get_context("spawn").Pool(options.at_once) as pool:
        cases = []
        for each in pool.imap(case, jobs):
            print(each, flush=True)
            cases.append(each)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "seed")}
    config |= {"bins": BINS, "window_steps": WINDOW_STEPS, "least_tokens": LEAST_TOKENS, "nats": NATS}
    config |= {"rollouts_and_tokens": THICK, "thin_rollouts_and_tokens": THIN}
    config |= {"risen": RISEN, "thin_risen": THIN_RISEN}
    about = {"config": config, "seed": options.seed, "wall_seconds": time.perf_counter() - began}
    print(f"wrote {records.write(options.out, 'impossible-simulation', cases, **about)}")


if __name__ == "__main__":
    main()
