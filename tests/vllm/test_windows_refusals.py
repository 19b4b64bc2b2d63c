"""What the plugin asks vLLM for where a schedule checks its drafts, and what it refuses then. Starts no engine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparroll.draft_check import DraftCheck
from sparroll.engines.vllm import launch
from sparroll.engines.vllm.windows import configure
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from vllm_runs import needs_vllm

CHECK = DraftCheck(window_tokens=32, floor=0.1)


def config(**changes: Any) -> SimpleNamespace:
    """The parts of a VllmConfig that matter here, with changes by dotted name written with two underscores."""
    made = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            scheduler_cls=None, async_scheduling=None, max_num_scheduled_tokens=None, max_num_batched_tokens=64
        ),
        parallel_config=SimpleNamespace(worker_cls="auto", pipeline_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(logits_processors=None, model="somewhere"),
        use_v2_model_runner=False,
        additional_config={},
    )
    for name, value in changes.items():
        place, _, field = name.rpartition("__")
        setattr(getattr(made, place) if place else made, field, value)
    return made


@needs_vllm
def test_the_configuration_names_our_scheduler_and_worker_and_nothing_runs_ahead() -> None:
    made = config()
    for _ in range(2):
        configure.name_parts(made, CHECK)
    assert made.scheduler_config.scheduler_cls == configure.SCHEDULER
    assert made.parallel_config.worker_cls in configure.WORKERS.values()
    assert made.scheduler_config.async_scheduling is False
    assert made.model_config.logits_processors == [configure.ADMISSION]
    configure.check_runner(made)


@needs_vllm
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scheduler_config__scheduler_cls": "their.Scheduler"}, "scheduler_cls='their.Scheduler'"),
        ({"scheduler_config__async_scheduling": True}, "async_scheduling=True"),
        ({"parallel_config__worker_cls": "their.Worker"}, "worker_cls='their.Worker'"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size = 2"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size = 2"),
        ({"model_config__logits_processors": ["their:Processor"]}, "logits processors of your own"),
        (
            {"scheduler_config__max_num_batched_tokens": 31},
            "a window of 32 tokens is longer than a step, which has 31",
        ),
    ],
)
def test_what_a_check_does_not_work_with_is_refused_with_a_way_out(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        configure.name_parts(config(**changes), CHECK)
    assert caught.value.hint


@needs_vllm
@pytest.mark.parametrize(
    "changes",
    [
        {"min_p": 0.1},
        {"logit_bias": {3: 1.0}},
        {"thinking_token_budget": 100},
        {"trace_decode_token_ids": [4, 5]},
        {"logprob_token_ids": [4, 5]},
        {"watermarking": True},
    ],
)
def test_a_request_is_refused_for_what_a_check_would_leave_undone(changes: dict[str, Any]) -> None:
    from sparroll.engines.vllm.windows.admission import Admission

    Admission.validate_params(SimpleNamespace(temperature=0.7, top_p=0.9, seed=3, top_k=0, watermarking=False))
    with pytest.raises(ValueError, match=f"does not know {next(iter(changes))}="):
        Admission.validate_params(SimpleNamespace(**changes))


def test_the_v2_runner_is_refused_with_the_variable_that_chooses() -> None:
    with pytest.raises(UserError, match="V2 model runner") as caught:
        configure.check_runner(config(use_v2_model_runner=True))
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in str(caught.value.hint)


def test_the_check_is_the_schedule_files(tmp_path: Path) -> None:
    plain, checked = Schedule.fixed(64), Schedule.fixed(64).checked(window_tokens=32, floor=0.1)
    for schedule, expected in ((plain, None), (checked, CHECK)):
        path = schedule.save(tmp_path / f"{schedule.name}.toml")
        assert configure.check_of(config(additional_config={"sparroll": str(path)})) == expected
    assert configure.check_of(config()) is None


def test_the_users_choice_of_a_runner_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv(configure.V2_VARIABLE, "1")
    launch.choose_runner(v1=False)
    assert os.environ[configure.V2_VARIABLE] == "1"
    launch.choose_runner(v1=True)
    assert os.environ[configure.V2_VARIABLE] == "0"
    launch.choose_runner(v1=False)
    assert os.environ[configure.V2_VARIABLE] == "1"
    monkeypatch.delenv(configure.V2_VARIABLE)
    launch.choose_runner(v1=True)
    launch.choose_runner(v1=False)
    assert configure.V2_VARIABLE not in os.environ
