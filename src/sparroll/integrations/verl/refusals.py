"""What of verl's own configuration contradicts sparse rollouts. Plain tables in, UserError out; verl is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparroll.errors import UserError, nearest
from sparroll.integrations import tested_version

TESTED = "0.9.1"
"""The version of verl whose methods our trainers override."""
MODES = {
    "sparroll_sync": "sync",
    "sparroll_colocate_async": "colocate_async",
    "sparroll_separate_async": "separate_async",
}
"""Our trainers, and those of verl that they extend."""
MANAGER = "sparroll.integrations.verl.agent_loops.SparrollManager"
"""Our manager of agent loops, by the name that verl loads it by."""
TOOL_LOOP = "tool_agent"
"""verl's agent loop that calls tools."""
_ROLLOUT = "actor_rollout_ref.rollout"
_DIVISORS = {
    "token-mean": "",
    "token-sum": "nothing",
    "seq-mean-token-sum": "rollouts",
    "seq-mean-token-sum-norm": "rollouts and loss_scale_factor",
    "seq-mean-token-mean": "the tokens that the correction keeps of each response, then by rollouts",
}
"""What verl's loss divides by in each mode. Only the first one gives the loss of our own loop."""


def check_version() -> None:
    """Raise UserError unless verl is installed with Ray, and in the version that was tested."""
    install = 'pip install -e ".[verl]", in an environment without TRL'
    tested_version.check("verl", TESTED, install, needs=("ray",))


def check(config: Mapping[str, Any]) -> None:
    """Raise UserError for the first setting that a run with sparroll cannot have. config: verl's whole configuration."""
    mode = _get(config, "trainer.v1.trainer_mode")
    if mode not in MODES:
        raise UserError(
            f"trainer.v1.trainer_mode={mode} runs without sparroll",
            f"use sparroll_{mode}" if f"sparroll_{mode}" in MODES else nearest(str(mode), list(MODES)),
        )
    for field, wrong, why, way_out in _WRONG:
        value = _get(config, field)
        if wrong(value):
            raise UserError(f"{field}={_shown(value)} {why}", way_out)
    _check_lora(config)
    _check_updates(config)
    _check_dense_logp(config, mode)
    _check_control_group(config, mode)
    _check_validation(config, mode)


def check_agents(names: Iterable[str]) -> None:
    """Raise UserError where the data sends a prompt to a loop that calls tools. names: the data's column `agent_name`."""
    if TOOL_LOOP in names:
        raise UserError(
            f"the data's column agent_name has {TOOL_LOOP}, which answers in several turns; the tail of a turn that "
            "continues a cached context is not measured yet",
            "leave the column out, or name single_turn_agent",
        )


def notices(config: Mapping[str, Any]) -> list[str]:
    """What a run says at its start of settings that it can have, and that mean something else than in our own loop."""
    actor = "actor_rollout_ref.actor"
    mode, lines = str(_get(config, f"{actor}.loss_agg_mode")), []
    if _DIVISORS.get(mode):
        lines.append(
            f"{actor}.loss_agg_mode={mode} divides the loss by {_DIVISORS[mode]}, where our own loop divides by all tokens "
            "that the correction keeps (token-mean)"
        )
    if _get(config, f"{actor}.use_kl_loss"):
        lines.append(
            f"{actor}.use_kl_loss=True: the KL term counts on the tokens that the correction keeps, unweighted"
        )
    return lines


