"""What of TRL's own configuration contradicts sparse rollouts. A GRPOConfig and the trainer's arguments in, UserError out;
TRL is not imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE
from sparroll.errors import UserError
from sparroll.integrations import tested_version

TESTED = "1.16"
"""The version of TRL whose methods the mixin overrides."""
EXACT_LOSSES = ("dapo", "cispo")
"""Loss types that divide by the kept tokens of the whole step, as our own loop does."""
SAMPLING_KEYS = ("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
"""Keys of generation_kwargs that leave the sampling distribution as it is."""


def check_version() -> None:
    """Raise UserError unless TRL is installed in the version that was tested."""
    tested_version.check("TRL", TESTED, 'pip install -e ".[trl]", in an environment without verl')


def check_arguments(args: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UserError for the first setting that a run with sparse rollouts cannot have.

    args: TRL's GRPOConfig.  arguments: the trainer's own keyword arguments.
    """
    for name in ("tools", "environment_factory", "rollout_func"):
        if arguments.get(name):
            raise UserError(
                f"{name} is given, and a response of several turns holds tokens that the engine did not sample",
                f"leave {name} out; TRL's own GRPOTrainer runs it densely",
            )
    for field, is_wrong, why, way_out in _WRONG:
        value = getattr(args, field, None)
        if is_wrong(value):
            raise UserError(f"{field}={value!r} {why}", way_out)
    keys = [key for key in args.generation_kwargs or {} if key not in SAMPLING_KEYS]
    if keys:
        raise UserError(
            f"generation_kwargs has {keys[0]!r}, which may change what is sampled, or what is returned of it",
            f"allowed are {', '.join(SAMPLING_KEYS)}; the rollouts' seed is SparseRollouts(seed=...)",
        )
    if os.environ.get(SCHEDULE_VARIABLE):
        raise UserError(
            f"{SCHEDULE_VARIABLE} is set, and names a schedule beside that of SparseRollouts",
            f"unset {SCHEDULE_VARIABLE}; the trainer sets it while the engine starts",
        )


def loss_notice(loss_type: str) -> list[str]:
    """An event for the start of a run whose loss does not divide by the tokens that the correction keeps."""
    if loss_type in EXACT_LOSSES:
        return []
    return [
        f"loss_type={loss_type!r} has a denominator of its own: weights and dropped tokens are those of the correction, but "
        f"the mean is not over the step's kept tokens, as with {' and '.join(EXACT_LOSSES)} (docs/trl.md)"
    ]


def _other_than(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


_OURS = "leave it at its default: SparseRollouts(correction=...) takes its place"
_SAME = "sample from the whole distribution, so that both log-probabilities of a token are of the same one"
_WRONG: list[tuple[str, Callable[[Any], bool], str, str]] = [
    ("use_vllm", _other_than(True), "samples without vLLM, where nothing is sparse", "use_vllm=True"),
    (
        "vllm_importance_sampling_correction",
        _other_than(True),
        "leaves out the dense log-probabilities that the correction needs",
        'leave it at True; SparseRollouts(correction="none") corrects nothing',
    ),
    ("vllm_importance_sampling_mode", _other_than("sequence_mask"), "would be a second correction", _OURS),
    ("vllm_importance_sampling_clip_max", _other_than(3.0), "would be a second correction", _OURS),
    ("vllm_importance_sampling_clip_min", _other_than(None), "would be a second correction", _OURS),
    (
        "off_policy_mask_threshold",
        _other_than(None),
        "drops rollouts from the loss's numerator a second time, and never from its denominator",
        'leave it out; SparseRollouts(correction="veto") and "mis" drop whole rollouts',
    ),
    (
        "loss_type",
        lambda value: value == "vespo",
        "takes the logarithm of every weight, which is 0 for a dropped token",
        f"loss_type={EXACT_LOSSES[0]!r} or another one",
    ),
    ("top_p", _other_than(1.0, None), "cuts the engine's distribution but not the trainer's", _SAME + ": top_p=1.0"),
    ("top_k", _other_than(0, -1, None), "cuts the engine's distribution but not the trainer's", _SAME + ": top_k=0"),
    ("min_p", _other_than(None, 0.0), "cuts the engine's distribution but not the trainer's", _SAME + ": min_p=None"),
    (
        "repetition_penalty",
        _other_than(1.0),
        "changes the engine's distribution but not the trainer's",
        _SAME + ": repetition_penalty=1.0",
    ),
    (
        "vllm_structured_outputs_regex",
        _other_than(None),
        "changes the engine's distribution but not the trainer's",
        "leave it out, and reward the form of a response instead",
    ),
    (
        "vllm_model_impl",
        _other_than("vllm", "auto"),
        "runs a model whose attention sparroll was never run in",
        'vllm_model_impl="vllm"',
    ),
    (
        "vllm_tensor_parallel_size",
        _other_than(1),
        "shares one engine among processes, which was never run with sparse rollouts",
        'vllm_tensor_parallel_size=1, or vllm_mode="server" with `vllm serve --tensor-parallel-size`',
    ),
]
