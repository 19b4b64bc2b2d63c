"""`sparroll rollout`: sample responses, dense or sparse, into a JSONL file. Continues where it was interrupted."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sparroll import records
from sparroll.cli.shared import common, named, options
from sparroll.cli.shared.options import SAMPLING, option
from sparroll.engines.make import check_names, check_samples_at
from sparroll.progress import Progress
from sparroll.tasks.prompt_file import plain_prompt, read_prompts
from sparroll.types import MOST_SAMPLES


def rollout(
    command: typer.Context,
    model: options.Model,
    out: options.Out,
    schedule: options.OneSchedule = None,
    budget: options.OneBudget = None,
    check_window: options.CheckWindow = None,
    check_floor: options.CheckFloor = None,
    adapter: options.Adapter = None,
    compression: options.CompressionKind = None,
    compression_set: options.CompressionSet = None,
    prompts_file: options.Prompts = None,
    task: options.Task = None,
    level: options.Level = 3,
    count: options.Count = 16,
    chat: options.Chat = False,
    n: Annotated[int, option(SAMPLING, "--n", "--samples", min=1, max=MOST_SAMPLES, help="Responses per prompt.")] = 1,
    max_new_tokens: options.MaxNewTokens = 1024,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    max_batch: options.MaxBatch = 64,
    seed: options.Seed = 0,
    engine_name: options.Engine = "hf",
    device: options.Device = None,
    dtype: options.Dtype = None,
    force_schedule: options.ForceSchedule = False,
    json_output: options.Json = False,
) -> None:
    """Sample responses and write them, with the log-probability of each token, to OUT/rollouts.jsonl. OUT/record.json sums
    up all of them. After an interruption its engine table counts only those that the last call sampled, and engine_rollouts
    says how many these are."""
    from sparroll.engines.adapter import described, load_adapter, refuse_check
    from sparroll.engines.generate_arguments import check_counts
    from sparroll.engines.prompt_encoder import PromptEncoder
    from sparroll.evaluate.rollout_file import RolloutFile, sample_missing, summarise_rollouts

    common.refuse_idle_prompt_options(command, prompts_file, task)
    common.refuse_idle(command, schedule is None, "without --schedule", "force_schedule")
    check_names(engine_name, model, device, dtype)
    check_counts(n, max_new_tokens, temperature, top_p=top_p)
    check_samples_at(engine_name, temperature)
    common.hold_folder(command, out)
    chosen = named.with_check(named.load_schedule(schedule, budget, model, force_schedule), check_window, check_floor)
    common.say_caveats(chosen)
    if adapter is not None and chosen is not None:
        refuse_check(chosen)
    policy = named.load_compression(compression, compression_set or [], chosen, engine_name)
    source = read_prompts(prompts_file, task, level, count, seed)
    common.say_prompts_left_out(command, prompts_file, len(source))
    config = {
        "model": model, "schedule": chosen.table() if chosen else None, "task": task, "level": level, "chat": chat,
        "prompts": [plain_prompt(prompt) for prompt in source], "n": n, "max_new_tokens": max_new_tokens,
        "temperature": temperature, "top_p": top_p, "seed": seed, "engine": engine_name, "dtype": dtype,
        "compression": policy.table() if policy else None, "adapter": described(adapter) if adapter else None,
    }  # fmt: skip
    rollouts = RolloutFile(out, config, n)
    started = time.perf_counter()
    with (
        common.interruptible(f"{out} keeps what is finished; run the same command to continue", rollouts.path),
        Progress(json_output) as bars,
        named.load_engine(engine_name, model, chosen, device, max_batch, dtype=dtype) as engine,
    ):
        engine.set_compression(policy)
        if adapter is not None:
            load_adapter(engine, model, adapter)
        engine.reset_report()
        sampled = sample_missing(
            engine, PromptEncoder(engine.tokenizer, chat).ids(source), rollouts,
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
            on_progress=bars.bar("rollouts"),
        )  # fmt: skip
        report = engine.report()
    counted = {"engine_rollouts": sampled * n, "engine": report.table()}
    summary = summarise_rollouts(rollouts.rows(), source, task) | counted
    if report.peak_dense_kv_bytes and policy is not None:
        # Measured on what was sampled now: the caches of earlier, interrupted calls are gone.
        summary["kv_saved_share"] = report.kv_saved_share
    path = out / "record.json"
    written = records.write_unless_same(
        path, "rollout", summary, config=config, seed=seed, wall_seconds=time.perf_counter() - started,
        # The engine has counted nothing where nothing was left to sample.
        aside=() if sampled else (*counted, "kv_saved_share"),
    )  # fmt: skip
    summary = records.read(path)["results"]
    if json_output:
        common.print_json(summary | {"rollouts": str(rollouts.path), "record": str(path)})
    else:
        print("\n".join(excerpts(rollouts.rows(), [prompt.text for prompt in source])), end="\n\n")
        common.print_facts(summary)
    common.wrote(rollouts.path, path, quiet=json_output, kept=() if written else (path,))


def excerpts(rows: list[dict[str, Any]], prompts: list[str], shown: int = 3) -> list[str]:
    """Lines with the first response to each of the first few prompts."""
    lines = []
    for row in [row for row in rows if row["sample_index"] == 0][:shown]:
        end = "stopped" if row["finish_reason"] == "stop" else "cut"
        lines.append(f"prompt {row['prompt_index']}: {_cut(prompts[row['prompt_index']])}")
        lines.append(f"  {_cut(row['response'])}  ({len(row['response_ids'])} tokens, {end})")
    return lines


def _cut(text: str, most: int = 240) -> str:
    """The beginning and the end of a long text, on one line, without characters that a terminal would obey."""
    line = common.harmless(" ".join(text.split()))
    return line if len(line) <= most else f"{line[: most * 2 // 3]} ... {line[-most // 3 :]}"
