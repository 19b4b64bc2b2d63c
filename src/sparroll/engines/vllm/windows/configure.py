"""What the configuration of an engine that checks its drafts names (scheduler, workers), and what it refuses. vLLM is
imported only where a function runs."""

from __future__ import annotations

from typing import Any

from sparroll.draft_check import DraftCheck
from sparroll.engines.vllm.settings import VLLMSettings
from sparroll.errors import UserError
from sparroll.schedule import Schedule

_PACKAGE = __package__
SCHEDULER = f"{_PACKAGE}.scheduler.WindowScheduler"
WORKERS = {"cuda": f"{_PACKAGE}.worker.WindowWorker", "cpu": f"{_PACKAGE}.cpu_worker.WindowCPUWorker"}
ADMISSION = f"{_PACKAGE}.admission:Admission"
V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_WITHOUT = "leave the check out of the schedule"


def check_of(vllm_config: Any) -> DraftCheck | None:
    """How the engine's schedule checks its drafts; None where it does not."""
    settings = VLLMSettings.find(vllm_config)
    if settings is None or settings.schedule is None:
        return None
    # Whether it fits the model is said where the model is loaded.
    return Schedule.load(settings.schedule).check


def name_parts(config: Any, check: DraftCheck) -> None:
    """Make the configuration name our scheduler and workers. Raises UserError where it names others, or asks for what
    they cannot do. Called before vLLM fills in what was left open, and again afterwards."""
    from vllm.platforms import current_platform

    scheduler, parallel, model = config.scheduler_config, config.parallel_config, config.model_config
    worker = WORKERS["cpu" if current_platform.is_cpu() else "cuda"]
    _take(scheduler, "scheduler_cls", None, SCHEDULER)
    _take(parallel, "worker_cls", "auto", worker)
    _take(scheduler, "async_scheduling", None, False)
    named = list(model.logits_processors or [])
    if ADMISSION not in named:
        if named:
            raise _refusal("logits processors of your own", "leave logits_processors out, or " + _WITHOUT)
        # It changes no logits; vLLM shows it each request's parameters in the process where the user reads the error.
        model.logits_processors = [ADMISSION]
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise _refusal(f"{name} = {getattr(parallel, name)}", f"use {name}=1, or {_WITHOUT}")
    most = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    rows = check.window_tokens + 1
    if rows > most:
        raise UserError(
            f"the check of {check.window_tokens} drafts takes {rows} tokens of a step, which has {most}",
            f"raise max_num_batched_tokens to {rows} at least, or lower window_tokens",
        )


def check_runner(config: Any) -> None:
    """Raise UserError where vLLM would run another model runner than the one that drafts."""
    if config.use_v2_model_runner:
        raise _refusal("vLLM's V2 model runner", f"set {V2_VARIABLE}=0, or {_WITHOUT}")


def _take(config: Any, field: str, unset: Any, ours: Any) -> None:
    value = getattr(config, field)
    if value == unset or value is None:
        setattr(config, field, ours)
    elif value != ours:
        raise _refusal(f"{field}={value!r}", f"leave {field} out, or {_WITHOUT}")


def _refusal(what: str, hint: str) -> UserError:
    return UserError(f"drafts cannot be checked in vLLM with {what}", hint)
