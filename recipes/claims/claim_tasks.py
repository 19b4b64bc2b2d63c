"""The tasks that claims are tried on, at full size and at toy size, and the `sparroll train` configuration of a run on
one. Runs nothing.

`table-sums` is the task of recipes/mismatch-study, where one wrong token spoils an answer. `remarks` is that of
recipes/tiny-reasoner, whose remarks are words that the model may choose freely. `walks` is a second one of the same model,
whose words all follow from the prompt and from one another.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "mismatch-study"
sys.path[:0] = [str(STUDY), str(HERE.parents[1] / "src")]

import table_sums  # noqa: E402
from study import write_dry_model  # noqa: E402
from study_folder import new_config, unpack, write_folder  # noqa: E402
from study_rows import Settings  # noqa: E402

from sparroll.attention.selectors import PageMean, make_selector  # noqa: E402
from sparroll.attention.selectors.base import Selector  # noqa: E402
from sparroll.errors import UserError, nearest  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402
from sparroll.train.config.file import config_from  # noqa: E402
from sparroll.train.config.run import TrainConfig  # noqa: E402

Reading = dict[str, Any]
"""What a decode step reads: {"kind": "dense"}; {"kind": "budget", "kv_budget_tokens": 96}, where "selector" may be a
selector's table; {"kind": "schedule", "table": ...}, a schedule file's table; or {"kind": "compression", "policy": "r_kv",
"budget_tokens": 512}."""
DENSE: Reading = {"kind": "dense"}
VLLM_PAGE_TOKENS = 64
"""Largest page of table-sums in vLLM, which spreads an index row over the page's tokens: as many as a head has channels."""
USUAL_TASKS = ("table-sums", "remarks")
"""Those of a call that names none."""


