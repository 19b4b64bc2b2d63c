"""Figures in sentences about training the tiny model, and about the guard. Measures nothing; claims.py puts them on the
pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from claims_speed import Claims, Figures, bare, down, up
from record_tables import RESULTS, results

from sparroll import records


def tiny_adapter() -> Figures:
    found = results("distill-tiny", "distill")
    before, after = found["before"]["q05"], found["after"]["q05"]
    return {
        "closed": down(100 * (after - before) / (1 - before)),
        "read": up(100 * found["kv_read_share"]),
        "ceiling": bare(down(found["dense_ceiling_q05"], 3)),
        "before": bare(down(before, 2)),
        "after": bare(down(after, 2)),
    }


def rl_grid() -> Figures:
    runs = results("rl-grid-tiny", "rl-grid")

    def of(schedule: str) -> list[dict[str, Any]]:
        return [run for run in runs if run["schedule"] == schedule]

    after = {name: [run["dense_accuracy"][-1] for run in of(name)] for name in ("dense", "calibrated")}
    dense, calibrated = (statistics.mean(after[name]) for name in ("dense", "calibrated"))
    reward = {
        name: statistics.mean(statistics.mean(run["reward"][-5:]) for run in of(name))
        for name in ("dense", "fixed-128")
    }
    # Of each accuracy from its held-out prompts, then of the difference of two means.
    error = max((share * (1 - share) / 256) ** 0.5 for share in after["dense"] + after["calibrated"])
    return {
        "difference": bare(up(dense - calibrated, 3)),
        "error": bare(up(error * (1 / len(after["dense"]) + 1 / len(after["calibrated"])) ** 0.5, 3)),
        "one": up(error, 3),
        "lost": up(100 * (1 - reward["fixed-128"] / reward["dense"])),
    }


def quickstart() -> Figures:
    record = records.read(RESULTS / "quickstart-seed-0.json", "quickstart")
    prompts = record["config"]["train"]["evaluate"]["prompts"]
    ends = [run[f"dense_accuracy_{end}"] for run in record["results"]["runs"].values() for end in ("first", "last")]
    error = max((share * (1 - share) / prompts) ** 0.5 for share in ends)
    return {
        "seconds": up(record["wall_seconds"]),
        "prompts": str(prompts),
        "error": up(error, 3),
        "bare_error": bare(up(error, 3)),
    }


def guard() -> Figures:
    """Runs with the tail above the target, and how many of them raised an alarm."""
    found = results("guard-simulation", "guard-simulation")
    at_target = [case["at"] for case in found if case["at"]]
    shares = [100 * case["alarms"] / case["runs"] for case in at_target]
    counts = {
        f"{name}_{what}": f"{sum(case[which][what] for case in found):,}"
        for name, which in (("all", "above"), ("thin", "thin_above"))
        for what in ("runs", "alarms")
    }
    return counts | {"at_target": down(min(shares))}


def replay() -> Figures:
    """By how much replay flatters the tail, where the tail is within .04 of .86."""
    rows = [row for row in results("replay", "replay")["rows"] if abs(row["faithful_q05"] - 0.86) < 0.04]
    off = [row["replay_q05"] - row["faithful_q05"] for row in rows]
    return {"least": bare(up(min(off), 2)), "most": bare(up(max(off), 2))}


PAGES: Mapping[str, Claims] = {
    "README.md": {
        "an accuracy is over {prompts} problems (standard error about {bare_error})": quickstart,
    },
    "docs/results.md": {
        "without the installation: {seconds} s.": quickstart,
        "Each is over {prompts} held-out prompts, with a standard error of about {error}": quickstart,
        "An adapter takes {closed} % of what the tiny model's tail lacks away.": tiny_adapter,
        "pages of 4 ({read} % of the cache read)": tiny_adapter,
        "the dense ceiling is {ceiling} (`distill-tiny.json`)": tiny_adapter,
        "256 held-out prompts make a standard error of about {one} per accuracy.": rl_grid,
        "the difference of their means is {difference}, its standard error {error}.": rl_grid,
        "The fixed budget loses {lost} % of the reward": rl_grid,
    },
    "docs/training.md": {
        "What this means: {all_alarms} of the {all_runs} runs with the tail .01 above the target raised an alarm": guard,
        "Of these {thin_runs} runs with the tail .01 above the target {thin_alarms} raised an alarm.": guard,
        "an alarm in at least {at_target} of 100 runs (correlation .1)": guard,
    },
    "docs/study.md": {
        "[A tiny model's tail](results.md#an-adapter-for-sparse-rollouts) went from {before} to {after}.": tiny_adapter,
    },
    "docs/calibration.md": {
        "Near 0.86 it is too high by {least} to {most} here.": replay,
    },
}
