"""Training on rows of a file: the same loop, a record of the rows, resume to the bit, and never on other rows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import data_files
from integration.train_runs import WORDS, short_config
from sparroll.errors import UserError
from sparroll.tasks.data import task as task_module
from sparroll.tasks.data.rows import Row
from sparroll.tasks.verdicts import Verdict
from sparroll.train import TrainConfig, train
from sparroll.train.runtime.sinks import read_lines


class Vowels:
    """A stand-in for the packaged reward: the share of vowels."""

    gives_answers = False

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        said = [text.split() for text in response_texts]
        return [Verdict(sum(word in "aeiou" for word in words) / max(len(words), 1)) for words in said]

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [True] * len(rows)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "reward_for", lambda kind, settings: Vowels())


def rows(count: int = 12) -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [{"prompt": " ".join(rng.choices(WORDS[2:], k=20 + 3 * number)), "answer": "a"} for number in range(count)]


def config(model: str, file: Path, steps: int = 2, **data: Any) -> TrainConfig:
    task = {"name": "data", "train_prompts": data.pop("train_prompts", None)}
    section = {"train": str(file), "holdout_rows": 3} | data
    return short_config(model, task=task, data=section, train={"steps": steps}, checkpoint={"every_steps": 1})


def test_a_run_on_a_file_that_goes_on_is_the_straight_run(model: str, tmp_path: Path) -> None:
    file = data_files.write(tmp_path / "own.jsonl", [*rows(), {"prompt": "a b", "answer": None}])
    straight = train(config(model, file), tmp_path / "straight")
    assert "step 1: data: 1 of 13 rows are not used: no answer 1" in straight.events
    train(config(model, file, steps=1), tmp_path / "resumed")
    train(config(model, file), tmp_path / "resumed", resume=True)
    weights = [
        load_file(tmp_path / name / "checkpoints" / "step-000002" / "model" / "model.safetensors")
        for name in ("straight", "resumed")
    ]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
    steps = [
        {
            line["step"]: line["reward/mean"]
            for line in read_lines(tmp_path / name / "metrics.jsonl")
            if "reward/mean" in line
        }
        for name in ("straight", "resumed")
    ]
    assert steps[0] == steps[1] and len(steps[0]) == 2
    record = json.loads((tmp_path / "straight" / "data.json").read_text())
    assert record["sources"] == {"own.jsonl": {"rows": 12, "skipped": {"no answer": 1}}}
    assert (record["train_rows"], record["eval_rows"]) == (9, 3)


def test_a_run_is_not_resumed_on_other_rows(model: str, tmp_path: Path) -> None:
    file = data_files.write(tmp_path / "own.jsonl", rows())
    train(config(model, file, steps=1), tmp_path / "run")
    data_files.write(file, rows()[::-1])
    with pytest.raises(UserError, match="was made with data.fingerprint"):
        train(config(model, file), tmp_path / "run", resume=True)


def test_what_cannot_be_trained_on_is_refused_before_the_first_step(model: str, tmp_path: Path) -> None:
    file = data_files.write(tmp_path / "own.jsonl", rows())
    for said, changes in {
        "has no eval rows": {"holdout_rows": 0},
        "train_prompts is 10, but data has 9 training prompts": {"train_prompts": 10},
        "no training rows are left": {"max_prompt_tokens": 5},
        "a contest window is asked for": {"contest_from": "2024-08-01"},
    }.items():
        with pytest.raises(UserError, match=said):
            train(config(model, file, **changes), tmp_path / "refused")
        assert not (tmp_path / "refused" / "config.json").exists()
    with pytest.raises(UserError, match=r'\[data\] is for task.name = "data"'):
        short_config(model, data={"train": "x.jsonl"})


@pytest.mark.parametrize(
    ("tokens", "hint"),
    [(470, r"max_new_tokens=42 or less, or leave long rows out"), (600, r"hint: leave long rows out")],
)
def test_a_row_that_leaves_no_room_for_a_response_is_refused_before_the_first_step(
    model: str, tmp_path: Path, tokens: int, hint: str
) -> None:
    """Its turn would come in some later step, and no resumed run could go on there."""
    file = data_files.write(tmp_path / "own.jsonl", [{"prompt": " ".join("a" * tokens), "answer": "a"}, *rows()])
    message = (
        rf"(?s)a training prompt has {tokens} tokens, and with rollout.max_new_tokens = 70 .* context of 512.*{hint}"
    )
    split = {
        "eval": [str(data_files.write(tmp_path / "eval.jsonl", rows(3)))],
        "holdout_rows": 0,
        "contamination": "off",
    }
    with pytest.raises(UserError, match=message):
        train(config(model, file, **split), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
    train(config(model, file, steps=1, max_prompt_tokens=100, **split), tmp_path / "run")


def test_too_long_prompts_are_counted_in_the_record(model: str, tmp_path: Path) -> None:
    file = data_files.write(tmp_path / "own.jsonl", rows())
    train(config(model, file, steps=1, max_prompt_tokens=40), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "data.json").read_text())
    assert record["removed"] == {"longer than 40 tokens": 9 - record["train_rows"]} and 0 < record["train_rows"] < 9
