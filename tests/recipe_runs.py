"""Every recipe that is a configuration, on a tiny model and small files: what a dry run changes, and the data it runs on."""

from __future__ import annotations

import importlib.util
import json
import random
import shlex
import tomllib
from pathlib import Path
from typing import Any

import data_files
from byte_model import write_model
from sandboxes import need_sandbox
from sparroll.tasks.data.catalog import SETS

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.parent for path in ROOT.glob("recipes/*/train.toml"))
NEW_TOKENS = 64

CHANGED = {
    "model.name": "a random model of that name in another folder",
    "model.device": "cpu",
    "attention.force": "true where the recipe has a schedule, which fits no model of other sizes",
    "engine": "hf",
    "rollout.max_new_tokens": NEW_TOKENS,
    "train.steps": 2,
    "train.prompts_per_step": 2,
    "data.mirror": "small files in the sets' schemas",
    "data.train": "a small file, where the recipe trains on a file",
    "evaluate.prompts": 1,
    "evaluate.samples_per_prompt": 2,
    "log.sinks": [],
}
"""All that a dry run may change of a recipe, and to what."""


def recipe(folder: Path) -> dict[str, dict[str, Any]]:
    """Its configuration, as written."""
    return tomllib.loads((folder / "train.toml").read_text(encoding="utf-8"))


def overrides(folder: Path, where: Path, engine: str = "hf") -> list[str]:
    """`--set` of all fields in CHANGED. where: for the model and the data. engine: vllm, where it is not to be changed."""
    name = recipe(folder)["model"]["name"].rpartition("/")[2]
    values = CHANGED | {
        # vLLM has kernels for few widths of heads.
        "model.name": write_model(where, name=name, head_dim=64 if engine == "vllm" else 8),
        "data.mirror": str(padded_mirror(where / "mirror")),
        "engine": engine,
        "attention.force": True if recipe(folder)["attention"]["kind"] == "schedule" else None,
    }
    values["data.train"] = str(prepared(folder, where)) if "train" in recipe(folder)["data"] else None
    return [
        word for key, value in values.items() if value is not None
        for word in ("--set", f"{key}={json.dumps(value) if isinstance(value, (bool, list, str)) else value}")
    ]  # fmt: skip


def padded_mirror(root: Path) -> Path:
    """Every set, with questions so long that the published schedules read a part of them. No two share their words."""
    rng = random.Random(1)
    for name, files in data_files.FILES.items():
        for file, rows in files.items():
            data_files.write(root / SETS[name].repository / file, [padded(row, rng) for row in rows])
    return root


def padded(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    question = next(column for column in ("problem", "question", "question_content", "prompt") if column in row)
    words = " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(100))
    return row | {question: f"{row[question]}\n# {words}"}


def prepared(folder: Path, where: Path) -> Path:
    """The file that the recipe's own prepare.py makes of one in the release's schema."""
    rng, source = random.Random(2), where / "release.jsonl"
    problems = [padded(data_files.problem(number, str(number - 1)), rng) for number in range(50, 58)]
    data_files.write(source, [{"prompt": row["problem"], "label": row["answer"]} for row in problems])
    spec = importlib.util.spec_from_file_location("prepare", folder / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.prepare(source, where / "prepared.jsonl") == len(problems)
    return where / "prepared.jsonl"


def evaluation(folder: Path, model: str, out: Path) -> list[str]:
    """The arguments of sparroll in the recipe's evaluate.sh."""
    text = (folder / "evaluate.sh").read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    command = text[text.index("\nsparroll ") :].replace("\\\n", " ").replace('"${@:3}"', "")
    words = shlex.split(command.replace('"$1"', shlex.quote(model)).replace('"$2"', shlex.quote(str(out))))
    assert words[:2] == ["sparroll", "evaluate"] and "$" not in " ".join(words)
    return words[1:]


def need_sandbox_for_programs(folder: Path) -> None:
    if "taco" in folder.name:
        need_sandbox()


def answer(prompt: str, sample: int, sparse: bool) -> str:
    """Right on every other sample."""
    wrong = sample % 2
    if "hens" in prompt:
        left = int(prompt.split(" hens")[0].rpartition(" ")[2]) - 1
        return f"\\boxed{{{left + wrong}}}"
    if "def add" in prompt:
        return f"```python\ndef add(a, b):\n    return a + b + {wrong}\n```"
    return f"```python\nprint(int(input()) + {1 + wrong})\n```"
