"""What a step of TRL costs with dense rollouts, with sparse ones and with verified ones, beside the plugin's engine alone on
the same requests. Weights are random: times depend on shapes and lengths alone.

    python benchmarks/trl_steps.py --out benchmarks/results/trl-steps-h200.json --work /tmp/trl
    python benchmarks/trl_steps.py --out benchmarks/results/trl-steps-h200-x2.json --work /tmp/trl2 --gpus 0 1 \\
        --cases server processes

Each case is one or more processes of their own on one or two GPUs: GRPO in TRL in colocate mode with sleep, Qwen3-1.7B's
shape, 4 prompts x 8 rollouts of 8,192 tokens (nothing ends a response), weights in fp32, autocast to bf16, gradient
checkpointing. `dense` is TRL's own GRPOTrainer, the others are SparseGRPOTrainer; `control` has a control group of
--control-share; `plugin-*` is VLLMEngine without a trainer; `server` has `vllm serve` on the second GPU and sends it the
weights over NCCL; `processes` is two processes with an engine each. Rewards are drawn from the responses, so that the policy
really moves. All steps but the first count, by their median. The first one, of --first-tokens, is there for what happens
only once: compiling, and the dense ceiling. What sparroll adds has its parts in step_costs.py.

After the steps of a sparse case an evaluation says whether the engine has the trained weights (`arrived`): how far its
log-probabilities are from the trainer's, and how far from those of the weights that the run began with. As a tail, that is
the trainer's ceiling beside the engine's (`ceilings`, trainer_ceiling.py). `in_force` is what was read at the end.

Weights are random, but as sure of a token as trained ones (random_models.make_sure_of_tokens), so that tails say something.
They would take back nearly every draft, so the verified cases keep each with the probability --kept-share, as
benchmarks/verified_rollouts.py does, after the rule was computed.

The record is written anew after each case. `--dry` runs everything with a tiny model on the CPU, where the figures say
nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from pathlib import Path
from typing import Any

import step_costs
from trl_case import CASES, sample_alone, train
from trl_processes import Run, run_all

from sparroll import records
from sparroll.schedule import Schedule

DRY = dict(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, vocabulary=512, response_tokens=96, server_tokens=96,
    first_tokens=40, prompts=2, samples=4, micro_batch=2, window_tokens=16, control_share=1 / 8,
    learning_rate=1e-3, cases=list(CASES),
)  # fmt: skip
DRY_SCHEDULE = Schedule.fixed(64, dense_layers=(0,))
NEAR = 1 / 4
"""The engine has the trained weights where its log-probabilities are so much nearer to them than to the first ones."""
SPEEDUPS = [("sparse", "dense"), ("verified", "dense"), ("control", "dense")]


# -- what the cases say together -----------------------------------------------------------------------------------------


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups of rollouts and of the step, inside TRL and of the plugin alone; what sparroll adds, by part; what
    re-scoring costs; and what a control group costs. Of the median of each case's steps that count."""
    rows = {row["case"]: row for row in found}
    steps = {name: step for name, row in rows.items() if (step := step_costs.middle(row)) is not None}
    said: dict[str, Any] = {}
    for name, dense in SPEEDUPS:
        plugin = "plugin-sparse" if name == "control" else f"plugin-{name}"
        inside, beside, alone, alone_dense = (steps.get(each) for each in (name, dense, plugin, f"plugin-{dense}"))
        if inside and beside:
            said[f"{name}/rollouts"] = inside["tokens_per_second"] / beside["tokens_per_second"]
            said[f"{name}/step"] = beside["step_seconds"] / inside["step_seconds"]
            if alone and alone_dense:
                speedup = alone["tokens_per_second"] / alone_dense["tokens_per_second"]
                said |= {
                    f"{name}/rollouts_of_plugin": speedup,
                    f"{name}/of_plugins": said[f"{name}/rollouts"] / speedup,
                }
        if inside:
            own = rows[name].get("in_force", {}).get("sparroll", {})
            every = 0 if name == "control" else int(own.get("mismatch", {}).get("ceiling_every_steps", 0))
            parts = step_costs.added_seconds(inside, step_costs.ceiling_seconds(rows[name]), every, alone)
            shares = step_costs.added_shares(parts, inside["step_seconds"])
            said |= {f"{name}/added/{part}": share for part, share in shares.items()}
            costs = step_costs.rescoring(inside, rows[name].get("in_force", {}).get("rollouts", 32))
            said |= {f"{name}/rescoring/{key}": value for key, value in costs.items()}
    if "control" in steps and "sparse" in steps:
        said |= {f"control/{name}": steps["control"]["metrics"][f"control/{name}"] for name in ("share", "dense_steps")}
        said["control/rollouts_cost"] = 1 - steps["control"]["tokens_per_second"] / steps["sparse"]["tokens_per_second"]
        said["control/step_cost"] = 1 - steps["sparse"]["step_seconds"] / steps["control"]["step_seconds"]
    return said


def wrong(found: list[dict[str, Any]], dry: bool) -> list[str]:
    """What a case was there to show, and did not."""
    said = []
    for row in found:
        arrived = row.get("arrived")
        # Without GPUs there is no sending of weights to a server.
        if arrived and not (dry and row["server"]) and arrived["from_trained"] > NEAR * arrived["from_first"]:
            said.append(f"{row['case']}: the engine's log-probabilities are not those of the trained weights")
        if row.get("control") and not any(step["metrics"].get("control/dense_steps") for step in row["steps"]):
            said.append(f"{row['case']}: no step of its control group was dense")
    return said


