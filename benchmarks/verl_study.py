"""The mismatch study's model trained by verl with sparse rollouts, and by our own loop: are tail and accuracy alike?

    python benchmarks/verl_study.py --out benchmarks/results/verl-study-h200.json --work /tmp/verl-study

Both train the packaged weights on the study's task under the schedule of --schedules-of, with the study's settings
(study_rows.Settings) at a temperature of 1, TIS, and dense validation before the first step and after the last one.
`verl` is `python -m sparroll.verl` in sparroll_sync; `own` is recipes/mismatch-study/study.py. Each is a process of its
own with a limit of --case-seconds, one after the other, and the record is written anew after each.

What differs between the two: verl's prompts keep the order of the task's stream. Both tails are lower bounds from the 20
likeliest tokens. At the study's own temperature of 0.8, re-scoring would need lists of the whole vocabulary, and vLLM
gives them for every token of its long prompts, too: a step then took minutes.

`--dry` runs an untrained small model for two steps on the CPU, where the figures say nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "recipes" / "mismatch-study"
sys.path.append(str(RECIPE))

import table_sums  # noqa: E402
import verl_seen  # noqa: E402
import verl_watch  # noqa: E402
from study import DRY, write_dry_model  # noqa: E402
from study_folder import new_config, unpack, write_folder  # noqa: E402
from study_jobs import visible_device  # noqa: E402
from study_rows import Settings  # noqa: E402
from verl_overrides import ACTOR, ROLLOUT, SPARROLL, Sizes, shared, sparse  # noqa: E402

from sparroll import records  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402
from sparroll.train.runtime.sinks import read_lines  # noqa: E402

CASES = ("verl", "own")
LOG_LINES = 20
MARK = "SPARROLL_STUDY_CASE"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} {% endif %}"
TAIL, KL = "mismatch/acceptance_q05", "mismatch/kl_sparse_to_dense"
COMPARED = (TAIL, KL, "correction/effective_sample_share")
EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
}
ON_GPU = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "NCCL_NVLS_ENABLE": "0", "VLLM_HOST_IP": "127.0.0.1"}
ON_CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
REWARD = """import sys

sys.path.append({recipe!r})
from table_sums import TableSums

