"""`sparroll plan`: what a schedule would save on a device, predicted from the model's config alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparroll import records
from sparroll.cli.shared import common, named, options
from sparroll.cli.shared.options import MODEL, OUTPUT, READING, option
from sparroll.errors import UserError
from sparroll.layer_groups import budgets_in_words
from sparroll.progress import quiet_transformers
from sparroll.rounding import percent_up, rounded_down, rounded_up

if TYPE_CHECKING:
    from sparroll.plan.speedup import ControlTime, KernelSteps, Plan, StepTime, VerifiedTime

MEASURE = "measure"


def plan(
    command: typer.Context,
    model: Annotated[
        str,
        option(MODEL, "--model", help="A built-in name such as Qwen3-1.7B, a folder, a config.json, or a hub name."),
    ],
    schedule: Annotated[str | None, option(READING, "--schedule", help="Preset or file.")] = None,
    budget: Annotated[
        int | None, option(READING, "--budget", min=1, help="A fixed KV budget in tokens, instead of a schedule.")
    ] = None,
    check_window: options.CheckWindow = None,
    check_floor: options.CheckFloor = None,
    cut_share: Annotated[
        float | None,
        option(
            READING,
            "--cut-share",
            help="Share of windows in which a check takes something back. Default: as measured on the study's model.",
        ),
    ] = None,
    drafted_per_kept: Annotated[
        float | None,
        option(READING, "--drafted-per-kept", help="The same in other terms: tokens drafted for each that stands."),
    ] = None,
    control_share: Annotated[
        float,
        option(READING, "--control-share", min=0, help="Share of requests that a control group decodes densely."),
    ] = 0.0,
    gpu: Annotated[
        str,
        option(MODEL, "--gpu", help="A100, H100, H200, B200, MI300X, a JSON profile, or `measure` for this machine."),
    ] = "H200",
    lengths: Annotated[
        str, typer.Option("--lengths", help="12000, 0-32768, 4000,9000, lognormal:18000,0.6,max=32768, or a JSON list.")
    ] = "0-32768",
    lengths_are: Annotated[
        str,
        typer.Option(
            "--lengths-are", help="contexts: --lengths are contexts of the requests in flight. rollouts: final lengths."
        ),
    ] = "contexts",
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", min=0, help="Context at which rollouts begin to decode; for --lengths-are rollouts."
        ),
    ] = 0,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Requests that decode together; default: as many as the memory holds.")
    ] = None,
    element_bytes: Annotated[
        int | None,
        typer.Option(
            "--element-bytes",
            min=1,
            help="Bytes per weight and cached number; default: 2, or with --fit-steps those of the model here.",
        ),
    ] = None,
    fit_steps: Annotated[
        bool,
        typer.Option(
            "--fit-steps", help="With --gpu measure: load the model and time real decode steps on this machine."
        ),
    ] = False,
    out: Annotated[Path | None, option(OUTPUT, "--out", help="Also write OUT/plan.json.")] = None,
    force_schedule: options.ForceSchedule = False,
    json_output: options.Json = False,
) -> None:
    """Predict tokens per second and speed-up of decoding with a schedule."""
    from sparroll.plan import hardware as devices
    from sparroll.plan import speedup as predict
    from sparroll.plan.model_shape import model_shape, name_to_check
    from sparroll.plan.time_model import time_model_here

    common.refuse_idle(command, schedule is None, "without --schedule", "force_schedule")
    common.refuse_idle(command, lengths_are == "contexts", "with --lengths-are contexts", "prompt_tokens")
    if out is not None:
        common.output_folder(out)
    if fit_steps and gpu != MEASURE:
        raise UserError(f"--fit-steps times this machine, not {gpu}", "add --gpu measure")
    shape = model_shape(model)
    chosen = named.load_schedule(schedule, budget, name_to_check(model, shape), force_schedule, shape.layers)
    if chosen is None:
        raise UserError("a plan needs --schedule or --budget", "`sparroll schedule list` names the presets")
    chosen = named.with_check(chosen, check_window, check_floor) or chosen
    if fit_steps:
        quiet_transformers()
    result = predict.plan(
        shape,
        chosen,
        hardware=devices.measure() if gpu == MEASURE else gpu,
        lengths=lengths,
        lengths_are=lengths_are,  # type: ignore[arg-type]
        prompt_tokens=prompt_tokens,
        batch=batch,
        element_bytes=element_bytes,
        time_model=time_model_here(model, chosen, element_bytes) if fit_steps else None,
        cut_share=cut_share,
        drafted_per_kept=drafted_per_kept,
        control_share=control_share,
        # It was checked above, where the folder of the model is known.
        force_schedule=True,
    )
    asked = {"model": model, "schedule": chosen.name, "gpu": gpu, "lengths": lengths, "lengths_are": lengths_are}
    path = records.write(out / "plan.json", "plan", result.table(), config=asked) if out is not None else None
    if json_output:
        common.print_json(result.table())
    else:
        print("\n".join(text(result)))
    if path is not None:
        common.wrote(path, quiet=json_output)


def _parameters(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def text(plan: Plan) -> list[str]:
    """The lines of a plan as it is printed."""
    device = plan.hardware
    budgets = [budgets_in_words(row.kv_budget_tokens) for row in plan.by_length]
    width = max(9, *(2 + len(each) for each in budgets))
    lines = [
        f"model      {plan.model.name}: {_parameters(plan.model.parameters)} parameters, {plan.model.layers} layers, "
        f"{plan.kv_bytes_per_token / 1024:.0f} KiB of cache per token",
        f"device     {device.name}: {device.bandwidth_bytes_per_second / 1e12:.2f} TB/s, "
        f"{device.flops_per_second / 1e12:{'.0f' if device.flops_per_second >= 1e13 else '.2g'}} TFLOP/s, "
        f"{device.memory_bytes / 1e9:.0f} GB",
        f"schedule   {plan.schedule}: reads {percent_up(plan.kv_read_share)} of the cache",
        f"lengths    {plan.lengths} (mean context {plan.mean_context_tokens:,.0f}), batch {plan.batch} ({plan.batch_is})",
        "",
        f"{'':<8}{'step':>11}{'weights':>11}{'KV':>11}{'index':>11}{'compute':>11}   {'bound':<9}{'tokens/s':>10}",
        _step("dense", plan.dense),
        _step("sparse", plan.sparse),
        "",
        f"speed-up   {rounded_down(plan.speedup, 2)}x",
        *(_kernels(plan.kernels) if plan.kernels else ()),
        *(_verified(plan, plan.verified) if plan.verified else ()),
        *(_control(plan.dense, plan.control) if plan.control else ()),
        "",
        f"{'context':>9}{'budget':>{width}}{'read':>7}{'speed-up':>10}",
        *(
            f"{row.context_tokens:>9,}{budget:>{width}}{percent_up(row.kv_read_share):>7}"
            f"{rounded_down(row.speedup, 2):>9}x"
            for row, budget in zip(plan.by_length, budgets, strict=True)
        ),
        "",
    ]
    return [*lines, *(f"- {line}" for line in plan.assumptions)]


def _kernels(found: KernelSteps) -> list[str]:
    return [
        f"kernels    {rounded_down(found.speedup, 2)}x with the kernels as they were timed: "
        f"{_duration(found.sparse.seconds)} a sparse step ({_duration(found.sparse.index_seconds)} of scores and choice), "
        f"{_duration(found.dense.seconds)} a dense one",
    ]


def _verified(plan: Plan, found: VerifiedTime) -> list[str]:
    net = found.seconds - found.scoring_seconds
    return [
        "",
        f"verified   {rounded_down(plan.verified_speedup, 2)}x, {found.tokens_per_second:,.0f} tokens/s: windows of "
        f"{found.window_tokens}, floor {found.floor:g}, {rounded_up(found.drafted_per_kept, 2)} drafted per kept",
        f"           a token of the batch takes {_duration(found.seconds)}: {rounded_up(found.drafted_per_kept, 2)} x "
        f"({_duration(plan.sparse.seconds)} sparse + {_duration(found.check_seconds)} of a check / "
        f"{found.window_tokens - 1})",
        f"           a check: attention {_duration(found.check_attention_seconds)}, layers "
        f"{_duration(found.check_layers_seconds)}, logits and the rule {_duration(found.check_logits_seconds)}",
        f"training   the checks replace the trainer's scoring pass, {_duration(found.scoring_seconds)} for the same tokens; "
        f"without it {_duration(net)} are left, beside {_duration(plan.sparse.seconds)} unverified",
    ]


def _control(dense: StepTime, found: ControlTime) -> list[str]:
    lost = percent_up(found.lost_share) if found.lost_share >= 0 else "none"
    return [
        f"control    {rounded_down(dense.seconds / found.seconds, 2)}x with {found.share:.3g} of the requests dense, "
        f"which costs {lost} of the tokens per second",
    ]


def _step(name: str, step: StepTime) -> str:
    parts = (step.seconds, step.weight_seconds, step.kv_seconds, step.index_seconds, step.compute_seconds)
    cells = "".join(f"{_duration(part):>11}" for part in parts)
    return f"{name:<8}{cells}   {step.bound:<9}{step.tokens_per_second:>10,.0f}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