def table(found: list[dict[str, Any]]) -> str:
    columns = ("step", "sync", "generate", "rollout", "score", "update")
    lines = [f"{'case':16}{'steps':>6}{'tokens/s':>10}" + "".join(f"{name + ' s':>11}" for name in columns)]
    for row in found:
        step = step_costs.middle(row)
        if step is None:
            lines.append(f"{row['case']:16} {row['state']}, {len(row['steps'])} steps")
            continue
        seconds = "".join(f"{step.get(f'{column}_seconds', 0.0):11.2f}" for column in columns)
        lines.append(f"{row['case']:16}{step['steps_counted']:6}{step['tokens_per_second']:10.0f}{seconds}")
    lines += [f"{name}: {value:.4g}" for name, value in together(found).items()]
    for row in found:
        if "arrived" in row:
            said = row["arrived"]
            lines.append(
                f"{row['case']}: engine - trainer {said['from_trained']:.2e}, - first {said['from_first']:.2e}"
            )
        if "ceilings" in row:
            lines.append(f"{row['case']}, ceilings: {row['ceilings']}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the model, the runs and their logs")
    one_gpu = ["dense", "sparse", "verified", "control", "plugin-dense", "plugin-sparse"]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=one_gpu)
    parser.add_argument("--gpus", nargs="+", type=int, default=[0])
    parser.add_argument("--case-seconds", type=float, default=420, help="limit of each case")
    parser.add_argument(
        "--limit-seconds", type=float, help="of all; then what is left is killed, and the rest recorded"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=8192)
    parser.add_argument("--server-tokens", type=int, default=2048, help="response tokens of the case server")
    parser.add_argument("--first-tokens", type=int, default=1024, help="response tokens of the first step")
    parser.add_argument("--schedule", default="qwen3-1.7b-0.86")
    parser.add_argument("--probe", type=int, help="rollouts that are re-scored; left out: sparroll's default")
    parser.add_argument("--control-share", type=float, default=1 / 32, help="of the rollouts of the case control")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="large, so that weights that arrive are seen")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--gpu-memory-share", type=float, default=0.45, help="of the engine in colocate mode")
    parser.add_argument("--window-tokens", type=int, default=64, help="of the verified cases")
    parser.add_argument("--floor", type=float, default=0.01, help="of their rule, which is computed and not obeyed")
    parser.add_argument("--kept-share", type=float, default=0.9993, help="of drafts, forced; the study's at 0.86")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU; further options still count")
    for hidden, kind in (("--one", str), ("--server-url", str), ("--group-port", int), ("--launched", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    if parser.parse_args().dry:
        parser.set_defaults(**DRY)
    options = parser.parse_args()
    needed = max(CASES[name].gpus for name in options.cases)
    if len(options.gpus) < needed and not options.dry:
        parser.error(f"a case needs {needed} GPUs, and --gpus names {len(options.gpus)}")
    if "server" in options.cases and importlib.util.find_spec("uvicorn") is None:
        parser.error("vllm serve needs the package uvicorn, which is not on the path")
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step is shorter than the others")
    return options


def main() -> None:
    options = arguments()
    if options.one:
        if CASES[options.one].trainer:
            train(options, options.one, options.server_url)
        else:
            sample_alone(options, options.one)
        return
    # So that `timeout` ends the cases, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.perf_counter()
    until = started + (options.limit_seconds or float("inf"))
    if (options.work / "model").exists():
        raise SystemExit(f"{options.work} already holds a run\nhint: give --work another folder")
    options.work.mkdir(parents=True, exist_ok=True)
    hidden = ("out", "work", "one", "server_url", "group_port", "launched")
    config = {name: value for name, value in vars(options).items() if name not in hidden}
    write_model(options)
    print(f"wrote the model after {time.perf_counter() - started:.0f} s", flush=True)

    def record(runs: list[Run]) -> list[dict[str, Any]]:
        found, wall = [run.result() for run in runs], time.perf_counter() - started
        results = {"cases": found, "together": together(found)}
        records.write(options.out, "trl-steps", results, config=config, seed=options.seed, wall_seconds=wall)
        return found

    found = record(run_all(options, until, record))
    print(table(found))
    print(f"wrote {options.out} after {time.perf_counter() - started:.0f} s")
    unfinished = set(options.cases) - {row["case"] for row in found if row["state"] == "finished"}
    lines = [f"not finished: {', '.join(sorted(unfinished))}"] if unfinished else []
    lines += wrong([row for row in found if row["state"] == "finished"], options.dry)
    if lines:
        raise SystemExit("\n".join(lines))


def write_model(options: argparse.Namespace) -> None:
    """Random weights, and a tokenizer with a word for every id and no end of sequence. vLLM decodes a response token by
    token, and begins anew as long as it has only seen ids without a word."""
    # Every case's process imports this file, and has no use for these.
    import training_step
    from random_models import make_sure_of_tokens
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    most_tokens = max(options.response_tokens, options.server_tokens)
    training_step.write_model(argparse.Namespace(**vars(options) | {"response_tokens": most_tokens}))
    make_sure_of_tokens(options.work / "model")
    words = ["<pad>", "<unk>", *map(str, range(10)), *(f"w{number}" for number in range(12, options.vocabulary))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    whole.save_pretrained(options.work / "model")
    DRY_SCHEDULE.save(options.work / "schedule.toml")


if __name__ == "__main__":
    main()
