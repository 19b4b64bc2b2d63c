"""How often the control group finds a reward gap where there is none, and how fast it finds one, over simulated runs
whose gap is known.

    python benchmarks/control_group_simulation.py --seed 1 --out benchmarks/results/control-group-simulation.json

Two events are counted, each as its first step in a run. A gap is *sure* where the evidence reaches gap_evidence.ALARM. The
*alarm* also asks that intervals lie beyond the tolerated gap (.05) and beyond 0. Cases:
  - false_alarms: no gap for 1,000 steps, in every world of control_group_world.py, with 8 and 16 samples of a prompt, 128
    rollouts a step; and with 32, 512 and 1,024 rollouts a step.
  - smaller: a gap that is tolerated (.01 to .05) for 1,000 steps. An alarm is no noise here, but it is not asked for either.
  - found: a gap of .05, .1 or .2 from the first step on, or from step 101 on, for several shares and sizes of a step.
  - worlds: the same with the default share, in every world.
  - first: several shares over several first steps, and gaps of .1 from the first step on.

The test and its constants are the real ones; intervals are computed for many runs at once. In some runs of each case
reward_gap.RewardGap itself is shown every step and must say the same (`confirmed`). All draws follow from --seed and the
case.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from control_group_world import POOL, WORLDS, Entries, Runs, World
from scipy import special, stats

from sparroll import records
from sparroll.control.control_group import ControlGroupSettings
from sparroll.control.gap_evidence import ALARM, HEAD_START, LOG_ODDS, LOOK_CLOSER, MOST, log_bets
from sparroll.control.paired_prompts import PairedPrompt, paired_prompts
from sparroll.control.reward_gap import SURE_CONFIDENCE, RewardGap
from sparroll.mismatch.bootstrap import CONFIDENCE, LEAST_ROLLOUTS

STEPS, LATE = 1000, 100
DEFAULT = ControlGroupSettings()
READ_SHARE = 0.3
"""What sparse rollouts read, of what dense ones read, in the column about cost."""
GAPS = (0.05, 0.1, 0.2)
NOT_UNDER_WAY = 10**9


@dataclass(frozen=True)
class Case:
    """Runs that are alike but for their draws."""

    part: str
    world: World = WORLDS[0]
    settings: ControlGroupSettings = DEFAULT
    gap: float = 0.0
    late: bool = False
    """Whether the gap begins behind step LATE, and not with the first step."""
    prompts: int = 16
    samples: int = 8

    @property
    def begins_after(self) -> int:
        return LATE if self.late else 0

    def about(self) -> dict[str, Any]:
        shares = {name: getattr(self.settings, name) for name in ("share", "share_first", "first_steps")}
        shape = {"prompts": self.prompts, "samples": self.samples, "rollouts": self.prompts * self.samples}
        return {"world": self.world.name, **shares, **shape, "gap": self.gap, "late": self.late}


@dataclass
class Found:
    """First steps of the events by run, 0 where there was none, and how many rollouts were dense."""

    sure_R: np.ndarray
    alarm_R: np.ndarray
    dense_share: float
    """Until the last step that was simulated."""


@cache
def bets_of(samples: int) -> np.ndarray:
    """log_bets for 0/1 rewards: [dense, right, dense and right, L], NaN where there is no such prompt."""
    most = samples // 2 + 1
    table = np.full((most + 1, samples + 1, most + 1, len(LOG_ODDS)), np.nan)
    for dense in range(1, most + 1):
        for right in range(samples + 1):
            for both in range(max(0, dense + right - samples), min(dense, right) + 1):
                table[dense, right, both] = log_bets(*rollouts_of(samples, dense, right, both))
    return table


def rollouts_of(samples: int, dense: int, right: int, both: int) -> tuple[list[float], list[bool]]:
    """-> (rewards, whether they are dense) of a prompt; both: dense and right."""
    rewards = [1.0] * both + [0.0] * (dense - both) + [1.0] * (right - both)
    return rewards + [0.0] * (samples - len(rewards)), [True] * dense + [False] * (samples - dense)


class Window:
    """The entries of the last steps, and RewardGap's intervals from them for some of the runs."""

    def __init__(self, case: Case, runs: int):
        self.case, self.runs = case, runs
        self.steps: deque[tuple[int, Entries, np.ndarray, np.ndarray]] = deque(maxlen=case.settings.window_steps)

    def add(self, step: int, entries: Entries) -> None:
        samples = self.case.samples
        weight_E = entries.dense_E * (samples - entries.dense_E) / samples
        excess_E = entries.dense_right_E - entries.dense_E * entries.right_E / samples
        self.steps.append((step, entries, weight_E, excess_E))

    def beyond(self, asked_R: np.ndarray, since_R: np.ndarray) -> np.ndarray:
        """Whether the intervals lie beyond the tolerated gap and 0, for the runs that are asked for; elsewhere false. Only
        steps after `since` count."""
        parts = []
        for step, each, weight_E, excess_E in self.steps:
            kept_E = (asked_R & (since_R < step))[each.run_E]
            parts.append([part_E[kept_E] for part_E in (each.run_E, each.prompt_E, weight_E, excess_E)])
        run_E, prompt_E, weight_E, excess_E = (np.concatenate(each) for each in zip(*parts, strict=True))
        if self.case.world.repeats:
            place_E = run_E * POOL + prompt_E
            weight_E, excess_E = (np.bincount(place_E, each, self.runs * POOL) for each in (weight_E, excess_E))
            run_E = np.repeat(np.arange(self.runs), POOL)
        total_R = np.bincount(run_E, weight_E, self.runs)
        with np.errstate(divide="ignore", invalid="ignore"):
            gap_R = np.bincount(run_E, excess_E, self.runs) / total_R
            prompts_R = total_R**2 / np.bincount(run_E, weight_E**2, self.runs)
            squares_R = np.bincount(run_E, (excess_E - weight_E * gap_R[run_E]) ** 2, self.runs)
            variance_R = squares_R / total_R**2 * prompts_R / (prompts_R - 1) + 0.5 / prompts_R**2
            low_R, sure_low_R = (
                gap_R - special.stdtrit(prompts_R - 1, (1 + confidence) / 2) * np.sqrt(variance_R)
                for confidence in (CONFIDENCE, SURE_CONFIDENCE)
            )
            beyond_R = (low_R > self.case.settings.reward_gap) & (sure_low_R > 0)
            return asked_R & (prompts_R >= LEAST_ROLLOUTS) & beyond_R


