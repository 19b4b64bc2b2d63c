"""The objects that options name: schedules, compressions, reward functions and engines, from the words of a command line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparroll.compression import Compression, compression_kinds, make_compression
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.progress import quiet_transformers
from sparroll.schedule import Schedule

if TYPE_CHECKING:
    from sparroll.engines import base
    from sparroll.tasks.reward_function import FunctionJudge


def load_schedule(
    schedule: str | None, budget: int | None, model: str, force: bool = False, layers: int | None = None
) -> Schedule | None:
    """The schedule that --schedule or --budget names; None (dense) if neither is given."""
    if schedule is not None and budget is not None:
        raise UserError(
            "--schedule and --budget exclude each other", "--budget reads the same number of tokens at every length"
        )
    if schedule is not None:
        return Schedule.load(schedule, model=model, force=force)
    return None if budget is None else fixed_budget(budget, layers)


def with_check(schedule: Schedule | None, window: int | None, floor: float | None) -> Schedule | None:
    """The schedule with the check that --check-window and --check-floor name; as it is if neither is given. What only
    one of them names is taken from the schedule's own check, or is the default."""
    if window is None and floor is None:
        return schedule
    asked = "--check-window" if window is not None else "--check-floor"
    if schedule is None:
        raise UserError(
            f"{asked} checks what is drafted under a schedule, and dense rollouts and those under a compression have no "
            "drafts",
            "add --schedule or --budget, or leave it out",
        )
    own = schedule.check or DraftCheck()
    check = DraftCheck(
        own.window_tokens if window is None else window,
        own.floor if floor is None else floor,
    )
    return schedule if check == schedule.check else schedule.checked(check.window_tokens, check.floor)


def load_compression(
    kind: str | None, settings: list[str], schedule: Schedule | None, engine: str
) -> Compression | None:
    """The policy that --compression and --compression-set name; None if neither is given."""
    if kind is None:
        if settings:
            raise UserError("--compression-set needs --compression", f"known: {', '.join(compression_kinds())}")
        return None
    if schedule is not None:
        raise UserError(
            "--compression excludes --schedule and --budget",
            "the compression has a budget itself: --compression-set budget_tokens=512",
        )
    if engine != "hf":
        raise UserError(f"--compression needs --engine hf, got {engine}", "vLLM cannot drop tokens from its cache")
    chosen = dict(_setting("--compression-set", text) for text in settings)
    if "kind" in chosen:
        raise UserError("--compression-set sets no kind", "the policy is what --compression says")
    return make_compression(kind, **chosen)


def load_judge(path: str | None, settings: list[str]) -> FunctionJudge | None:
    """The function that --reward and --reward-set name; None if neither is given."""
    from sparroll.tasks.async_calls import AsyncCalls
    from sparroll.tasks.reward_function import FunctionJudge, RewardFunction, look_in

    if path is None:
        if settings:
            raise UserError("--reward-set needs --reward", "for example --reward my_rewards:brevity")
        return None
    if ":" not in path:
        raise UserError(f"--reward takes package.module:function, got {path!r}")
    look_in(Path.cwd())
    function = RewardFunction(path, dict(_setting("--reward-set", text) for text in settings))
    return FunctionJudge(function, AsyncCalls())


def _setting(option: str, text: str) -> tuple[str, Any]:
    name, equals, raw = text.partition("=")
    if not equals or not name:
        raise UserError(f"{option} takes name=value, got {text!r}", "for example budget_tokens=512")
    for read in (int, float, _toml):
        try:
            return name.strip(), read(raw)
        except ValueError:
            continue
    return name.strip(), raw.strip()


def _toml(raw: str) -> Any:
    """true, false, lists and quoted strings, as in a configuration. Raises ValueError for anything else."""
    return tomllib.loads(f"value = {raw}")["value"]


def layer_numbers(text: str) -> tuple[int, ...]:
    """The layers that --dense-layers names."""
    if text.strip() == "none":
        return ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UserError(f"--dense-layers takes numbers of layers, got {text!r}", "for example 0,1, or none") from None


def fixed_budget(kv_budget_tokens: int, layers: int | None = None) -> Schedule:
    """One budget at every length. Layers 0 and 1 stay dense, as published, if the model has that many."""
    return Schedule.fixed(kv_budget_tokens, dense_layers=tuple(range(min(2, layers if layers is not None else 2))))


def load_engine(
    kind: str,
    model: str,
    schedule: Schedule | None,
    device: str | None,
    max_batch: int = 64,
    capacity: Schedule | None = None,
    gpu_memory_share: float = 0.85,
    dtype: str | None = None,
) -> base.Engine:
    """An engine with the model loaded, without progress bars of transformers.

    capacity: a schedule with the selector and dense layers of those that will be set later; only vLLM needs to know it.
    """
    from sparroll.engines.make import dtype_named, make_engine

    quiet_transformers()
    return make_engine(
        kind,
        model,
        schedule=schedule,
        capacity=capacity,
        dtype=dtype_named(dtype),
        device=device,
        max_batch=max_batch,
        gpu_memory_share=gpu_memory_share,
    )
