"""An evaluation that was killed with SIGKILL, at any point, ends with the numbers and samples of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.deaths import run_script
from integration.evaluation_runs import evaluate
from integration.killed_evaluations import MOMENTS

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    out = tmp_path_factory.mktemp("straight")
    return evaluate(model, out), pq.read_table(out / "samples.parquet")


@pytest.fixture(scope="module")
def killed(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    run_script("killed_evaluations.py", model, str(folder), *MOMENTS)
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_evaluation_killed_at_any_moment_ends_with_the_same_numbers(
    moment: str, model: str, killed: Path, straight: tuple[dict[str, Any], Any]
) -> None:
    out = killed / moment
    assert not (out / "evaluation.json").exists()
    assert evaluate(model, out) == straight[0]
    assert pq.read_table(out / "samples.parquet").equals(straight[1])


def test_a_batch_of_another_size_changes_no_number(
    model: str, straight: tuple[dict[str, Any], Any], tmp_path: Path
) -> None:
    # The dense scores' last digits hang on the batch, so only what was sampled is equal.
    def without_tails(found: dict[str, Any]) -> dict[str, Any]:
        return {
            label: {name: policy | {"tail": None} for name, policy in task["policies"].items()}
            for label, task in found["tasks"].items()
        }

    assert without_tails(evaluate(model, tmp_path, "--max-batch", "7")) == without_tails(straight[0])