def simulate(case: Case, runs: int, seed: int, steps: int = STEPS, confirm: int = 0) -> Found:
    """Simulate until every run has had its alarm, or all of the steps. Where a gap is tolerated, alarms are only looked
    for in the parts that count them."""
    drawn = Runs(case.world, runs, case.prompts, case.samples, (seed, zlib.crc32(repr(case).encode())))
    settings, table = case.settings, bets_of(case.samples)
    counts_alarms = case.part in ("false_alarms", "smaller") or case.gap > (settings.reward_gap or 0)
    window, watched = Window(case, runs), [RewardGap(settings) for _ in range(confirm if counts_alarms else 0)]
    log_RL = np.full((runs, len(LOG_ODDS)), np.log1p(HEAD_START))
    sure_R, alarm_R, dense = np.zeros(runs, dtype=int), np.zeros(runs, dtype=int), 0.0
    # The step after which the evidence has been under way; as long as it is not, this is beyond every step.
    since_R, level_R = np.zeros(runs, dtype=int), np.full(runs, np.log1p(HEAD_START))
    for step in range(1, steps + 1):
        unsettled_R = (level_R >= np.log1p(LOOK_CLOSER)) & (level_R < np.log1p(ALARM))
        share_R = np.where(unsettled_R | (step <= settings.first_steps), settings.share_first, settings.share)
        dense += float(drawn.counts(step, share_R).mean())
        entries = drawn.step(step, steps, share_R, case.gap if step > case.begins_after else 0.0)
        bets_EL = table[entries.dense_E, entries.right_E, entries.dense_right_E]
        bets_LR = [np.bincount(entries.run_E, bets_E, runs) for bets_E in bets_EL.T]
        log_RL = np.logaddexp(np.minimum(log_RL + np.transpose(bets_LR), np.log(MOST)), 0)
        level_R = special.logsumexp(log_RL, 1) - np.log(len(LOG_ODDS))
        since_R = np.where(level_R < np.log1p(LOOK_CLOSER), NOT_UNDER_WAY, np.minimum(since_R, step))
        is_sure_R = level_R >= np.log1p(ALARM)
        window.add(step, entries)
        alarms_R = np.zeros(runs, dtype=bool)
        if counts_alarms and is_sure_R.any():
            asked_R = is_sure_R & (alarm_R == 0)
            alarms_R = window.beyond(asked_R, np.zeros(runs)) | window.beyond(asked_R, since_R)
        confirm_step(case, watched, step, entries, share_R, alarms_R, alarm_R)
        sure_R[(sure_R == 0) & is_sure_R], alarm_R[alarms_R] = step, step
        if (alarm_R if counts_alarms else sure_R).all():
            break
    return Found(sure_R, alarm_R, dense / step / (case.prompts * case.samples))