def _check_control_group(config: Mapping[str, Any], mode: str) -> None:
    """What would make the control group's comparison one of something else than the way of decoding."""
    group = _get(config, f"{_ROLLOUT}.custom.sparroll.control_group")
    if not isinstance(group, Mapping) or not group.get("share"):
        return
    for field, wrong, why, way_out in (
        (
            "trainer.v1.trainer_mode",
            mode != "sparroll_sync",
            "weights and schedule change while a rollout is under way, and prompts are dropped by how long they take, which "
            "is longer with a dense rollout",
            "trainer.v1.trainer_mode=sparroll_sync",
        ),
        (
            "algorithm.filter_groups.enable",
            _set(_get(config, "algorithm.filter_groups.enable")),
            "verl discards prompts by their rewards before sparroll sees them, so the ones that are left say nothing of a "
            "difference of rewards",
            "algorithm.filter_groups.enable=False",
        ),
        (
            "algorithm.adv_estimator",
            _get(config, "algorithm.adv_estimator") == "remax",
            "some rollouts of a prompt are greedy",
            "algorithm.adv_estimator=grpo",
        ),
        (
            f"{_ROLLOUT}.agent.agent_loop_manager_class",
            bool(_get(config, f"{_ROLLOUT}.agent.agent_loop_manager_class")),
            "sparroll's own manager tells the engine which requests are dense",
            f"leave {_ROLLOUT}.agent.agent_loop_manager_class at null",
        ),
    ):
        if wrong:
            raise UserError(
                f"{field}={_shown(_get(config, field))} and a control group exclude each other: {why}",
                f"{way_out}, or leave {_ROLLOUT}.custom.sparroll.control_group out",
            )


def _check_validation(config: Mapping[str, Any], mode: str) -> None:
    """In the asynchronous modes validation runs beside training, and verl asks for log-probabilities in both."""
    field = f"{_ROLLOUT}.agent.agent_loop_manager_class"
    validates = _get(config, "trainer.val_before_train") or int(_get(config, "trainer.test_freq") or 0) > 0
    if mode != "sparroll_sync" and validates and _get(config, field) not in (None, MANAGER):
        raise UserError(
            f"{field}={_shown(_get(config, field))} with trainer.v1.trainer_mode={mode}: sparroll's own manager tells the "
            "engine which requests are validation, and without it they would be measured as training",
            f"leave {field} at null, or validate elsewhere: trainer.test_freq=-1 trainer.val_before_train=False",
        )


def _check_lora(config: Mapping[str, Any]) -> None:
    model = "actor_rollout_ref.model"
    for field in (f"{model}.lora_rank", f"{model}.lora.rank"):
        if (_get(config, field) or 0) > 0 and not _get(config, f"{model}.lora.merge"):
            raise UserError(
                f"{field}={_get(config, field)} puts a LoRA adapter into vLLM, where sparse attention does not run with one",
                f"merge it into the weights that vLLM gets, {model}.lora.merge=True, or train all weights",
            )


def _check_updates(config: Mapping[str, Any]) -> None:
    """verl draws the rows of an update at random with shuffle; which rows share a denominator is then not known."""
    actor = "actor_rollout_ref.actor"
    if _get(config, f"{actor}.shuffle"):
        raise UserError(
            f"{actor}.shuffle=True hides which rollouts share an update, so an update whose tokens are all dropped would "
            "divide by 0",
            f"leave {actor}.shuffle=False",
        )


