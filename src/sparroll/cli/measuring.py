"""The options that say how tails are measured: `profile` and `calibrate` have all of them, `evaluate` has some."""

from __future__ import annotations

from typing import Annotated

import typer

from sparroll.types import MOST_SAMPLES

Samples = Annotated[int, typer.Option("--samples", min=1, max=MOST_SAMPLES, help="Rollouts per prompt.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest response, in tokens.")]
Temperature = Annotated[
    float,
    typer.Option("--temperature", min=0, help="Temperature of sampling, and of both policies when they are compared."),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", min=0, max=1, help="Draw from the fewest most likely tokens with at least this mass; 1: from all."
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        help="faithful: generate with every budget. replay: read one set of dense rollouts again, which is cheaper.",
    ),
]
Estimator = Annotated[
    str, typer.Option("--estimator", help="top_k_lower (the published scale), top_k_upper, exact (small vocabularies).")
]
BinTokens = Annotated[int, typer.Option("--bin-tokens", min=1, help="Width of the context-length bins.")]
Kind = Annotated[str, typer.Option("--selector", help="page_mean, quest, head_softmax, streaming, oracle_page, ...")]
PageTokens = Annotated[
    int, typer.Option("--page-tokens", min=1, max=128, help="Tokens in a page, which are read or left out together.")
]
MaxBatch = Annotated[int, typer.Option("--max-batch", min=1, help="Rollouts that decode together.")]