@dataclass(frozen=True)
class ClaimTask:
    """A task with its model, and what all runs on it share."""

    name: str
    task: str
    """As sparroll.tasks knows it."""
    model: str
    """Packaged name or folder."""
    level: int
    temperature: float
    max_new_tokens: int
    page_tokens: int
    first_tokens: int
    recent_tokens: int
    bin_tokens: int
    budgets: tuple[int, ...]
    """In tokens, from very little to everything; pages of every size that is tried divide them."""
    low_budget: int
    """Whose rollouts are far from dense."""
    middle_budget: int
    """Whose rollouts train nearly like dense ones."""
    kept_tokens: tuple[int, ...]
    """What eviction leaves in the cache, the prompt included."""
    compress_every_tokens: int = field(default=128, kw_only=True)
    targets: tuple[float, ...]
    page_sizes: tuple[int, ...]
    lr: float
    steps: int = 60
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    evaluate_prompts: int = 256
    measure_prompts: int = 32
    """Held-out prompts of a measurement."""
    measure_samples: int = 2
    measure_new_tokens: int | None = None
    """Longest response of a measurement of tokens; None: as long as in training."""
    calibration_prompts: int = 16
    verify_rounds: int = 4
    max_batch: int = 128
    top_k: int = 20
    engine: str = "hf"
    device: str = "cpu"
    dtype: str = "fp32"
    dense_layers: tuple[int, ...] = (0, 1)
    toy: bool = False

    @property
    def selector(self) -> PageMean:
        return PageMean(**self.ends(self.page_tokens))

    def ends(self, page_tokens: int) -> dict[str, int]:
        """Page, first and recent tokens of a selector with such pages: whole pages, and at least as many tokens as with
        the task's own."""

        def whole(tokens: int) -> int:
            return -(-tokens // page_tokens) * page_tokens

        return {
            "page_tokens": page_tokens,
            "first_tokens": whole(self.first_tokens),
            "recent_tokens": whole(self.recent_tokens),
        }

    def table(self) -> dict[str, Any]:
        """Plain data for a record. Of the model only its name: where it lay is no part of an experiment."""
        return asdict(self) | {"model": Path(self.model).name}


def claim_tasks(out: Path, device: str, engine: str | None, *, toy: bool) -> list[ClaimTask]:
    """All tasks, in the order of records. engine: of table-sums; the others run on HFEngine."""
    study = Settings("", level=0) if toy else Settings("")
    sums = ClaimTask(
        name="table-sums", task=table_sums.NAME, model=str(out / "models" / "table-sums"), level=study.level,
        temperature=study.temperature, max_new_tokens=study.max_new_tokens, page_tokens=study.page_tokens,
        first_tokens=study.first_tokens, recent_tokens=study.recent_tokens, bin_tokens=study.bin_tokens,
        budgets=study.budgets, low_budget=study.fixed_budget, middle_budget=study.uniform_budget,
        kept_tokens=(1024, 2048, 3072, 3584), targets=(0.6, 0.7, 0.75, 0.8, 0.86, 0.9, 0.94, 0.98),
        page_sizes=(4, 8, 16, 32, 64, 128), lr=study.lr, evaluate_prompts=study.evaluate_prompts,
        calibration_prompts=study.calibration_prompts, max_batch=study.max_batch, device=device,
        engine=engine or ("hf" if device == "cpu" else "vllm"), dtype="fp32" if device == "cpu" else study.dtype,
    )  # fmt: skip
    remarks = ClaimTask(
        name="remarks", task="synthetic_add", model="tiny-reasoner", level=3, temperature=1.2, max_new_tokens=480,
        page_tokens=4, first_tokens=16, recent_tokens=32, bin_tokens=100,
        budgets=(64, 96, 128, 160, 192, 256, 320, 640), low_budget=96, middle_budget=192,
        kept_tokens=(128, 192, 256, 384), targets=(0.6, 0.7, 0.75, 0.8, 0.86, 0.9, 0.94, 0.98),
        page_sizes=(4, 8, 16, 32), lr=1e-4, device=device,
    )  # fmt: skip
    walks = replace(
        remarks, name="walks", task="synthetic_walk", level=2, temperature=1.5, max_new_tokens=384, page_tokens=8,
        budgets=(64, 96, 128, 160, 192, 256, 576), low_budget=64, middle_budget=128, kept_tokens=(208, 224, 256, 320),
    )  # fmt: skip
    tasks = [sums, remarks, walks]
    return [toy_size(task) for task in tasks] if toy else tasks


def toy_size(task: ClaimTask) -> ClaimTask:
    """The same code paths in seconds on a CPU: short problems, two steps, few of everything."""
    same = dict(
        level=0, steps=2, prompts_per_step=1, samples_per_prompt=4, evaluate_prompts=2, measure_prompts=2,
        measure_samples=2, calibration_prompts=8, verify_rounds=1, max_batch=16, engine="hf", device="cpu", dtype="fp32",
        targets=(0.8,), compress_every_tokens=16, toy=True,
    )  # fmt: skip
    if task.name == "table-sums":
        return replace(
            task, **same, page_tokens=4, first_tokens=4, recent_tokens=8, bin_tokens=64, budgets=(24, 48, 160),
            low_budget=24, middle_budget=48, kept_tokens=(48,), page_sizes=(4, 8), max_new_tokens=40,
        )  # fmt: skip
    return replace(
        task, **same, max_new_tokens=124, bin_tokens=50, budgets=(64, 96, 160), low_budget=64, middle_budget=96,
        kept_tokens=(96,), page_sizes=(4, 8), temperature=1.4, measure_new_tokens=60,
    )  # fmt: skip


def with_settings(task: ClaimTask, table: dict[str, Any]) -> ClaimTask:
    """The task as a folder's file of settings has it. Its model stays where it is."""
    kept = {name: value for name, value in table.items() if name in task.table() and name not in ("name", "model")}
    return replace(task, **{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()})


def make_model(task: ClaimTask) -> None:
    """Write the folder of the task's model, if it has one of its own and it is missing."""
    if task.name != "table-sums" or Path(task.model).exists():
        return
    partial = Path(f"{task.model}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    if task.toy:
        write_dry_model(partial)
    else:
        write_folder(partial, unpack(STUDY / "model", new_config()), new_config())
    partial.rename(task.model)


def find_task(tasks: list[ClaimTask], name: str) -> ClaimTask:
    found = {task.name: task for task in tasks}
    if name not in found:
        raise UserError(f"there is no task {name!r}", nearest(name, list(found)))
    return found[name]


def budget(kv_budget_tokens: int, selector: Selector | None = None) -> Reading:
    """A fixed budget at every length; selector: other than the task's."""
    chosen = {} if selector is None else {"selector": selector.table()}
    return {"kind": "budget", "kv_budget_tokens": kv_budget_tokens, **chosen}


def evicting(task: ClaimTask, policy: str, budget_tokens: int) -> Reading:
    """Tokens leave the cache until so many are left."""
    every = task.compress_every_tokens
    return {"kind": "compression", "policy": policy, "budget_tokens": budget_tokens, "every_tokens": every}


def engine_kind(task: ClaimTask, readings: Sequence[Reading]) -> str:
    """The task's engine, or HFEngine where vLLM cannot run one of the readings on a GPU: it evicts nothing, has kernels for
    two selectors, and keeps no index of very large pages."""
    selectors = [reading.get("selector", {"kind": "page_mean"}) for reading in readings]
    evicts = any(reading["kind"] == "compression" for reading in readings)
    other = any(each["kind"] not in ("page_mean", "quantized_mean") for each in selectors)
    large = any(each.get("page_tokens", 0) > VLLM_PAGE_TOKENS for each in selectors)
    return "hf" if evicts or other or large else task.engine


def engine_options(kind: str) -> dict[str, Any]:
    """What an engine of that kind takes so that several share a GPU."""
    study = Settings("")
    return {"gpu_memory_share": study.gpu_memory_share, "kv_cache_gib": study.kv_cache_gib} if kind == "vllm" else {}


def schedule_of(task: ClaimTask, reading: Reading) -> Schedule | None:
    """The schedule of a reading; None for dense attention and for a compression."""
    if reading["kind"] == "budget":
        selector = make_selector(reading["selector"]) if "selector" in reading else task.selector
        return Schedule.fixed(reading["kv_budget_tokens"], selector, task.dense_layers)
    return Schedule.from_table(reading["table"]) if reading["kind"] == "schedule" else None


def run_config(task: ClaimTask, reading: Reading, seed: int, folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    """The configuration of one run. folder: the schedule's file is written there. sections: what differs from the other
    runs of the task, key by key; without [correction], TIS."""
    schedule, attention = schedule_of(task, reading), dict(reading)
    if schedule is not None:
        attention = {"kind": "schedule", "name": str(schedule.save(folder / "schedule.toml"))}
    kind = engine_kind(task, [reading])
    every = (task.steps + 1) // 2
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": task.model, "device": task.device},
        "task": {"name": task.task, "level": task.level, "train_prompts": task.steps * task.prompts_per_step},
        "engine": {"kind": kind, **engine_options(kind)},
        "attention": attention,
        "rollout": {
            "samples_per_prompt": task.samples_per_prompt,
            "temperature": task.temperature,
            "max_new_tokens": task.max_new_tokens,
            "max_batch": task.max_batch,
            "dtype": task.dtype,
            "top_k": task.top_k,
            "control_share": 0,
        },
        "train": {
            "steps": task.steps,
            "prompts_per_step": task.prompts_per_step,
            "lr": task.lr,
            "beta2": 0.95,
            "dtype": task.dtype,
            "seed": seed,
        },
        "mismatch": {"bin_tokens": task.bin_tokens, "ceiling_prompts": 1 if task.toy else 2},
        "guard": {"action": "off"},
        "evaluate": {
            "prompts": task.evaluate_prompts,
            "every_steps": 0 if task.toy else every,
            "temperature": task.temperature,
        },
        "checkpoint": {"every_steps": 1 if task.toy else 5, "keep": 1},
        "log": {"sinks": []},
    }
    for section, table in sections.items():
        tables[section] = tables.get(section, {}) | table
    return config_from(tables)
