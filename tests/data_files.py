"""Small sets in the schemas of the published ones, and where a hub mirror keeps them. Every row was written here."""

from __future__ import annotations

import base64
import csv
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

from sparroll.tasks.data.catalog import SETS

Rows = list[dict[str, Any]]


def write(path: Path, rows: Rows) -> Path:
    """In the format that the name ends with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as sink:
            writer = csv.DictWriter(sink, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


def private(tests: Rows) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def problem(number: int, answer: Any, **more: Any) -> dict[str, Any]:
    return {"problem": f"A farmer has {number} hens and sells one. How many are left?", "answer": answer, **more}


def livecodebench_rows(first: int, count: int = 1) -> Rows:
    stdin = [{"input": f"{first} 2\n", "output": f"{first + 2}\n", "testtype": "stdin"}]
    return [
        {
            "question_title": "Sum", "question_content": f"Print the sum of two numbers ({number}).",
            "question_id": f"made_{number}", "contest_date": f"2024-{7 + number % 3:02d}-15T00:00:00", "starter_code": "",
            "difficulty": "easy", "public_test_cases": json.dumps(stdin), "private_test_cases": private(stdin * 2),
            "metadata": "{}",
        }
        for number in range(first, first + count)
    ]  # fmt: skip


def function_row() -> dict[str, Any]:
    case = [{"input": "[1, 2]\n3", "output": "true", "testtype": "functional"}]
    return livecodebench_rows(90)[0] | {
        "starter_code": "class Solution:\n    def has(self, xs: list[int], x: int) -> bool:\n        ",
        "public_test_cases": json.dumps(case), "private_test_cases": json.dumps(case),
        "metadata": json.dumps({"func_name": "has"}),
    }  # fmt: skip


def taco_row(number: int, tests: Any, **more: Any) -> dict[str, Any]:
    row = {"question": f"Read a number and print it plus {number}.", "solutions": ["print(1)"], "starter_code": ""}
    return row | {"input_output": json.dumps(tests), "source": "made", "difficulty": "EASY"} | more


def stdin_tests(count: int) -> dict[str, Any]:
    return {"inputs": [f"{n}\n" for n in range(count)], "outputs": [f"{n + 1}\n" for n in range(count)]}


FILES: dict[str, dict[str, Rows]] = {
    "polaris": {"polaris-data.parquet": [problem(n, str(n - 1), difficulty=f"{n % 8}/8") for n in range(2, 12)]},
    "deepscaler": {
        "deepscaler.json": [
            problem(3, "2", solution="..."), problem(4, "", solution=""), problem(5, None, solution=""),
            problem(6, "5", solution="..."),
        ]
    },
    "aime24": {"data/train-00000-of-00001.parquet": [problem(20, "019", solution="", url="", year="2030")]},
    "aime25": {"data/train-00000-of-00001.parquet": [problem(21, "20"), problem(22, "21")]},
    "aime26": {"data/train-00000-of-00001.parquet": [problem(23, 22)]},
    "amc": {"data/train-00000-of-00001.parquet": [problem(143, 142.0), problem(2, 1.5)]},
    "amc12_2024": {"data/train-00000-of-00001.parquet": [problem(30, "29")]},
    "math500": {"test.jsonl": [problem(40, "\\frac{1}{2}", subject="Algebra", level=3, solution="", unique_id="a")]},
    "gsm8k": {
        "main/train-00000-of-00001.parquet": [
            {"question": "Ann has 1,200 stamps and buys 34. How many?", "answer": "1200+34=<<1200+34=1234>>\n#### 1,234"},
            {"question": "How cold is it?", "answer": "It is cold.\n#### -5"},
        ],
        "main/test-00000-of-00001.parquet": [{"question": "Two and two?", "answer": "#### 4"}],
        "socratic/train-00000-of-00001.parquet": [{"question": "Another config", "answer": "#### 9"}],
    },
    "taco": {
        "taco_verified.json": [
            taco_row(1, stdin_tests(3)),
            taco_row(2, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, starter_code="def add(a, b):\n"),
            taco_row(3, {"inputs": [], "outputs": []}),
        ]
    },
    "livecodebench": {
        "test.jsonl": [*livecodebench_rows(1, 2), function_row()],
        **{f"test{n}.jsonl": livecodebench_rows(10 * n) for n in range(2, 7)},
    },
    "humaneval_plus": {
        "data/test-00000-of-00001.parquet": [
            {
                "task_id": "Made/0", "prompt": "def one() -> int:\n    '''One.'''\n", "canonical_solution": "    return 1\n",
                "entry_point": "one", "test": "def check(candidate):\n    assert candidate() == 1\n",
            }
        ]
    },
    "mbpp_plus": {
        "data/test-00000-of-00001.parquet": [
            {
                "task_id": 1, "prompt": "Write a function that doubles.", "test": "assert double(2) == 4\n",
                "test_list": ["assert double(2) == 4", "assert double(3) == 6"],
                "code": "def helper(x):\n    return x\ndef double(x):\n    return 2 * helper(x)\n",
            }
        ]
    },
}  # fmt: skip
"""Set -> files of its repository. LiveCodeBench's earlier releases are the first files of its last."""


def plain_mirror(root: Path, *names: str) -> Path:
    """root/org/name/files."""
    for name in names or FILES:
        for file, rows in FILES[name].items():
            write(root / SETS[name].repository / file, rows)
        (root / SETS[name].repository / "README.md").write_text("# Made up\n")
    return root


def cached_mirror(root: Path, *names: str, commit: str = "0" * 40) -> Path:
    """root/datasets--org--name/snapshots/commit/files, with refs/main: the layout of the hub's cache."""
    for name in names or FILES:
        repository = root / f"datasets--{SETS[name].repository.replace('/', '--')}"
        for file, rows in FILES[name].items():
            write(repository / "snapshots" / commit / file, rows)
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return root
