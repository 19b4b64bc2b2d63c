"""What a step of verl costs with dense rollouts, with sparse ones and with verified ones, beside the plugin's engine alone
on the same requests. Weights are random: times depend on shapes and lengths alone.

    python benchmarks/verl_steps.py --out benchmarks/results/verl-steps-h200.json --work /tmp/verl
    python benchmarks/verl_steps.py --out benchmarks/results/verl-steps-h200-x2.json --work /tmp/verl2 --gpus 0 1 \\
        --cases two-replicas-dense two-replicas tensor-parallel-dense tensor-parallel separate-async

benchmarks/README.md has the calls of a lease. Each case is a run of verl of its own, with a Ray of its own, on one or two
GPUs: GRPO with the hybrid engine, FSDP2 and sleep, Qwen3-1.7B's shape, 8 prompts x 4 rollouts of 8,192 tokens (nothing ends
a response). `dense` is verl as it is (`python -m verl.trainer.main_ppo`), the others are `python -m sparroll.verl`;
`plugin-*` is VLLMEngine without a trainer, with the same prompts, lengths and limits. Rewards are drawn from the responses,
so that the policy really moves. All steps but the first count, by their median: the first one compiles, measures the dense
ceiling, and samples --first-tokens alone.

    control         sparse, with a control group of --control-share: what it costs
    ceilings        one step with a control group of a quarter, whose rollouts show the engine's dense ceiling and the
                    trainer's (trainer_ceiling.py)
    two-replicas, tensor-parallel   a guard moves the schedule after the third step, and every replica and worker must follow
    separate-async  trained at --arrival-learning-rate; the engine must end with the trained weights, and not the first ones

Seconds of a step: `rollout` is from the begin of the first request to the end of the last one, and `waited` what verl's
`gen` has beside it and what sparroll measures: verl looks every 2 s whether the rollouts are done. What sparroll adds has
its parts in step_costs.py.

What was in force is read at run time (`in_force`, verl_watch.py). The verified case takes its old log-probabilities from the
checks, so verl's pass for them is left out. Random weights would take back nearly every draft, so the verified cases keep
each with the probability --kept-share (forced_verdicts.py).

The record is written anew after each case. `--dry` runs everything with a tiny model on the CPU, where the figures say
nothing; the dense cases then keep vLLM's first weights, since verl alone cannot give a CPU's vLLM others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "mismatch-study"))

import step_costs
import verl_case
import verl_seen
from study_jobs import visible_device
from trl_processes import python_path
from verl_case import CASES, metrics_path, response_tokens, step_of, steps_of_case, watched_folder

from sparroll import files, records
from sparroll.schedule import Schedule
from sparroll.train.runtime.sinks import read_lines

DRY = dict(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, vocabulary=512, response_tokens=96, short_tokens=96,
    first_tokens=80, prompts=4, samples=4, micro_batch=2, window_tokens=16, step_tokens=1024, learning_rate=1e-4,
    arrival_learning_rate=1e-3, control_share=1 / 8, gpu_memory_share=0.2,
)  # fmt: skip
DRY_SCHEDULE = Schedule.fixed(64, dense_layers=(0,))
PROGRESS_SECONDS = 20
LOG_LINES = 25
LEFT_OUT = ("VLLM_ENABLE_V1_MULTIPROCESSING", "PYTHONDONTWRITEBYTECODE")
"""What an environment may say about another process, and what makes every process compile all modules anew."""


class Run:
    """The processes of one case, and what they have left so far."""

    def __init__(self, options: argparse.Namespace, name: str, gpus: list[int]):
        self.options, self.name, self.gpus, self.case = options, name, gpus, CASES[name]
        self.began, self.seconds, self.cut = time.perf_counter(), 0.0, ""
        self.log = options.work / f"{name}.log"
        devices = [] if options.dry else [visible_device(gpu) for gpu in gpus]
        if self.case.trainer:
            entry = "sparroll.verl" if self.case.schedule else "verl.trainer.main_ppo"
            settings = verl_case.overrides(options, name)
            command = [sys.executable, "-m", entry, *(f"{key}={value}" for key, value in settings.items())]
        else:
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one", name]
        self.mark = f"{os.getpid()}-{name}"
        own = verl_case.environment(options, name, devices, python_path(options)) | {"SPARROLL_CASE": self.mark}
        kept = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=kept | own,
                cwd=options.work,
                start_new_session=True,
            )

    def look(self) -> None:
        """Notice that it ended, or end it."""
        if self.seconds:
            return
        code = self.process.poll()
        if code is not None:
            self.end("failed" if code else "")
        elif time.perf_counter() - self.began > self.options.case_seconds:
            self.end("cut off")

    def end(self, why: str) -> None:
        if self.seconds:
            return
        self.seconds, self.cut = time.perf_counter() - self.began, why
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        kill_marked(self.mark)

    @property
    def state(self) -> str:
        return self.cut or ("finished" if self.seconds else "running")

    def last_lines(self, count: int) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[:400] for line in lines if line.strip()][-count:]

    def steps(self) -> list[dict[str, Any]]:
        path = metrics_path(self.options, self.name)
        lines = read_lines(path) if path.is_file() else []
        if not self.case.trainer:
            return lines
        sampled = {}
        if self.case.mode == "sync":
            sampled = verl_seen.sampled_seconds(watched_folder(self.options, self.name))
        return [step_of(self.options, line["step"], line["data"], sampled.get(line["step"])) for line in lines]

    def result(self) -> dict[str, Any]:
        told = {"case": self.name, **vars(self.case), "response_tokens": response_tokens(self.options, self.case)}
        told |= {"gpus_used": len(self.gpus), "on_gpus": self.gpus, "state": self.state, "steps": self.steps()}
        # Lines of a log, which name folders of this machine, are printed and not recorded.
        told |= {"case_seconds": self.seconds or time.perf_counter() - self.began}
        return told | self.seen(told["steps"])

    def seen(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """What verl_watch.py saw."""
        folder = watched_folder(self.options, self.name)
        found: dict[str, Any] = {"in_force": verl_seen.in_force(folder)}
        if self.case.guarded:
            counts, tokens = verl_seen.counts_by_step(folder), response_tokens(self.options, self.case)
            prompt_tokens = int(steps[0]["metrics"]["prompt_length/mean"]) if steps else 0
            found["followed"] = verl_seen.followed(counts, schedules(self.options), prompt_tokens, tokens)
            under = {count["step"]: count["schedule"] for count in counts}
            for step in steps:
                step["schedule"] = under.get(step["step"])
        found |= {"arrived": verl_seen.arrived(folder)} if self.case.arrives else {}
        if self.case.both_ceilings:
            found["ceilings"] = verl_seen.ceilings(folder)
        return found

    def in_words(self) -> str:
        steps = ", ".join(f"{step['step_seconds']:.1f} s" for step in self.steps())
        return f"{self.name}: {self.state}, {time.perf_counter() - self.began:.0f} s, steps: {steps or '-'}"


def schedules(options: argparse.Namespace) -> dict[str, Schedule]:
    """Those that the guarded cases move between, by name."""
    both = (verl_case.schedule_of(options), str(verl_case.wider_schedule(options)))
    return {each.name: each for each in (Schedule.load(source, force=True) for source in both)}


def kill_marked(mark: str) -> None:
    """Kill what a case has left: Ray's processes have sessions of their own, but they inherit its environment."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SPARROLL_CASE") == mark:
                process.kill()


