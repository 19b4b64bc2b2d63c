"""Train and evaluate on math and code rows from a mirror of the hub, with responses that are known: each reward, share and
accuracy is a number that was counted beforehand. Commands, loaders, rewards and files are those of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import data_files
from byte_model import follow, tokenizer, write_model
from sandboxes import need_sandbox
from sparroll.cli import main
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.tasks.data.catalog import SETS
from sparroll.tasks.data.rows import Row
from sparroll.tasks.data.templates import filled
from sparroll.train.runtime.sinks import read_lines
from sparroll.types import Prompt, Rollout

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("math_verify")

LONGEST = 120
"""Most bytes of a response; what is longer is cut."""
RIGHT, WRONG, CUT, OTHER_FORM = range(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"), context_tokens=2048)


def hens(number: int) -> dict[str, Any]:
    return {"problem": f"[{number}] A farmer has {number} hens and sells one. How many are left?", "answer": number - 1}


def math_says(prompt: str, kind: int) -> str:
    """Kinds of response to the problem of `hens`."""
    left = int(prompt[prompt.index("[") + 1 : prompt.index("]")]) - 1
    return {
        RIGHT: f"One is gone. \\boxed{{{left}}}",
        WRONG: f"None is gone. \\boxed{{{left + 1}}}",
        CUT: "So many hens. " * 20,
        OTHER_FORM: f"\\boxed{{\\frac{{{2 * left}}}{{2}}}}",
    }[kind]


def mirror(root: Path, **sets: list[dict[str, Any]]) -> Path:
    """root/datasets--org--name/snapshots/...: the layout of the hub's cache, with files of the sets' own names."""
    for name, rows in sets.items():
        (file,) = data_files.FILES[name]
        repository = root / f"datasets--{SETS[name].repository.replace('/', '--')}"
        data_files.write(repository / "snapshots" / "c0ffee" / file, rows)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("c0ffee")
    return root


def train(model: str, where: Path, out: Path, settings: str, steps: int) -> list[dict[str, Any]]:
    """`sparroll train` on a configuration file; the lines of its steps."""
    file = out.with_suffix(".toml")
    file.write_text(
        f'[model]\nname = "{model}"\ndevice = "cpu"\n[train]\nsteps = {steps}\nlr = 0.001\n{settings}'
        f"[evaluate]\nprompts = 0\n[log]\nsinks = []\n",
    )
    assert main(["train", "--config", str(file), "--set", f"data.mirror={where}", "--out", str(out)]) == 0
    return [line for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]


def evaluate(model: str, where: Path, out: Path, tasks: str, *more: str) -> dict[str, Any]:
    """`sparroll evaluate`, dense and sparse; the record's results."""
    command = [
        "evaluate",
        "--model",
        model,
        "--tasks",
        tasks,
        "--mirror",
        str(where),
        "--samples",
        "4",
        "--budget",
        "64",
    ]
    command += ["--also-dense", "--max-new-tokens", str(LONGEST), "--chat", "--no-thinking", "--device", "cpu", *more]
    assert main([*command, "--out", str(out)]) == 0
    assert (out / "report.html").read_text().count("What the model gets right") == 1
    return dict(json.loads((out / "evaluation.json").read_text())["results"]["tasks"])


MATH = f"""
prompts_per_step = 6
[task]
name = "polaris"
chat_template = true
thinking = false
[data]
eval = ["aime24"]
[attention]
kind = "budget"
kv_budget_tokens = 64
[rollout]
samples_per_prompt = 4
max_new_tokens = {LONGEST}
"""


