"""The arguments of `vllm serve` for sparse rollouts under a schedule. vLLM is not imported."""

from __future__ import annotations

import re
from pathlib import Path

from sparroll.engines.vllm.capacity import block_tokens
from sparroll.engines.vllm.lists_route import MIDDLEWARE
from sparroll.engines.vllm.settings import check_token_count
from sparroll.engines.vllm.worker import EXTENSION
from sparroll.errors import UserError
from sparroll.models import fingerprint
from sparroll.presets import presets
from sparroll.schedule import Schedule

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def serve_arguments(name: str, model: str | None = None, force: bool = False, short_step_tokens: int = 0) -> list[str]:
    """The arguments, one string each. Quotes would not survive a shell's $(...), so nested settings are written with
    dots. short_step_tokens: see VLLMSettings."""
    check_token_count(short_step_tokens)
    schedule = Schedule.load(name, model=model, force=force)
    served = None if model is None else fingerprint.of_model(model)
    if served is not None and served.layers is not None:
        schedule.check_layers(served.layers)
    if short_step_tokens and schedule.check is not None:
        raise UserError("short steps are not decoded densely where drafts are checked", "leave --short-step-tokens out")
    source = name if name in presets() else str(Path(name).resolve())
    if not _SAFE.fullmatch(source):
        raise UserError(
            f"the path {source!r} has characters that a shell would split or expand",
            "copy the schedule to a path of letters, digits and - _ . /",
        )
    setting = "--additional-config.sparroll"
    more = [f"{setting}.force_schedule=true"] if force else []
    more += [f"{setting}.short_step_tokens={short_step_tokens}"] if short_step_tokens else []
    where = [f"{setting}.schedule={source}", *more] if more else [f"{setting}={source}"]
    return [
        "--attention-backend=CUSTOM",
        *where,
        f"--block-size={block_tokens(schedule.selector)}",
        # Log-probabilities of the distribution that was sampled from, as every correction needs them.
        "--logprobs-mode=processed_logprobs",
        # With it the server can be asked what ran (docs/vllm.md).
        f"--worker-extension-cls={EXTENSION}",
        # And lists of log-probabilities can be had as bytes instead of text.
        f"--middleware={MIDDLEWARE}",
    ]
