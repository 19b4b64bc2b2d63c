"""`sparroll config`: what every setting of `sparroll train` and `sparroll distill` means."""

from __future__ import annotations

from typing import Annotated

import typer

from sparroll.cli.shared import common, options
from sparroll.errors import UserError


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
    """Explain the settings of a training run, as a TOML file with comments for --config. With --json, print the JSON
    schema of all of them."""
    from sparroll.train.config.describe import describe
    from sparroll.train.config.distill import DistillConfig
    from sparroll.train.config.run import TrainConfig

    if json_output and key is not None:
        raise UserError(
            f"--json prints the JSON schema of all settings, and {key} alone is asked for",
            f"leave one of them out: `sparroll config {key}` explains that part in words",
        )
    chosen = DistillConfig if distill else TrainConfig
    if json_output:
        common.print_json(chosen.model_json_schema())
    else:
        print(describe(chosen, key), end="")
