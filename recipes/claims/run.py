"""The experiments that the claims of the papers still lacked, each a list of cells: training runs and measurements.

python recipes/claims/run.py --toy --out runs/claims-toy                       # all of them in two minutes, on a CPU
python recipes/claims/run.py --only threshold over-iterations --out runs/claims --gpus 0 1 --at-once 5 --minutes 25
python recipes/claims/run.py --only page-size --tasks remarks --device cpu --out runs/claims-cpu

Cut it at any moment, kill -9 included, and call it again: finished cells stay, and a training run goes on from its last
checkpoint. After each cell the record of its experiment is written anew, OUT/claims-NAME-HARDWARE.json.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

BEGAN = time.time()
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "mismatch-study"), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from claim_asked import Asked, Call, keep_asked  # noqa: E402
from claim_cells import Cell, Experiment, Place, begun, cell_path, read_cell, run_cell, write_record  # noqa: E402
from claim_restored import restore  # noqa: E402
from claim_tasks import USUAL_TASKS, ClaimTask, claim_tasks, find_task, make_model  # noqa: E402
from experiments import NAMES, experiment  # noqa: E402
from study import gpus_of, interrupt  # noqa: E402
from study_jobs import GRACE_SECONDS, Job, Outcome, check_minutes, run_jobs  # noqa: E402
from table_sums import register  # noqa: E402

from sparroll import files  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.locks import locked  # noqa: E402
from sparroll.progress import quiet_transformers  # noqa: E402
from sparroll.resume import begin_or_resume  # noqa: E402
from sparroll.types import check_seed  # noqa: E402

Wanted = list[tuple[Experiment, Cell]]
LOST_SECONDS = 1.0
"""How often a worker looks whether the process that started it is still there."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of cells and records")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(NAMES), help=", ".join(NAMES))
    parser.add_argument("--toy", action="store_true", help="short problems, two steps, one seed, on a CPU")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2, with --toy 0")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help=f"default: {' and '.join(USUAL_TASKS)}; walks, too")
    parser.add_argument(
        "--cells", nargs="+", metavar="BEGINNING", help="only cells whose names begin like one of these"
    )
    parser.add_argument(
        "--continue", type=Path, nargs="+", metavar="RECORD", default=[], dest="continued",
        help="begin with the finished cells of these records of the recipe",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="of training runs; default 60, with --toy 2")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    parser.add_argument("--engine", choices=["hf", "vllm"], help="of table-sums; default: vllm on a GPU")
    parser.add_argument("--gpus", type=int, nargs="+", help="of those that this process sees; default: all")
    parser.add_argument("--at-once", type=int, default=1, help="cells that share a GPU, or the CPU")
    parser.add_argument("--threads", type=int, default=1, help="of each cell")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="from the start of this process to its end; over 1.5"
    )
    parser.add_argument("--work", nargs="+", metavar="CELL", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def known_tasks(args: argparse.Namespace) -> list[ClaimTask]:
    """All tasks, on the device of this call."""
    if args.toy and (args.device == "cuda" or args.engine == "vllm"):
        raise UserError("--toy runs on a CPU with HFEngine", "leave out --device and --engine, or --toy")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU for --device cuda", "--device cpu needs none")
    device = "cpu" if args.toy else args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return claim_tasks(args.out, device, args.engine, toy=args.toy)


def the_tasks(args: argparse.Namespace) -> list[ClaimTask]:
    """The tasks that are asked for, with the settings of this call."""
    known = known_tasks(args)
    chosen = [find_task(known, name) for name in dict.fromkeys(args.tasks or USUAL_TASKS)]
    if args.steps is None:
        return chosen
    if args.steps < 2 or args.steps % 2:
        raise UserError(f"--steps must be an even number from 2 on, got {args.steps}", "its half is a step, too")
    return [replace(task, steps=args.steps) for task in chosen]


def the_seeds(args: argparse.Namespace) -> list[int]:
    seeds = list(dict.fromkeys(args.seeds or ([0] if args.toy else [0, 1, 2])))
    for seed in seeds:
        check_seed(seed)
    return seeds


def check_counts(args: argparse.Namespace) -> None:
    for name in ("at_once", "threads"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(args, name)}")
    if not args.minutes > 0:
        raise UserError(f"--minutes must be above 0, got {args.minutes}")


def wanted_cells(names: Sequence[str], tasks: list[ClaimTask], seeds: list[int]) -> Wanted:
    made = [experiment(name) for name in dict.fromkeys(names)]
    return [(each, cell) for each in made for cell in each.cells(tasks, seeds)]


def asked_cells(beginnings: Sequence[str] | None, wanted: Wanted) -> Wanted:
    """Those of --cells, and what they need. A record counts the others as missing."""
    if beginnings is None:
        return wanted
    for beginning in beginnings:
        if not any(cell.name.startswith(beginning) for _, cell in wanted):
            names = ", ".join(sorted({cell.name for _, cell in wanted})[:8])
            raise UserError(f"no cell's name begins with {beginning!r}", f"there are {names}, ...")
    chosen = [(each, cell) for each, cell in wanted if cell.name.startswith(tuple(beginnings))]
    asked = {(each.NAME, name) for each, cell in chosen for name in (cell.name, *cell.needs)}
    return [(each, cell) for each, cell in wanted if (each.NAME, cell.name) in asked]


def begin(out: Path, tasks: list[ClaimTask]) -> None:
    """The folder's settings; they must be those that its cells were made with. Other tasks may be added."""
    for task in tasks:
        begin_or_resume(out / "settings" / f"{task.name}.json", task.table(), begun=begun(out))
        make_model(task)


def in_folder(args: argparse.Namespace, tasks: list[ClaimTask], asked: Wanted, gpus: list[int]) -> list[Asked]:
    """What this call and all earlier ones of the folder asked for, of each experiment of this call."""
    machine = {"at_once": args.at_once, "threads": args.threads, "gpus": len(gpus)}
    return keep_asked(args.out, asked, Call(tasks, known_tasks(args), the_seeds(args), machine), begun=begun(args.out))


def warn_of_shared_seconds(args: argparse.Namespace, asked: Wanted) -> None:
    measures = [(each, cell) for each, cell in asked if each.NAME == "page-size"]
    if args.at_once > 1 and _missing(args, measures):
        where = f"--at-once {args.at_once}"
        print(
            f"warning: cells of page-size share the machine ({where}), so their decode_seconds are too long", flush=True
        )


def jobs(args: argparse.Namespace, wanted: Wanted) -> list[Job]:
    """A process for each cell that is missing, which waits for the cells that it needs. Toy cells are so short that one
    process takes many: each experiment's cells are in one of them."""
    missing = [(each, cell) for each, cell in wanted if read_cell(args.out, each, cell) is None]
    groups: dict[Any, Wanted] = {}
    for each, cell in missing:
        place = NAMES.index(each.NAME) % args.at_once if args.toy else f"{each.NAME}/{cell.name}"
        groups.setdefault(place, []).append((each, cell))
    return [_job(args, str(place) if not args.toy else f"toy-{place}", cells) for place, cells in groups.items()]


def _job(args: argparse.Namespace, name: str, cells: Wanted) -> Job:
    words = [sys.executable, str(HERE / "run.py"), "--out", str(args.out), "--seeds", *map(str, the_seeds(args))]
    for option in ("only", "tasks", "steps", "device", "engine"):
        value = getattr(args, option)
        if value is not None:
            words += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    words += ["--toy"] if args.toy else []
    words += ["--work", *(f"{each.NAME}/{cell.name}" for each, cell in cells)]
    own = {cell.name for _, cell in cells}
    needed = [cell_path(args.out, each.NAME, need) for each, cell in cells for need in cell.needs if need not in own]
    log = args.out / "logs" / f"{name.replace('/', '-')}.log"
    return Job(name, words, log, blocked=partial(_absent, needed))


def _absent(paths: list[Path]) -> bool:
    return not all(path.is_file() for path in paths)


def work(args: argparse.Namespace, tasks: list[ClaimTask], wanted: Wanted) -> int:
    """In a process of its own: run these cells, one after the other. -> exit status; a cell that fails stops no other"""
    end_with(os.getppid())
    asked, failed = set(args.work), 0
    for each, cell in wanted:
        if f"{each.NAME}/{cell.name}" not in asked or read_cell(args.out, each, cell) is not None:
            continue
        place = Place(args.out, each.NAME, cell.name, find_task(tasks, cell.config["task"]), say=_say)
        try:
            run_cell(each, cell, place)
        except KeyboardInterrupt:
            return 130
        except UserError as error:
            failed += 1
            print(f"{cell.name}: error: {error}", file=sys.stderr, flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"{cell.name} failed", file=sys.stderr, flush=True)
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, flush=True)


