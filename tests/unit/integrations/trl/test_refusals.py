"""What contradicts sparse rollouts in TRL is refused at the start, with the field's name and the way out. No TRL here."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE
from sparroll.errors import UserError
from sparroll.integrations.trl import refusals

DEFAULTS: dict[str, Any] = {
    "use_vllm": True,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
    "loss_type": "dapo",
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "vllm_structured_outputs_regex": None,
    "vllm_model_impl": "vllm",
    "vllm_tensor_parallel_size": 1,
    "generation_kwargs": None,
}
"""Those of TRL 1.16, but for use_vllm; tests/in_trl compares them with its own."""


def test_trls_defaults_pass() -> None:
    refusals.check_arguments(SimpleNamespace(**DEFAULTS), {"tools": None, "rollout_func": None})


@pytest.mark.parametrize(
    ("field", "value", "way_out"),
    [
        ("use_vllm", False, "use_vllm=True"),
        ("vllm_importance_sampling_correction", False, 'correction="none"'),
        ("vllm_importance_sampling_mode", "token_truncate", "SparseRollouts(correction=...)"),
        ("vllm_importance_sampling_clip_max", 2.0, "SparseRollouts(correction=...)"),
        ("vllm_importance_sampling_clip_min", 0.5, "SparseRollouts(correction=...)"),
        ("off_policy_mask_threshold", 0.5, "veto"),
        ("loss_type", "vespo", "dapo"),
        ("top_p", 0.95, "top_p=1.0"),
        ("top_k", 50, "top_k=0"),
        ("min_p", 0.1, "min_p=None"),
        ("repetition_penalty", 1.1, "repetition_penalty=1.0"),
        ("vllm_structured_outputs_regex", "[0-9]+", "leave it out"),
        ("vllm_model_impl", "transformers", 'vllm_model_impl="vllm"'),
        ("vllm_tensor_parallel_size", 2, "server"),
        ("generation_kwargs", {"stop": ["</s>"], "logit_bias": {"5": 1}}, "allowed are stop"),
        ("generation_kwargs", {"seed": 1}, "SparseRollouts(seed=...)"),
    ],
)
def test_a_setting_that_contradicts_is_named_with_the_way_out(field: str, value: Any, way_out: str) -> None:
    with pytest.raises(UserError) as refused:
        refusals.check_arguments(SimpleNamespace(**DEFAULTS | {field: value}), {})
    assert field in refused.value.message and way_out in str(refused.value.hint)


@pytest.mark.parametrize("name", ["tools", "environment_factory", "rollout_func"])
def test_responses_of_several_turns_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is given"):
        refusals.check_arguments(SimpleNamespace(**DEFAULTS), {name: [print]})


def test_stop_texts_are_allowed() -> None:
    refusals.check_arguments(SimpleNamespace(**DEFAULTS | {"generation_kwargs": {"stop": ["\n\n"]}}), {})


def test_a_second_schedule_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCHEDULE_VARIABLE, "qwen3-4b-0.86")
    with pytest.raises(UserError, match=SCHEDULE_VARIABLE):
        refusals.check_arguments(SimpleNamespace(**DEFAULTS), {})


def test_another_version_of_trl_is_refused_and_so_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.17.0")
    with pytest.raises(UserError, match=r"TRL 1\.17\.0 is installed"):
        refusals.check_version()
    monkeypatch.setattr(metadata, "version", lambda name: "1.16.3")
    refusals.check_version()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match="not installed"):
        refusals.check_version()


def test_a_loss_with_its_own_denominator_says_so() -> None:
    assert refusals.loss_notice("dapo") == refusals.loss_notice("cispo") == []
    (line,) = refusals.loss_notice("grpo")
    assert "denominator of its own" in line
