"""The whole grid as one record: per run the series of its steps, per row the figures of the table. Reads what the runs
wrote; runs nothing.

python recipes/mismatch-study/study_record.py a/study.json b/study.json --out study.json

puts parts together that were made on several machines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from study_jobs import Outcome  # noqa: E402
from study_rows import Row, Settings, model_sha256  # noqa: E402
from study_rows import rows as grid  # noqa: E402

from sparroll import files, records  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.train.runtime.sinks import read_lines  # noqa: E402

KIND = "mismatch-study"
SERIES = (
    "reward/mean",
    "reward/groups_all_equal_share",
    "rollout/response_tokens_mean",
    "rollout/cut_share",
    "rollout/kv_read_share",
    "mismatch/acceptance_mean",
    "mismatch/acceptance_q01",
    "mismatch/acceptance_q05",
    "mismatch/acceptance_q05_worst_bin",
    "mismatch/dense_ceiling_q05",
    "mismatch/kl_sparse_to_dense",
    "policy/clipped_share",
    "policy/gradient_norm",
    "control/share",
    "control/rollouts",
    "control/pairs",
    "control/reward_gap",
    "control/reward_gap_low",
    "control/reward_gap_high",
    "control/reward_gap_evidence",
    "control/step_reward_gap",
)
FAMILIES = (
    "mismatch/acceptance_q05/",
    "correction/",
    "compression/",
    "check/",
    "controller/",
    "distill/",
    "time/",
)
"""Of these every metric is kept."""
GAP_ALARM = "sparse rollouts get less reward"
"""How the guard's event about the control group begins."""


def make_record(
    settings: Settings, out: Path, rows: list[Row], seeds: list[int], outcomes: Mapping[str, Outcome]
) -> Path:
    """OUT/study.json, rewritten in one piece. Runs that were not begun are in it too, as waiting."""
    runs = [_run(out, row, seed, outcomes.get(f"{row.name}-{seed}"), settings) for row in rows for seed in seeds]
    table = [summary(row.name, row.about, row.family, [run for run in runs if run["row"] == row.name]) for row in rows]
    calibration = out / "calibration" / "calibration.json"
    results = {
        "table": table,
        "runs": runs,
        "calibration": json.loads(calibration.read_text()) if calibration.is_file() else None,
    }
    seconds = sum(run["wall_seconds"] or 0.0 for run in runs)
    # Of the folder only its name: where it was is no part of the study.
    model = {"model": Path(settings.model).name, "model_sha256": model_sha256(settings.model)}
    config = settings.table() | model
    return records.write(out / "study.json", KIND, results, config=config, seed=seeds[0], wall_seconds=seconds)


def _run(out: Path, row: Row, seed: int, outcome: Outcome | None, settings: Settings) -> dict[str, Any]:
    folder = out / "runs" / f"{row.name}-{seed}"
    metrics = folder / "metrics.jsonl"
    lines = read_lines(metrics) if metrics.is_file() else []
    steps = [line for line in lines if "reward/mean" in line]
    finished = (folder / "result.json").is_file()
    failed = outcome is not None and outcome.state == "failed" and not finished
    state = "finished" if finished else "failed" if failed else "cut" if lines else "waiting"
    result = records.read(folder / "result.json", "train")["results"] if finished else {}
    return {
        "row": row.name,
        "seed": seed,
        "state": state,
        "reason": outcome.reason if failed and outcome is not None else "",
        "steps": len(steps),
        "wall_seconds": _rounded(
            sum(line.get("time/step_seconds", 0) + line.get("time/evaluate_seconds", 0) for line in lines)
        ),
        "dense_accuracy": [
            [line["step"], *(_rounded(line[f"evaluate/dense_accuracy{end}"]) for end in ("", "_low", "_high"))]
            for line in lines
            if "evaluate/dense_accuracy" in line
        ],
        "stopped": result.get("stopped", ""),
        "reward_gap_alarms": [
            line["step"] for line in lines if any(event.startswith(GAP_ALARM) for event in line.get("events", ()))
        ],
        "events": [f"step {line['step']}: {event}" for line in lines for event in line.get("events", ())][:50],
        "series": _series(steps),
    }


