"""The processes of benchmarks/trl_steps.py: which case runs on which GPUs, when it is over, and what it left. A case is a
script's own command once more with `--one`, by as many processes as it needs, and a vLLM server where it has one.
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
from trl_case import CASES, CONTEXT_ROOM, STEP_TOKENS

from sparroll.engines.vllm.serve_args import serve_arguments
from sparroll.train.runtime.sinks import read_lines

REPOSITORY = Path(__file__).resolve().parents[1]
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
LEFT_OUT = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    "PYTHONDONTWRITEBYTECODE",
)
"""What an environment may say about another process, and what makes every process compile all modules anew."""


class Run:
    """The processes of one case on its GPUs, and what they have left so far. The last ones are the trainer's; a server
    ends with them."""

    def __init__(self, options: argparse.Namespace, name: str, gpus: list[int]):
        self.options, self.name, self.gpus, self.case = options, name, gpus, CASES[name]
        self.began, self.seconds, self.cut = time.perf_counter(), 0.0, ""
        self.logs: list[Path] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        arguments = [sys.executable, str(Path(sys.argv[0]).resolve()), *sys.argv[1:], "--one", name]
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
        # Lines of a log, which name folders of this machine, are printed and not recorded.
        return told | {"case_seconds": self.seconds or time.perf_counter() - self.began, **about, "steps": steps}

    def in_words(self) -> str:
        steps = ", ".join(f"{step['step_seconds']:.1f} s" for step in self.lines() if "step" in step)
        ran = self.seconds or time.perf_counter() - self.began
        return f"{self.name}: {self.state}, {ran:.0f} s, steps: {steps or '-'}"


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
                    said = [line[-100:] for line in next(iter(run.last_lines(1).values()))]
                    print(run.in_words(), *said, sep=" | ", flush=True)
    finally:
        for run in runs:
            run.end("cut off")
    return runs


def show_logs(run: Run) -> None:
    for name, lines in run.last_lines(LOG_LINES).items():
        print(f"-- {name}", *lines, sep="\n   ", flush=True)
