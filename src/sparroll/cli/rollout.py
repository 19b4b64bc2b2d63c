"""`sparroll rollout`: sample responses, dense or sparse, into a JSONL file. Goes on where it was interrupted."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparroll import files, records
from sparroll.cli import common, prompts
from sparroll.engines.make import check_available
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.errors import UserError
from sparroll.progress import Progress
from sparroll.types import Prompt, Rollout

if TYPE_CHECKING:
    from sparroll.engines.base import Engine


def rollout(
    model: common.Model,
    out: common.Out,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Preset or file; dense without it.")] = None,
    budget: Annotated[int | None, typer.Option("--budget", help="A fixed KV budget in tokens instead.")] = None,
    adapter: common.Adapter = None,
    compression: common.CompressionKind = None,
    compression_set: common.CompressionSet = None,
    prompts_file: common.Prompts = None,
    task: common.Task = None,
    level: common.Level = 3,
    count: common.Count = 16,
    chat: common.Chat = False,
    n: Annotated[int, typer.Option("--n", min=1, help="Responses per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")] = 1.0,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Responses that decode together.")] = 64,
    seed: common.Seed = 0,
    engine_name: common.Engine = "hf",
    device: common.Device = None,
    dtype: common.Dtype = None,
    force_schedule: common.ForceSchedule = False,
    json_output: common.Json = False,
) -> None:
    """Sample responses and write them, with the log-probability of each token, to OUT/rollouts.jsonl."""
    check_available(engine_name)
    common.output_folder(out)
    chosen = common.load_schedule(schedule, budget, model, force_schedule)
    policy = common.load_compression(compression, compression_set or [], chosen, engine_name)
    source = prompts.read(prompts_file, task, level, count, seed)
    config = {
        "model": model, "schedule": chosen.table() if chosen else None, "task": task, "level": level, "chat": chat,
        "prompts": [prompts.plain(entry) for entry in source],
        "n": n, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    if engine_name != "hf":
        config["engine"] = engine_name
    if dtype is not None:
        config["dtype"] = dtype
    if policy is not None:
        config["compression"] = policy.table()
    if adapter is not None:
        from sparroll.engines.adapter import weights_digest

        config["adapter"] = {"folder": str(adapter), "weights": weights_digest(adapter)}
    sink = _Sink(out, config, n)
    started = time.perf_counter()
    with (
        common.interruptible(f"{out} keeps what is finished; the same command goes on"),
        Progress(json_output) as bars,
        common.load_engine(engine_name, model, chosen, device, max_batch, dtype=dtype) as engine,
    ):
        engine.set_compression(policy)
        if adapter is not None:
            from sparroll.engines.adapter import load_adapter

            load_adapter(engine, model, adapter)
        engine.reset_report()
        ids = PromptEncoder(engine.tokenizer, chat).ids(source)
        _sample(engine, ids, sink, n, max_new_tokens, temperature, seed, bars.bar("rollouts"))
        report = engine.report()
    rows = sink.rows()
    summary = _summary(rows, source, task) | {"engine": report.table()}
    if report.peak_dense_kv_bytes and policy is not None:
        # Of what was sampled now: rollouts of an earlier sitting have no cache any more.
        summary["kv_saved_share"] = report.kv_saved_share
    path = records.write(
        out / "record.json", "rollout", summary, config=config, seed=seed, wall_seconds=time.perf_counter() - started
    )
    if json_output:
        common.print_json(summary | {"rollouts": str(sink.path), "record": str(path)})
    else:
        common.print_facts(summary)
    common.wrote(sink.path, path, quiet=json_output)


class _Sink:
    """The JSONL file: finished rows survive a kill, and a second run of the same command adds only what is missing."""

    def __init__(self, out: Path, config: dict[str, Any], n: int):
        self.path = out / "rollouts.jsonl"
        asked = out / "config.json"
        config = json.loads(json.dumps(records.plain(config)))
        if asked.exists() and json.loads(asked.read_text(encoding="utf-8")) != config:
            raise UserError(f"{out} holds rollouts that were asked for differently", "choose another folder with --out")
        files.write_json(asked, config)
        if self.path.exists():
            # A kill while a prompt's rows were written leaves some of them, or half a line: that prompt is done again.
            rows = [json.loads(line) for line in self._lines() if line.endswith("\n")]
            held = Counter(row["prompt_index"] for row in rows)
            whole = [json.dumps(row) + "\n" for row in rows if held[row["prompt_index"]] == n]
            files.write_text(self.path, "".join(whole))

    def _lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []

    def rows(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self._lines()]
        return sorted(rows, key=lambda row: (row["prompt_index"], row["sample_index"]))

    def add(self, rows: list[dict[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as sink:
            sink.writelines(json.dumps(row) + "\n" for row in rows)
            sink.flush()
            os.fsync(sink.fileno())


def _sample(
    engine: Engine,
    ids: list[list[int]],
    sink: _Sink,
    n: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    on_progress: Any,
) -> None:
    """Whole prompts in groups of about four batches, so that a kill costs at most one group."""
    from sparroll.engines.sampling import request_seed

    held = {row["prompt_index"] for row in sink.rows()}
    missing = [index for index in range(len(ids)) if index not in held]
    group = max(1, 4 * engine.max_batch // n)
    total, done = n * len(ids), n * (len(ids) - len(missing))
    for start in range(0, len(missing), group):
        indices = missing[start : start + group]

        def on_group(finished: int, _: int, text: str = "", /, *, before: int = done) -> None:
            on_progress(before + finished, total)

        rollouts = engine.generate(
            [ids[index] for index in indices],
            n,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=[request_seed(seed, index, sample) for index in indices for sample in range(n)],
            on_progress=on_group,
        )
        sink.add([_row(engine, entry, indices[entry.prompt_index]) for entry in rollouts])
        done += len(rollouts)


def _row(engine: Engine, rollout: Rollout, prompt_index: int) -> dict[str, Any]:
    assert engine.tokenizer is not None
    return {
        "prompt_index": prompt_index,
        "sample_index": rollout.sample_index,
        "seed": rollout.seed,
        "response": engine.tokenizer.decode(rollout.response_ids),
        "finish_reason": rollout.finish_reason,
        "attention": rollout.attention,
        "schedule_name": rollout.schedule_name,
        "compression_name": rollout.compression_name,
        "kv_read_share": rollout.kv_read_share,
        "prompt_ids": rollout.prompt_ids,
        "response_ids": rollout.response_ids,
        "sparse_logp": [round(value, 6) for value in rollout.sparse_logp.tolist()],
    }


def _summary(rows: list[dict[str, Any]], source: list[Prompt], task: str | None) -> dict[str, Any]:
    tokens = [len(row["response_ids"]) for row in rows]
    summary: dict[str, Any] = {
        "rollouts": len(rows),
        "response_tokens_mean": sum(tokens) / len(tokens),
        "stopped_share": sum(row["finish_reason"] == "stop" for row in rows) / len(rows),
        "kv_read_share": sum(row["kv_read_share"] for row in rows) / len(rows),
    }
    if task is not None:
        from sparroll import tasks

        judge = tasks.get(task)
        rewards = [judge.reward(source[row["prompt_index"]], row["response"]) for row in rows]
        summary["reward_mean"] = sum(rewards) / len(rewards)
    return summary