def _check_dense_logp(config: Mapping[str, Any], mode: str) -> None:
    field = f"{_ROLLOUT}.custom.sparroll.verify.dense_logp"
    if _get(config, field) == "engine" and mode != "sparroll_sync":
        raise UserError(
            f"{field}=engine with trainer.v1.trainer_mode={mode}: a rollout may hold tokens of several weights there, and "
            "the checks know each part's own weights alone",
            f"+{field}=trainer, or trainer.v1.trainer_mode=sparroll_sync",
        )


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table custom.sparroll. Raises UserError where there is none."""
    own = _get(config, f"{_ROLLOUT}.custom.sparroll")
    if not isinstance(own, Mapping):
        raise UserError(
            f"{_ROLLOUT}.custom.sparroll is missing",
            f"name a schedule: +{_ROLLOUT}.custom.sparroll.schedule=qwen3-4b-0.86",
        )
    return own


def _get(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _set(value: Any) -> bool:
    return value is not None and value is not False


_LEAVE = "leave it at null; +actor_rollout_ref.rollout.custom.sparroll.correction.name=... is sparroll's (docs/verl.md)"
_WRONG: list[tuple[str, Any, str, str]] = [
    (
        "trainer.use_v1",
        lambda value: value is False,
        "asks for verl's old trainer, which has no place for sparroll",
        "leave trainer.use_v1=True",
    ),
    (
        f"{_ROLLOUT}.name",
        lambda value: value != "vllm",
        "is an engine that sparroll's attention does not run in",
        f"{_ROLLOUT}.name=vllm",
    ),
    (
        "algorithm.rollout_correction.rollout_is",
        _set,
        "would weight the loss a second time",
        _LEAVE,
    ),
    (
        "algorithm.rollout_correction.rollout_rs",
        _set,
        "would drop tokens a second time",
        _LEAVE,
    ),
    (
        "algorithm.rollout_correction.bypass_mode",
        _set,
        "takes the sparse policy's log-probabilities for the dense ones, and nothing would be left to correct",
        "leave algorithm.rollout_correction.bypass_mode=False",
    ),
    (
        "actor_rollout_ref.model.mtp.enable_rollout",
        _set,
        "decodes speculatively, which sparse attention does not run with",
        "leave actor_rollout_ref.model.mtp.enable_rollout=False",
    ),
    (
        f"{_ROLLOUT}.disaggregation.enabled",
        _set,
        "moves the KV cache between engines, and sparse attention's index would stay behind",
        f"leave {_ROLLOUT}.disaggregation.enabled=False",
    ),
    (
        f"{_ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype",
        lambda value: value not in (None, "auto", "float16", "bfloat16", "float32"),
        "is a KV cache that sparse attention cannot read",
        "leave kv_cache_dtype out",
    ),
    (
        f"{_ROLLOUT}.engine_kwargs.vllm.speculative_config",
        _set,
        "decodes speculatively, which sparse attention does not run with",
        "leave it out; verified rollouts are +actor_rollout_ref.rollout.custom.sparroll.verify.window=64",
    ),
    (
        f"{_ROLLOUT}.data_parallel_size",
        lambda value: value not in (None, 1),
        "makes one replica of several engines, whose counters cannot be read",
        f"{_ROLLOUT}.data_parallel_size=1: verl then makes more replicas",
    ),
    (
        f"{_ROLLOUT}.logprobs_mode",
        lambda value: value not in (None, "processed_logprobs"),
        "gives other log-probabilities than those that were sampled from",
        f"leave {_ROLLOUT}.logprobs_mode=processed_logprobs",
    ),
    (
        f"{_ROLLOUT}.top_p",
        lambda value: value not in (None, 1, 1.0),
        "cuts the distribution that the acceptance compares",
        f"{_ROLLOUT}.top_p=1",
    ),
    (
        f"{_ROLLOUT}.top_k",
        lambda value: value not in (None, -1, 0),
        "cuts the distribution that the acceptance compares",
        f"{_ROLLOUT}.top_k=-1",
    ),
    (
        f"{_ROLLOUT}.multi_turn.enable",
        _set,
        "answers in several turns, and the tail of a turn that continues a cached context is not measured yet",
        f"leave {_ROLLOUT}.multi_turn.enable=False",
    ),
    (
        f"{_ROLLOUT}.agent.default_agent_loop",
        lambda value: value == TOOL_LOOP,
        "answers in several turns, and the tail of a turn that continues a cached context is not measured yet",
        f"{_ROLLOUT}.agent.default_agent_loop=single_turn_agent",
    ),
    (
        "algorithm.adv_estimator",
        lambda value: value == "gae",
        "trains a critic, and its loss would leave out the tokens that the correction drops",
        "algorithm.adv_estimator=grpo",
    ),
    (
        "critic.enable",
        _set,
        "trains a critic, and its loss would leave out the tokens that the correction drops",
        "leave critic.enable at null",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        lambda value: value not in (None, "vanilla"),
        "is a loss for which the weights were never compared with sparroll's own",
        "leave loss_mode=vanilla",
    ),
    (
        "skip.rollout_tq.enable",
        _set,
        "replays rollouts that no engine samples, so there is nothing to measure",
        "leave skip.rollout_tq.enable=False",
    ),
]
"""(field, whether its value is wrong, why, the way out)."""
