"""recipes/mismatch-study: the scheduler of its jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import study_recipe
from sparroll.errors import UserError

registered = study_recipe.registered

import study  # noqa: E402
import study_jobs  # noqa: E402
from study_jobs import Job, Outcome, run_jobs  # noqa: E402


def job(folder: Path, name: str, code: str, **more) -> Job:
    return Job(name, [sys.executable, "-c", code], folder / f"{name}.log", **more)


def soon() -> float:
    return time.time() + 60


def test_a_failure_is_reported_with_its_last_words_and_stops_nothing(tmp_path) -> None:
    made = [job(tmp_path, "bad", "raise SystemExit('no luck')"), job(tmp_path, "good", "print('fine')")]
    outcomes = run_jobs(made, gpus=[], at_once=1, deadline=soon())
    assert outcomes["bad"].state == "failed" and "no luck" in outcomes["bad"].reason
    assert outcomes["good"].state == "finished"


def test_a_job_waits_for_what_it_needs_and_fails_when_that_cannot_come(tmp_path) -> None:
    made_later = tmp_path / "made-later"
    first = job(tmp_path, "first", f"open({str(made_later)!r}, 'w')")
    second = job(tmp_path, "second", "pass", blocked=lambda: not made_later.exists())
    third = job(
        tmp_path, "third", "pass", blocked=lambda: True, hopeless=lambda: "never" if made_later.exists() else ""
    )
    fourth = job(tmp_path, "fourth", "pass", blocked=lambda: True)
    outcomes = run_jobs([second, third, fourth, first], gpus=[], at_once=2, deadline=soon())
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "first": "finished", "second": "finished", "third": "failed", "fourth": "failed"
    }  # fmt: skip
    assert outcomes["third"].reason == "never" and "did not come" in outcomes["fourth"].reason


def interrupted(folder: Path, on_interrupt: str, began: str = "") -> Outcome:
    """How a job ends that is interrupted as soon as it has begun; another one never begins."""
    code = f"""
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path({str(folder)!r})
try:
    {began or "pass"}
    (folder / "began").touch()
    time.sleep(60)
except KeyboardInterrupt:
    {on_interrupt}
"""
    outcomes = run_jobs(
        [job(folder, "long", code), job(folder, "late", "pass")],
        gpus=[],
        at_once=1,
        deadline=1.0,
        least_seconds=0,
        clock=lambda: float((folder / "began").exists()),
    )
    assert "late" not in outcomes
    return outcomes["long"]


def test_at_the_deadline_jobs_are_interrupted_once_and_may_save(tmp_path, monkeypatch) -> None:
    sent, send = [], subprocess.Popen.send_signal
    monkeypatch.setattr(subprocess.Popen, "send_signal", lambda self, number: (sent.append(number), send(self, number)))
    assert interrupted(tmp_path, "(folder / 'saved').touch(); sys.exit(130)").state == "cut"
    assert (tmp_path / "saved").exists() and sent == [signal.SIGINT]


def test_a_job_that_breaks_when_it_is_interrupted_has_failed(tmp_path) -> None:
    outcome = interrupted(tmp_path, "sys.exit('could not save')")
    assert outcome.state == "failed" and "could not save" in outcome.reason


def test_a_job_that_outlasts_its_grace_is_cut_and_its_children_end_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study_jobs, "GRACE_SECONDS", 0)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = "import time; time.sleep(20); print('outlived it', flush=True)"
    began = "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    began += f"subprocess.Popen([sys.executable, '-c', {child!r}], stdout=(folder / 'pipe').open('w'))"
    assert interrupted(tmp_path, "pass", began).state == "cut"
    os.set_blocking(reader, True)
    with open(reader) as pipe:
        assert pipe.read() == ""


def test_a_record_that_cannot_be_written_stops_no_job_and_is_told_at_the_end(tmp_path, capsys) -> None:
    def full(outcomes: dict[str, Outcome]) -> None:
        raise OSError("no space left")

    made = [job(tmp_path, name, "print('done')") for name in ("first", "second")]
    with pytest.raises(OSError, match="no space left"):
        run_jobs(made, gpus=[], at_once=1, deadline=soon(), on_change=full)
    assert [each.log.read_text() for each in made] == ["done\n", "done\n"]
    assert "no space left" in capsys.readouterr().err


def test_sigterm_lets_the_runs_save(tmp_path, monkeypatch, capsys) -> None:
    code = f"""
import os, pathlib, signal, sys, time
try:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(tmp_path)!r}, "saved").touch()
    sys.exit(130)