def lanes(options: argparse.Namespace) -> list[tuple[list[int], list[str]]]:
    """GPUs, and the cases that run on them one after the other, as far as there are GPUs at the same time."""
    if not options.beside:
        return [(list(options.gpus), list(options.cases))]
    return [(options.gpus[:-1], list(options.cases)), (options.gpus[-1:], list(options.beside))]


def run_all(options: argparse.Namespace, until: float, on_end: Any) -> list[Run]:
    """Cases of each lane in their order, each when its GPUs are free; what is left at `until` is killed or never begins."""
    waiting, runs, told = lanes(options), [], time.perf_counter()
    try:
        while any(cases for _, cases in waiting) or any(not run.seconds for run in runs):
            if time.perf_counter() > until:
                break
            begun = [run for lane in waiting if (run := _next(options, lane, runs)) is not None]
            if begun:
                runs += begun
                continue
            time.sleep(0.5)
            for run in [run for run in runs if not run.seconds]:
                run.look()
                if run.seconds:
                    lines = [] if run.state == "finished" else run.last_lines(LOG_LINES)
                    print(run.in_words(), *lines, sep="\n   ", flush=True)
                    on_end(runs)
            if time.perf_counter() - told > PROGRESS_SECONDS:
                told = time.perf_counter()
                for run in [run for run in runs if not run.seconds]:
                    print(run.in_words(), *run.last_lines(1), sep=" | ", flush=True)
    finally:
        for run in runs:
            run.end("cut off")
    return runs


