"""The study: every remedy for mismatch under identical conditions, rows x seeds, on as many GPUs as there are.

python recipes/mismatch-study/study.py --model runs/study-model/folder --out runs/study --gpus 0 1 --at-once 6 --minutes 9
python recipes/mismatch-study/study.py --dry --out runs/dry-study          # every row for two steps, CPU, a minute or two

Called again, it goes on: finished runs are skipped, cut ones resume from their checkpoint. OUT/study.json is the record of
the whole grid, rewritten as runs finish; plots.py draws it. Settings are fixed by the first call (OUT/settings.json).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

BEGAN = time.time()
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from study_folder import new_model, small_config, stored_weights, write_folder  # noqa: E402
from study_jobs import GRACE_SECONDS, Job, Outcome, check_minutes, run_jobs  # noqa: E402
from study_record import KIND, make_record  # noqa: E402
from study_rows import (  # noqa: E402
    CALIBRATED_UNDER,
    Row,
    Settings,
    chosen,
    model_sha256,
    schedule_path,
    write_fixed_schedules,
)

from sparroll import files, records  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.resume import refuse_changes  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402

DRY = {
    "level": 0,
    "device": "cpu",
    "dtype": "fp32",
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "evaluate_prompts": 2,
    "max_batch": 8,
    "checkpoint_every_steps": 1,
    "page_tokens": 4,
    "first_tokens": 4,
    "recent_tokens": 8,
    "bin_tokens": 64,
    "fixed_budget": 24,
    "uniform_budget": 48,
    "wide_from_tokens": 96,
    "wide_budget": 96,
    "eviction_budgets": (48, 96),
    "check_budgets": (32,),
    "quantized_budgets": (24,),
    "unchecked_quantized_budgets": (48,),
    "wide_times": 2,
    "draft_units": ("4x4",),
    "budgets": (24, 48, 160),
    "calibration_prompts": 8,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", help="only these; the record holds no others")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--gpus", type=int, nargs="+", help="of those that this process sees; default: all")
    parser.add_argument("--at-once", type=int, default=4, help="runs that share a GPU, or the CPU")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="from the start of this process to its end; above 1.5"
    )
    parser.add_argument(
        "--schedules-of", type=Path, help="a record of this study: its schedules, instead of a new sweep"
    )
    parser.add_argument(
        "--schedules-anyway", action="store_true", help="--schedules-of counts though it was calibrated in another way"
    )
    parser.add_argument("--copy", type=Path, help="also copy study.json here whenever it is written")
    parser.add_argument("--dry", action="store_true", help="a small untrained model, two steps, one seed, CPU")
    for field in fields(Settings):
        example = getattr(Settings(""), field.name)
        about = {"default": argparse.SUPPRESS, "help": f"default {example!r}"}
        if isinstance(example, tuple):
            about |= {"type": type(example[0]), "nargs": "+"}
        elif isinstance(example, bool):
            about |= {"action": "store_true"}
        else:
            about |= {"type": type(example)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", dest=f"set_{field.name}", **about)
    return parser.parse_args()


def write_dry_model(folder: Path) -> None:
    """Untrained, but sure of what it says: lists of 20 tokens hold nearly all of its probability, as a trained one's do."""
    model = new_model(small_config(), 0)
    with torch.no_grad():
        model.model.norm.weight *= 20
    write_folder(folder, stored_weights(model), small_config())


def read_settings(args: argparse.Namespace) -> Settings:
    """Those of the command line; they must agree with what the folder was begun with."""
    given = {name.removeprefix("set_"): value for name, value in vars(args).items() if name.startswith("set_")}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    path = args.out / "settings.json"
    if args.dry:
        given = DRY | given
        given.setdefault("model", str((args.out / "model").resolve()))
    if path.is_file():
        before = json.loads(path.read_text())
        refuse_changes(
            args.out, before, Settings.from_table({**before, **given}).table(), defaults=Settings("").table()
        )
        return Settings.from_table(before)
    if "model" not in given:
        raise UserError("a new study needs --model, the folder that study_folder.py writes")
    if args.dry and not Path(given["model"]).exists():
        write_dry_model(Path(given["model"]))
    config = Path(given["model"]) / "config.json"
    if config.is_file():
        layers = json.loads(config.read_text(encoding="utf-8"))["num_hidden_layers"]
        if given.setdefault("layers", layers) != layers:
            raise UserError(f"the model has {layers} layers, not {given['layers']}", "leave out --layers")
    return Settings(**given)


def gpus_of(settings: Settings, asked: list[int] | None) -> list[int]:
    """The GPUs of this call; none for a study on the CPU. Raises UserError for GPUs that it cannot have."""
    if settings.device == "cpu":
        if asked is not None:
            named = " ".join(str(gpu) for gpu in asked)
            raise UserError(f"--gpus {named} is given, and jobs of this call run on the CPU", "leave out --gpus")
        return []
    seen = list(range(torch.cuda.device_count()))
    missing = [str(gpu) for gpu in asked or [] if gpu not in seen]
    if missing or not seen:
        raise UserError(f"there is no GPU {', '.join(missing)}".strip(), f"GPUs here: {seen}; --device cpu needs none")
    return asked or seen


