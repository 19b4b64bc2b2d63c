"""verl's settings that contradict sparse rollouts are refused with the field's name and the way out."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from sparroll.errors import UserError
from sparroll.integrations.verl import refusals


def config(**changes: Any) -> dict[str, Any]:
    """verl's configuration, as far as it is looked at; changes: by dotted name, with / for dots."""
    table: dict[str, Any] = {}
    plain = {
        "trainer.v1.trainer_mode": "sparroll_sync",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.top_p": 1,
        "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.custom.sparroll.schedule": "qwen3-4b-0.86",
        "algorithm.rollout_correction.bypass_mode": False,
        "actor_rollout_ref.model.lora.merge": False,
        "actor_rollout_ref.actor.shuffle": False,
    }
    for name, value in (plain | {key.replace("/", "."): value for key, value in changes.items()}).items():
        *parents, last = name.split(".")
        place = table
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return table


def test_another_version_of_verl_is_refused_and_so_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"verl": "0.10.0", "ray": "2.50.0"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    for other in ("0.10.0", "0.9.2"):
        found["verl"] = other
        with pytest.raises(UserError, match=rf"methods of verl 0\.9\.1, and verl {other} is installed"):
            refusals.check_version()
    found["verl"] = "0.9.1"
    refusals.check_version()
    del found["ray"]
    with pytest.raises(UserError, match="verl is not installed: there is no ray"):
        refusals.check_version()


def test_verls_defaults_pass() -> None:
    refusals.check(config())
    assert refusals.settings_of(config()) == {"schedule": "qwen3-4b-0.86"}


@pytest.mark.parametrize(
    ("field", "value", "way_out"),
    [
        ("trainer/v1/trainer_mode", "sync", "sparroll_sync"),
        ("trainer/v1/trainer_mode", "sparrol_sync", "sparroll_sync"),
        ("trainer/use_v1", False, "use_v1=True"),
        ("actor_rollout_ref/rollout/name", "sglang", "name=vllm"),
        ("algorithm/rollout_correction/rollout_is", "token", "correction.name"),
        ("algorithm/rollout_correction/rollout_rs", "seq_mean_k1", "correction.name"),
        ("algorithm/rollout_correction/bypass_mode", True, "bypass_mode=False"),
        ("actor_rollout_ref/model/lora_rank", 16, "lora.merge=True"),
        ("actor_rollout_ref/model/lora/rank", 16, "lora.merge=True"),
        ("actor_rollout_ref/model/mtp/enable_rollout", True, "enable_rollout=False"),
        ("actor_rollout_ref/rollout/disaggregation/enabled", True, "enabled=False"),
        ("actor_rollout_ref/rollout/engine_kwargs/vllm/kv_cache_dtype", "fp8", "leave kv_cache_dtype out"),
        ("actor_rollout_ref/rollout/engine_kwargs/vllm/speculative_config", {"method": "mtp"}, "verify.window"),
        ("actor_rollout_ref/rollout/data_parallel_size", 2, "data_parallel_size=1"),
        ("actor_rollout_ref/rollout/logprobs_mode", "raw_logprobs", "processed_logprobs"),
        ("actor_rollout_ref/rollout/top_p", 0.95, "top_p=1"),
        ("actor_rollout_ref/rollout/top_k", 20, "top_k=-1"),
        ("actor_rollout_ref/rollout/multi_turn/enable", True, "multi_turn.enable=False"),
        ("actor_rollout_ref/actor/policy_loss/loss_mode", "gspo", "vanilla"),
        ("actor_rollout_ref/actor/shuffle", True, "shuffle=False"),
        ("skip/rollout_tq/enable", True, "enable=False"),
        ("actor_rollout_ref/rollout/agent/default_agent_loop", "tool_agent", "single_turn_agent"),
        ("algorithm/adv_estimator", "gae", "adv_estimator=grpo"),
        ("critic/enable", True, "critic.enable at null"),
    ],
)
def test_what_contradicts_sparse_rollouts_is_refused_by_its_name(field: str, value: Any, way_out: str) -> None:
    with pytest.raises(UserError) as refused:
        refusals.check(config(**{field: value}))
    assert field.replace("/", ".") in refused.value.message
    assert way_out in str(refused.value.hint)