def _next(options: argparse.Namespace, lane: tuple[list[int], list[str]], runs: list[Run]) -> Run | None:
    """The lane's next case, begun, where it has one and enough of its GPUs are free."""
    gpus, cases = lane
    taken = {gpu for run in runs if not run.seconds for gpu in run.gpus}
    free = [gpu for gpu in gpus if gpu not in taken]
    needed = 1 if options.dry or not cases else CASES[cases[0]].gpus
    return Run(options, cases.pop(0), free[:needed]) if cases and len(free) >= needed else None


# -- the plugin alone, in a process of its own ---------------------------------------------------------------------------


def sample_alone(options: argparse.Namespace, name: str) -> None:
    """The same requests, one step after the other."""
    import engine_facts
    import pandas as pd
    import torch
    from forced_verdicts import verdicts_forced

    from sparroll.engines.load_model import load_tokenizer
    from sparroll.engines.vllm.engine import VLLMEngine

    case, tokens = CASES[name], response_tokens(options, CASES[name])
    schedule = Schedule.load(verl_case.schedule_of(options), force=True) if case.schedule else None
    if schedule is not None and case.verified:
        schedule = schedule.checked(options.window_tokens, 0.01)
    rows = pd.read_parquet(options.work / "train.parquet")["prompt"].tolist()
    tokenizer = load_tokenizer(str(options.work / "model"))
    asked = [tokenizer(row[0]["content"])["input_ids"] for row in rows]
    engine = VLLMEngine(
        str(options.work / "model"),
        schedule=schedule,
        sparse=case.schedule,
        dtype=torch.float32 if options.dry else torch.bfloat16,
        max_batch=options.prompts * options.samples,
        max_context_tokens=tokens + verl_case.CONTEXT_ROOM,
        gpu_memory_share=options.gpu_memory_share,
        max_num_batched_tokens=options.step_tokens,
    )
    folder, worker = watched_folder(options, name), engine._llm.llm_engine.model_executor.driver_worker
    folder.mkdir(parents=True, exist_ok=True)
    found = engine_facts.of_engine(engine._llm.llm_engine.vllm_config) | {"workers": [engine_facts.of_worker(worker)]}
    files.write_json(folder / "engine-0.json", found)
    whole = tokens
    with verdicts_forced(options.kept_share) if case.verified else nullcontext():
        for step in range(1, steps_of_case(options, name) + 1):
            tokens = options.first_tokens if step == 1 else whole
            of_step = asked[(step - 1) * options.prompts : step * options.prompts]
            engine.reset_report()
            began = time.perf_counter()
            rollouts = engine.generate(of_step, options.samples, max_new_tokens=tokens, seed=step, stop_ids=[])
            seconds, made = time.perf_counter() - began, sum(len(each.response_ids) for each in rollouts)
            line = {"step": step, "step_seconds": seconds, "rollout_seconds": seconds, "rollout_tokens": made}
            line |= {"tokens_per_second": made / seconds, "kv_read_share": engine.report().kv_read_share}
            with metrics_path(options, name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    engine.close()


# -- what the cases say together -----------------------------------------------------------------------------------------


def together(found: list[dict[str, Any]]) -> dict[str, float]:
    """Speed-ups of rollouts and of the step, inside verl and of the plugin alone; what sparroll adds, by part; what
    re-scoring costs; and what a control group costs. Of the median of each case's steps that count."""
    rows = {row["case"]: row for row in found}
    steps = {name: step for name, row in rows.items() if (step := step_costs.middle(row)) is not None}
    said: dict[str, float] = {}
    for name, dense in verl_case.DENSE_BESIDE.items():
        if name in steps and dense in steps:
            said[f"{name}/rollouts"] = steps[name]["tokens_per_second"] / steps[dense]["tokens_per_second"]
            said[f"{name}/step"] = steps[dense]["step_seconds"] / steps[name]["step_seconds"]
    for name, plugin in verl_case.PLUGIN_BESIDE.items():
        alone, alone_dense = steps.get(plugin), steps.get("plugin-dense")
        if name in steps and alone:
            # Of dense rollouts, it is verl's own.
            longer = steps[name]["rollout_seconds"] - steps[name]["rollout_tokens"] / alone["tokens_per_second"]
            said[f"{name}/rollout_seconds_over_plugin"] = longer
        if f"{name}/rollouts" in said and alone and alone_dense:
            said[f"{name}/rollouts_of_plugin"] = alone["tokens_per_second"] / alone_dense["tokens_per_second"]
            said[f"{name}/of_plugins"] = said[f"{name}/rollouts"] / said[f"{name}/rollouts_of_plugin"]
    for name, step in steps.items():
        if CASES[name].trainer and CASES[name].schedule:
            shares = added(rows[name], step, steps.get(verl_case.PLUGIN_BESIDE.get(name, "")))
            said |= {f"{name}/added/{part}": share for part, share in shares.items()}
            rollouts = round(step["rollout_tokens"] / rows[name]["response_tokens"])
            said |= {f"{name}/rescoring/{key}": value for key, value in step_costs.rescoring(step, rollouts).items()}
    if "control" in steps and "sparse" in steps:
        control, sparse = steps["control"], steps["sparse"]
        said |= {f"control/{name}": control["metrics"][f"control/{name}"] for name in ("share", "dense_steps")}
        said["control/rollouts_cost"] = 1 - control["tokens_per_second"] / sparse["tokens_per_second"]
        said["control/step_cost"] = 1 - sparse["step_seconds"] / control["step_seconds"]
    return said


def added(row: dict[str, Any], step: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, float]:
    """Shares of a step that sparroll adds."""
    # Else there is no ceiling, or the control group shows it.
    measures = row["mode"] == "sync" and not row["control"]
    own = row["in_force"].get("run", {}).get("sparroll", {})
    every = own["mismatch"]["ceiling_every_steps"] if own and measures else 0
    parts = step_costs.added_seconds(step, step_costs.ceiling_seconds(row), every, alone)
    return step_costs.added_shares(parts, step["step_seconds"])


def wrong(found: list[dict[str, Any]]) -> list[str]:
    """What a case was there to show, and did not."""
    said = []
    for row in found:
        moved = {step["schedule"] for step in row.get("followed", [])}
        if row.get("guarded") and len(moved) != 2:
            said.append(f"{row['case']}: its guard was to move the schedule once, and its steps had {sorted(moved)}")
        said += [
            f"{row['case']}: in step {step['step']}, not every replica followed {step['schedule']}"
            for step in row.get("followed", [])
            if not step["follows"]
        ]
        if row.get("arrives") and not row["arrived"].get("arrived"):
            said.append(f"{row['case']}: the engine's log-probabilities are not those of the trained weights")
        measured = [step["metrics"].get("rescoring/measured", 0) for step in row["steps"] if "metrics" in step]
        if row.get("arrives") and not any(measured[1:]):
            said.append(f"{row['case']}: no step behind the first one was measured")
        decoded = [step["metrics"].get("control/dense_steps", 0) for step in row["steps"] if "metrics" in step]
        if row.get("control") and not any(decoded):
            said.append(f"{row['case']}: no step of its control group was dense")
        if row.get("both_ceilings") and not row["ceilings"]:
            said.append(f"{row['case']}: the trainer read none of the dense rollouts")
    return said


def table(found: list[dict[str, Any]]) -> str:
    parts = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")
    lines = [f"{'case':22}{'steps':>6}{'tokens/s':>10}{'step s':>9}{'rollout s':>11}"]
    lines[0] += "".join(f"{part:>15}" for part in parts)
    for row in found:
        step = step_costs.middle(row)
        if step is None:
            lines.append(f"{row['case']:22} {row['state']}, {len(row['steps'])} steps")
            continue
        metrics = step.get("metrics", {})
        seconds = "".join(f"{metrics.get(f'timing_s/{part}', 0.0):15.2f}" for part in parts)
        said = f"{row['case']:22}{step['steps_counted']:6}{step['tokens_per_second']:10.0f}"
        lines.append(f"{said}{step['step_seconds']:9.1f}{step['rollout_seconds']:11.2f}{seconds}")
    lines += [f"{name}: {value:.4g}" for name, value in together(found).items()]
    for row in found:
        for name in ("arrived", "ceilings"):
            said = {key: value for key, value in row.get(name, {}).items() if key != "all_steps"}
            lines += [f"{row['case']}, {name}: {said}"] if said else []
        for step in row.get("followed", []):
            counts = [(each["sparse_steps"], each["dense_steps"]) for each in step["replicas"]]
            lines.append(
                f"{row['case']}, step {step['step']}: {step['schedule']}, {counts}, follows: {step['follows']}"
            )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the model, the runs and their logs")
    one_gpu = ["dense", "sparse", "plugin-dense", "plugin-sparse", "verified", "plugin-verified"]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=one_gpu)
    parser.add_argument("--beside", nargs="+", choices=CASES, help="cases on the last of --gpus, at the same time")
    parser.add_argument("--gpus", nargs="+", type=int, default=[0])
    parser.add_argument("--case-seconds", type=float, default=480, help="limit of each case")
    parser.add_argument("--limit-seconds", type=float, help="of all; then what is left is killed")
    parser.add_argument("--steps", type=int, default=4, help="some cases have more")
    parser.add_argument("--steps-of", nargs="+", type=case_and_number, default=[], metavar="CASE=N", help="of one case")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=8192)
    parser.add_argument("--short-tokens", type=int, default=2048, help="of cases that are not about speed")
    parser.add_argument("--first-tokens", type=int, default=1024, help="of the first step, which does not count")
    parser.add_argument("--schedule", default="qwen3-1.7b-0.86")
    parser.add_argument("--probe", type=int, help="rollouts that are re-scored; left out: sparroll's default")
    parser.add_argument("--control-share", type=float, default=1 / 32, help="of the rollouts of the case control")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--arrival-learning-rate", type=float, default=1e-4, help="of separate-async")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--gpu-memory-share", type=float, default=0.45, help="of the engine")
    parser.add_argument("--window-tokens", type=int, default=64, help="of the verified cases")
    parser.add_argument("--kept-share", type=float, default=0.9993, help="of drafts, forced; the study's at 0.86")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU; further options still count")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    if parser.parse_args().dry:
        parser.set_defaults(**DRY)
    options = parser.parse_args()
    options.work = options.work.resolve()
    for gpus, cases in lanes(options):
        needed = max(CASES[name].gpus for name in cases)
        if len(gpus) < needed and not options.dry:
            parser.error(f"a case needs {needed} GPUs, and has {len(gpus)} of --gpus")
    if min([options.steps, *(number for _, number in options.steps_of)]) < 2:
        parser.error("--steps must be at least 2: a first step compiles, and says nothing of the others")
    return options


