"""How often the guard cries wolf, and how fast it finds a low tail, over simulated runs whose tail is known.

    python benchmarks/guard_simulation.py --out benchmarks/results/guard-simulation.json

A step has 64 rollouts with 16 tokens each in each of 18 bins (see guard_world.py). Cases, for each published shape and each
correlation between the tokens of a rollout:
  - above: the true tail is .01 above the target in every bin for 1,000 steps. An alarm is false.
  - at: it is at the target exactly. Nobody asks for silence here; the share says how close to the edge the guard works.
  - fallen: .01 above everywhere, until one bin falls to .03 below the target and stays. An alarm must come in 10 steps.
The old rule, for comparison: the lowest 5th percentile of a step's bins is under the target in five steps in a row.

The guard and its statistics are the real ones. What cannot end in an alarm is left out: a bin's upper bound is under the
target only if more of the window's tokens are under it than the bound for independent tokens asks for, so only such windows
are drawn token by token. tests/unit/control/test_guard_simulation.py shows that this is the guard, step by step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from guard_world import BIN_TOKENS, SHAPES, Shape, Tail, statistics_of
from scipy import special, stats

from sparroll import records
from sparroll.control.guard import Guard, confidence_of
from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import StepEvidence
from sparroll.mismatch import TailStatistics
from sparroll.schedule import Schedule

TARGET, ABOVE, BELOW = 0.86, 0.87, 0.83
BINS, WINDOW_STEPS, WITHIN = 18, 10, 10
CORRELATIONS = (0.0, 0.05, 0.1, 0.2, 0.3)
OLD_STEPS = 5
SCHEDULE = Schedule.fixed(512)


@dataclass
class Run:
    """One simulated run. below_BS: tokens under the target by bin and step; tails_BS: the law of each bin and step."""

    below_BS: np.ndarray
    tails_BS: np.ndarray
    number: int
    replicates: int = 200

    @property
    def steps(self) -> int:
        return self.below_BS.shape[1]

    @cached_property
    def tokens(self) -> int:
        """Of a step in a bin."""
        first = self.tails_BS[0, 0]
        return first.rollouts * first.tokens

    def statistics(self, step: int, bins: list[int] | None = None) -> TailStatistics:
        """What was measured in a step (from 0). The same tokens whenever and for whichever bins it is asked."""
        histograms = {}
        for place in range(len(self.below_BS)) if bins is None else bins:
            rng = np.random.default_rng((self.number, place, step))
            histograms[place] = self.tails_BS[place, step].cells(rng, int(self.below_BS[place, step]))
        names = [f"{self.number}/{step}#{rollout}" for rollout in range(self.tails_BS[0, 0].rollouts)]
        return statistics_of(histograms, names, self.replicates)

    def alarms_by_guard(self) -> list[int]:
        """Steps with an alarm until the first one, every step shown to the guard."""
        guard = Guard("stop", TARGET, WINDOW_STEPS)
        for step in range(self.steps):
            evidence = StepEvidence(step + 1, SCHEDULE, False, self.statistics(step), {})
            if guard.watch(evidence).action == "stop":
                return [step]
        return []

    def alarms(self) -> list[int]:
        """The same, where most windows need not be looked at."""
        places, steps = self._candidates()
        measured = cache(lambda step, place: self.statistics(step, [place]))
        for step, place in sorted(zip(steps.tolist(), places.tolist(), strict=True)):
            window = TailWindow(WINDOW_STEPS)
            for each in range(max(0, step + 1 - WINDOW_STEPS), step + 1):
                window.add(each + 1, measured(each, place))
            row = window.row(place * BIN_TOKENS, confidence=confidence_of(len(self.below_BS)))
            assert row is not None, "a bin without a token"
            if row.high < TARGET:
                return [step]
        return []

    def _candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """(bins, steps) whose window has more tokens under the target than the bound for independent tokens asks for."""
        sums_BS = self.below_BS.cumsum(1)
        sums_BS[:, WINDOW_STEPS:] -= sums_BS[:, :-WINDOW_STEPS].copy()
        tokens_S = self.tokens * np.minimum(np.arange(1, self.steps + 1), WINDOW_STEPS)
        beyond = (1 - confidence_of(len(self.below_BS))) / 2
        least_S = special.betaincinv(0.05 * tokens_S + 1, 0.95 * tokens_S, 1 - beyond) * tokens_S
        return np.nonzero(sums_BS >= np.floor(least_S))

    def old_rule(self) -> tuple[float, bool]:
        """Share of steps whose worst bin is under the target, and whether five in a row ever were."""
        under_S = (self.below_BS >= np.ceil(0.05 * self.tokens - 1e-9)).any(0)
        rows = np.convolve(under_S, np.ones(OLD_STEPS, dtype=int), "valid") if self.steps >= OLD_STEPS else np.zeros(1)
        return float(under_S.mean()), bool((rows == OLD_STEPS).any())


def steady(shape: Shape, tail: float, correlation: float, steps: int, number: int, bins: int = BINS) -> Run:
    """The same tail in every bin and step."""
    law = Tail(shape, tail, TARGET, correlation)
    below_BS = _sums(law).draw(np.random.default_rng((number, 0)), (bins, steps))
    return Run(below_BS, np.full((bins, steps), _sums(law), dtype=object), number)


def fallen(shape: Shape, correlation: float, number: int, bins: int = BINS, before: int = WINDOW_STEPS) -> Run:
    """One bin of a run falls behind step `before`."""
    run = steady(shape, ABOVE, correlation, before + WITHIN, number, bins)
    low = _sums(Tail(shape, BELOW, TARGET, correlation))
    run.tails_BS[0, before:] = low
    run.below_BS[0, before:] = low.draw(np.random.default_rng((number, 1)), (WITHIN,))
    return run


_LAWS: dict[Tail, Tail] = {}


def _sums(law: Tail) -> Tail:
    """One object for each law, since its tables take a second to make."""
    return _LAWS.setdefault(law, law)


def share(hits: int, runs: int) -> dict[str, Any]:
    """With its exact 95 % interval (Clopper and Pearson)."""
    interval = stats.binomtest(hits, runs).proportion_ci(method="exact")
    return {"runs": runs, "alarms": hits, "share": hits / runs, "low": interval.low, "high": interval.high}


def case(job: tuple[Shape, float, argparse.Namespace]) -> dict[str, Any]:
    """All figures of one shape and one correlation."""
    shape, correlation, options = job
    above = [steady(shape, ABOVE, correlation, options.steps, number) for number in range(options.runs)]
    old = [run.old_rule() for run in above]
    low = [fallen(shape, correlation, number) for number in range(options.fallen_runs)]
    found = [run.alarms() for run in low]
    delays = [each[0] + 1 - WINDOW_STEPS for each in found if each and each[0] >= WINDOW_STEPS]
    at_runs = options.at_runs if correlation == options.at_correlation else 0
    at = [steady(shape, TARGET, correlation, options.steps, number) for number in range(at_runs)]
    confirmed = [run.alarms_by_guard() == run.alarms() for run in low[: options.confirm]]
    assert all(confirmed), "the short cut and the guard disagree"
    return {
        "shape": shape.name,
        "correlation": correlation,
        "design_effect": Tail(shape, TARGET, TARGET, correlation).design_effect,
        "above": share(sum(bool(run.alarms()) for run in above), len(above)),
        "at": share(sum(bool(run.alarms()) for run in at), len(at)) if at else None,
        "fallen": share(len(delays), len(low)) | {"median_steps": float(np.median(delays)) if delays else None},
        "old_rule": {"steps_below": float(np.mean([each[0] for each in old]))}
        | share(sum(each[1] for each in old), len(old)),
        "confirmed_by_guard": len(confirmed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=400, help="with the tail above the target")
    parser.add_argument("--at-runs", type=int, default=100, help="with the tail at the target")
    parser.add_argument("--at-correlation", type=float, default=0.1, help="for which these are run: they take longest")
    parser.add_argument("--fallen-runs", type=int, default=200, help="with a bin that falls")
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
            print({name: each[name] for name in ("shape", "correlation")}, each["above"], each["fallen"], flush=True)
            cases.append(each)
    config = {name: value for name, value in vars(options).items() if name != "out"}
    config |= {"target": TARGET, "above": ABOVE, "below": BELOW, "bins": BINS, "within_steps": WITHIN}
    config |= {"rollouts": 64, "tokens_per_rollout_and_bin": 16, "window_steps": WINDOW_STEPS}
    wall = time.perf_counter() - began
    print(f"wrote {records.write(options.out, 'guard-simulation', cases, config=config, wall_seconds=wall)}")


if __name__ == "__main__":
    main()
