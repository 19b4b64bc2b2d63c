"""Tokens per second of whole rollout batches in vLLM: stock dense FlashAttention 3 against sparse at a published preset, and
against a schedule of small units where one is asked for.

    python benchmarks/rollout.py --model qwen3-1.7b --out-folder benchmarks/results
    python benchmarks/rollout.py --model qwen3-1.7b --sets drained --whole-run --out-folder benchmarks/results
    python benchmarks/rollout.py --model qwen3-1.7b --sets drained steady long --windows 14 --minutes 8 \\
        --fine runs/code-lm/presets/qwen3-1.7b-0.86-scaled.toml --out-folder benchmarks/results

The request sets are in request_sets.py, the attainable step in step_bytes.py, the schedule of small units in
fine_schedule.py. All engines get the same requests, in as much cache as the smallest of them has.

Engines run one after the other in one process with the same settings (--separate: a process each). The first one leaves a
little memory taken (`left_over_gib` in the record), which vLLM does not count against the next: its cache comes out larger
by up to that.

Whole runs take minutes to hours, so steps are measured at --windows evenly spaced moments of the run, each with exactly
the contexts that the requests have at that moment, and the time between is interpolated linearly. Steps are timed in blocks
without a synchronisation in between (see vllm_engines.py). --whole-run compares the shortcut with a drained run from the
first token to the last, all response lengths cut to --scale of theirs, next to windows of that same shorter run.

A call may be cut. Every measurement goes to a line of rollout-<model>[-fine].jsonl in the output folder as it is made, and
--continue-from takes that file. The moments are measured coarsely first, and the record, which is written again after each
moment of the last engine, lists those that are missing. --minutes bounds the call: each engine gets an equal share of what
is left, begins no moment behind its end, and measures only what the engines before it did.

Where the schedule of small units misses its target and time is left, the kernels of a step at the set's middle moment go
into the record (`profile`, as profile_step.py has them).
"""

# B requests in a batch

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import fine_schedule
import profile_step
import rollout_record
import vllm_engines
from measured_windows import Measured
from request_sets import (
    DRAINED_REQUESTS,
    PROMPT_TOKENS,
    SETS,
    Windows,
    drained_windows,
    response_tokens,
    slack_tokens,
    windows_of_sets,
)
from rollout_record import REST_CONTEXT
from step_bytes import layers_of, smaller_capacity
from vllm_engines import DoesNotFit, Engine

from sparroll import records
from sparroll.schedule import Schedule

ONE_TOKEN = 2
"""Prompt of a request that begins to decode with one token in its cache."""


def sets_to_measure(options: argparse.Namespace, dense_capacity_tokens: int) -> dict[str, Windows]:
    """The windows of each set; "whole" are those of the run that --whole-run runs whole."""
    schedules = [Schedule.load(path) for path in options.schedules.values()]
    held = smaller_capacity(dense_capacity_tokens, schedules, layers_of(options.model))
    slack = slack_tokens(options.steps, options.repeats)
    windows = windows_of_sets(options.sets, options.windows, held, options.max_seqs, slack, options.shrink)
    if options.whole_run:
        windows["whole"] = drained_windows(options.windows, scale=options.scale * options.shrink)
    return windows


def measure(options: argparse.Namespace, name: str, until: float | None) -> None:
    """All that one engine is still asked for, until a time of the clock."""
    found = Measured(options.progress)
    asked = None if name == "dense" else {"schedule": options.schedules[name], "attention": options.sparse_engine}
    engine = Engine(options.model, Path(options.folder), asked, max_num_seqs=options.max_seqs)
    with engine:
        if found.get("windows") is None:
            found.put(sets_to_measure(options, engine.capacity_tokens), "windows")
        found.put(engine.settings() | {"capacity_tokens": engine.capacity_tokens}, "engine", name)
        if name == "dense":
            time_one_token(options, engine, found, "before")
        measure_moments(options, engine, found, name, until)
        if name == "dense":
            time_one_token(options, engine, found, "after")
        for batch in rests_missing(options, found) if name == "dense" else ():
            if in_time(until):
                found.put(engine.step_seconds([REST_CONTEXT] * batch, options.steps, options.repeats), "rest", batch)
        if options.whole_run:
            lengths = response_tokens(DRAINED_REQUESTS, scale=options.scale * options.shrink)
            found.put(engine.whole_run(PROMPT_TOKENS, lengths.tolist()), "whole", name)
        if name == "fine":
            profile_misses(options, engine, found, until)
    found.put(round(engine.left_over_bytes / 2**30, 2), "left_over_gib", name)


