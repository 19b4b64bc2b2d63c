"""Makes a Study from the names that a command or a file gives: engine, scorer, prompts as token ids. Measures
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparroll.attention.selectors import Selector, make_selector
from sparroll.calibrate.defaults import BATCH, BATCH_TOGETHER
from sparroll.calibrate.measure import MeasureSettings, Study
from sparroll.engines.base import Engine
from sparroll.engines.make import check_available, check_samples_at, dtype_named, make_engine, roomiest
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.plan.model_shape import ModelShape, model_shape
from sparroll.schedule import Schedule
from sparroll.tasks.prompt_file import plain_prompt
from sparroll.types import Prompt

SCORING_BYTES = 8 << 30
"""That scoring takes beside the weights: activations of a batch, and the logits of 1,024 tokens a few times."""
LEAST_SHARE, MOST_SHARE, SPARE_SHARE = 0.5, 0.85, 0.03


def open_study(
    model: str,
    prompts: Sequence[Prompt],
    chat: bool,
    settings: MeasureSettings,
    schedules: Sequence[Schedule],
    *,
    engine: str = "hf",
    device: str | None = None,
    dtype: str | None = None,
    max_batch: int | None = None,
) -> Study:
    """A study with an engine and a scorer on one model. The scorer is always transformers, whichever engine samples.

    schedules: those that will be measured, or one of each kind.  max_batch: rollouts that decode together; default: BATCH,
    or BATCH_TOGETHER with vLLM where no schedule checks drafts, whose logits take memory for each rollout.

    Raises UserError if the engine cannot run one of them, or cannot sample at the temperature. One vLLM engine has one
    selector, so another one is started for each of them.
    """
    check_samples_at(engine, settings.temperature)
    precision, apart = dtype_named(dtype), engine == "vllm"
    together = apart and not any(schedule.check for schedule in schedules)
    batch = max_batch or (BATCH_TOGETHER if together else BATCH)

    def alike(schedule: Schedule | None) -> list[Schedule]:
        """Those that one engine runs, together with this one."""
        return [each for each in schedules if not apart or schedule is None or each.selector == schedule.selector]

    def start(schedule: Schedule | None) -> Engine:
        share = LEAST_SHARE
        if together and torch.cuda.is_available():
            # Anew for each engine, because a scorer may be there by now.
            share = share_beside_a_scorer(model_shape(model), *torch.cuda.mem_get_info())
        return make_engine(
            engine,
            model,
            capacity=roomiest(alike(schedule)),
            dtype=precision,
            device=device,
            max_batch=batch,
            gpu_memory_share=share,
        )

    if apart:
        _check_kernels(engine, schedules)
    first = schedules[0] if schedules else None
    sampler = start(first)
    try:
        # Those of an engine that is started later are checked now, not after the measurements before it.
        for schedule in schedules:
            sampler.check_schedule(schedule, roomiest(alike(schedule)))
        scorer = Scorer.beside(sampler, device=device, dtype=precision)
        study = Study(sampler, scorer, PromptEncoder(sampler.tokenizer, chat).ids(prompts), settings)
    except BaseException:
        sampler.close()
        raise
    if apart and first is not None:
        study.restart, study.indexed = start, first.selector
    return study


def share_beside_a_scorer(shape: ModelShape, free_bytes: int, gpu_bytes: int) -> float:
    """Of the GPU's memory, for an engine whose model a scorer loads once more on the same GPU, in fp32 at most. The larger
    the engine's cache is, the more schedules are sampled together. vLLM does not start where less than the share is free,
    so what others have is left to them, down to LEAST_SHARE."""
    scorer_bytes = 4 * shape.parameters + SCORING_BYTES
    share = min(1 - scorer_bytes / gpu_bytes, free_bytes / gpu_bytes - SPARE_SHARE, MOST_SHARE)
    return max(share, LEAST_SHARE)


def _check_kernels(engine: str, schedules: Sequence[Schedule]) -> None:
    check_available(engine)
    from sparroll.engines.vllm.arguments import check_selector

    for schedule in schedules:
        check_selector(schedule.selector)


def study_table(
    model: str,
    prompts: Sequence[Prompt],
    chat: bool,
    settings: MeasureSettings,
    engine: str,
    **more: Any,
) -> dict[str, Any]:
    """The configuration of a study, as a record holds it."""
    engines = {"rollouts": engine, "dense_scores": "transformers"}
    asked = [plain_prompt(prompt) for prompt in prompts]
    return {"model": model, "engines": engines, **settings.table(), **more, "chat": chat, "prompts": asked}


PAGE_TOKENS = 16
"""Of a selector whose pages nobody named."""


def published_selector(
    kind: str, page_tokens: int, first_tokens: int | None = None, recent_tokens: int | None = None, **more: int
) -> Selector:
    """A selector that always reads the first and the last tokens. By default it reads at least the first 16 and the
    last 32, in whole pages, as published. more: settings of its own, such as the bits of quantized_mean."""
    first, recent = (-(-tokens // page_tokens) * page_tokens for tokens in (16, 32))
    table: dict[str, Any] = {"kind": kind, "page_tokens": page_tokens}
    table["first_tokens"] = first if first_tokens is None else first_tokens
    table["recent_tokens"] = max(recent, 2 * page_tokens) if recent_tokens is None else recent_tokens
    return make_selector(table | more)


def selector_from(
    text: str, page_tokens: int | None = None, first_tokens: int | None = None, recent_tokens: int | None = None
) -> Selector:
    """A selector from its kind and settings in one word: "quantized_mean,page_tokens=4,bits=2". What is left out is what
    the other arguments say, and as in `published_selector`, with pages of 16 tokens."""
    kind, *parts = text.split(",")
    beside = {"page_tokens": page_tokens, "first_tokens": first_tokens, "recent_tokens": recent_tokens}
    settings: dict[str, int] = {}
    for part in parts:
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not value.isdecimal():
            raise UserError(
                f"a selector is its kind, then settings as name=number, got {part!r} in {text!r}",
                "for example quantized_mean,page_tokens=4,bits=2",
            )
        if name == "kind" or name in settings:
            raise UserError(f"{name} is given twice in {text!r}", "leave one of them out")
        settings[name] = int(value)
        if beside.get(name) not in (None, settings[name]):
            option = f"--{name.replace('_', '-')} {beside[name]}"
            raise UserError(f"{option} is given, and {part.strip()} in {text!r}", "leave one of them out")
    given = {name: value for name, value in beside.items() if value is not None}
    return published_selector(kind.strip(), **{"page_tokens": PAGE_TOKENS, **given, **settings})
