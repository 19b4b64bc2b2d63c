"""Custom rewards and the overlong penalty in whole runs: what they change, and that nothing is lost when a function
breaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from integration.train_runs import DYNAMIC, SHORT, Vowels, assert_same_weights, lines, short_config, steps
from sparroll.errors import UserError
from sparroll.tasks.reward_function import look_in
from sparroll.train import train
from sparroll.types import Prompt, Rollout

HERE = Path(__file__).parent


def share_of_vowels(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
    """What the task says too."""
    return Vowels().reward(prompt, response_text)


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    train(short_config(model, **DYNAMIC), out)
    return out


def test_a_function_that_says_what_the_task_says_gives_the_run_of_the_task(model: str, tmp_path: Path) -> None:
    train(short_config(model, **SHORT), tmp_path / "task")
    own = {"use": "integration.test_train_rewards:share_of_vowels"}
    for name, terms in (("own", [own]), ("both", [{"use": "task"}, own | {"weight": 0.0}])):
        train(short_config(model, **SHORT, reward={"terms": terms}), tmp_path / name)
        assert lines(tmp_path / name, ("time/", "reward/term/")) == lines(tmp_path / "task")
        assert_same_weights(tmp_path / name, tmp_path / "task", 2)
    for line in steps(tmp_path / "both"):
        assert line["reward/term/task"] == line["reward/term/share_of_vowels"] == pytest.approx(line["reward/mean"])
    (record,) = json.loads((tmp_path / "own/rewards.json").read_text())
    assert record["use"] == "integration.test_train_rewards:share_of_vowels"
    assert record["file"] == "test_train_rewards.py"
    assert len(record["sha256"]) == 64
    assert json.loads((tmp_path / "own/result.json").read_text())["results"]["reward_functions"] == [record]
    assert not (tmp_path / "task/rewards.json").exists()


def test_every_metric_of_such_runs_is_documented(model: str, straight: Path, tmp_path: Path) -> None:
    reward = {"overlong_buffer_tokens": 60, "leave_out_truncated": True}
    train(short_config(model, **SHORT, reward=reward), tmp_path / "run")
    page = (HERE.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = {name for line in [*steps(straight), *steps(tmp_path / "run")] for name in line}
    told = {name for name in names if name.startswith(("reward/", "groups/", "policy/"))} - {"reward/term/early_vowel"}
    assert {"groups/spare", "reward/kept_mean", "reward/overlong_share", "policy/left_out_rollouts"} <= told
    assert sorted(name for name in told if f"`{name}`" not in page) == []
    assert "`reward/term/" in page


def test_truncated_responses_leave_the_loss_and_its_denominator(model: str, tmp_path: Path) -> None:
    base = SHORT | {"train": {"steps": 1}, "rollout": {"max_new_tokens": 30}}
    train(short_config(model, **base), tmp_path / "with")
    train(short_config(model, reward={"leave_out_truncated": True}, **base), tmp_path / "without")
    (with_them,), (without,) = steps(tmp_path / "with"), steps(tmp_path / "without")
    cut = without["rollout/cut_share"] * 16
    assert cut == without["policy/left_out_rollouts"] > 0
    assert with_them["policy/kept_tokens"] - without["policy/kept_tokens"] == 30 * cut
    assert without["policy/trained_rollouts"] == 16 - cut
    assert without["reward/mean"] == with_them["reward/mean"]
    assert without["mismatch/acceptance_mean"] == with_them["mismatch/acceptance_mean"]


@pytest.mark.parametrize("name", ["tis", "seq_tis", "sparse_rl_released", "jackpot"])
def test_a_run_of_truncated_responses_alone_stops(name: str, model: str, tmp_path: Path) -> None:
    changes = {"rollout": {"max_new_tokens": 1}, "correction": {"name": name}, "guard": {"empty_steps": 1}}
    result = train(short_config(model, **SHORT | changes, reward={"leave_out_truncated": True}), tmp_path / "run")
    (line,) = steps(tmp_path / "run")
    assert line["policy/left_out_rollouts"] == 16
    assert "reward.leave_out_truncated kept no token for 1 steps: stopped" in result.stopped


def test_a_function_that_breaks_loses_no_step_and_its_change_is_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    look_in(tmp_path)
    body = "def reward(prompt, response_text, rollout):\n    return float(len(rollout.response_ids) % 3)\n"
    terms = [{"use": "breaking:reward"}]
    file, config = tmp_path / "breaking.py", short_config(model, **SHORT, reward={"terms": terms})
    file.write_text(
        body.replace("    return", "    if rollout.weight_version == 1:\n        raise OSError(28, 'full')\n    return")
    )
    with pytest.raises(
        UserError, match=r"breaking:reward raised OSError: .*full \(breaking\.py, line 3\), for the prompt vow"
    ):
        train(config, tmp_path / "run")
    assert "stopped by an error: step 1 is saved; --resume goes on there" in capsys.readouterr().err
    file.write_text(body)
    del sys.modules["breaking"]
    train(config, tmp_path / "run", resume=True)
    (told,) = [
        line["events"] for line in lines(tmp_path / "run") if any("has changed" in e for e in line.get("events", ()))
    ]
    assert told[0].startswith("the reward breaking:reward has changed since the checkpoint: its file was ")
    train(config, tmp_path / "straight")
    assert lines(tmp_path / "run", ("time/", "events")) == lines(tmp_path / "straight", ("time/", "events"))
    assert_same_weights(tmp_path / "run", tmp_path / "straight", 2)


def test_a_run_that_cannot_find_its_reward_leaves_nothing(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the module no_such_rewards of the reward"):
        train(short_config(model, reward={"terms": [{"use": "no_such_rewards:reward"}]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def nothing(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
    return -1.0


def test_a_run_without_any_reward_says_so_and_why(model: str, tmp_path: Path) -> None:
    """The random model never says "answer", the word before which the task looks for nothing."""
    task = {"name": "synthetic_add", "level": 0, "train_prompts": 10}
    result = train(short_config(model, **SHORT | {"train": {"steps": 1}}, task=task), tmp_path / "unanswered")
    (line,) = steps(tmp_path / "unanswered")
    assert (line["reward/rewarded_share"], line["reward/no_answer_share"]) == (0.0, 1.0)
    (event,) = result.events
    assert event.startswith(
        "step 1: no rollout of step 1 was rewarded (16 rollouts): no answer was found in any response; the task reads the "
        'words after the last "answer"'
    )
    own = {"terms": [{"use": "integration.test_train_rewards:nothing"}]}
    result = train(short_config(model, **SHORT, reward=own), tmp_path / "unrewarded")
    assert [line["reward/rewarded_share"] for line in steps(tmp_path / "unrewarded")] == [0.0, 0.0]
    assert "reward/no_answer_share" not in steps(tmp_path / "unrewarded")[0]
    (event,) = result.events
    assert event.startswith(
        "step 2: no rollout of steps 1 to 2 was rewarded (32 rollouts): every response got the lowest reward; choose"
    )
