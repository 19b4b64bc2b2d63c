"""The drained request set of rollout.py from the first token to the last, nothing interpolated: seconds of one engine.

    python benchmarks/whole_run.py --engine dense  --out-folder benchmarks/results
    python benchmarks/whole_run.py --engine triton --out-folder benchmarks/results
    python benchmarks/whole_run.py --engine fine --fine SCHEDULE.toml --out-folder benchmarks/results

"fine" is the Triton engine under a schedule of small units (fine_schedule.py).

Qwen3-1.7B takes about 8 minutes of an H200 dense and 3 1/2 sparse, and a minute to start. So each engine is a call of its
own, with the settings of rollout.py; their records together say the speed-up (render.py). Every --every steps a line with
the step and the seconds so far goes to <out-folder>/whole-run-<model>-<engine>.jsonl. A run that was cut goes on from there
with

    --continue-from <that file>

since what a request holds at a step follows from its number of tokens: its cache is filled without a prefill, like
every context of these benchmarks. Filling it counts for nothing. The record says in how many pieces the run was made.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import fine_schedule
import request_sets
import vllm_engines
from vllm_engines import Engine

from sparroll import records
from sparroll.schedule import Schedule

FILLING_STEPS = 3
"""Steps of a later piece until its caches are filled; they were counted in the piece before."""
Line = dict[str, Any]


def last_line(path: Path | None, lengths: list[int]) -> Line:
    """Where an earlier call was cut; the start without one."""
    if path is None:
        return {"step": 0, "seconds": 0.0, "pieces": 0}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    if not lines or lines[-1]["lengths_sum"] != sum(lengths):
        raise SystemExit(f"{path} holds no progress of these requests")
    return lines[-1]


def requests_at(lengths: list[int], step: int) -> tuple[int, list[int]]:
    """(context that each request has, tokens that each still makes) of those that are not done after so many steps."""
    return request_sets.PROMPT_TOKENS + step, [length - step for length in lengths if length > step]


def run(options: argparse.Namespace, lengths: list[int], progress: Path) -> dict[str, Any]:
    """The rest of the run, and what all pieces took."""
    before = last_line(options.continue_from, lengths)
    first = max(before["step"] - FILLING_STEPS, 0)
    context, left = requests_at(lengths, first)
    attention = "triton" if options.engine == "fine" else options.engine
    asked = None if options.engine == "dense" else {"schedule": options.schedule, "attention": attention}
    pieces = before["pieces"] + 1

    def note(step: int, seconds: float) -> None:
        line = {
            "step": first + step,
            "seconds": before["seconds"] + seconds,
            "pieces": pieces,
            "lengths_sum": sum(lengths),
        }
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{line['step']} of {max(lengths)} steps, {line['seconds']:.1f} s", flush=True)

    engine = Engine(options.model, Path(options.folder), asked, max_num_seqs=options.max_seqs)
    with engine:
        about = engine.settings() | {"capacity_tokens": engine.capacity_tokens}
        print(f"engine up after {engine.start_seconds:.0f} s", flush=True)
        found = engine.whole_run(
            context, left, uncounted_steps=before["step"] - first, on_progress=note, every_steps=options.every
        )
    return {
        "model": options.model,
        "engine": options.engine,
        "schedule": None if options.engine == "dense" else options.schedule,
        **(fine_schedule.described(Schedule.load(options.schedule)) if options.engine == "fine" else {}),
        "request_set": "drained",
        "requests": len(lengths),
        "tokens": sum(lengths),
        "steps": max(lengths),
        "seconds": before["seconds"] + found["seconds"],
        "pieces": pieces,
        "steps_with_requests_put_off": found["steps_with_requests_put_off"],
        "settings": about,
    }


def main() -> None:
    options = arguments()
    began = time.perf_counter()
    lengths = request_sets.response_tokens(request_sets.DRAINED_REQUESTS, scale=options.scale).tolist()
    device = vllm_engines.device_name()
    options.out_folder.mkdir(parents=True, exist_ok=True)
    name = f"whole-run-{options.model}-{options.engine}"
    progress = options.out_folder / f"{name}.jsonl"
    if options.continue_from is None:
        progress.unlink(missing_ok=True)
    found = run(options, lengths, progress)
    config = {key: getattr(options, key) for key in ("scale", "every", "max_seqs")}
    wall = time.perf_counter() - began
    path = options.out_folder / f"{name}-{device}.json"
    records.write(path, "whole-run", found, config=config, seed=0, wall_seconds=wall)
    print(json.dumps({key: value for key, value in found.items() if key != "settings"}), flush=True)
    print(f"wrote {path} after {wall:.0f} s", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, choices=["dense", "triton", "fa3_pages", "fine"])
    parser.add_argument("--out-folder", type=Path, required=True)
    parser.add_argument("--continue-from", type=Path, help="the .jsonl of a call that was cut")
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule", help="preset or file; default: the model's published 0.86 preset")
    fine_schedule.add_arguments(parser)
    parser.add_argument("--scale", type=float, default=1.0, help="of the response lengths")
    parser.add_argument("--every", type=int, default=500, help="steps between two lines of progress")
    parser.add_argument("--max-seqs", type=int, default=128, help="as rollout.py")
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    options = parser.parse_args()
    if fine_schedule.asked(options) != (options.engine == "fine"):
        parser.error("--engine fine takes one of --fine, --budget-ratio and --ratio-records, and no other engine does")
    options.schedule = vllm_engines.schedule_of(options.model, options.schedule, Path(options.folder))
    if options.engine == "fine":
        with fine_schedule.refusals_told():
            options.schedule = fine_schedule.inline(options)
    return options


if __name__ == "__main__":
    main()
