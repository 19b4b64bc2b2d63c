"""How often the guard cries wolf, and how fast it finds a low tail, over simulated runs whose tail is known.

    python benchmarks/guard_simulation.py --seed 2 --out benchmarks/results/guard-simulation.json

A step has 64 rollouts with 16 tokens each in each of 18 bins (see guard_world.py). Cases, for each published shape and each
correlation between the tokens of a rollout:
  - above: the true tail is .01 above the target in every bin for 1,000 steps. An alarm is false.
  - at: it is at the target exactly. Nobody asks for silence here; the share says how close to the edge the guard works.
  - fallen: .01 above everywhere, until one bin falls to .03 below the target and stays. An alarm must come in 10 steps.
  - thin: a step has 8 rollouts with 2 tokens each in each of 18 bins, and the tokens of a rollout depend on each other
    across its bins, too. No bin ever has enough tokens alone: the guard merges 13 of them at the first step and 2 of them
    once the window is full. "above" as above; "fallen" means that all bins fall to .6, since so few tokens cannot show a
    small fall.
The old rule, for comparison: the lowest 5th percentile of a step's bins is under the target in five steps in a row.

The guard and its statistics are the real ones. What cannot end in an alarm is left out: an upper bound is under the target
only if more of the window's tokens are under it than the bound for independent tokens asks for, so only such windows are
tested. tests/unit/control/test_guard_simulation.py shows that this is the guard, step by step. All draws follow from --seed,
the number of the run and the case, so another seed gives other runs, and the runs of all cases are independent.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from guard_world import BIN_TOKENS, SHAPES, Shape, Tail, histograms_of, statistics_of
from scipy import special, stats

from sparroll import records
from sparroll.control.guard import Guard, confidence_of, surely_low
from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import StepEvidence
from sparroll.mismatch import TailStatistics
from sparroll.schedule import Schedule

TARGET, ABOVE, BELOW, COLLAPSED = 0.86, 0.87, 0.83, 0.6
BINS, WINDOW_STEPS, WITHIN = 18, 10, 10
THICK, THIN = (64, 16), (8, 2)
"""Rollouts of a step, and tokens of each in each bin."""
CORRELATIONS = (0.0, 0.05, 0.1, 0.2, 0.3)
LEAST_TOKENS = 200
OLD_STEPS = 5
SCHEDULE = Schedule.fixed(512)


@dataclass
class Run:
    """One simulated run. All of its bins have equally many tokens."""

    name: str
    """No two runs have the same rollouts, so their names differ."""
    below_BS: np.ndarray
    """Tokens under the target by bin and step."""
    rollouts: int
    tokens: int
    """Of each rollout in each bin."""
    histograms: Callable[[int, int], np.ndarray]
    """(bin, step) -> the tokens of each rollout, [U, C]. The same whenever it is asked."""
    replicates: int = 200

    @property
    def bins(self) -> int:
        return self.below_BS.shape[0]

    @property
    def steps(self) -> int:
        return self.below_BS.shape[1]

    def statistics(self, step: int, bins: Sequence[int] | None = None) -> TailStatistics:
        """What was measured in a step (from 0), in all bins or in some."""
        asked = range(self.bins) if bins is None else bins
        names = [f"{self.name}/{step}#{rollout}" for rollout in range(self.rollouts)]
        return statistics_of({place: self.histograms(place, step) for place in asked}, names, self.replicates)

    def alarms_by_guard(self) -> list[int]:
        """Steps with an alarm until the first one, every step shown to the guard."""
        guard = Guard("stop", TARGET, WINDOW_STEPS, least_tokens=LEAST_TOKENS)
        for step in range(self.steps):
            evidence = StepEvidence(step + 1, SCHEDULE, False, self.statistics(step), {})
            if guard.watch(evidence).action == "stop":
                return [step]
        return []

    def alarms(self) -> list[int]:
        """The same, where most windows need not be looked at."""
        measured = cache(lambda step, group: self.statistics(step, group).packed_state())
        for step, group, tests in self._candidates():
            window = TailWindow(WINDOW_STEPS)
            steps = range(max(0, step + 1 - WINDOW_STEPS), step + 1)
            window.evidence = tuple((each + 1, measured(each, group)) for each in steps)
            if surely_low(window, [place * BIN_TOKENS for place in group], tests, TARGET) is not None:
                return [step]
        return []

    def _candidates(self) -> list[tuple[int, tuple[int, ...], int]]:
        """(step, bins that are tested together, how many such tests) wherever more tokens of the window are under the
        target than the bound for independent tokens asks for, in the order of the steps."""
        window_BS = self.below_BS.cumsum(1)
        window_BS[:, WINDOW_STEPS:] -= window_BS[:, :-WINDOW_STEPS].copy()
        found = []
        for steps in range(1, min(WINDOW_STEPS, self.steps) + 1):
            last = self.steps if steps == WINDOW_STEPS else steps
            groups = groups_of(self.bins, self.rollouts, self.tokens, steps)
            for group in groups:
                tokens = len(group) * self.rollouts * self.tokens * steps
                beyond = (1 - confidence_of(len(groups))) / 2
                least = np.floor(special.betaincinv(0.05 * tokens + 1, 0.95 * tokens, 1 - beyond) * tokens)
                below_S = window_BS[list(group), steps - 1 : last].sum(0)
                found += [(steps - 1 + int(at), group, len(groups)) for at in np.nonzero(below_S >= least)[0]]
        return sorted(found)

    def old_rule(self) -> tuple[float, bool]:
        """Share of steps whose worst bin is under the target, and whether five in a row ever were."""
        under_S = (self.below_BS >= np.ceil(0.05 * self.rollouts * self.tokens - 1e-9)).any(0)
        rows = np.convolve(under_S, np.ones(OLD_STEPS, dtype=int), "valid") if self.steps >= OLD_STEPS else np.zeros(1)
        return float(under_S.mean()), bool((rows == OLD_STEPS).any())


@cache
def groups_of(bins: int, rollouts: int, tokens: int, steps: int) -> list[tuple[int, ...]]:
    """Which bins the guard tests together once its window holds so many steps. Depends on the amount of data alone."""
    each = np.zeros((rollouts, 2002), dtype=int)
    each[:, -1] = tokens
    window = TailWindow(steps)
    for step in range(steps):
        names = [f"{step}#{rollout}" for rollout in range(rollouts)]
        window.add(step + 1, statistics_of(dict.fromkeys(range(bins), each), names, replicates=20))
    return [tuple(start // BIN_TOKENS for start in group) for group in window.groups(LEAST_TOKENS)]


def steady(
    shape: Shape, tail: float, correlation: float, steps: int, number: int, bins: int = BINS, seed: int = 0
) -> Run:
    """The same tail in every bin and step."""
    law = _law(Tail(shape, tail, TARGET, correlation, *THICK))
    below_BS = law.draw(np.random.default_rng((seed, number, 0, _stream(law))), (bins, steps))
    return _thick(below_BS, np.full((bins, steps), law, dtype=object), number, seed)


def fallen(
    shape: Shape, correlation: float, number: int, bins: int = BINS, before: int = WINDOW_STEPS, seed: int = 0
) -> Run:
    """One bin of a run falls behind step `before`."""
    high, low = (_law(Tail(shape, tail, TARGET, correlation, *THICK)) for tail in (ABOVE, BELOW))
    below_BS = high.draw(np.random.default_rng((seed, number, 1, _stream(high))), (bins, before + WITHIN))
    below_BS[0, before:] = low.draw(np.random.default_rng((seed, number, 1, _stream(low))), (WITHIN,))
    tails_BS = np.full(below_BS.shape, high, dtype=object)
    tails_BS[0, before:] = low
    return _thick(below_BS, tails_BS, number, seed)


def thin(shape: Shape, tails: Sequence[float], correlation: float, number: int, bins: int = BINS, seed: int = 0) -> Run:
    """A run whose bins have too few tokens alone. tails: the true one of each step, in all bins."""
    laws = [_law(Tail(shape, tail, TARGET, correlation, *THIN)) for tail in tails]
    rng = np.random.default_rng((seed, number, 3, _stream(laws[-1])))
    cells_SBUT = np.stack([law.cells_of_all_bins(rng, bins) for law in laws])
    below_BS = (cells_SBUT <= laws[0].border_cell).sum((2, 3)).T
    return Run(f"{seed}.{number}", below_BS, *THIN, lambda place, step: histograms_of(cells_SBUT[step, place]))


def _thick(below_BS: np.ndarray, tails_BS: np.ndarray, number: int, seed: int) -> Run:
    """tails_BS: the law of each bin and step, from which the tokens are drawn given how many are under the target."""

    def histograms(place: int, step: int) -> np.ndarray:
        law = tails_BS[place, step]
        rng = np.random.default_rng((seed, number, 2, place, step, _stream(law)))
        drawn: np.ndarray = law.cells(rng, int(below_BS[place, step]))
        return drawn

    return Run(f"{seed}.{number}", below_BS, *THICK, histograms)


def _stream(law: Tail) -> int:
    """What is drawn from one law owes nothing to what is drawn from another, so runs of all cases may be counted
    together."""
    return zlib.crc32(f"{law.shape.name} {law.tail} {law.correlation} {law.rollouts} {law.tokens}".encode())


_LAWS: dict[Tail, Tail] = {}


def _law(law: Tail) -> Tail:
    """One object for each law, since its tables take a second to make."""
    return _LAWS.setdefault(law, law)


def share(hits: int, runs: int) -> dict[str, Any]:
    """With its exact 95 % interval (Clopper and Pearson)."""
    interval = stats.binomtest(hits, runs).proportion_ci(method="exact")
    return {"runs": runs, "alarms": hits, "share": hits / runs, "low": interval.low, "high": interval.high}


def found_in_time(runs: Sequence[Run]) -> dict[str, Any]:
    """How many of the falls behind step WINDOW_STEPS were found, and after how many steps."""
    found = [run.alarms() for run in runs]
    delays = [each[0] + 1 - WINDOW_STEPS for each in found if each and each[0] >= WINDOW_STEPS]
    return share(len(delays), len(runs)) | {"median_steps": float(np.median(delays)) if delays else None}


def confirmed(runs: Sequence[Run]) -> int:
    """How many of these runs were shown to the guard step by step, which must say the same as the short cut."""
    assert all(run.alarms_by_guard() == run.alarms() for run in runs), "the short cut and the guard disagree"
    return len(runs)


def case(job: tuple[Shape, float, argparse.Namespace]) -> dict[str, Any]:
    """All figures of one shape and one correlation."""
    shape, correlation, options = job
    steps, seed = options.steps, options.seed
    above = [steady(shape, ABOVE, correlation, steps, number, seed=seed) for number in range(options.runs)]
    old = [run.old_rule() for run in above]
    low = [fallen(shape, correlation, number, seed=seed) for number in range(options.fallen_runs)]
    at_runs = options.at_runs if correlation == options.at_correlation else 0
    at = [steady(shape, TARGET, correlation, steps, number, seed=seed) for number in range(at_runs)]
    falling = [ABOVE] * WINDOW_STEPS + [COLLAPSED] * WITHIN
    thin_low = [thin(shape, falling, correlation, number, seed=seed) for number in range(options.thin_fallen_runs)]
    thin_above = (thin(shape, [ABOVE] * steps, correlation, number, seed=seed) for number in range(options.thin_runs))
    return {
        "shape": shape.name,
        "correlation": correlation,
        "design_effect": Tail(shape, TARGET, TARGET, correlation, *THICK).design_effect,
        "above": share(sum(bool(run.alarms()) for run in above), len(above)),
        "at": share(sum(bool(run.alarms()) for run in at), len(at)) if at else None,
        "fallen": found_in_time(low),
        "thin_above": share(sum(bool(run.alarms()) for run in thin_above), options.thin_runs),
        "thin_fallen": found_in_time(thin_low),
        "old_rule": {"steps_below": float(np.mean([each[0] for each in old]))}
        | share(sum(each[1] for each in old), len(old)),
        "confirmed_by_guard": confirmed([*low[: options.confirm], *thin_low[: options.confirm]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0, help="all draws follow from it and the number of the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=400, help="with the tail above the target")
    parser.add_argument("--at-runs", type=int, default=100, help="with the tail at the target")
    parser.add_argument("--at-correlation", type=float, default=0.1, help="for which these are run: they take longest")
    parser.add_argument("--fallen-runs", type=int, default=200, help="with a bin that falls")
    parser.add_argument("--thin-runs", type=int, default=400, help="thin ones with the tail above the target")
    parser.add_argument("--thin-fallen-runs", type=int, default=60, help="thin ones that fall")
    parser.add_argument("--confirm", type=int, default=1, help="runs of each case that the guard sees step by step")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--correlations", nargs="+", type=float, default=list(CORRELATIONS))
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    options = parser.parse_args()
    began = time.perf_counter()
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    jobs = [(shape, correlation, options) for shape in shapes for correlation in options.correlations]
    with multiprocessing.get_context("spawn").Pool(options.at_once) as pool:
        cases = []
        for each in pool.imap(case, jobs):
            said = {name: each[name] for name in ("shape", "correlation")}
            print(said, *(each[name] for name in ("above", "fallen", "thin_above", "thin_fallen")), flush=True)
            cases.append(each)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "seed")}
    config |= {
        "target": TARGET,
        "above": ABOVE,
        "below": BELOW,
        "thin_below": COLLAPSED,
        "bins": BINS,
        "within_steps": WITHIN,
    }
    config |= {"rollouts_and_tokens": THICK, "thin_rollouts_and_tokens": THIN, "window_steps": WINDOW_STEPS}
    config |= {"least_tokens": LEAST_TOKENS}
    about = {"config": config, "seed": options.seed, "wall_seconds": time.perf_counter() - began}
    print(f"wrote {records.write(options.out, 'guard-simulation', cases, **about)}")


if __name__ == "__main__":
    main()
