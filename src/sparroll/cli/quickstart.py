"""`sparroll quickstart`: everything from a profile to a report on a small model, on this machine's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparroll.cli.shared import common, options
from sparroll.progress import Progress
from sparroll.rounding import percent_up, rounded_down
from sparroll.types import LARGEST_SEED


def quickstart(
    command: typer.Context,
    out: options.Out = Path("runs/quickstart"),
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with other sizes; default: the packaged ones.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed to use instead of the one in the sizes.")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Profile, calibrate, run RL three times (dense, calibrated, too aggressive), plan, report. Resumes if
    interrupted."""
    from sparroll.quickstart import load_settings
    from sparroll.quickstart import quickstart as run

    settings = load_settings(config)
    if seed is not None:
        settings = settings.model_copy(update={"seed": seed})
    common.hold_folder(command, out)
    with (
        common.interruptible(f"{out} keeps what is finished; run the same command to continue"),
        Progress(json_output) as bars,
    ):
        summary = run(settings, out, bars, common.as_typed(command))
    if json_output:
        common.print_json(summary)
    else:
        print("\n".join(text(summary)))
    common.wrote(out / "summary.json", out / "report.html", quiet=json_output)


def text(summary: dict[str, Any]) -> list[str]:
    """The lines of the summary as it is printed."""
    lines = [f"{'from context':>12}{'KV budget':>11}{'tail q05':>10}{'low':>8}{'dense ceiling':>15}"]
    for row in summary["tail"]:
        tails = (("q05", 10), ("q05_low", 8), ("dense_ceiling_q05", 15))
        figures = "".join(f"{rounded_down(row[name]):>{width}}" for name, width in tails)
        lines.append(f"{row['from_context_tokens']:>12,}{row['kv_budget_tokens']:>11,}{figures}")
    lines += ["", f"{'run':<12}{'reward':>18}{'dense accuracy':>18}{'lowest tail':>13}"]
    for name, run in summary["runs"].items():
        reward = f"{rounded_down(run['reward_first'])} to {rounded_down(run['reward_last'])}"
        accuracy = "-"
        if run["dense_accuracy_first"] is not None:
            accuracy = f"{rounded_down(run['dense_accuracy_first'])} to {rounded_down(run['dense_accuracy_last'])}"
        lines.append(f"{name:<12}{reward:>18}{accuracy:>18}{rounded_down(run['tail_q05_min']):>13}")
    share = summary["kv_read_share"]
    read = "" if share is None else f"calibrated rollouts read {percent_up(share)} of the KV cache; "
    return ["", *lines, "", f"{read}target {summary['target']:g}, {summary['wall_seconds']:.0f} s in all"]