def confirm_step(
    case: Case,
    watched: list[RewardGap],
    step: int,
    entries: Entries,
    share_R: np.ndarray,
    alarms_R: np.ndarray,
    alarm_R: np.ndarray,
) -> None:
    """Show a step to RewardGap in the first runs, which must say the same, until its first alarm."""
    for run, real in enumerate(watched):
        if alarm_R[run]:
            continue
        assert real.share(step) == share_R[run], "the simulation and RewardGap disagree about the share"
        _, reason = real.observe(step, "sparse", pairs_of(case, step, entries, run))
        assert bool(reason) == bool(alarms_R[run]), f"the simulation and RewardGap disagree in step {step}: {reason}"


def pairs_of(case: Case, step: int, entries: Entries, run: int) -> list[PairedPrompt]:
    names, rewards, flags = {}, [], []
    for number, place in enumerate(np.nonzero(entries.run_E == run)[0]):
        counts = (int(each[place]) for each in (entries.dense_E, entries.right_E, entries.dense_right_E))
        own, dense = rollouts_of(case.samples, *counts)
        name = entries.prompt_E[place] if case.world.repeats else f"{step}/{number}"
        names[number], rewards, flags = str(name), rewards + own, flags + dense
    return paired_prompts(step, names, flags, {"reward": rewards})


def share(hits: int, runs: int) -> dict[str, Any]:
    """With its exact 95 % interval (Clopper and Pearson)."""
    interval = stats.binomtest(hits, runs).proportion_ci(method="exact")
    return {"runs": runs, "hits": hits, "share": hits / runs, "low": interval.low, "high": interval.high}


def alarms(case: Case, runs: int, seed: int, confirm: int) -> dict[str, Any]:
    """How many runs of STEPS steps find a gap, and how many raise an alarm."""
    found = simulate(case, runs, seed, confirm=confirm)
    sure, alarm = (share(int((each > 0).sum()), runs) for each in (found.sure_R, found.alarm_R))
    return case.about() | {"sure": sure, "alarm": alarm, "dense_share": found.dense_share, "confirmed": confirm}


def delays(case: Case, runs: int, seed: int, confirm: int) -> dict[str, Any]:
    """Steps from the beginning of the gap until it is sure, and until the alarm. Runs with an event before are left out,
    each event for itself."""
    found = simulate(case, runs, seed, confirm=confirm)
    kinds = {"sure": found.sure_R}
    if case.gap > (case.settings.reward_gap or 0):
        kinds["alarm"] = found.alarm_R
    return case.about() | {name: _delay(each, case) for name, each in kinds.items()} | {"confirmed": confirm}


