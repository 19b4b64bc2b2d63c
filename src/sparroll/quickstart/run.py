"""A quickstart from beginning to end: profile, calibrate, plan, three RL runs, summary, report. Resumes where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparroll import files, records
from sparroll.progress import Progress, say
from sparroll.quickstart import jobs, stages
from sparroll.quickstart.settings import CALIBRATED, QuickstartSettings
from sparroll.report import write_report
from sparroll.resume import begin_or_resume


def quickstart(settings: QuickstartSettings, out: Path, progress: Progress) -> dict[str, Any]:
    """Everything into `out`; returns what summary.json holds."""
    files.output_folder(out)
    begin_or_resume(out / "settings.json", settings.model_dump(mode="json"))
    for name in settings.runs:
        # A mistake in a section is found now, not after the calibration.
        stages.train_config(settings, out, name)
    clock = _Clock(out / "seconds.json")
    with clock.running():
        _calibrated(settings, out, progress)
        stages.make_plans(settings, out)
        _trained(settings, out, progress)
    summary = summarise(settings, out, clock.seconds)
    files.write_json(out / "summary.json", summary)
    records.write(
        out / "quickstart.json", "quickstart", summary, config=settings, seed=settings.seed, wall_seconds=clock.seconds
    )
    write_report(out)
    return summary


def _calibrated(settings: QuickstartSettings, out: Path, progress: Progress) -> None:
    if (out / stages.CALIBRATION / "calibration.json").exists():
        return
    # The largest budget first and alone: it brings the dense rollouts that the others share.
    budgets = sorted(settings.calibrate.budgets)
    with _stage("1/3 profile", progress):
        first = budgets.pop()
        _run(progress, out, [("dense ceiling", stages.measure, (settings, out, [first]))])
        workers = min(jobs.cores(), len(budgets))
        parts = [budgets[place::workers] for place in range(workers)]
        work = [(f"budgets {', '.join(map(str, part))}", stages.measure, (settings, out, part)) for part in parts]
        _run(progress, out, work)
    with _stage("2/3 fit and verify the schedule", progress):
        _run(progress, out, [("fit and verify", stages.fit_and_verify, (settings, out))])


def _trained(settings: QuickstartSettings, out: Path, progress: Progress) -> None:
    missing = [name for name in settings.runs if not (out / name / "result.json").exists()]
    if missing:
        with _stage(f"3/3 RL runs: {', '.join(missing)}", progress):
            work = [(f"train {name}", stages.train_run, (settings, out, name)) for name in missing]
            # All at once: three equal runs that take turns on two cores end sooner than two and then one.
            _run(progress, out, work, at_once=len(work))


def _run(
    progress: Progress, out: Path, work: list[tuple[str, Any, tuple[Any, ...]]], at_once: int | None = None
) -> None:
    made = [
        jobs.Job(name, function, arguments, out / "logs" / f"{name.replace(' ', '-').replace(',', '')}.log")
        for name, function, arguments in work
    ]
    jobs.run(made, {job.name: progress.bar(job.name) for job in made}, at_once)


@contextmanager
def _stage(what: str, progress: Progress) -> Iterator[None]:
    """A line before and after, for those who see no bars."""
    started = time.perf_counter()
    say(what, quiet=progress.silent)
    yield
    say(f"{what}: {time.perf_counter() - started:.0f} s", quiet=progress.silent)


class _Clock:
    """Seconds spent on this folder, interrupted or not."""

    def __init__(self, path: Path):
        self._path = path
        self.seconds = float(json.loads(path.read_text())) if path.exists() else 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started
            files.write_json(self._path, round(self.seconds, 1))


def summarise(settings: QuickstartSettings, out: Path, wall_seconds: float) -> dict[str, Any]:
    """The figures of the finished stages, read back from their records."""
    calibration = records.read(out / stages.CALIBRATION / "calibration.json", "calibration")["results"]
    results = {name: records.read(out / name / "result.json", "train")["results"] for name in settings.runs}
    calibrated = next((name for name, run in settings.runs.items() if run.schedule == CALIBRATED), None)
    return {
        "schedule_path": str(stages.schedule_path(out)),
        "target": settings.calibrate.target,
        "tail": [row for row in calibration["rows"] if row["q05"] is not None],
        "runs": {name: _run_figures(result) for name, result in results.items()},
        "kv_read_share": results[calibrated]["kv_read_share"] if calibrated else None,
        "wall_seconds": round(wall_seconds, 1),
    }


def _run_figures(result: dict[str, Any]) -> dict[str, Any]:
    first, last = result["dense_accuracy_first"], result["dense_accuracy_last"]
    return {
        "reward_first": result["reward_first"],
        "reward_last": result["reward_last"],
        "dense_accuracy_first": first["value"] if first else None,
        "dense_accuracy_last": last["value"] if last else None,
        "tail_q05_min": result["tail_q05_min"],
    }
