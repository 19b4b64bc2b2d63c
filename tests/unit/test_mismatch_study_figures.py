"""recipes/mismatch-study: from runs to a table's rows and to figures."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

import study_recipe
from sparroll import records
from sparroll.errors import UserError

registered = study_recipe.registered
ROOT = Path(__file__).parents[2]

import plots  # noqa: E402
from study_record import KIND, merge, summary  # noqa: E402
from study_rows import Settings, rows  # noqa: E402


def test_figures_hold_the_rows_of_which_a_run_went_to_its_end() -> None:
    def run(row: str, state: str, steps: int, stopped: str = "") -> dict:
        names = ("reward/mean", "mismatch/acceptance_q05", "mismatch/kl_sparse_to_dense", "rollout/kv_read_share")
        names += ("rollout/response_tokens_mean", "time/step_seconds", "time/rollout_seconds")
        ends = [0, steps] if state == "finished" else [0]
        return {
            "row": row,
            "state": state,
            "steps": steps,
            "stopped": stopped,
            "dense_accuracy": [[step, 0.5, 0.4, 0.6] for step in ends],
            "series": {name: [0.1] * steps for name in names},
        }

    runs = [
        run("dense", "finished", 5),
        run("cut", "cut", 5),
        run("stopped", "finished", 3, "no token kept"),
        run("waiting", "waiting", 0),
    ]
    table = [summary(each["row"], "", "", [each]) for each in runs]
    assert [(row["seeds"], row["steps"]) for row in table] == [(1, 5), (1, 5), (1, 3), (0, 0)]
    # A run that was cut has figures, and no accuracy after.
    assert table[1]["reward_last"]["mean"] == 0.1 and table[1]["accuracy_change"] is None
    assert [row["row"] for row in plots._whole_rows({"table": table, "runs": runs})] == ["dense"]
    # A seed that stopped itself is in no figure.
    runs = [run("dense", "finished", 5), run("dense", "finished", 3, "no token kept")]
    results = {"table": [summary("dense", "", "dense", runs)], "runs": runs}
    assert list(plots.progress(results).axes[0].lines[0].get_xdata()) == [0, 5]
    assert list(plots.accuracy(results).axes[0].lines[0].get_xdata()) == [0]


def test_the_rows_of_a_family_are_told_apart_or_refused(tmp_path) -> None:
    families = [row.family for row in rows(Settings("folder")).values()]
    assert max(map(families.count, families)) <= len(set(plots.LINES)) == len(set(plots.MARKS))
    whole = {"state": "finished", "stopped": ""}
    table = [{"row": str(n), "family": "eviction", "accuracy_change": {"mean": 0.0}} for n in range(10)]
    results = {"runs": [whole | {"row": row["row"]} for row in table], "table": table}
    with pytest.raises(UserError, match="10 rows"):
        plots.draw(records.write(tmp_path / "study.json", KIND, results), tmp_path / "figures")


def test_a_row_is_summed_up_as_mean_and_range_over_its_finished_seeds() -> None:
    def run(last: float, state: str = "finished", stopped: str = "") -> dict:
        series = {
            "reward/mean": [0.1, last],
            "mismatch/acceptance_q05": [0.8, 0.9],
            "correction/masked_token_share": [0.0, 0.2],
        }
        series |= {"mismatch/kl_sparse_to_dense": [0.1, 0.3], "rollout/kv_read_share": [0.5, 0.5]}
        series |= {
            "rollout/response_tokens_mean": [10, 12],
            "time/step_seconds": [1, 3],
            "time/rollout_seconds": [1, 1],
        }
        ends = [[0, 0.5, 0.4, 0.6], [2, last, 0, 1]]
        return {"state": state, "steps": 2, "stopped": stopped, "dense_accuracy": ends, "series": series}

    stopped = [run(0.1, stopped="no token kept"), run(0.3, stopped="no token kept")]
    found = summary("row", "about", "fixed", [run(0.6), run(0.8), run(0.0, "cut"), stopped[0]])
    assert found["seeds"] == 2 and found["runs"] == 4 and found["stopped"] == 1
    assert found["accuracy_change"] == {"mean": 0.2, "low": 0.1, "high": 0.3}
    assert found["tail"]["mean"] == 0.85 and found["masked_share"]["mean"] == 0.1 and found["kv_saved_share"] is None
    found = summary("row", "about", "fixed", [*stopped, run(0.0, "cut")])
    assert found["seeds"] == found["stopped"] == 2 and found["accuracy_change"]["mean"] == -0.3


@pytest.mark.parametrize("name", ["mismatch-study-h200", "mismatch-study-60-steps-h200"])
def test_the_committed_tables_are_those_of_their_runs(name) -> None:
    found = records.read(study_recipe.RECIPE.parents[1] / "benchmarks" / "results" / f"{name}.json", KIND)["results"]
    for row in found["table"]:
        made = summary(
            row["row"], row["about"], row["family"], [run for run in found["runs"] if run["row"] == row["row"]]
        )
        assert made | row == made


def test_parts_that_ran_a_row_under_two_calibrations_are_not_merged(tmp_path: Path) -> None:
    """Machines that each made a sweep of their own have other budgets under the same name."""
    whole = records.read(ROOT / "benchmarks" / "results" / "mismatch-study-60-steps-h200.json", KIND)

    def part(seed: int, row: str = "", target: str = "calibrated-0.86", **budgets: int) -> Path:
        of = copy.deepcopy(whole)
        of["results"]["runs"] = [
            run for run in of["results"]["runs"] if run["seed"] == seed and run["row"] in (row or run["row"],)
        ]
        for step in of["results"]["calibration"][target]["schedule"]["steps"]:
            step |= budgets
        path = tmp_path / f"{seed}-{row}-{len(budgets)}.json"
        path.write_text(json.dumps(of), encoding="utf-8")
        return path

    assert {run["seed"] for run in merge([part(0), part(1)])["results"]["runs"]} == {0, 1}
    with pytest.raises(UserError, match=r"different schedules of the name calibrated-0.86, and runs under them"):
        merge([part(0), part(1, kv_budget_tokens=128)])
    # The row with an adapter runs under the schedule of another row.
    with pytest.raises(UserError, match=r"different schedules of the name calibrated-0.75"):
        merge([part(0, "distill-kl"), part(1, "distill-kl", "calibrated-0.75", kv_budget_tokens=128)])