def _delay(first_R: np.ndarray, case: Case) -> dict[str, Any]:
    begun_R = first_R[(first_R == 0) | (first_R > case.begins_after)]
    taken_R = np.where(begun_R == 0, np.inf, begun_R - case.begins_after)
    ends = [float(np.quantile(taken_R, level, method="higher")) for level in (0.5, 0.95)]
    median, most = (end if np.isfinite(end) else None for end in ends)
    within = share(int((taken_R <= 30).sum()), len(taken_R))
    return {"runs": len(taken_R), "median_steps": median, "q95_steps": most, "within_30_steps": within}


def constant(size: float) -> ControlGroupSettings:
    """The same share in all steps."""
    return replace(DEFAULT, share=size, share_first=size, first_steps=0)


def cases() -> list[tuple[Case, Callable[..., dict[str, Any]]]]:
    found = [
        *(Case("false_alarms", world, prompts=p, samples=s) for world in WORLDS for p, s in ((16, 8), (8, 16))),
        *(Case("false_alarms", prompts=prompts) for prompts in (4, 8, 64, 128)),
        *(Case("false_alarms", settings=constant(size)) for size in (1 / 32, 1 / 4)),
        *(Case("smaller", WORLDS[place], gap=gap) for place in (0, 3) for gap in (0.01, 0.02, 0.03, 0.04, 0.05)),
    ]
    for settings in (DEFAULT, *(constant(size) for size in (1 / 32, 1 / 16, 1 / 8, 1 / 4))):
        for prompts in (8, 16, 64, 128):
            for late in (False, True):
                found += [Case("found", WORLDS[0], settings, gap, late, prompts) for gap in GAPS]
    for world in WORLDS[:-1]:
        for prompts, samples in ((16, 8), (8, 16)):
            found += [Case("worlds", world, DEFAULT, 0.1, late, prompts, samples) for late in (False, True)]
    for size, steps in ((1 / 32, 0), (1 / 8, 30), (1 / 4, 0), (1 / 4, 10), (1 / 4, 20), (1 / 4, 30), (1 / 2, 15)):
        found.append(Case("first", settings=replace(DEFAULT, share_first=size, first_steps=steps), gap=0.1))
    return [(case, alarms if case.part in ("false_alarms", "smaller") else delays) for case in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0, help="all draws follow from it and the case")
    parser.add_argument("--runs", type=int, default=1000, help="without a gap")
    parser.add_argument("--smaller-runs", type=int, default=400, help="with a tolerated gap")
    parser.add_argument("--found-runs", type=int, default=400, help="with a gap")
    parser.add_argument("--confirm", type=int, default=1, help="runs of each case that RewardGap sees step by step")
    options = parser.parse_args()
    began, results = time.perf_counter(), {}
    for case, judged in cases():
        runs = {"false_alarms": options.runs, "smaller": options.smaller_runs}.get(case.part, options.found_runs)
        row = judged(case, runs, options.seed, options.confirm)
        results.setdefault(case.part, []).append(row)
        print(case.part, row, f"{time.perf_counter() - began:.0f} s", flush=True)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "seed")}
    config |= {"steps": STEPS, "late_after": LATE, "read_share": READ_SHARE, "defaults": DEFAULT}
    config |= {"worlds": {world.name: world.said for world in WORLDS}}
    config |= {"alarm": ALARM, "look_closer": LOOK_CLOSER, "log_odds": LOG_ODDS, "sure_confidence": SURE_CONFIDENCE}
    about = {"config": config, "seed": options.seed, "wall_seconds": time.perf_counter() - began}
    print(f"wrote {records.write(options.out, 'control-group-simulation', results, **about)}")


if __name__ == "__main__":
    main()
