"""Do the study's calibrated schedules hold their targets in rollouts that are sampled with them? Trains nothing.

python recipes/mismatch-study/study_verify.py --model runs/study-model/folder --out runs/study-verified \\
  --schedules-of benchmarks/results/mismatch-study-h200.json

The study's calibration replays dense rollouts and leaves the verification out. Here each of its schedules samples
rollouts of prompts that no run and no calibration saw, and its bins are held against its target. Where a bin misses,
its budget is raised to the next one of the sweep and the schedule is measured again, up to --rounds times, as
`sparroll calibrate` does. OUT/verified.json is the record, rewritten after each schedule; a second call goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.time()
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from study_record import KIND  # noqa: E402
from study_rows import Settings, model_sha256  # noqa: E402
from study_worker import open_study  # noqa: E402
from table_sums import register  # noqa: E402

from sparroll import records  # noqa: E402
from sparroll.calibrate.curve import cells_of  # noqa: E402
from sparroll.calibrate.fit import MIN_TOKENS  # noqa: E402
from sparroll.calibrate.measure import Measurement, Study  # noqa: E402
from sparroll.calibrate.verify import verify  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS  # noqa: E402
from sparroll.progress import quiet_transformers  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402

SEED = 30_000
"""Stream of prompts that no run trains on, no calibration measured and no run is evaluated on."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that study_folder.py writes")
    parser.add_argument("--schedules-of", type=Path, required=True, help="a record of the study with its calibration")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=2, help="rollouts of each prompt")
    parser.add_argument("--rounds", type=int, default=4, help="how often a schedule is measured at most")
    return parser.parse_args()


def bins_of(measurement: Measurement) -> list[dict[str, Any]]:
    """The bins with enough data: budget, tail and its interval."""
    assert measurement.schedule is not None
    return [
        {
            "from_context_tokens": cell.from_context_tokens,
            "kv_budget_tokens": measurement.schedule.kv_budget_tokens(cell.from_context_tokens),
            **cell.summary(),
        }
        for cell in cells_of(measurement.tail(), 0)
        if cell.counts(MIN_TOKENS, LEAST_ROLLOUTS)
    ]


def verified(study: Study, name: str, made: dict[str, Any], args: argparse.Namespace, settings: Settings) -> Any:
    """One schedule: the bins of each round, and whether the last one met the target everywhere."""
    schedule = Schedule.from_table(made["schedule"], name)
    assert schedule.target is not None, f"{name} names no target"
    target = schedule.target["at_least"]
    found = verify(
        study,
        schedule,
        target=target,
        notches=settings.budgets,
        out=args.out / name,
        most_rounds=args.rounds,
        on_progress=lambda done, total, what="": print(f"{name}: {done}/{total} {what}", flush=True),
    )
    rounds = [{"kv_read_share": each.kv_read_share, "bins": bins_of(each)} for each in found.rounds]
    if not rounds[0]["bins"]:
        raise UserError(
            f"no length bin of {name} has {MIN_TOKENS} tokens of {LEAST_ROLLOUTS} rollouts", "ask more prompts"
        )
    return {
        "schedule": name,
        "target": target,
        "held_as_made": min(cell["value"] for cell in rounds[0]["bins"]) >= target,
        "met": found.met,
        "rounds": rounds,
        "notes": list(found.notes),
        "verified_schedule": found.schedule.table(),
    }


def main() -> None:
    args = arguments()
    register()
    quiet_transformers()
    try:
        record = records.read(args.schedules_of, KIND)
        known = {name: value for name, value in record["config"].items() if name != "model_sha256"}
        settings = Settings.from_table(known)
        if record["config"].get("model_sha256") not in (None, model_sha256(args.model)):
            raise UserError(f"{args.schedules_of} was made with other weights than {args.model}")
        calibration = record["results"]["calibration"]
        if not calibration:
            raise UserError(f"{args.schedules_of} holds no calibration")
        dtype = settings.dtype if args.device == "cuda" else "fp32"
        settings = dataclasses.replace(settings, model=args.model, device=args.device, dtype=dtype)
        study, found = open_study(settings, SEED, args.prompts, args.samples, mode="faithful"), []
        for name, made in calibration.items():
            found.append(verified(study, name, made, args, settings))
            config = {key: getattr(args, key) for key in ("prompts", "samples", "rounds", "device")}
            config |= {"model_sha256": model_sha256(args.model), "level": settings.level, "dtype": settings.dtype}
            path = records.write(
                args.out / "verified.json",
                "study-verification",
                {"schedules": found},
                config=config,
                seed=SEED,
                wall_seconds=time.time() - BEGAN,
            )
            last = found[-1]
            lowest = min(cell["value"] for cell in last["rounds"][0]["bins"])
            print(
                f"{name}: worst bin {lowest:.4f} for a target of {last['target']}, {len(last['rounds'])} rounds",
                flush=True,
            )
        print(f"wrote {path}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
