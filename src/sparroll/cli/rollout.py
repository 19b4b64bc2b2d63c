"""`sparroll rollout`: sample responses, dense or sparse, into a JSONL file. Continues where it was interrupted."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sparroll import records
from sparroll.cli import common
from sparroll.cli.common import SAMPLING, option
from sparroll.engines.make import check_names
from sparroll.progress import Progress
from sparroll.tasks.prompt_file import plain_prompt, read_prompts
from sparroll.types import MOST_SAMPLES


def rollout(
    command: typer.Context,
    model: common.Model,
    out: common.Out,
    schedule: common.OneSchedule = None,
    budget: common.OneBudget = None,
    check_window: common.CheckWindow = None,
    check_floor: common.CheckFloor = None,
    adapter: common.Adapter = None,
    compression: common.CompressionKind = None,
    compression_set: common.CompressionSet = None,
    prompts_file: common.Prompts = None,
    task: common.Task = None,
    level: common.Level = 3,
    count: common.Count = 16,
    chat: common.Chat = False,
    n: Annotated[int, option(SAMPLING, "--n", min=1, max=MOST_SAMPLES, help="Responses per prompt.")] = 1,
    max_new_tokens: common.MaxNewTokens = 1024,
    temperature: common.Temperature = 1.0,
    top_p: common.TopP = 1.0,
    max_batch: common.MaxBatch = 64,
    seed: common.Seed = 0,
    engine_name: common.Engine = "hf",
    device: common.Device = None,
    dtype: common.Dtype = None,
    force_schedule: common.ForceSchedule = False,
    json_output: common.Json = False,
) -> None:
    """Sample responses and write them, with the log-probability of each token, to OUT/rollouts.jsonl."""
    from sparroll.engines.adapter import described, load_adapter, refuse_check
    from sparroll.engines.generate_arguments import check_counts
    from sparroll.engines.prompt_encoder import PromptEncoder
    from sparroll.evaluate.rollout_file import RolloutFile, sample_missing, summarise_rollouts

    common.refuse_idle_prompt_options(command, prompts_file, task)
    common.refuse_idle(command, schedule is None, "without --schedule", "force_schedule")
    check_names(engine_name, model, device, dtype)
    check_counts(n, max_new_tokens, temperature, top_p=top_p)
    common.hold_folder(command, out)
    chosen = common.with_check(common.load_schedule(schedule, budget, model, force_schedule), check_window, check_floor)
    common.say_caveats(chosen)
    if adapter is not None and chosen is not None:
        refuse_check(chosen)
    policy = common.load_compression(compression, compression_set or [], chosen, engine_name)
    source = read_prompts(prompts_file, task, level, count, seed)
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
        common.load_engine(engine_name, model, chosen, device, max_batch, dtype=dtype) as engine,
    ):
        engine.set_compression(policy)
        if adapter is not None:
            load_adapter(engine, model, adapter)
        engine.reset_report()
        sample_missing(
            engine, PromptEncoder(engine.tokenizer, chat).ids(source), rollouts,
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
            on_progress=bars.bar("rollouts"),
        )  # fmt: skip
        report = engine.report()
    summary = summarise_rollouts(rollouts.rows(), source, task) | {"engine": report.table()}
    if report.peak_dense_kv_bytes and policy is not None:
        # Measured on what was sampled now: the caches of earlier, interrupted calls are gone.
        summary["kv_saved_share"] = report.kv_saved_share
    path = records.write(
        out / "record.json", "rollout", summary, config=config, seed=seed, wall_seconds=time.perf_counter() - started
    )
    if json_output:
        common.print_json(summary | {"rollouts": str(rollouts.path), "record": str(path)})
    else:
        print("\n".join(excerpts(rollouts.rows(), [prompt.text for prompt in source])), end="\n\n")
        common.print_facts(summary)
    common.wrote(rollouts.path, path, quiet=json_output)


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
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most * 2 // 3]} ... {line[-most // 3 :]}"
