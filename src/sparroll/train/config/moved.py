"""Where keys of version 0.1 are now, and why there is no such key as one may expect, so that an error can say more than
that a key is unknown."""

from __future__ import annotations

_BUDGET = 'attention.kv_budget_tokens, with attention.kind = "budget"'
_VLLM = 'with engine.kind = "vllm"'
_CHEAPER = 'with control.by = "cheaper"'

MOVED = {
    "rollout.schedule": 'attention.name, with attention.kind = "schedule"; "dense" is attention.kind = "dense"',
    "rollout.kv_budget_tokens": _BUDGET,
    "rollout.force_schedule": 'attention.force, with attention.kind = "schedule"',
    "rollout.engine": "engine.kind",
    "rollout.gpu_memory_share": f"engine.gpu_memory_share, {_VLLM}",
    "rollout.kv_cache_gib": f"engine.kv_cache_gib, {_VLLM}",
    "rollout.sleep_level": f"engine.sleep_level, {_VLLM}",
    "compression": '[attention] with kind = "compression", policy = "r_kv" and that policy\'s settings',
    "controller": '[control] with by = "controller"',
    "guard.stricter": 'control.stricter, with control.by = "guard"',
    "guard.action=stricter": 'control.by = "guard", with the schedules in control.stricter',
    "distill.enabled": "the section [distill] itself: an adapter is trained where there is one",
    "distill.cheaper": f"control.schedules, {_CHEAPER}",
    "distill.cheaper_at_least": f"control.at_least, {_CHEAPER}",
    "distill.cheaper_every_steps": f"control.every_steps, {_CHEAPER}",
    "distill.cheaper_prompts": f"control.prompts, {_CHEAPER}",
    "distill.cheaper_patience": f"control.patience, {_CHEAPER}",
}
"""From an old section, section.key or section.key=value to what it is now."""


MISSING = {
    "rollout.top_p": "leave it out: rollouts for training are drawn from the whole distribution, because the acceptance "
    "and the corrections compare whole policies; evaluate.top_p is for the responses of the evaluation",
}
"""Why there is no such key."""


def way_out(key: str) -> str | None:
    """A hint for a key of version 0.1, or one that is missing on purpose; None for other keys."""
    return f"it is now {MOVED[key]}" if key in MOVED else MISSING.get(key)
