"""`sparroll evaluate` on sets, splits and files, in thinking mode, and with an adapter that only the sparse policy has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import data_files
from byte_model import follow, write_model
from cli_runs import error_of
from integration.evaluation_runs import FirstVowel, command, evaluate
from integration.train_runs import write_model as write_word_model
from sparroll.cli import main
from sparroll.engines.adapter import Adapter, load_adapter
from sparroll.engines.hf.engine import HFEngine
from sparroll.engines.load_model import load_model
from sparroll.schedule import Schedule

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"), context_tokens=1024)


@pytest.fixture(scope="module")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_word_model(tmp_path_factory.mktemp("word-model"))


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(data_files.plain_mirror(tmp_path_factory.mktemp("mirror"), "aime25", "polaris", "gsm8k"))


def on_data(model: str, mirror: str, out: Path, tasks: str, *more: str) -> list[str]:
    return [
        "evaluate", "--model", model, "--tasks", tasks, "--mirror", mirror, "--samples", "1", "--temperature", "0",
        "--max-new-tokens", "24", "--no-tail", "--device", "cpu", "--out", str(out), *more,
    ]  # fmt: skip


def record(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "evaluation.json").read_text()))


def rows(out: Path, policy: str) -> list[dict[str, Any]]:
    return [row for row in pq.read_table(out / "samples.parquet").to_pylist() if row["policy"] == policy]


def test_sets_splits_and_files_stand_side_by_side(
    model: str, mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: set[str] = set()

    def says(prompt: str, sample: int, sparse: bool) -> str:
        prompts.add(prompt)
        return "\\boxed{20}" if "21 hens" in prompt or "1,200" in prompt else "\\boxed{4}"

    follow(says, monkeypatch)
    problems = [{"problem": "Two and two?", "answer": "4"}, {"problem": "Why?", "answer": ""}]
    own = data_files.write(tmp_path / "own.csv", problems)
    template = tmp_path / "template.txt"
    template.write_text("Q: {problem}\nBox it.\n")
    tasks = f"aime25,gsm8k,gsm8k:train,{own}"
    out = tmp_path / "out"
    more = ["--chat", "--no-thinking", "--prompt-template", str(template)]
    assert main(on_data(model, mirror, out, tasks, *more)) == 0
    found = record(out)["results"]["tasks"]
    right = {label: task["policies"]["dense"]["mean@1"]["value"] for label, task in found.items()}
    assert right == {"aime25": 0.5, "gsm8k": 1.0, "gsm8k:train": 0.0, str(own): 1.0}
    assert "user: Q: Two and two?\nBox it.\nassistant: <none>" in prompts
    said = capsys.readouterr()
    assert f"{own}: 1 of 2 rows are not used: no answer 1" in said.err and said.err.count("are not used") == 1
    printed = said.out.splitlines()
    assert printed[0].split()[-1] == "tokens/s" and len({len(line) for line in printed[:5]}) == 1


def test_thinking_is_the_template_s(
    model: str, mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[str] = []
    follow(lambda prompt, *_: prompts.append(prompt) or "4", monkeypatch)
    assert main(on_data(model, mirror, tmp_path / "on", "gsm8k", "--chat", "--thinking")) == 0
    assert prompts[0].endswith("\nassistant: ") and record(tmp_path / "on")["config"]["thinking"] is True
    capsys.readouterr()
    message, _ = error_of(on_data(model, mirror, tmp_path / "on", "gsm8k", "--chat", "--no-thinking"), capsys)
    assert "was made with thinking = true, and thinking = false" in message


@pytest.mark.parametrize(
    ("tasks", "more", "expected"),
    [
        ("polaris", [], "polaris is made for training"),
        ("aime25:test", [], "has no data files of the split 'test'"),
        ("aime24", [], "has no HuggingFaceH4/aime_2024"),
        ("nowhere.jsonl", [], "cannot read nowhere.jsonl"),
        ("aime25,aime25", [], "is named twice"),
        ("data", [], 'task.name = "data" needs data.train or data.eval'),
        ("gsm8k", ["--contest-from", "2024-08-01"], "a contest window is asked for, but no row has a contest date"),
        ("gsm8k", ["--test-seconds", "0"], "--test-seconds must be above 0 and finite, got 0.0"),
        ("gsm8k", ["--thinking"], "--thinking and --no-thinking need --chat"),
        ("gsm8k", ["--prompt-template", "nothing"], "unknown prompt template 'nothing'"),
        ("synthetic_add:0", ["--prompt-template", "math"], "prompt templates are for sets and files"),
        ("gsm8k", ["--adapter", "."], "--adapter is only for sparse responses"),
        ("gsm8k", ["--adapter", ".", "--budget", "64"], "there is no adapter in ."),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    tasks: str, more: list[str], expected: str, model: str, mirror: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    message, _ = error_of(on_data(model, mirror, tmp_path / "out", tasks, *more), capsys)
    assert expected in message
    assert not (tmp_path / "out" / "config.json").exists()


def test_other_tests_of_the_same_problem_are_not_gone_on_with(
    model: str, mirror: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.jsonl"
    command = on_data(model, mirror, tmp_path / "out", str(file), "--allow-unsafe-sandbox")

    def write(expected: str) -> None:
        row = {"prompt": "Print it.", "tests": [{"input": "", "output": expected}]}
        file.write_text(json.dumps(row) + "\n")

    write("1\n")
    assert main(command) == 0
    assert main(command) == 0
    limits = record(tmp_path / "out")["config"]["test_limits"]
    assert limits == {str(file): [{"seconds": 10.0, "memory_gib": 1.0}]}
    capsys.readouterr()
    message, _ = error_of([*command, "--test-seconds", "2"], capsys)
    assert "was made with test_limits" in message
    write("2\n")
    capsys.readouterr()
    message, _ = error_of(command, capsys)
    assert "was made with rows." in message


def write_adapter(model: str, folder: Path, seed: int) -> Path:
    """One that changes what the model says."""
    adapter = Adapter(load_model(model, torch.float32, "cpu")[0])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapter.write(folder, Path(model).name)
    return folder


def test_an_adapter_is_the_sparse_policy_s_alone(
    word_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A budget that holds everything: what differs is the adapter.
    folder = write_adapter(word_model, tmp_path / "adapter", 1)
    plain, adapted = tmp_path / "plain", tmp_path / "adapted"
    evaluate(word_model, plain, "--budget", "512")
    found = evaluate(word_model, adapted, "--budget", "512", "--adapter", str(folder))
    assert [row["response_ids"] for row in rows(adapted, "dense")] == [
        row["response_ids"] for row in rows(plain, "dense")
    ]
    assert [row["response_ids"] for row in rows(adapted, "sparse")] != [
        row["response_ids"] for row in rows(plain, "sparse")
    ]
    tails = {
        name: found["tasks"]["first_vowel"]["policies"][name]["tail"]["overall"]["mean"] for name in ("dense", "sparse")
    }
    # Scored by the model itself: were the scorer's weights the adapter's, both would be the ceiling.
    assert tails["sparse"] < tails["dense"] - 0.05
    engine = HFEngine(word_model, schedule=Schedule.fixed(512), device="cpu")
    load_adapter(engine, word_model, folder)
    row = next(row for row in rows(adapted, "sparse") if row["task"] == "first_vowel")
    (first, *_) = FirstVowel().prompts("eval", 3, 0, 1)
    (rollout,) = engine.generate([first.text], max_new_tokens=18, seed=[row["seed"]])
    assert rollout.response_ids == row["response_ids"]
    capsys.readouterr()
    other = write_adapter(word_model, tmp_path / "other", 2)
    message, _ = error_of(command(word_model, adapted, "--budget", "512", "--adapter", str(other)), capsys)
    assert "was made with policies.sparse.adapter" in message
