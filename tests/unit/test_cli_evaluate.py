"""`sparroll evaluate`: train, then evaluate; what the record says; pairs of runs; each bad input by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_runs import error_of
from integration.evaluation_runs import SAMPLES, command, evaluate
from integration.train_runs import short_config, write_model
from sparroll.cli import main
from sparroll.cli.shared.named import load_judge
from sparroll.evaluate.estimators import pass_at_k
from sparroll.train import train

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def out(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    evaluate(model, folder)
    return folder


def _results(out: Path) -> dict[str, Any]:
    return json.loads((out / "evaluation.json").read_text())["results"]


def _rows(out: Path, task: str, policy: str) -> list[dict[str, Any]]:
    rows = pq.read_table(out / "samples.parquet").to_pylist()
    return [row for row in rows if (row["task"], row["policy"]) == (task, policy)]


def test_the_figures_follow_from_the_saved_samples(out: Path) -> None:
    found = _results(out)["tasks"]["first_vowel"]["policies"]
    for policy in ("dense", "sparse"):
        rows = _rows(out, "first_vowel", policy)
        assert [(row["problem"], row["sample"]) for row in rows] == [(p, s) for p in range(5) for s in range(SAMPLES)]
        judged = [[row["reward"] for row in rows if row["problem"] == p] for p in range(5) if p != 3]
        assert found[policy][f"mean@{SAMPLES}"]["value"] == pytest.approx(np.mean(judged))
        passed = [sum(rewards) for rewards in judged]
        for k in (1, 2, 4):
            expected = np.mean([pass_at_k(SAMPLES, int(count), k) for count in passed])
            assert found[policy][f"pass@{k}"]["value"] == pytest.approx(expected)
        lengths = [len(row["response_ids"]) for row in rows]
        assert found[policy]["response_tokens"]["mean"] == pytest.approx(np.mean(lengths))
        assert found[policy]["truncated_share"] == np.mean([row["finish_reason"] == "length" for row in rows])
        assert all(len(row["acceptance"]) == len(row["response_ids"]) for row in rows)
        assert found[policy]["tail"]["overall"]["tokens"] == sum(lengths)


def test_what_has_no_verdict_is_counted_and_in_no_mean(out: Path) -> None:
    found = _results(out)["tasks"]["first_vowel"]["policies"]["dense"]
    assert found["excluded_samples"] == {"unparsable_gold": SAMPLES}
    assert found[f"mean@{SAMPLES}"]["problems"] == 4
    assert found[f"mean@{SAMPLES}"]["problems_left_out"] == 1
    assert sum(found["statuses"].values()) == 5 * SAMPLES


def test_a_task_without_answers_has_no_majority(out: Path) -> None:
    tasks = _results(out)["tasks"]
    assert f"majority@{SAMPLES}" not in tasks["vowels:0"]["policies"]["dense"]
    assert tasks["first_vowel"]["policies"]["dense"][f"majority@{SAMPLES}"]["problems"] == 4


def test_sparse_reads_less_and_the_dense_row_is_the_ceiling(out: Path) -> None:
    found = _results(out)["tasks"]["first_vowel"]["policies"]
    assert found["dense"]["kv_read_share"] == 1.0
    assert found["sparse"]["kv_read_share"] < 0.95
    assert found["sparse"]["sparse_share"] == 1.0
    # Lists of 20 tokens out of 28 bound the acceptance from below, so even the ceiling is not 1.
    assert found["dense"]["tail"]["overall"]["q05"] > found["sparse"]["tail"]["overall"]["q05"]


def test_a_budget_that_holds_everything_makes_no_difference(model: str, tmp_path: Path) -> None:
    found = evaluate(model, tmp_path, "--budget", "512", "--no-tail")
    for task in found["tasks"].values():
        mean = task["paired"]["sparse - dense"]["mean"]
        assert (mean["value"], mean["sign_flip"]["p"], mean["sign_flip"]["different"]) == (0.0, 1.0, 0)
        assert task["policies"]["dense"]["tail"] is None
    left, right = (_rows(tmp_path, "vowels:0", policy) for policy in ("dense", "sparse"))
    assert [row["response_ids"] for row in left] == [row["response_ids"] for row in right]


def test_top_p_cuts_both_sides_of_the_tail_and_the_summary_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate(model, tmp_path, "--top-p", "0.5")
    printed = capsys.readouterr().out
    assert found["top_p"] == 0.5 and "as top-p 0.5 cuts them; targets such as 0.86 are for whole policies" in printed
    assert "as top-p 0.5 cuts them" in (tmp_path / "report.html").read_text()
    # With half of the mass, lists of 20 tokens out of 28 hold all of it, so the ceiling is 1.
    assert found["tasks"]["vowels:0"]["policies"]["dense"]["tail"]["overall"]["mean"] == pytest.approx(1, abs=0.01)
    message, _ = error_of([*command(model, tmp_path / "other"), "--top-p", "0"], capsys)
    assert "top_p must be above 0 and at most 1, got 0.0" in message


def test_a_finished_evaluation_is_read_again_without_a_model(
    model: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _results(out)
    monkeypatch.setattr("sparroll.evaluate.evaluation._engine", lambda *_: pytest.fail("loaded a model"))
    path = out / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"date": "2020-01-01T00:00:00+00:00"}))
    assert main(command(model, out)) == 0
    assert _results(out) == before
    # The record is of the call that sampled.
    assert json.loads(path.read_text())["date"].startswith("2020")


@pytest.mark.parametrize("emptied", [False, True])
def test_a_finished_evaluation_without_its_log_is_kept_from_another_request_and_not_sampled_again(
    emptied: bool,
    model: str,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(out, tmp_path / "done")
    (folder / "samples.jsonl").unlink()
    if emptied:
        (folder / "samples.jsonl").touch()
    before = {name: (folder / name).read_bytes() for name in ("config.json", "evaluation.json", "samples.parquet")}
    monkeypatch.setattr("sparroll.evaluate.evaluation._engine", lambda *_: pytest.fail("loaded a model"))
    message, _ = error_of([*command(model, folder), "--max-new-tokens", "9"], capsys)
    assert "was made with max_new_tokens = 18, and max_new_tokens = 9 is asked for now" in message
    assert main(command(model, folder)) == 0
    assert "evaluation.json stays as it was: nothing was left to do" in capsys.readouterr().err
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_samples_alone_keep_another_request_out(model: str, out: Path, tmp_path: Path, capsys: Any) -> None:
    folder = shutil.copytree(out, tmp_path / "done")
    for name in ("samples.jsonl", "evaluation.json"):
        (folder / name).unlink()
    message, _ = error_of([*command(model, folder), "--max-new-tokens", "9"], capsys)
    assert "was made with max_new_tokens = 18" in message


def test_train_then_evaluate_then_compare(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(short_config(model), tmp_path / "run")
    (trained,) = sorted((tmp_path / "run").glob("checkpoints/step-*4/model"))
    first, second = evaluate(model, tmp_path / "before"), evaluate(str(trained), tmp_path / "after")
    capsys.readouterr()
    assert main(["evaluate", "--compare", str(tmp_path / "before"), str(tmp_path / "after"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for policy in ("dense", "sparse"):
        mean = found["tasks"]["vowels:0"][policy]["mean"]
        one, other = (each["tasks"]["vowels:0"]["policies"][policy] for each in (first, second))
        name = f"mean@{SAMPLES}"
        assert mean["value"] == pytest.approx(other[name]["value"] - one[name]["value"])
    assert set(found["differs_in"]) == {"model", "weights"}
    assert found["refused"] == {}
    page = (tmp_path / "after" / "report.html").read_text()
    assert "What the model gets right" in page
    assert "unparsable_gold" in page


def test_runs_on_other_problems_are_not_paired(
    model: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(model, tmp_path / "fewer", "--count", "4", "--no-tail")
    evaluate(model, tmp_path / "other", "--problem-seed", "1", "--no-tail")
    capsys.readouterr()
    message, _ = error_of(["evaluate", "--compare", str(out), str(tmp_path / "fewer")], capsys)
    assert "first_vowel: 1 of 5 problems are in one run only" in message
    message, _ = error_of(["evaluate", "--compare", str(out), str(tmp_path / "other")], capsys)
    assert "10 of 10 problems" in message
    message, _ = error_of(["evaluate", "--compare", str(out), str(tmp_path)], capsys)
    assert "cannot read the record" in message


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--tasks", "first_vowel,first_vowel"], "is named twice"),
        (["--tasks", "nothing"], "unknown task 'nothing'"),
        (["--tasks", "vowels:x"], "--tasks takes name or name:level"),
        (["--tasks", ""], "--tasks takes name or name:level"),
        (["--temperature", "0"], "all 4 samples of a problem are equal"),
        (["--max-new-tokens", "600"], "exceed the context of 512"),
        (["--budget", "64", "--schedule", "qwen3-4b-0.86"], "--schedule and --budget exclude each other"),
        (["--reward", "my_rewards"], "--reward takes package.module:function, got 'my_rewards'"),
        (["--reward", "no_such_module:reward"], "the module no_such_module of the reward"),
        (["--reward-set", "worth=1"], "--reward-set needs --reward"),
        (["--reward", "integration.evaluation_runs:short", "--reward-set", "worth"], "--reward-set takes name=value"),
        (
            ["--reward", "integration.evaluation_runs:short", "--reward-set", "wroth=1"],
            "unexpected keyword argument 'wroth'",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    more: list[str], expected: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, _ = error_of(command(model, tmp_path / "out", *more), capsys)
    assert expected in message


def test_other_settings_do_not_go_on_with_the_same_folder(
    model: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, _ = error_of(command(model, out, "--seed", "9"), capsys)
    assert "was made with seed = 0, and seed = 9" in message


def test_a_function_of_ones_own_judges_instead_of_the_tasks(
    model: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--reward", "integration.evaluation_runs:short", "--reward-set", "most_tokens=15"]
    evaluate(model, tmp_path, *short, "--no-tail")
    for label in ("first_vowel", "vowels:0"):
        found = _results(tmp_path)["tasks"][label]["policies"]["dense"]
        rows, before = _rows(tmp_path, label, "dense"), _rows(out, label, "dense")
        assert [row["response_ids"] for row in rows] == [row["response_ids"] for row in before]
        lengths = [len(row["response_ids"]) for row in rows]
        expected = [None if tokens == 1 else float(tokens <= 15) for tokens in lengths]
        assert [row["reward"] for row in rows] == expected
        assert 0 < sum(value == 1 for value in expected) < len(rows)
        assert found["excluded_samples"] == ({"ungraded": expected.count(None)} if None in expected else {})
        assert f"majority@{SAMPLES}" not in found
    reward = json.loads((tmp_path / "config.json").read_text())["reward"]
    assert (reward["use"], reward["settings"]) == (short[1], {"most_tokens": 15})
    assert len(reward["sha256"]) == 64
    capsys.readouterr()
    message, _ = error_of(command(model, tmp_path, "--no-tail"), capsys)
    assert "was made with reward." in message
    message, hint = error_of(command(model, tmp_path / "far", "--reward", "integration.evaluation_runs:tokens"), capsys)
    assert "evaluation_runs:tokens gave" in message
    assert hint is not None
    assert "from 0 to 1" in hint


def test_settings_of_a_function_are_values_not_words() -> None:
    words = ["a=3", "b=.5", "c=false", "d=[1, 2]", "e=as it is", 'f="7"']
    judge = load_judge("integration.evaluation_runs:anything", words)
    assert judge is not None
    assert judge.function.settings == {"a": 3, "b": 0.5, "c": False, "d": [1, 2], "e": "as it is", "f": "7"}


def test_without_model_tasks_and_out_nothing_starts(capsys: pytest.CaptureFixture[str]) -> None:
    message, _ = error_of(["evaluate", "--tasks", "synthetic"], capsys)
    assert "needs --model, --tasks and --out" in message


def test_without_pyarrow_nothing_starts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message, hint = error_of(command(model, tmp_path / "out"), capsys)
    assert "pyarrow is not installed" in message
    assert hint == "pip install -e '.[data]'"
    assert not (tmp_path / "out").exists()