def take_schedules(path: Path, settings: Settings, out: Path, *, anyway: bool = False) -> None:
    """The calibrated schedules of an earlier record, so that rows made on another day read the same. anyway: of one that
    was calibrated under other settings, too; the model must be the same."""
    record = records.read(path, KIND)
    for name in () if anyway else CALIBRATED_UNDER:
        if settings.table()[name] != record["config"].get(name):
            raise UserError(
                f"{path} was made with another {name}",
                "leave out --schedules-of, or add --schedules-anyway to read what it says under these settings",
            )
    if record["config"].get("model_sha256") not in (None, model_sha256(settings.model)):
        raise UserError(f"{path} was made with other weights than {settings.model}", "leave out --schedules-of")
    found = record["results"]["calibration"]
    if not found:
        raise UserError(f"{path} holds no calibration", "leave out --schedules-of")
    own = out / "calibration" / "calibration.json"
    if own.is_file() and json.loads(own.read_text()) != found:
        raise UserError(f"{own} differs from that of {path}, and runs may have used it", "use another --out")
    for name, made in found.items():
        Schedule.from_table(made["schedule"]).save(out / "calibration" / f"{name}.toml")
    files.write_json(own, found)


def jobs(settings: Settings, out: Path, rows: list[Row], seeds: list[int]) -> list[Job]:
    """What is not finished: the calibration if a row needs it, then all rows of the first seed, and so on."""
    calibration = out / "calibration" / "calibration.json"
    worker = [sys.executable, str(HERE / "study_worker.py"), str(out)]
    made = []
    if any(row.schedule.startswith("calibrated") for row in rows) and not calibration.is_file():
        made.append(Job("calibrate", [*worker, "calibrate"], out / "logs" / "calibrate.log"))
    for seed in seeds:
        for row in rows:
            name, path = f"{row.name}-{seed}", schedule_path(out, row)
            if (out / "runs" / name / "result.json").is_file():
                continue
            job = Job(name, [*worker, "run", row.name, str(seed)], out / "logs" / f"{name}.log")
            if path is not None:
                job.blocked = partial(_absent, path)
                job.hopeless = partial(_never, path, calibration)
            made.append(job)
    return made


def _absent(path: Path) -> bool:
    return not path.is_file()


def _never(path: Path, calibration: Path) -> str:
    """Why the schedule will not come; empty while it may. What an earlier calibration said that did not end counts for
    nothing."""
    why = path.with_suffix(".failed")
    if path.is_file() or not calibration.is_file():
        return ""
    return why.read_text() if why.is_file() else f"the calibration made no {path.name}"


def interrupt(*_: object) -> None:
    """SIGTERM, which `timeout` sends, is Ctrl-C: runs save and end. A second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    args = arguments()
    try:
        settings = read_settings(args)
        rows, gpus = chosen(settings, args.rows), gpus_of(settings, args.gpus)
        seeds = [0] if args.dry else args.seeds
        if jobs(settings, args.out, rows, seeds):
            check_minutes(args.minutes, BEGAN)
        if args.schedules_of:
            take_schedules(args.schedules_of, settings, args.out, anyway=args.schedules_anyway)
    except UserError as error:
        sys.exit(f"error: {error}")
    files.write_json(args.out / "settings.json", settings.table())
    write_fixed_schedules(settings, args.out)
    told: dict[str, str] = {}

    def on_change(outcomes: dict[str, Outcome]) -> None:
        for name, outcome in outcomes.items():
            if told.get(name) != outcome.state:
                told[name] = outcome.state
                print(
                    f"{time.time() - BEGAN:6.0f} s  {name}: {outcome.state} after {outcome.seconds:.0f} s  {outcome.reason}",
                    flush=True,
                )
        path = make_record(settings, args.out, rows, seeds, outcomes)
        if args.copy:
            files.write_bytes(args.copy, path.read_bytes())

    waiting = jobs(settings, args.out, rows, seeds)
    print(f"{len(waiting)} jobs on {len(gpus)} GPUs, {args.at_once} at once on each", flush=True)
    # Interrupted runs need their time within ours.
    deadline = BEGAN + 60 * args.minutes - GRACE_SECONDS
    signal.signal(signal.SIGTERM, interrupt)
    run_jobs(waiting, gpus=gpus, at_once=args.at_once, deadline=deadline, threads=args.threads, on_change=on_change)
    states = [run["state"] for run in json.loads((args.out / "study.json").read_text())["results"]["runs"]]
    print(", ".join(f"{states.count(state)} {state}" for state in ("finished", "cut", "failed", "waiting")), flush=True)
    sys.exit(1 if "failed" in states else 0)


if __name__ == "__main__":
    main()