def _series(steps: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    names = {name: None for line in steps for name in line if name in SERIES or name.startswith(FAMILIES)}
    return {name: [_rounded(line.get(name)) for line in steps] for name in names}


def _rounded(value: float | None) -> float | None:
    """To four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def is_whole(run: dict[str, Any]) -> bool:
    """Whether it went to its last step."""
    return run["state"] == "finished" and not run["stopped"]


def summary(name: str, about: str, family: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table, over the runs of a row that went to their last step: {"mean", "low", "high"} over seeds of each
    figure. Where none did, over those that stopped themselves; where none was finished, over those that took steps, which
    have no accuracy after. `steps` says how many were taken at most, `stopped` how many runs stopped themselves.

    `tail` and `kl` are means over steps, `tail_last` is the mean of the last five, `worst_tail_last` the same of the worst
    length bin; `masked_share` is of tokens, those of dropped sequences included.
    """
    finished = [run for run in runs if run["state"] == "finished" and run["dense_accuracy"]]
    finished = [run for run in finished if is_whole(run)] or finished
    done = finished or [run for run in runs if run["steps"] and run["dense_accuracy"]]
    ends = [(run["dense_accuracy"][0][1], run["dense_accuracy"][-1][1]) for run in finished]
    figures = {
        "accuracy_before": [run["dense_accuracy"][0][1] for run in done],
        "accuracy_after": [after for _, after in ends],
        "accuracy_change": [after - before for before, after in ends],
        "reward_last": [_mean(run["series"]["reward/mean"][-5:]) for run in done],
        "tail": [_mean(run["series"]["mismatch/acceptance_q05"]) for run in done],
        "tail_last": [_mean(run["series"]["mismatch/acceptance_q05"][-5:]) for run in done],
        "worst_tail_last": [_mean(run["series"].get("mismatch/acceptance_q05_worst_bin", [])[-5:]) for run in done],
        "kl": [_mean(run["series"]["mismatch/kl_sparse_to_dense"]) for run in done],
        "masked_share": [_mean(run["series"].get("correction/masked_token_share", [0.0])) for run in done],
        "effective_sample_share": [_mean(run["series"].get("correction/effective_sample_share", [])) for run in done],
        "kv_read_share": [_mean(run["series"]["rollout/kv_read_share"]) for run in done],
        "kv_saved_share": [_mean(run["series"].get("compression/kv_saved_share", [])) for run in done],
        "response_tokens": [_mean(run["series"]["rollout/response_tokens_mean"]) for run in done],
        "step_seconds": [_mean(run["series"]["time/step_seconds"]) for run in done],
        "rollout_seconds": [_mean(run["series"]["time/rollout_seconds"]) for run in done],
    }
    about_row = {"row": name, "about": about, "family": family, "seeds": len(done), "runs": len(runs)}
    about_row["stopped"] = sum(bool(run["stopped"]) for run in runs)
    about_row["steps"] = max((len(run["series"]["reward/mean"]) for run in done), default=0)
    return about_row | {figure: _spread(values) for figure, values in figures.items()}


ORDER = ("finished", "cut", "failed", "waiting")
"""Of a run that several parts know, the first of these counts."""


HARMLESS = {"model", "checkpoint_every_steps", "keep_checkpoints"}
"""In which parts may differ: where the model lay, and what was kept."""


def merge(paths: list[Path]) -> dict[str, Any]:
    """One record from parts that were made with the same settings and weights, rows in the grid's order. The machine and
    versions are those of the first part, and each part's stand beside them."""
    parts = [records.read(path, KIND) for path in paths]
    # A setting that a part does not name is newer than its runs, so none of them had a use for it.
    config: dict[str, Any] = {}
    for name, value in [item for part in parts for item in part["config"].items()]:
        if config.setdefault(name, value) != value and name not in HARMLESS:
            what = "the weights of the model" if name == "model_sha256" else name
            raise UserError(
                f"the parts differ in {what}", "merge only what was made with the same settings and weights"
            )
    found = {row["row"]: row for part in parts for row in part["results"]["table"]}
    settings = {name: value for name, value in config.items() if name != "model_sha256"}
    order = list(grid(Settings.from_table(settings)))
    lost = sorted(set(found) - set(order))
    if lost:
        raise UserError(f"the study has no row {lost[0]!r}", "merge with the version that made the parts")
    table = {name: found[name] for name in order if name in found}
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    for run in [run for part in parts for run in part["results"]["runs"]]:
        known = runs.setdefault((run["row"], run["seed"]), run)
        if (ORDER.index(run["state"]), -run["steps"]) < (ORDER.index(known["state"]), -known["steps"]):
            runs[run["row"], run["seed"]] = run
    ordered = [run for name in table for (row, _), run in sorted(runs.items()) if row == name]
    rows = [
        summary(name, row["about"], row["family"], [run for run in ordered if run["row"] == name])
        for name, row in table.items()
    ]
    calibrations = [part["results"]["calibration"] for part in parts if part["results"]["calibration"]]
    _check_calibrations(parts, {name: row.schedule for name, row in grid(Settings.from_table(settings)).items()})
    about = ("date", "commit", "hardware", "versions", "wall_seconds")
    results = {
        "table": rows,
        "runs": ordered,
        "calibration": calibrations[0] if calibrations else None,
        "parts": [{name: part[name] for name in about} for part in parts],
    }
    return parts[0] | {
        "config": config,
        "results": results,
        "wall_seconds": sum(part["wall_seconds"] or 0.0 for part in parts),
    }


def _check_calibrations(parts: Sequence[Mapping[str, Any]], schedules: Mapping[str, str]) -> None:
    """Raises UserError where two parts ran rows under one schedule's name that was calibrated twice. schedules: by row."""
    first: dict[str, Any] = {}
    for part in parts:
        ran = {schedules[run["row"]] for run in part["results"]["runs"]}
        for target, of in (part["results"]["calibration"] or {}).items():
            if target not in ran:
                continue
            steps = [(step["from_context_tokens"], step["kv_budget_tokens"]) for step in of["schedule"]["steps"]]
            if first.setdefault(target, steps) != steps:
                raise UserError(
                    f"the parts have different schedules of the name {target}, and runs under them",
                    "give the later ones --schedules-of the study.json of the first, so that all have one calibration",
                )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _spread(values: list[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": _rounded(statistics.fmean(known)), "low": _rounded(min(known)), "high": _rounded(max(known))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        print(files.write_json(args.out, merge(args.parts)))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
