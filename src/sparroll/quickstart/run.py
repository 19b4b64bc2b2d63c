"""A quickstart from beginning to end: profile, calibrate, three RL runs, plan, summary, report. Resumes if
interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sparroll import files, records
from sparroll.calibrate.prospects import check_request
from sparroll.locks import locked
from sparroll.progress import Progress, say
from sparroll.quickstart import jobs, stages
from sparroll.quickstart.settings import CALIBRATED, QuickstartSettings
from sparroll.report import write_report
from sparroll.resume import begin_or_resume

FIT = "fit and verify"
ACCURACY = "accuracy before training"


def quickstart(
    settings: QuickstartSettings, out: Path, progress: Progress, command: str = "sparroll quickstart"
) -> dict[str, Any]:
    """Run the quickstart into `out`, and return what summary.json holds. From the first tail on, report.html shows what
    there is so far. command: what the schedule says that it was made by."""
    about = settings.calibrate
    check_request(about.target, about.prompts, about.samples, about.max_new_tokens)
    with locked(out, "sparroll quickstart"):
        return _quickstart(settings, out, progress, command)


def _quickstart(settings: QuickstartSettings, out: Path, progress: Progress, command: str) -> dict[str, Any]:
    begun = (out / stages.CALIBRATION).is_dir()
    begin_or_resume(out / "settings.json", settings.model_dump(mode="json"), begun=begun)
    for name in settings.runs:
        # Finds a mistake in a section now, instead of after the calibration.
        stages.train_config(settings, out, name)
    clock = _Clock(out / "seconds.json")
    with clock.running():
        _profiled(settings, out, progress)
        _trained(settings, out, progress, command)
        stages.make_plans(settings, out)
    summary = summarise(settings, out, clock.seconds)
    files.write_json(out / "summary.json", summary)
    records.write(
        out / "quickstart.json", "quickstart", summary, config=settings, seed=settings.seed, wall_seconds=clock.seconds
    )
    write_report(out)
    return summary


def _profiled(settings: QuickstartSettings, out: Path, progress: Progress) -> None:
    """Measure every budget of the grid and the dense ceiling. The first tails are shown as soon as the ceiling and one
    budget are measured."""
    if stages.is_calibrated(out):
        return
    stages.open_calibration(settings, out)
    first, *others = sorted(settings.calibrate.budgets)
    with _stage("1/3 profile: dense rollouts and the smallest budget", progress):
        work = [
            _Work("dense ceiling", stages.measure_ceiling),
            _Work(f"budget {first}", stages.measure_budgets, [first]),
        ]
        _run(progress, settings, out, work)
    if first_tail := stages.first_tail(settings, out, first):
        say("\n".join(first_tail), quiet=progress.silent)
        write_report(out)
    with _stage("1/3 profile: the other budgets", progress):
        workers = max(1, min(jobs.cores(), len(others)))
        parts = [others[place::workers] for place in range(workers)]
        work = [_Work(f"budgets {', '.join(map(str, part))}", stages.measure_budgets, part) for part in parts if part]
        _run(progress, settings, out, work)


def _trained(settings: QuickstartSettings, out: Path, progress: Progress, command: str) -> None:
    """Make the schedule, and train. The runs begin with the same weights, so their accuracy before training is measured
    once, by the configuration of a run that needs no schedule, while the schedule is made. Then all runs share the
    cores: on two cores three equal runs side by side end sooner than two and then one."""
    calibrated = stages.is_calibrated(out)
    work = [] if calibrated else [_Work(FIT, stages.fit_and_verify, command)]
    missing = [name for name in settings.runs if not (out / name / "result.json").exists()]
    early = next((name for name in missing if settings.runs[name].schedule != CALIBRATED), None)
    if early and len(missing) > 1 and not stages.first_accuracy_path(out).exists():
        work.append(_Work(ACCURACY, stages.measure_first_accuracy, early))
    begun = {each.name for each in work}
    for name in missing:
        needs = {ACCURACY} if settings.runs[name].schedule != CALIBRATED else {ACCURACY, FIT}
        work.append(_Work(f"train {name}", stages.train_run, name, tuple(needs & begun)))
    if work:
        with _stage(f"2/3 schedule, 3/3 RL runs: {', '.join(missing)}", progress):
            _run(progress, settings, out, work, at_once=len(work))


class _Work(NamedTuple):
    """A job that does not know its settings and its folder yet."""

    name: str
    function: Callable[..., None]
    about: Any = None
    """A further argument of the function, after settings and folder."""
    after: tuple[str, ...] = ()


def _run(
    progress: Progress, settings: QuickstartSettings, out: Path, work: list[_Work], at_once: int | None = None
) -> None:
    made = [
        jobs.Job(
            each.name,
            each.function,
            (settings, out) if each.about is None else (settings, out, each.about),
            out / "logs" / f"{each.name.replace(' ', '-').replace(',', '')}.log",
            each.after,
        )
        for each in work
    ]
    jobs.run(made, {job.name: progress.bar(job.name) for job in made}, at_once)


@contextmanager
def _stage(what: str, progress: Progress) -> Iterator[None]:
    """Print a line before and after the stage, for logs and terminals without bars."""
    started = time.perf_counter()
    say(what, quiet=progress.silent)
    yield
    say(f"{what}: {time.perf_counter() - started:.0f} s", quiet=progress.silent)


class _Clock:
    """Seconds spent on this folder, over all calls, interrupted ones included."""

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
