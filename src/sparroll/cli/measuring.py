"""What `profile` and `calibrate` share: the options that say how tails are measured, and the study they add up to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparroll.attention.selectors import Selector, make_selector
from sparroll.cli import common, prompts
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.schedule import Schedule
from sparroll.types import Prompt

if TYPE_CHECKING:
    from sparroll.calibrate.measure import MeasureSettings, Study

Samples = Annotated[int, typer.Option("--samples", min=1, help="Rollouts per prompt.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest response, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Of sampling and of both policies.")]
Mode = Annotated[
    str,
    typer.Option(
        "--mode", help="faithful: generate with every budget. replay: re-read one set of dense rollouts; cheaper."
    ),
]
Estimator = Annotated[str, typer.Option("--estimator", help="top_k_lower (the published scale), top_k_upper, exact.")]
BinTokens = Annotated[int, typer.Option("--bin-tokens", min=1, help="Width of the context-length bins.")]
Kind = Annotated[str, typer.Option("--selector", help="page_mean, quest, head_softmax, streaming, oracle_page, ...")]
PageTokens = Annotated[
    int, typer.Option("--page-tokens", min=1, max=128, help="Tokens that are read or left out together.")
]
MaxBatch = Annotated[int, typer.Option("--max-batch", min=1, help="Rollouts that decode together.")]


def selector(kind: str, page_tokens: int) -> Selector:
    """At least 16 first and 32 recent tokens are always read, in whole pages, as published."""
    first, recent = (-(-tokens // page_tokens) * page_tokens for tokens in (16, 32))
    table: dict[str, Any] = {"kind": kind, "page_tokens": page_tokens}
    return make_selector(table | {"first_tokens": first, "recent_tokens": max(recent, 2 * page_tokens)})


def source(path: Path | None, task: str | None, level: int, count: int, seed: int) -> list[Prompt]:
    """The prompts as they were given; see prompts.read."""
    return prompts.read(path, task, level, count, seed)


def study(
    model: str,
    entries: list[Prompt],
    chat: bool,
    settings: MeasureSettings,
    device: str | None,
    max_batch: int,
    engine_name: str,
    schedules: list[Schedule],
    dtype: str | None = None,
) -> Study:
    """Engine and scorer on one model, and the prompts as token ids. The scorer is transformers, whoever samples.

    schedules: what will be measured, or one of each kind; refused here where the engine cannot run one.
    """
    from sparroll.calibrate.measure import Study
    from sparroll.engines.scoring import Scorer

    engine = common.load_engine(
        engine_name, model, None, device, max_batch, schedules[0], gpu_memory_share=0.5, dtype=dtype
    )
    for schedule in schedules:
        engine.check_schedule(schedule)
    scorer = Scorer.beside(engine, device=device, dtype=common.torch_dtype(dtype))
    return Study(engine, scorer, PromptEncoder(engine.tokenizer, chat).ids(entries), settings)


def described(
    model: str, entries: list[Prompt], chat: bool, settings: MeasureSettings, engine_name: str, **more: Any
) -> dict[str, Any]:
    """The configuration as a record holds it."""
    engines = {"rollouts": engine_name, "dense_scores": "transformers"}
    asked = [prompts.plain(entry) for entry in entries]
    return {"model": model, "engines": engines, **settings.table(), **more, "chat": chat, "prompts": asked}
