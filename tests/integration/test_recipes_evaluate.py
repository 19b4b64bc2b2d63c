"""Recipes through `sparroll evaluate`: the command of each evaluate.sh on a tiny model, with small copies of its sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from byte_model import follow, write_model
from recipe_runs import NEW_TOKENS, RECIPES, answer, evaluation, need_sandbox_for_programs, padded_mirror
from sparroll.cli import main

pytest.importorskip("math_verify")
pytest.importorskip("pyarrow")


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_a_recipe_is_evaluated_as_it_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_sandbox_for_programs(folder)
    follow(lambda *asked: answer(*asked) if "hens" in asked[0] else "none", monkeypatch)
    model, out = write_model(tmp_path, name="model"), tmp_path / "out"
    command = evaluation(folder, model, out)
    smaller = ["--engine", "hf", "--device", "cpu", "--max-new-tokens", str(NEW_TOKENS), "--mirror"]
    if "--schedule" in command:
        # The schedule fits no model of other sizes.
        smaller = ["--force-schedule", *smaller]
    assert main([*command, *smaller, str(padded_mirror(tmp_path / "mirror"))]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    given = dict(zip(command[1::1], command[2::1], strict=False))
    tasks = given["--tasks"].split(",")
    assert list(found["results"]["tasks"]) == tasks
    samples = int(given["--samples"])
    assert found["results"]["samples"] == samples and found["config"]["temperature"] == float(given["--temperature"])
    assert found["config"]["top_p"] == float(given["--top-p"])
    for label, task in found["results"]["tasks"].items():
        sparse = task["policies"].get("sparse")
        assert ("--also-dense" in command) == (sparse is not None)
        if sparse is not None:
            assert sparse["sparse_share"] == 1.0 and sparse["kv_read_share"] < 0.95 and sparse["tail"] is not None
        if label == "livecodebench":
            assert task["problems"] == 5, "three of the eight are of July"
        if label.startswith("aime"):
            assert task["policies"]["dense"][f"mean@{samples}"]["value"] == (0.5 if samples > 1 else 1.0)