def test_math_from_training_to_a_comparison(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [hens(number) | {"difficulty": "3/8", "answer": str(number - 1)} for number in range(10, 16)]
    where = mirror(
        tmp_path / "hub", polaris=[*rows, rows[0], hens(99) | {"answer": None}], aime24=[hens(20), hens(21), hens(22)]
    )
    follow(lambda prompt, sample, sparse: math_says(prompt, sample), monkeypatch)
    lines = train(model, where, tmp_path / "run", MATH, steps=2)
    # Of four responses two are right: the plain one, and the one in another form.
    for line in lines:
        assert line["reward/mean"] == 0.5 and line["reward/groups_all_equal_share"] == 0.0
        assert (line["rollout/count"], line["rollout/cut_share"]) == (24, 0.25)
        # A quarter of the first steps' rollouts are the control group's.
        assert line["rollout/sparse_share"] == 0.75 and line["rollout/kv_read_share"] < 0.9
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data["sources"]["polaris:train"] == {"rows": 7, "skipped": {"no answer": 1}}
    assert (data["removed"], data["train_rows"], data["eval_rows"]) == ({"duplicate": 1}, 6, 3)

    trained = str(tmp_path / "run" / "checkpoints" / "step-000002" / "model")
    assert preference(trained) > preference(model)

    found = {}
    for name, weights in (("before", model), ("after", trained)):
        # The sparse policy is wrong once more, on the first problem; after training the second one is always right.
        def says(prompt: str, sample: int, sparse: bool, after: bool = name == "after") -> str:
            slip = sparse and "[20]" in prompt and sample == RIGHT
            return math_says(prompt, WRONG if slip else RIGHT if after and "[21]" in prompt else sample)

        follow(says, monkeypatch)
        found[name] = evaluate(weights, where, tmp_path / name, "aime24", "--bin-tokens", "100")["aime24"]
    assert_math(found["before"], tmp_path / "before")
    assert found["after"]["policies"]["dense"]["mean@4"]["value"] == pytest.approx(8 / 12)

    capsys.readouterr()
    assert main(["evaluate", "--compare", str(tmp_path / "before"), str(tmp_path / "after"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["tasks"]["aime24"]["dense"]["mean"]["value"] == pytest.approx(2 / 12)
    assert compared["tasks"]["aime24"]["dense"]["mean"]["sign_flip"]["different"] == 1
    assert set(compared["differs_in"]) == {"model", "weights"}


def assert_math(found: dict[str, Any], out: Path) -> None:
    """Dense: RIGHT, WRONG, CUT, OTHER_FORM on each of three problems. Sparse: the same with one more wrong on the first."""
    dense, sparse = (found["policies"][name] for name in ("dense", "sparse"))
    assert dense["mean@4"]["value"] == 0.5 and sparse["mean@4"]["value"] == pytest.approx(5 / 12)
    # 1 - C(2, 2) / C(4, 2) with two of four right, 1 - C(3, 2) / C(4, 2) with one.
    assert dense["pass@2"]["value"] == pytest.approx(5 / 6)
    assert sparse["pass@2"]["value"] == pytest.approx((1 / 2 + 5 / 6 + 5 / 6) / 3)
    assert dense["pass@4"]["value"] == 1.0
    # Two votes for the answer, one for another: right. With one of the two gone it is one against two.
    assert dense["majority@4"]["value"] == 1.0 and sparse["majority@4"]["value"] == pytest.approx(2 / 3)
    assert dense["statuses"] == {"no_answer": 3, "right": 6, "wrong": 3}
    assert dense["truncated_share"] == 0.25 and dense["response_tokens"]["max"] == LONGEST
    difference = found["paired"]["sparse - dense"]["mean"]
    assert difference["value"] == pytest.approx(-1 / 12) and difference["sign_flip"]["different"] == 1
    for table in (dense["mean@4"], dense["pass@2"], dense["majority@4"]):
        assert table["low"] <= table["value"] <= table["high"]
    assert dense["tokens_per_second"] > 0 and sparse["tail"]["overall"]["tokens"] > 0
    rows = pq.read_table(out / "samples.parquet").to_pylist()
    assert [row["reward"] for row in rows if row["policy"] == "dense"] == [1.0, 0.0, 0.0, 1.0] * 3
    assert [row["reward"] for row in rows if row["policy"] == "sparse"][:4] == [0.0, 0.0, 0.0, 1.0]
    assert {row["answer"] for row in rows if row["problem"] == 1 and row["reward"]} == {"20"}
    assert all(len(row["acceptance"]) == len(row["response_ids"]) <= LONGEST for row in rows)


def preference(model: str) -> float:
    """Log-probability of the right responses to the training problems minus that of the others: what GRPO raises."""
    scorer = Scorer(model, device="cpu")
    encoder = PromptEncoder(scorer.tokenizer, chat_template=True, thinking=False)
    rollouts = []
    for number in range(10, 16):
        text = filled(Row("", hens(number)["problem"], "math"), None).text
        prompt = encoder.ids([Prompt("", text, "")])[0]
        for kind in (RIGHT, OTHER_FORM, WRONG, CUT):
            response = tokenizer()(math_says(text, kind))["input_ids"][:LONGEST]
            rollouts.append(Rollout(prompt, response, torch.zeros(len(response)), "stop"))
    logp = [float(score.logp.sum()) for score in scorer.dense(rollouts, temperature=1.0)]
    return sum(value if place % 4 < 2 else -value for place, value in enumerate(logp))


CODE = f"""
prompts_per_step = 4
[task]
name = "taco"
chat_template = true
[data]
eval = ["humaneval_plus"]
max_tests = 2
difficulties = ["easy"]
[attention]
kind = "budget"
kv_budget_tokens = 64
[rollout]
samples_per_prompt = 4
max_new_tokens = {LONGEST}
"""
SUMS = {
    RIGHT: "```python\nprint(int(input()) + {n})\n```",
    WRONG: "```python\nprint(int(input()) - {n})\n```",
    CUT: "```python\n# " + "thinking " * 20,
    OTHER_FORM: "```python\nx = int(input())\nprint(x + {n} if x < 2 else 0)\n```",
}
"""The last one passes the first of the tests only: all of them must."""
CALLS = {
    RIGHT: "```python\ndef triple(x):\n    return 3 * x\n```",
    WRONG: "```python\ndef triple(x):\n    return x\n```",
    CUT: "# " * 80,
    OTHER_FORM: "```python\nraise SystemExit\n```",
}


def code_says(prompt: str, kind: int) -> str:
    if "triple" in prompt:
        return CALLS[kind]
    return SUMS[kind].replace("{n}", prompt.split("plus ")[1].split(".")[0])


def triple_row() -> dict[str, Any]:
    head = 'def triple(x: int) -> int:\n    """Three times x."""\n'
    test = "def check(candidate):\n    assert candidate(2) == 6\n    assert candidate(-1) == -3\n"
    return {"task_id": "Made/1", "prompt": head, "entry_point": "triple", "test": test}


def test_code_from_training_to_evaluation(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_sandbox()

    def sums(number: int) -> dict[str, Any]:
        return {"inputs": ["1\n", "2\n", "3\n"], "outputs": [f"{given + number}\n" for given in (1, 2, 3)]}

    rows = [data_files.taco_row(number, sums(number)) for number in (1, 2, 3)]
    calls = {"inputs": [[1], [2]], "outputs": [[3], [6]], "fn_name": "triple"}
    rows.append(data_files.taco_row(4, calls, starter_code="def triple(x):\n", question="Give three times x."))
    rows += [data_files.taco_row(5, sums(5), difficulty="HARD"), data_files.taco_row(6, {"inputs": [], "outputs": []})]
    where = mirror(tmp_path / "hub", taco=rows, humaneval_plus=[triple_row()])
    follow(lambda prompt, sample, sparse: code_says(prompt, sample), monkeypatch)
    (line,) = train(model, where, tmp_path / "run", CODE, steps=1)
    # One of four responses passes all tests.
    assert line["reward/mean"] == 0.25 and line["reward/groups_all_equal_share"] == 0.0
    assert line["reward/ungraded_share"] == 0.0 and line["rollout/cut_share"] == 0.25
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data["sources"]["taco:train"] == {"rows": 5, "skipped": {"no tests": 1}}
    assert (data["train_rows"], data["eval_rows"]) == (4, 1)

    trained = str(tmp_path / "run" / "checkpoints" / "step-000001" / "model")
    follow(lambda prompt, sample, sparse: code_says(prompt, WRONG if sparse else sample), monkeypatch)
    own = data_files.write(
        tmp_path / "own.jsonl",
        [
            {
                "problem": "Read x and print it plus 7.",
                "tests": [{"input": "1", "output": "8"}, {"input": "5", "output": "12"}],
            }
        ],
    )
    found = evaluate(trained, where, tmp_path / "after", f"humaneval_plus,taco:train,{own}", "--no-tail")
    statuses = {label: task["policies"]["dense"]["statuses"] for label, task in found.items()}
    assert statuses["humaneval_plus"] == {"crash": 1, "passed": 1, "wrong answer": 2}
    assert [found[label]["problems"] for label in found] == [1, 5, 1]
    for task in found.values():
        dense, sparse = (task["policies"][name] for name in ("dense", "sparse"))
        assert (dense["mean@4"]["value"], dense["pass@2"]["value"], dense["pass@4"]["value"]) == (0.25, 0.5, 1.0)
        assert sparse["mean@4"]["value"] == 0.0 and "majority@4" not in dense
        assert task["paired"]["sparse - dense"]["mean"]["value"] == -0.25
    rows = pq.read_table(tmp_path / "after" / "samples.parquet").to_pylist()
    assert len(rows) == 2 * 4 * (1 + 5 + 1) and {row["acceptance"] for row in rows} == {None}
    assert sum(row["reward"] for row in rows) == 1 + 5 + 1
