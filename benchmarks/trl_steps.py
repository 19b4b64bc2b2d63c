"""What a step of TRL costs with dense rollouts, with sparse ones and with verified ones, beside the plugin's engine alone on
the same requests. Weights are random: times depend on shapes and lengths alone.

    python benchmarks/trl_steps.py --out benchmarks/results/trl-steps-h200.json --work /tmp/trl
    python benchmarks/trl_steps.py --out benchmarks/results/trl-steps-h200-x2.json --work /tmp/trl2 --gpus 0 1 \\
        --cases server processes

Each case is one or more processes of their own on one or two GPUs: GRPO in TRL in colocate mode with sleep, Qwen3-1.7B's
shape, 4 prompts x 8 rollouts of 8,192 tokens (nothing ends a response), weights in fp32, autocast to bf16, gradient
checkpointing. `dense` is TRL's own GRPOTrainer, the others are SparseGRPOTrainer; `plugin-*` is VLLMEngine without a
trainer; `server` has `vllm serve` on the second GPU and sends it the weights over NCCL; `processes` is two processes with an
engine each. Rewards are drawn from the responses, so that the policy really moves. The last step counts. The first one,
of --first-tokens, is there for what happens only once: compiling, and the dense ceiling.

After the steps of a sparse case an evaluation says whether the engine has the trained weights (`arrived`): how far its
log-probabilities are from the trainer's, and how far from those of the weights that the run began with.

Random weights would take back nearly every draft, so the verified cases keep each with the probability --kept-share, as
benchmarks/verified_rollouts.py does, after the rule was computed.

--probe: of 32 rollouts, 8 are re-scored, the share that the default of SparseRollouts has in a step of 128.

The record is written anew after each case. `--dry` runs everything with a tiny model on the CPU, where the figures say
nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "mismatch-study"))

from study_jobs import visible_device
from trl_case import CASES, CONTEXT_ROOM, STEP_TOKENS, sample_alone, train

from sparroll import records
from sparroll.engines.vllm.serve_args import serve_arguments
from sparroll.schedule import Schedule
from sparroll.train.runtime.sinks import read_lines

REPOSITORY = Path(__file__).resolve().parents[1]
DRY = dict(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, vocabulary=512, response_tokens=96, server_tokens=96,
    first_tokens=40, prompts=2, samples=4, micro_batch=2, probe=8, window_tokens=16, cases=list(CASES),
)  # fmt: skip
DRY_SCHEDULE = Schedule.fixed(64, dense_layers=(0,))
PROGRESS_SECONDS = 20
LOG_LINES = 20
ON_GPU = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    # A host without a network has no other.
    "VLLM_HOST_IP": "127.0.0.1",
}
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
SPEEDUPS = [("sparse", "dense"), ("verified", "dense")]


class Run:
    """The processes of one case on its GPUs, and what they have left so far. The last ones are the trainer's; a server
    ends with them."""

    def __init__(self, options: argparse.Namespace, name: str, gpus: list[int]):
        self.options, self.name, self.gpus, self.case = options, name, gpus, CASES[name]
        self.began, self.seconds, self.cut = time.perf_counter(), 0.0, ""
        self.logs: list[Path] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        arguments = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one", name]
        arguments += ["--launched", str(time.time())]
        devices = [visible_device(gpu) for gpu in gpus] if not options.dry else []
        if self.case.server:
            port, group_port = free_port(), free_port()
            command = server_command(options, port)
            served = {"PYTHONPATH": python_path(options), "VLLM_SERVER_DEV_MODE": "1"}
            self.server = self._start("server", command, devices[1:], served)
            arguments += ["--server-url", f"http://127.0.0.1:{port}", "--group-port", str(group_port)]
            devices = devices[:1]
        master = {"WORLD_SIZE": str(self.case.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(self.case.processes):
            shared = master | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.case.processes > 1 else {}
            self.workers.append(self._start(str(rank), arguments, devices, shared))

    def _start(
        self, role: str, command: list[str], devices: list[str], more: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        options = self.options
        own = (ON_CPU if options.dry else ON_GPU) | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        # Two that begin together would write the same files.
        own["VLLM_CACHE_ROOT"] = str(options.work / f"{self.name}-{role}-vllm")
        kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        self.logs.append(options.work / f"{self.name}-{role}.log")
        with self.logs[-1].open("w") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=kept | own | more, start_new_session=True
            )

    def look(self) -> None:
        """Notice what ended, and end the rest of a case that is over."""
        if self.seconds:
            return
        codes = [each.poll() for each in self.workers]
        ended = time.perf_counter() - self.began
        if self.server is not None and self.server.poll() is not None and None in codes:
            self.end("the server ended")
        elif any(codes):
            self.end("failed")
        elif ended > self.options.case_seconds:
            self.end("cut off")
        elif None not in codes:
            self.end("")

    def end(self, why: str) -> None:
        if self.seconds:
            return
        self.seconds, self.cut = time.perf_counter() - self.began, why
        for each in [*self.workers, *([self.server] if self.server else [])]:
            # Its own children may outlive it.
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    @property
    def state(self) -> str:
        return self.cut or ("finished" if self.seconds else "running")

    def last_lines(self, count: int) -> dict[str, list[str]]:
        said = {log.name: log.read_text(errors="replace").splitlines() for log in self.logs}
        return {name: [line for line in lines if line.strip()][-count:] for name, lines in said.items()}

    def lines(self) -> list[dict[str, Any]]:
        """What the first process wrote; of seconds, the longest of all processes."""
        paths = [self.options.work / f"{self.name}-{rank}.jsonl" for rank in range(self.case.processes)]
        every = [read_lines(path) if path.is_file() else [] for path in paths]
        together = []
        for same in zip(*every, strict=False):
            longest = {key: max(each.get(key, 0.0) for each in same) for key in same[0] if key.endswith("_seconds")}
            together.append(same[0] | longest)
        return together

    def result(self) -> dict[str, Any]:
        lines = self.lines()
        steps = [line for line in lines if "step" in line]
        for step in steps:
            step["tokens_per_second"] = step["rollout_tokens"] / step["rollout_seconds"]
        about = {key: value for line in lines if "step" not in line for key, value in line.items()}
        told = {"case": self.name, **vars(self.case), "gpus": len(self.gpus), "state": self.state}
        told |= {"case_seconds": self.seconds or time.perf_counter() - self.began, **about, "steps": steps}
        return told if self.state == "finished" else told | {"last_lines": self.last_lines(LOG_LINES)}

    def in_words(self) -> str:
        steps = ", ".join(f"{step['step_seconds']:.1f} s" for step in self.lines() if "step" in step)
        ran = self.seconds or time.perf_counter() - self.began
        return f"{self.name}: {self.state}, {ran:.0f} s, steps: {steps or '-'}"


LEFT_OUT = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    "PYTHONDONTWRITEBYTECODE",
)
"""What an environment may say about another process, and what makes every process compile all modules anew."""


def server_command(options: argparse.Namespace, port: int) -> list[str]:
    """What `vllm serve MODEL` runs; the command itself asks for a package named vllm, which vllm-cpu is not."""
    settings = [
        "--host=127.0.0.1",
        f"--port={port}",
        f"--max-model-len={options.server_tokens + CONTEXT_ROOM}",
        f"--max-num-seqs={options.prompts * options.samples}",
        f"--max-num-batched-tokens={STEP_TOKENS}",
    ]
    settings += (
        ["--dtype=float32", "--enforce-eager"] if options.dry else ['--weight-transfer-config={"backend":"nccl"}']
    )
    schedule = str(options.work / "schedule.toml") if options.dry else options.schedule
    settings += serve_arguments(schedule, force=True)
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(options.work / "model"),
        *settings,
    ]


def python_path(options: argparse.Namespace) -> str:
    """With sparroll's entry points, which a server finds the plugin by, also where it is on the path but not installed."""
    site, group = options.work / "site", "vllm.general_plugins"
    found = [entry.name for entry in importlib.metadata.entry_points(group=group)]
    if "sparroll" not in found and not site.exists():
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        folder = site / "sparroll-0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sparroll\nVersion: 0\n")
        entries = [f"{name} = {target}" for name, target in project["entry-points"][group].items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries, ""]))
    return os.pathsep.join([str(site), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_all(options: argparse.Namespace, until: float, on_end: Any) -> list[Run]:
    """Cases in their order, each when its GPUs are free; what is left at `until` is killed or never begins."""
    waiting, runs, told = list(options.cases), [], time.perf_counter()
    try:
        while waiting or any(not run.seconds for run in runs):
            if time.perf_counter() > until:
                break
            taken = {gpu for run in runs if not run.seconds for gpu in run.gpus}
            free = [gpu for gpu in options.gpus if gpu not in taken]
            needed = 1 if options.dry else CASES[waiting[0]].gpus if waiting else 0
            if waiting and len(free) >= needed:
                runs.append(Run(options, waiting.pop(0), free[:needed]))
                continue
            before = [run for run in runs if not run.seconds]
            time.sleep(0.5)
            for run in before:
                run.look()
                if run.seconds:
                    print(run.in_words(), flush=True)
                    if run.state != "finished":
                        show_logs(run)
                    on_end(runs)
            if time.perf_counter() - told > PROGRESS_SECONDS:
                told = time.perf_counter()
                for run in before:
                    print(run.in_words(), *next(iter(run.last_lines(1).values()))[-1:], sep=" | ", flush=True)
    finally:
        for run in runs:
            run.end("cut off")
    return runs


def show_logs(run: Run) -> None:
    for name, lines in run.last_lines(LOG_LINES).items():
        print(f"-- {name}", *lines, sep="\n   ", flush=True)


# -- what the cases say together -----------------------------------------------------------------------------------------


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups of rollouts and of the step, inside TRL and of the plugin alone, and the share of what sparroll adds; of
    each finished case's last step."""
    last = {row["case"]: row["steps"][-1] for row in found if len(row["steps"]) > 1}
    said: dict[str, Any] = {}
    for name, dense in SPEEDUPS:
        rates = [last.get(each) for each in (name, dense, f"plugin-{name}", f"plugin-{dense}")]
        if rates[0] and rates[1]:
            inside = said[f"{name}/rollouts"] = rates[0]["tokens_per_second"] / rates[1]["tokens_per_second"]
            said[f"{name}/step"] = rates[1]["step_seconds"] / rates[0]["step_seconds"]
            if rates[2] and rates[3]:
                alone = rates[2]["tokens_per_second"] / rates[3]["tokens_per_second"]
                said |= {f"{name}/rollouts_of_plugin": alone, f"{name}/of_plugins": inside / alone}
    for name, step in last.items():
        if "added_seconds" in step and CASES[name].schedule:
            said[f"{name}/added_share"] = step["added_seconds"] / step["step_seconds"]
    return said


def table(found: list[dict[str, Any]]) -> str:
    columns = ("step", "sync", "generate", "rollout", "score", "update", "added")
    lines = [f"{'case':16}{'tokens/s':>10}" + "".join(f"{name + ' s':>11}" for name in columns)]
    for row in found:
        if len(row["steps"]) < 2:
            lines.append(f"{row['case']:16} {row['state']}, {len(row['steps'])} steps")
            continue
        step = row["steps"][-1]
        seconds = "".join(f"{step.get(f'{column}_seconds', 0.0):11.2f}" for column in columns)
        lines.append(f"{row['case']:16}{step['tokens_per_second']:10.0f}{seconds}")
    lines += [f"{name}: {value:.3f}" for name, value in together(found).items()]
    for row in found:
        if "arrived" in row:
            said = row["arrived"]
            lines.append(
                f"{row['case']}: engine - trainer {said['from_trained']:.2e}, - first {said['from_first']:.2e}"
            )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the model, the runs and their logs")
    one_gpu = ["dense", "sparse", "plugin-dense", "plugin-sparse", "verified"]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=one_gpu)
    parser.add_argument("--gpus", nargs="+", type=int, default=[0])
    parser.add_argument("--case-seconds", type=float, default=420, help="limit of each case")
    parser.add_argument(
        "--limit-seconds", type=float, help="of all; then what is left is killed, and the rest recorded"
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=8192)
    parser.add_argument("--server-tokens", type=int, default=2048, help="response tokens of the case server")
    parser.add_argument("--first-tokens", type=int, default=1024, help="response tokens of the first step")
    parser.add_argument("--schedule", default="qwen3-1.7b-0.86")
    parser.add_argument("--probe", type=int, default=8, help="rollouts that are re-scored")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
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
    # Every case's process imports this file, and has no use for our own loop.
    import training_step

    training_step.write_model(argparse.Namespace(**vars(options) | {"response_tokens": most_tokens(options)}))
    DRY_SCHEDULE.save(options.work / "schedule.toml")
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
    if unfinished:
        raise SystemExit(f"not finished: {', '.join(sorted(unfinished))}")


def most_tokens(options: argparse.Namespace) -> int:
    return int(max(options.response_tokens, options.server_tokens))


if __name__ == "__main__":
    main()