from sparroll.types import Prompt


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return TableSums().reward(Prompt("", "", ground_truth, data_source, 0), solution_str)
"""


# -- what both cases begin with ------------------------------------------------------------------------------------------


def write_world(options: argparse.Namespace, settings: Settings) -> None:
    """The model, once as our own loop reads it and once with a tokenizer for verl; prompts, reward, schedule."""
    import pyarrow
    import pyarrow.parquet

    for folder in (options.work / "model", options.work / "verl-model"):
        if options.dry:
            write_dry_model(folder)
        else:
            write_folder(folder, unpack(RECIPE / "model", new_config()), new_config())
    make_tokenizer_verls(options.work / "verl-model")
    task = table_sums.TableSums()
    counts = {"train": settings.steps * settings.prompts_per_step, "eval": settings.evaluate_prompts}
    for split, count in counts.items():
        rows = [
            {
                "data_source": table_sums.NAME,
                "prompt": [{"role": "user", "content": prompt.text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": prompt.answer},
                "extra_info": {"index": index},
            }
            for index, prompt in enumerate(task.prompts(split, settings.level, options.seed, count))  # type: ignore[arg-type]
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), options.work / f"{split}.parquet")
    (options.work / "reward.py").write_text(REWARD.format(recipe=str(RECIPE)))
    study_schedule(options, settings).save(options.work / "schedule.toml")


def study_schedule(options: argparse.Namespace, settings: Settings) -> Schedule:
    if options.dry:
        return Schedule.fixed(settings.fixed_budget, settings.selector, settings.dense_layers)
    found = records.read(options.schedules_of)["results"]["calibration"]
    return Schedule.from_table(found[f"calibrated-{settings.corrected_target:.2f}"]["schedule"])


def make_tokenizer_verls(folder: Path) -> None:
    """verl wants a line break that is one token, and Qwen's end of a turn; no id changes."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"<pad>"', '"<|im_end|>"').replace('"<bos>"', '"\\n"'))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {"pad_token": "<|im_end|>", "bos_token": "\n", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


# -- the cases -----------------------------------------------------------------------------------------------------------


def command(options: argparse.Namespace, settings: Settings, name: str) -> list[str]:
    if name == "verl":
        given = verl_overrides(options, settings)
        return [sys.executable, "-m", "sparroll.verl", *(f"{key}={value}" for key, value in given.items())]
    study = [sys.executable, str(RECIPE / "study.py"), "--out", str(options.work / "own"), "--seeds", str(options.seed)]
    study += ["--model", str(options.work / "model"), "--steps", str(settings.steps)]
    study += ["--temperature", str(settings.temperature)]
    if options.dry:
        return [*study, "--dry", "--rows", "fixed-tis"]
    study += ["--rows", f"calibrated-{settings.corrected_target:.2f}", "--engine", "vllm", "--gpus", "0"]
    # They were calibrated at the study's own temperature.
    study += ["--schedules-of", str(options.schedules_of), "--schedules-anyway"]
    return [*study, "--evaluate-prompts", str(settings.evaluate_prompts)]


def verl_overrides(options: argparse.Namespace, settings: Settings) -> dict[str, str]:
    """The study's settings in verl's words."""
    prompt_tokens = table_sums.LEVELS[settings.level].prompt_tokens
    sizes = Sizes(
        steps=settings.steps,
        prompts=settings.prompts_per_step,
        samples=settings.samples_per_prompt,
        prompt_tokens=prompt_tokens,
        response_tokens=settings.max_new_tokens,
        context_tokens=prompt_tokens + settings.max_new_tokens + 64,
        rollouts_at_once=settings.max_batch,
        batched_tokens=512 if options.dry else 8192,
        micro_batch=min(options.micro_batch, settings.prompts_per_step * settings.samples_per_prompt),
        learning_rate=settings.lr,
        gpu_memory_share=0.2 if options.dry else 0.4,
    )
    given = {
        **shared(sizes, options.work, "", options.dry),
        **sparse(options.work / "schedule.toml"),
        "trainer.v1.trainer_mode": "sparroll_sync",
        "trainer.n_gpus_per_node": "1",
        "trainer.val_before_train": "True",
        "trainer.test_freq": str(settings.steps),
        "data.val_files": str(options.work / "eval.parquet"),
        "actor_rollout_ref.model.path": str(options.work / "verl-model"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": "False",
        f"{ACTOR}.clip_ratio_high": "0.28",
        f"{ACTOR}.optim.betas": "[0.9,0.95]",
        f"{ACTOR}.optim.weight_decay": "0",
        f"{ROLLOUT}.temperature": str(settings.temperature),
        f"{ROLLOUT}.val_kwargs.temperature": str(settings.temperature),
        f"{ROLLOUT}.val_kwargs.do_sample": "True",
        f"{ROLLOUT}.tensor_model_parallel_size": "1",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": "64",
        f"{SPARROLL}.guard.action": "off",
        f"{SPARROLL}.mismatch.bin_tokens": str(settings.bin_tokens),
        f"{SPARROLL}.rescoring.top_k": str(settings.top_k),
        "+ray_kwargs.ray_init.num_gpus": "1",
        "ray_kwargs.ray_init.num_cpus": "12",
        # Another run of verl on this machine knows nothing of this one. Ray's sockets have short paths.
        "+ray_kwargs.ray_init._temp_dir": f"/tmp/ray-study-{os.getpid()}",
    }
    if options.dry:
        # A group of two must find eight rollouts to be measured, which a dry step has not.
        given |= {f"{SPARROLL}.rescoring.probe_rollouts": "null"}
    return given


def environment(options: argparse.Namespace, name: str) -> dict[str, str]:
    paths = [str(written_site(options.work)), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    own, modules = EVERYWHERE | (ON_CPU if options.dry else ON_GPU), []
    if options.dry:
        paths.insert(0, str(REPOSITORY / "tests" / "in_verl" / "shim"))
        modules.append("verl_on_cpu")
    else:
        own["CUDA_VISIBLE_DEVICES"] = visible_device(options.gpu)
    if name == "verl":
        # Our own loop imports the recipe's modules, some of which have the names of benchmarks.
        paths.append(str(REPOSITORY / "benchmarks"))
        modules.append("verl_watch")
        own |= {verl_watch.FOLDER: str(options.work / "watched"), "VERL_USE_EXTERNAL_MODULES": ",".join(modules)}
    own |= {"VERL_FILE_LOGGER_PATH": str(options.work / "verl.jsonl"), MARK: f"{os.getpid()}-{name}"}
    own |= {"VLLM_CACHE_ROOT": str(options.work / f"{name}-vllm"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # It would make each of the many processes compile all modules anew.
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | own


def written_site(work: Path) -> Path:
    """A folder with sparroll's entry points, where it is on the path but not installed: vLLM finds the plugin by them."""
    site, group = work / "site", "vllm.general_plugins"
    if "sparroll" not in [entry.name for entry in importlib.metadata.entry_points(group=group)] and not site.exists():
        folder = site / "sparroll-0.dist-info"
        folder.mkdir(parents=True)
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        entries = [f"{key} = {target}" for key, target in project["entry-points"][group].items()]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sparroll\nVersion: 0\n")
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries, ""]))
    return site


def run(options: argparse.Namespace, settings: Settings, name: str) -> dict[str, Any]:
    """One case to its end or its limit. -> its part of the record"""
    began, log, env = time.perf_counter(), options.work / f"{name}.log", environment(options, name)
    with log.open("w") as sink:
        process = subprocess.Popen(
            command(options, settings, name),
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    try:
        code = process.wait(options.case_seconds)
        state = "failed" if code else "finished"
    except subprocess.TimeoutExpired:
        state = "cut off"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_marked(env[MARK])
    told: dict[str, Any] = {"case": name, "state": state, "seconds": time.perf_counter() - began}
    told |= of_verl(options) if name == "verl" else of_own(options)
    # Lines of a log, which name folders of this machine, are printed and not recorded.
    lines = [line[:400] for line in log.read_text(errors="replace").splitlines() if line.strip()]
    shown = [] if state == "finished" else lines[-LOG_LINES:]
    print(f"{name}: {state} after {told['seconds']:.0f} s", *shown, sep="\n   ", flush=True)
    return told


def kill_marked(mark: str) -> None:
    """Ray's processes have sessions of their own, but they inherit the environment."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


# -- what they say ---------------------------------------------------------------------------------------------------------


def of_verl(options: argparse.Namespace) -> dict[str, Any]:
    path = options.work / "verl.jsonl"
    in_force = verl_seen.in_force(options.work / "watched")
    return from_log(read_lines(path) if path.is_file() else []) | {"in_force": in_force}


def from_log(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """From verl's log: series by step, and the dense accuracy as [step, accuracy]."""
    steps = [line["data"] for line in lines if "timing_s/step" in line["data"]]
    series = {name: [step.get(name) for step in steps] for name in sorted({name for step in steps for name in step})}
    accuracy = [
        [line["step"], value]
        for line in lines
        for name, value in line["data"].items()
        if name.startswith("val-core/") and "/acc/mean@" in name
    ]
    return {"series": series, "dense_accuracy": accuracy}


def of_own(options: argparse.Namespace) -> dict[str, Any]:
    path = options.work / "own" / "study.json"
    runs = json.loads(path.read_text())["results"]["runs"] if path.is_file() else []
    if not runs or "series" not in runs[0]:
        return {"series": {}, "dense_accuracy": []}
    # Without the interval, which verl does not give.
    return {"series": runs[0]["series"], "dense_accuracy": [each[:2] for each in runs[0]["dense_accuracy"]]}


def together(found: list[dict[str, Any]]) -> dict[str, float]:
    """Means over a case's steps of what is compared, and its dense accuracy before and after.

    >>> together([{"case": "own", "series": {TAIL: [0.8, 0.9]}, "dense_accuracy": [[0, 0.5], [2, 0.6]]}])
    {'own/mismatch/acceptance_q05': 0.85, 'own/accuracy_before': 0.5, 'own/accuracy_after': 0.6}
    """
    said: dict[str, float] = {}
    for row in found:
        for name in COMPARED:
            values = [value for value in row["series"].get(name, []) if value is not None]
            if values:
                said[f"{row['case']}/{name}"] = round(sum(values) / len(values), 6)
        accuracy = row["dense_accuracy"]
        if len(accuracy) > 1:
            said |= {f"{row['case']}/accuracy_before": accuracy[0][1], f"{row['case']}/accuracy_after": accuracy[-1][1]}
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the model, the runs and their logs")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--case-seconds", type=float, default=480, help="limit of each case")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--evaluate-prompts", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules-of", type=Path, default=REPOSITORY / "benchmarks/results/mismatch-study-h200.json")
    parser.add_argument("--dry", action="store_true", help="a small untrained model, two steps, on the CPU")
    options = parser.parse_args()
    options.work, options.schedules_of = options.work.resolve(), options.schedules_of.resolve()
    return options


def main() -> None:
    options = arguments()
    # So that `timeout` ends the case, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.perf_counter()
    if options.work.exists() and any(options.work.iterdir()):
        raise SystemExit(f"{options.work} already holds a run\nhint: give --work another folder")
    options.work.mkdir(parents=True, exist_ok=True)
    asked = {"steps": options.steps, "evaluate_prompts": options.evaluate_prompts}
    shared = {"model": str(options.work / "model"), "temperature": 1.0}
    settings = Settings.from_table({**(DRY if options.dry else asked), **shared})
    write_world(options, settings)
    config = settings.table() | {"model": "recipes/mismatch-study/model", "dry": options.dry, "seed": options.seed}
    found: list[dict[str, Any]] = []
    for name in options.cases:
        found.append(run(options, settings, name))
        results, wall = {"cases": found, "together": together(found)}, time.perf_counter() - began
        records.write(options.out, "verl-study", results, config=config, seed=options.seed, wall_seconds=wall)
    print("\n".join(f"{name}: {value:.4f}" for name, value in together(found).items()))
    if any(row["state"] != "finished" for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
