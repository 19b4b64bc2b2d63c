"""benchmarks/verl_study.py: what it says of two logs, and the world that both trainers begin with. No verl."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from benchmark_scripts import benchmark


@pytest.fixture
def verl_study() -> ModuleType:
    return benchmark("verl_study")


def test_a_log_of_verl_becomes_series_and_accuracies(verl_study: ModuleType) -> None:
    validation = "val-core/table_sums/acc/mean@1"
    lines = [
        {"step": 0, "data": {validation: 0.5}},
        {"step": 1, "data": {"timing_s/step": 3.0, verl_study.TAIL: 0.8}},
        {"step": 2, "data": {"timing_s/step": 2.0, verl_study.TAIL: 0.9, validation: 0.75}},
    ]
    told = verl_study.from_log(lines)
    assert told["dense_accuracy"] == [[0, 0.5], [2, 0.75]]
    assert told["series"][verl_study.TAIL] == [0.8, 0.9]
    said = verl_study.together([{"case": "verl", **told}])
    assert said["verl/mismatch/acceptance_q05"] == pytest.approx(0.85)
    assert (said["verl/accuracy_before"], said["verl/accuracy_after"]) == (0.5, 0.75)


def test_a_case_without_steps_says_nothing(verl_study: ModuleType) -> None:
    assert verl_study.together([{"case": "own", "series": {}, "dense_accuracy": []}]) == {}


def test_verls_tokenizer_gives_the_same_ids(verl_study: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    settings = verl_study.Settings.from_table({"model": str(tmp_path / "model"), **verl_study.DRY})
    verl_study.write_world(argparse.Namespace(work=tmp_path, dry=True, seed=0), settings)
    own, verls = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "verl-model"))
    (prompt,) = verl_study.table_sums.TableSums().prompts("train", settings.level, 0, 1)
    chat = verls.apply_chat_template(
        [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
    )
    assert verls(chat)["input_ids"] == own(prompt.text)["input_ids"]
    assert (verls.pad_token, verls.pad_token_id) == ("<|im_end|>", own.pad_token_id)