def end_with(parent: int) -> None:
    """End this process when the one that started it has gone, so that a killed runner leaves nothing behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOST_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class Records:
    """Writes an experiment's record whenever one more of its cells is finished, and says so."""

    def __init__(self, out: Path, asked: list[Asked]):
        self.out, self.asked = out, [(each, each.cells()) for each in asked]
        self.finished: dict[str, set[str]] = {}

    def update(self) -> None:
        for asked, cells in self.asked:
            name = asked.experiment.NAME
            found = {cell.name for cell in cells if cell_path(self.out, name, cell.name).is_file()}
            before = self.finished.get(name)
            if found and found != before:
                self.finished[name] = found
                path = write_record(self.out, asked.experiment, cells, asked.about())
                for cell in sorted(found - (before or set())) if before is not None else [""]:
                    print(f"{time.time() - BEGAN:6.0f} s  {name} {len(found)}/{len(cells)} {cell}  {path}", flush=True)
            elif before is None:
                self.finished[name] = found


def _missing(args: argparse.Namespace, asked: Wanted) -> int:
    return sum(not cell_path(args.out, each.NAME, cell.name).is_file() for each, cell in asked)


def run_all(args: argparse.Namespace, tasks: list[ClaimTask], asked: Wanted, gpus: list[int]) -> int:
    """Start the workers of the cells that are asked for, and write the records of their experiments, with the cells of
    earlier calls, as cells finish. -> exit status"""
    waiting = jobs(args, asked)
    if waiting:
        check_minutes(args.minutes, BEGAN)
    begin(args.out, tasks)
    told: dict[str, str] = {}
    made = Records(args.out, in_folder(args, tasks, asked, gpus))
    made.update()

    def on_change(outcomes: dict[str, Outcome]) -> None:
        made.update()
        for name, outcome in outcomes.items():
            if outcome.state != told.get(name) and outcome.state != "finished":
                print(f"{time.time() - BEGAN:6.0f} s  {name}: {outcome.state}  {outcome.reason}", flush=True)
            told[name] = outcome.state

    where = f"{len(gpus)} GPUs" if gpus else "the CPU"
    print(f"{_missing(args, asked)} of {len(asked)} cells to run on {where}, {args.at_once} at once", flush=True)
    warn_of_shared_seconds(args, asked)
    deadline = BEGAN + 60 * args.minutes - GRACE_SECONDS
    signal.signal(signal.SIGTERM, interrupt)
    run_jobs(
        waiting, gpus=gpus, at_once=args.at_once, deadline=deadline, threads=args.threads, on_change=on_change,
        on_poll=made.update,
    )  # fmt: skip
    failed = [name for name, state in told.items() if state == "failed"]
    if missing := _missing(args, asked):
        why = f"{len(failed)} failed, see {args.out / 'logs'}" if failed else "call again to go on"
        print(f"{missing} of {len(asked)} cells are missing: {why}", flush=True)
    return 1 if failed else 0


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    register()
    quiet_transformers()
    try:
        check_counts(args)
        tasks = the_tasks(args)
        wanted = wanted_cells(args.only, tasks, the_seeds(args))
        if args.work:
            return work(args, tasks, wanted)
        asked, gpus = asked_cells(args.cells, wanted), gpus_of(tasks[0], args.gpus)
        files.output_folder(args.out)
        with locked(args.out, "recipes/claims/run.py"):
            for path in args.continued:
                print(f"{restore(args.out, path)} cells are taken from {path}", flush=True)
            return run_all(args, tasks, asked, gpus)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