def time_one_token(options: argparse.Namespace, engine: Engine, found: Measured, when: str) -> None:
    """Before or after the moments, unless a call that was cut has done so. The fastest step of both counts, so that one
    disturbance of the host does not meet all of them."""
    if found.get("one_token", when) is None:
        found.put(engine.step_seconds([ONE_TOKEN], options.steps, options.repeats), "one_token", when)


def measure_moments(
    options: argparse.Namespace, engine: Engine, found: Measured, name: str, until: float | None
) -> None:
    """What is missing, line by line. What takes as long as the longest before must end in time."""
    longest = 0.0
    for request_set, place in missing(options, found, name):
        began = time.time()
        if not in_time(until, longest):
            print(f"{name}: the time is over, what is left stays unmeasured", flush=True)
            return
        contexts = found.windows()[request_set][place]["contexts"]
        try:
            seconds = engine.step_seconds(contexts, options.steps, options.repeats)
        except DoesNotFit as error:
            found.put(str(error), "skipped", name, request_set, place)
            print(f"{name}, {request_set}: {error}", flush=True)
            continue
        found.put(seconds, "seconds", name, request_set, place)
        longest = max(longest, time.time() - began)
        if name == options.engines[-1]:
            write(options, found, request_set)


def profile_misses(options: argparse.Namespace, engine: Engine, found: Measured, until: float | None) -> None:
    """The kernels of a step of each set whose target is missed, at the middle one of its moments."""
    schedule, layers = Schedule.load(options.schedules["fine"]), layers_of(options.model)
    for request_set in profiles_missing(options, found):
        if in_time(until):
            places = found.common(options.engines, request_set)
            window = found.windows()[request_set][places[len(places) // 2]]
            wall, kernels = profile_step.look(engine, window["contexts"], options)
            floors = profile_step.floors_ms(window["contexts"], schedule, layers, found.get("bandwidth"))
            seen = profile_step.summed(kernels, vllm_engines.median(wall), options.profile_steps)
            seen["kernels"] = seen["kernels"][:20]
            about = {"step": window["step"], "batch": len(window["contexts"]), "floors_ms": floors["sparse"]}
            found.put(about | seen, "profile", request_set)
            write(options, found, request_set)


def profiles_missing(options: argparse.Namespace, found: Measured) -> list[str]:
    """The sets that miss their target and have no profile yet."""
    return [
        request_set
        for request_set in options.sets
        if found.get("profile", request_set) is None
        and found.enough(options.engines, request_set)
        and rollout_record.misses_target(options, found, request_set)
    ]


def missing(options: argparse.Namespace, found: Measured, name: str) -> list[tuple[str, int]]:
    return found.missing(name, options.engines[: options.engines.index(name)])


def rests_missing(options: argparse.Namespace, found: Measured) -> list[int]:
    """Batches whose step without context the line through dense steps lacks; three engines draw none."""
    if "fine" in options.engines:
        return []
    batches = {len(w["contexts"]) for rows in found.windows().values() for w in rows}
    return sorted(batch for batch in batches if found.get("rest", batch) is None)


def to_do(options: argparse.Namespace, found: Measured, name: str) -> bool:
    """Whether an engine has anything left to measure."""
    if found.get("windows") is None or missing(options, found, name):
        return True
    if options.whole_run and found.get("whole", name) is None:
        return True
    if name == "fine" and profiles_missing(options, found):
        return True
    return name == "dense" and (found.get("one_token", "after") is None or bool(rests_missing(options, found)))


def in_time(until: float | None, needed_seconds: float = 0.0) -> bool:
    return until is None or time.time() + needed_seconds < until


def write(options: argparse.Namespace, found: Measured, request_set: str) -> dict[str, Any] | None:
    """The record of one set, if enough of it was measured."""
    if not found.enough(options.engines, request_set) or request_set == "whole":
        return None
    made = rollout_record.result(options, found, request_set)
    if request_set == "drained" and options.whole_run and found.get("whole", options.engines[-1]):
        made["whole_run"] = rollout_record.whole_run(options, found)
    if options.out_folder:
        path = options.out_folder / rollout_record.file_name(options, request_set)
        config, wall = rollout_record.config(options, found), time.time() - options.began
        records.write(path, "rollout", made, config=config, seed=0, wall_seconds=wall)
    return made


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    found = Measured.begin(options.progress, about(options), options.continue_from)
    end = None if options.minutes is None else options.began + 60 * options.minutes
    for name in options.engines:
        if to_do(options, found, name) and in_time(end):
            left = len(options.engines) - options.engines.index(name)
            until = None if end is None else time.time() + (end - time.time()) / left
            if options.separate:
                vllm_engines.own_process(measure, options, name, until)
            else:
                measure(options, name, until)
            found = Measured(options.progress)
            print(f"{name} measured after {time.time() - options.began:.0f} s", flush=True)
        if found.get("bandwidth") is None:
            found.put(vllm_engines.copy_bandwidth(), "bandwidth")
    without_record = []
    for name in options.sets:
        made = write(options, found, name)
        without_record += [] if made else [name]
        said = json.dumps(rollout_record.shown(made)) if made else f"{name}: too little was measured for a record"
        print(said, flush=True)
    print(f"every measurement is in {options.progress}", flush=True)
    if without_record:
        raise SystemExit(f"no record of {' and '.join(without_record)}: go on with --continue-from {options.progress}")


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same where a cut call is gone on with."""
    keys = ("model", "sets", "windows", "steps", "repeats", "max_seqs", "sparse_engine", "whole_run", "scale", "shrink")
    schedules = {name: Schedule.load(path).inline() for name, path in options.schedules.items()}
    asked = {key: getattr(options, key) for key in keys} | {
        "device": vllm_engines.device_name(),
        "schedules": schedules,
    }
    return dict(json.loads(json.dumps(asked)))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-folder", type=Path)
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument(
        "--schedule", help="of the second engine: preset or file; default: the model's published 0.86 preset"
    )
    fine_schedule.add_arguments(parser)
    parser.add_argument("--sets", nargs="+", default=["drained", "steady"], choices=SETS)
    parser.add_argument("--sparse-engine", default="triton", choices=["triton", "fa3_pages"])
    parser.add_argument(
        "--windows", type=int, default=10, help="moments of the drained run; half as many of each other set"
    )
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are timed as one")
    parser.add_argument("--repeats", type=int, default=3, help="how often they are timed in each window")
    parser.add_argument(
        "--minutes", type=float, help="bound of the call; on an H200 three engines take 3 1/2 to start, and 4 with 8B"
    )
    parser.add_argument("--continue-from", type=Path, help="the .jsonl of a call that was cut")
    parser.add_argument("--whole-run", action="store_true", help="also run the drained set whole, at --scale")
    parser.add_argument("--scale", type=float, default=1 / 8, help="of the response lengths in the whole run")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--separate", action="store_true", help="each engine in a process of its own")
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    parser.add_argument("--profile-steps", type=int, default=4, help="decode steps of a profile")
    parser.add_argument("--shrink", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.began = time.time()
    if options.whole_run and "drained" not in options.sets:
        parser.error("--whole-run is compared with the drained set: --sets drained")
    if options.whole_run and fine_schedule.asked(options):
        parser.error("--whole-run compares two engines; whole_run.py --engine fine runs the full lengths")
    if options.windows < 2:
        parser.error("--windows must be at least 2: the first and the last moment")
    with fine_schedule.refusals_told():
        engines_and_schedules(options)
    return options


def engines_and_schedules(options: argparse.Namespace) -> None:
    """Adds who runs, under which schedule each sparse one does, and where the measurements go."""
    folder = Path(options.folder)
    options.schedule = vllm_engines.schedule_of(options.model, options.schedule, folder)
    options.engines, options.schedules = ["dense", "sparse"], {"sparse": options.schedule}
    if fine_schedule.asked(options):
        options.engines.append("fine")
        options.schedules["fine"] = fine_schedule.inline(options)
    name = f"rollout-{options.model}{'-fine' if 'fine' in options.engines else ''}.jsonl"
    options.progress = (options.out_folder or folder) / name


if __name__ == "__main__":
    main()
