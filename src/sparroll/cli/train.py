"""`sparroll train`: GRPO from a TOML file and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sparroll.cli.shared import common, options
from sparroll.cli.shared.options import RUN, option
from sparroll.progress import Progress, quiet_transformers


def train(
    out: options.RunOut = None,
    config: Annotated[Path | None, option(RUN, "--config", help="TOML file; default: all defaults.")] = None,
    overrides: Annotated[
        list[str] | None,
        option(RUN, "--set", help="section.key=value, or a whole section such as attention=dense; repeatable."),
    ] = None,
    print_config: options.PrintConfig = False,
    resume: Annotated[bool, option(RUN, "--resume", help="Go on from the newest whole checkpoint in OUT.")] = False,
    json_output: options.Json = False,
) -> None:
    """Train a model with GRPO on sparse or dense rollouts. After Ctrl-C, --resume continues the run."""
    from sparroll.report import write_report
    from sparroll.tasks.reward_function import look_in
    from sparroll.train import load_config
    from sparroll.train import train as run

    # Your own reward functions are found beside the configuration and in the current folder.
    look_in(*([config.parent] if config else []), Path.cwd())
    settings = load_config(config, overrides or [])
    if print_config:
        common.print_config(settings, json_output)
        return
    out = common.run_folder(out)
    quiet_transformers()
    with Progress(json_output) as bars:
        result = run(settings, out, resume=resume, on_progress=bars.bar("train"))
    page = write_report(out)
    if json_output:
        common.print_json(result.table())
    else:
        common.print_facts(result.table())
    common.wrote(result.checkpoint / "model", page, out / "result.json", quiet=json_output)