def test_a_lora_adapter_that_is_merged_before_it_reaches_vllm_is_fine() -> None:
    refusals.check(config(**{"actor_rollout_ref/model/lora/rank": 16, "actor_rollout_ref/model/lora/merge": True}))


def test_data_that_sends_prompts_to_tools_is_refused() -> None:
    refusals.check_agents(["single_turn_agent", "my_agent"])
    with pytest.raises(UserError, match="agent_name has tool_agent"):
        refusals.check_agents(["single_turn_agent", "tool_agent"])


def test_what_means_something_else_than_in_our_own_loop_is_said_at_the_start() -> None:
    actor = "actor_rollout_ref/actor"
    assert refusals.notices(config(**{f"{actor}/loss_agg_mode": "token-mean"})) == []
    (mode,) = refusals.notices(config(**{f"{actor}/loss_agg_mode": "seq-mean-token-sum"}))
    assert "divides the loss by rollouts" in mode
    (kl,) = refusals.notices(config(**{f"{actor}/loss_agg_mode": "token-mean", f"{actor}/use_kl_loss": True}))
    assert "tokens that the correction keeps" in kl


def test_log_probabilities_of_the_checks_are_those_of_one_set_of_weights_alone() -> None:
    field = "actor_rollout_ref/rollout/custom/sparroll/verify/dense_logp"
    refusals.check(config(**{field: "engine"}))
    with pytest.raises(UserError, match="tokens of several weights") as refused:
        refusals.check(config(**{field: "engine", "trainer/v1/trainer_mode": "sparroll_colocate_async"}))
    assert "trainer_mode=sparroll_sync" in str(refused.value.hint)


def test_validation_beside_training_needs_our_manager() -> None:
    mine = {"actor_rollout_ref/rollout/agent/agent_loop_manager_class": "my.Manager", "trainer/test_freq": 5}
    refusals.check(config(**mine))
    refusals.check(config(**mine | {"trainer/v1/trainer_mode": "sparroll_separate_async", "trainer/test_freq": -1}))
    ours = {"actor_rollout_ref/rollout/agent/agent_loop_manager_class": refusals.MANAGER}
    refusals.check(config(**mine | ours | {"trainer/v1/trainer_mode": "sparroll_separate_async"}))
    with pytest.raises(UserError, match="measured as training"):
        refusals.check(config(**mine | {"trainer/v1/trainer_mode": "sparroll_separate_async"}))


def test_without_settings_of_ours_the_error_names_the_first_one() -> None:
    with pytest.raises(UserError, match=r"custom\.sparroll is missing"):
        refusals.settings_of({"actor_rollout_ref": {"rollout": {"custom": None}}})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("trainer/v1/trainer_mode", "sparroll_colocate_async", "dropped by how long they take"),
        ("trainer/v1/trainer_mode", "sparroll_separate_async", "dropped by how long they take"),
        ("algorithm/filter_groups/enable", True, "by their rewards"),
        ("algorithm/adv_estimator", "remax", "greedy"),
        ("actor_rollout_ref/rollout/agent/agent_loop_manager_class", "my.Manager", "which requests are dense"),
    ],
)
def test_what_would_bias_a_control_group_is_refused_with_one_and_runs_without(field: str, value: Any, why: str) -> None:
    share = "actor_rollout_ref/rollout/custom/sparroll/control_group/share"
    refusals.check(config(**{field: value}))
    refusals.check(config(**{field: value, share: 0}))
    refusals.check(config(**{share: 0.125}))
    with pytest.raises(UserError, match=why) as refused:
        refusals.check(config(**{field: value, share: 0.125}))
    assert f"{field.replace('/', '.')}={value}" in refused.value.message
    assert "control_group out" in str(refused.value.hint)
