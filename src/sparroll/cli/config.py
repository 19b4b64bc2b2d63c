"""`sparroll config`: what every setting of `sparroll train` and `sparroll distill` means."""

from __future__ import annotations

from typing import Annotated

import typer

from sparroll.cli.shared import common, options


def config(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="A section such as rollout, or a key such as train.lr; default: all."),
    ] = None,
    distill: Annotated[
        bool, typer.Option("--distill", help="The settings of `sparroll distill` instead of `sparroll train`.")
    ] = False,
    json_output: options.Json = False,
) -> None:
    """Explain the settings of a training run, as a TOML file with comments for --config. With --json, print their JSON
    schema."""
    from sparroll.train.config.describe import describe
    from sparroll.train.config.distill import DistillConfig
    from sparroll.train.config.run import TrainConfig

    chosen = DistillConfig if distill else TrainConfig
    explained = describe(chosen, key)
    if json_output:
        common.print_json(chosen.model_json_schema())
    else:
        print(explained, end="")
