"""Where metrics go: whole lines, cut exactly, and missing packages named at the start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparroll.errors import UserError
from sparroll.train.config.file import config_from
from sparroll.train.runtime.sinks import ConsoleLine, JsonLines, open_sinks, read_lines


def test_lines_read_back_with_events_only_where_there_are_some(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1, {"reward/mean": 0.1}, [])
    sink.write(2, {"reward/mean": 1 / 3}, ["switched"])
    sink.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 1 / 3, "events": ["switched"]},
    ]


def test_opening_at_a_position_cuts_off_what_a_killed_run_wrote_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    position = sink.write(1, {"x": 1.0}, [])
    sink.write(2, {"x": 2.0}, [])
    sink.close()
    path.write_bytes(path.read_bytes()[:-4])
    again = JsonLines(path, position)
    again.write(2, {"x": 3.0}, [])
    again.close()
    assert [line["x"] for line in read_lines(path)] == [1.0, 3.0]


def test_a_file_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has 3 bytes, but the checkpoint was made at 50"):
        JsonLines(tmp_path / "metrics.jsonl", 50)


def test_a_metric_that_is_not_finite_is_our_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="reward/mean is nan"):
        JsonLines(tmp_path / "metrics.jsonl").write(1, {"reward/mean": float("nan")}, [])


def test_the_console_shows_one_line_and_the_events_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleLine(10).write(3, {"reward/mean": 0.5, "rollout/kv_read_share": 0.314, "other": 1.0}, ["stop: [x]"])
    assert capsys.readouterr().err == "step 3/10  reward 0.500  KV read 32%\n  stop: [x]\n"


def test_the_console_shows_the_reward_gap_with_its_interval_where_there_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gap = {"control/reward_gap": 0.0121, "control/reward_gap_low": -0.0205, "control/reward_gap_high": 0.04}
    ConsoleLine(10).write(3, {"reward/mean": 0.5, **gap}, [])
    ConsoleLine(10).write(4, {"reward/mean": 0.5, "control/reward_gap": 0.5}, [])
    said = capsys.readouterr().err
    assert said == "step 3/10  reward 0.500  reward gap 0.013 [-0.020, 0.040]\nstep 4/10  reward 0.500\n"


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_chosen_sink_without_its_package_is_an_error_with_a_hint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(UserError, match=rf"(?s)package {name} is not installed.*pip install {name}"):
        open_sinks(config_from({"log": {"sinks": [name]}}), tmp_path)


def test_tensorboard_gets_every_metric(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(config_from({"log": {"sinks": ["tensorboard"]}}), tmp_path)
    sink.write(1, {"reward/mean": 0.25}, ["why"])
    sink.write(2, {"reward/mean": 0.5}, [])
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize(("completed", "kept"), [(None, 0), (0, 1), (2, 3)])
def test_tensorboard_forgets_what_a_killed_run_wrote_after_its_checkpoint(
    completed: int | None, kept: int, tmp_path: Path
) -> None:
    """None: it had no checkpoint, so not even the evaluation before its first step stays."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_from({"log": {"sinks": ["tensorboard"]}})
    for again, begin in ((None, 0), (completed, kept)):
        (sink,) = open_sinks(config, tmp_path, again)
        for step in range(begin, 5):
            sink.write(step, {"reward/mean": 0.5}, [])
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == list(range(5))


class FakeTracker:
    """What W&B and trackio have in common."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def init(self, **about: object) -> FakeTracker:
        self.calls.append(("init", about))
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, metrics)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_under_the_same_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    config = config_from({"log": {"sinks": [name], "project": "p", "run_name": "r"}})
    for _ in range(2):
        (sink,) = open_sinks(config, tmp_path)
        sink.write(1, {"reward/mean": 0.5}, ["one", "two"])
        sink.close()
    first, second = (call[1] for call in tracker.calls if call[0] == "init")
    assert first == second
    assert first["project"] == "p"
    assert ("log", (1, {"reward/mean": 0.5, "events": "one; two"})) in tracker.calls
    assert tracker.calls[-1] == ("finish", None)