"""

    def unhandled(*_: object) -> None:
        raise RuntimeError("nobody heeds SIGTERM")

    monkeypatch.setattr(study, "jobs", lambda *_: [job(tmp_path, "dense-0", code)])
    monkeypatch.setattr(sys, "argv", ["study.py", "--dry", "--out", str(tmp_path), "--rows", "dense"])
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        with pytest.raises(KeyboardInterrupt):
            study.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "saved").exists() and "dense-0: cut" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_while_a_job_is_started_reaches_that_job(tmp_path, monkeypatch, number) -> None:
    outcomes: dict[str, Outcome] = {}
    begun: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def starts(*arguments, **settings) -> subprocess.Popen:
        begun.append(popen(*arguments, **settings))
        os.kill(os.getpid(), number)
        return begun[-1]

    monkeypatch.setattr(study_jobs.subprocess, "Popen", starts)
    # Where tests run in the background of a shell, SIGINT is ignored.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: study.interrupt}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        with pytest.raises(KeyboardInterrupt):
            run_jobs(
                [job(tmp_path, "long", "import time; time.sleep(60)"), job(tmp_path, "next", "pass")],
                gpus=[], at_once=2, deadline=soon(), on_change=outcomes.update,
            )  # fmt: skip
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    # It may be too young to heed the signal as a run does, so how it ends is open.
    assert list(outcomes) == ["long"] and [each.poll() is not None for each in begun] == [True]


@pytest.mark.parametrize(
    ("seen", "given"), [(None, ("0", "1")), ("4,5", ("4", "5")), ("GPU-b, GPU-a", ("GPU-b", "GPU-a"))]
)
def test_jobs_are_spread_over_the_gpus_that_are_visible(tmp_path, monkeypatch, seen, given) -> None:
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']); input()"
    made = [job(tmp_path, f"job-{number}", code) for number in range(4)]
    run_jobs(made, gpus=[0, 1], at_once=2, deadline=soon(), threads=3)
    told = sorted(each.log.read_text().splitlines()[0] for each in made)
    assert told == sorted(f"{name} 3" for name in given for _ in range(2))


def test_engines_that_run_at_a_time_look_for_ports_in_different_places(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)
    # The first two wait for each other, so they run at a time; the third takes the place of one of them.
    code = f"""
import os, pathlib, sys, time
folder = pathlib.Path({str(tmp_path)!r})
(folder / sys.argv[1]).write_text(os.environ["VLLM_PORT"])
while sys.argv[1] != "third" and not ((folder / "first").exists() and (folder / "second").exists()):
    time.sleep(0.01)
"""
    names = ["first", "second", "third"]
    made = [Job(name, [sys.executable, "-c", code, name], tmp_path / f"{name}.log") for name in names]
    run_jobs(made, gpus=[], at_once=2, deadline=soon())
    first, second, third = (int((tmp_path / name).read_text()) for name in names)
    assert abs(first - second) == study_jobs.PORTS_OF_A_JOB and third in (first, second)
    monkeypatch.setenv("VLLM_PORT", "31000")
    run_jobs(made[2:], gpus=[], at_once=1, deadline=soon())
    assert (tmp_path / "third").read_text() == "31000"


def test_calls_that_run_at_a_time_have_ports_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)
    made = job(tmp_path, "job", "import os; print(os.environ['VLLM_PORT'])")
    with study_jobs._claim_ports(1) as other:
        run_jobs([made], gpus=[], at_once=1, deadline=soon())
        taken = range(other.getsockname()[1], other.getsockname()[1] + study_jobs.PORTS_OF_A_CALL)
    assert int(made.log.read_text()) not in taken
    monkeypatch.setattr(study_jobs, "MOST_CALLS", 0)
    with pytest.raises(UserError, match="calls run on this machine already"):
        run_jobs([made], gpus=[], at_once=1, deadline=soon())
    with pytest.raises(UserError, match="64 jobs at a time have no ports for their engines: there are some for 63"):
        run_jobs([made], gpus=[0, 1], at_once=32, deadline=soon())


def test_gpus_for_a_study_on_the_cpu_are_refused() -> None:
    on_cpu = study.Settings("folder", device="cpu")
    assert study.gpus_of(on_cpu, None) == []
    with pytest.raises(UserError, match="--gpus 0 1 is given, and jobs of this call run on the CPU"):
        study.gpus_of(on_cpu, [0, 1])


def test_fewer_minutes_than_a_job_needs_are_refused_with_the_least(tmp_path, monkeypatch) -> None:
    began = time.time() - 3
    study_jobs.check_minutes(1.6, began)
    for minutes in (0.5, 1.5):
        with pytest.raises(UserError, match=f"--minutes must be at least 1.6, got {minutes}: .* 45 s to run, and 45 s"):
            study_jobs.check_minutes(minutes, began)
    monkeypatch.setattr(sys, "argv", ["study.py", "--dry", "--out", str(tmp_path), "--minutes", "0.5"])
    with pytest.raises(SystemExit, match="error: --minutes must be at least"):
        study.main()
    # A dry run makes its model before it knows what is missing.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_why_a_schedule_is_missing_counts_only_when_the_calibration_is_over(tmp_path) -> None:
    calibration = tmp_path / "calibration" / "calibration.json"
    row = study.chosen(study.Settings("folder", targets=(0.75,), corrected_target=0.75), ["calibrated-0.75"])
    job = study.jobs(study.Settings("folder"), tmp_path, row, [0])[-1]
    calibration.parent.mkdir()
    # Of an earlier calibration, or of one that still runs.
    (calibration.parent / "calibrated-0.75.failed").write_text("no budget meets it")
    assert not job.hopeless()
    calibration.write_text("{}")
    assert job.hopeless() == "no budget meets it"


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match="no GPU 4: CUDA_VISIBLE_DEVICES is '4,5'"):
        study_jobs.visible_device(4)
