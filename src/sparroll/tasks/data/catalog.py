"""The published sets by name: where each is, its splits, and which function reads its columns. Loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparroll.errors import UserError, nearest
from sparroll.tasks.code.limits import SandboxLimits
from sparroll.tasks.data import code_sets, math_sets
from sparroll.tasks.data.rows import Raw, Row


@dataclass(frozen=True)
class DataSet:
    """A set on the hub."""

    name: str
    repository: str
    columns: tuple[str, ...]
    """Columns that must be there. Without them it is another set, or another version of this one."""
    read: Callable[[Raw, str], Row]
    """Makes a Row of a raw row and its id. Raises Skipped if the row cannot be used."""
    train: str | None = None
    """The split to train on; None if the set is only for evaluation."""
    eval: str | None = None
    config: str | None = None
    files: tuple[str, ...] = ()
    """The files of the split, if their names do not contain the split's name."""
    also: tuple[str, ...] = ()
    """Columns that are read if they are there."""
    day: str = ""
    """The column with the day of a problem's contest; empty if the set has none."""
    limits: SandboxLimits | None = None
    """What the official grader allows a program for one test; None for sets without programs."""
    note: str = ""


_LCB_FILES = ("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7)))
_LCB_COLUMNS = ("question_content", "public_test_cases", "private_test_cases")
_LCB_ALSO = ("starter_code", "metadata", "difficulty", "contest_date", "question_id")
_QA = ("problem", "answer")
# LiveCodeBench: `--timeout 6`, "max memory is set to 4GB". evalplus: 4 s at least for each call of the function, 4 GiB.
# TACO: TIMEOUT = 4; it limits no memory, and 4 GiB are what the others allow.
_LIMITS = SandboxLimits()
_LCB_LIMITS, _EVALPLUS_LIMITS, _TACO_LIMITS = (_LIMITS.with_test(seconds, 4) for seconds in (6, 4, 4))

_SETS = (
    DataSet(
        "polaris", "POLARIS-Project/Polaris-Dataset-53K", _QA, math_sets.problem, train="train", also=("difficulty",)
    ),
    DataSet("deepscaler", "agentica-org/DeepScaleR-Preview-Dataset", _QA, math_sets.problem, train="train"),
    DataSet("aime24", "HuggingFaceH4/aime_2024", _QA, math_sets.problem, eval="train"),
    DataSet("aime25", "yentinglin/aime_2025", _QA, math_sets.problem, eval="train"),
    DataSet("aime26", "MathArena/aime_2026", _QA, math_sets.problem, eval="train", note="licence CC BY-NC-SA"),
    DataSet("amc", "AI-MO/aimo-validation-amc", _QA, math_sets.problem, eval="train"),
    DataSet("amc12_2024", "rawsh/2024_AMC12", _QA, math_sets.problem, eval="train"),
    DataSet("math500", "HuggingFaceH4/MATH-500", _QA, math_sets.problem, eval="test", also=("level", "subject")),
    DataSet("gsm8k", "openai/gsm8k", ("question", "answer"), math_sets.gsm8k, "train", "test", config="main"),
    DataSet(
        "taco",
        "likaixin/TACO-verified",
        ("question", "input_output"),
        code_sets.taco,
        train="train",
        also=("starter_code", "difficulty"),
        limits=_TACO_LIMITS,
    ),
    *(
        DataSet(
            f"livecodebench_v{release}" if release < 6 else "livecodebench",
            "livecodebench/code_generation_lite",
            _LCB_COLUMNS,
            code_sets.livecodebench,
            eval="test",
            files=_LCB_FILES[:release],
            also=_LCB_ALSO,
            day="contest_date",
            limits=_LCB_LIMITS,
        )
        for release in range(1, 7)
    ),
    DataSet(
        "humaneval_plus",
        "evalplus/humanevalplus",
        ("prompt", "entry_point", "test"),
        code_sets.humaneval,
        eval="test",
        limits=_EVALPLUS_LIMITS,
    ),
    DataSet(
        "mbpp_plus",
        "evalplus/mbppplus",
        ("prompt", "test", "test_list"),
        code_sets.mbpp,
        eval="test",
        also=("code", "test_imports"),
        limits=_EVALPLUS_LIMITS,
    ),
)
SETS = {each.name: each for each in _SETS}


def set_names() -> list[str]:
    return sorted(SETS)


def named(name: str) -> DataSet:
    """The set with that name or hub id. Raises UserError with the nearest name."""
    for each in SETS.values():
        if name in (each.name, each.repository) and not (each.files and name == each.repository):
            return each
    raise UserError(
        f"unknown data {name!r}", f"{nearest(name, set_names())}; or give a .jsonl, .parquet, .csv or .json file"
    )