def case_and_number(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in CASES or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not CASE=N")
    return name, int(number)


def main() -> None:
    options = arguments()
    if options.one:
        sample_alone(options, options.one)
        return
    # So that `timeout` ends the cases, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.perf_counter()
    until = started + (options.limit_seconds or float("inf"))
    if (options.work / "model").exists():
        raise SystemExit(f"{options.work} already holds a run\nhint: give --work another folder")
    options.work.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "work", "one")}
    # Every case's process imports this file, and has no use for our own loop.
    import training_step
    from random_models import make_sure_of_tokens

    training_step.write_model(options)
    make_sure_of_tokens(options.work / "model")
    verl_case.write_tokenizer(options)
    verl_case.write_prompts(options)
    DRY_SCHEDULE.save(options.work / "schedule.toml")
    verl_case.write_wider_schedule(options)
    print(f"wrote the model after {time.perf_counter() - started:.0f} s", flush=True)

    def record(runs: list[Run]) -> list[dict[str, Any]]:
        found, wall = [run.result() for run in runs], time.perf_counter() - started
        results = {"cases": found, "together": together(found)}
        records.write(options.out, "verl-steps", results, config=config, seed=options.seed, wall_seconds=wall)
        return found

    found = record(run_all(options, until, record))
    print(table(found))
    print(f"wrote {options.out} after {time.perf_counter() - started:.0f} s")
    asked = {*options.cases, *(options.beside or [])}
    unfinished = asked - {row["case"] for row in found if row["state"] == "finished"}
    lines = [f"not finished: {', '.join(sorted(unfinished))}"] if unfinished else []
    lines += wrong([row for row in found if row["state"] == "finished"])
    if lines:
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
