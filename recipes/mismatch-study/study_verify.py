"""Do the study's calibrated schedules hold their targets on fresh rollouts, and what would hold them?

python recipes/mismatch-study/study_verify.py --record benchmarks/results/mismatch-study-h200.json \
    --model runs/study-model/folder --out runs/study-verified

The study fitted its schedules to replayed dense rollouts and did not verify them. Here each one samples with its own
sparse attention, on prompts that neither the fit nor a run saw; where a bin misses the target its budget is raised to
the next one of the study's grid, and the schedule samples again. OUT/verified.json is the record: round 1 is the schedule
as the study used it. Called again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from study_record import KIND  # noqa: E402
from study_rows import Settings, model_sha256  # noqa: E402
from table_sums import NAME, register  # noqa: E402

from sparroll import records, tasks  # noqa: E402
from sparroll.calibrate.measure import MeasureSettings, Study  # noqa: E402
from sparroll.calibrate.verify import verify  # noqa: E402
from sparroll.engines.hf.engine import HFEngine  # noqa: E402
from sparroll.engines.prompt_encoder import PromptEncoder  # noqa: E402
from sparroll.engines.scoring import Scorer  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import quiet_transformers  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402

VERIFICATION_SEED = 20_000
"""Stream of prompts that no run trains on or is evaluated on, and that no schedule was fitted to."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="the study's record, which holds its schedules")
    parser.add_argument("--model", required=True, help="folder that study_folder.py writes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=2, help="rollouts per prompt and round")
    parser.add_argument("--rounds", type=int, default=4, help="at most so many for each schedule")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def read_study(args: argparse.Namespace) -> tuple[Settings, dict[str, Schedule]]:
    """The study's settings, and its calibrated schedules by name."""
    record = records.read(args.record, KIND)
    known = Settings("").table()
    settings = Settings.from_table({name: record["config"][name] for name in known if name in record["config"]})
    if record["config"].get("model_sha256") not in (None, model_sha256(args.model)):
        raise UserError(f"{args.record} was made with other weights than {args.model}", "give --model its folder")
    found = record["results"]["calibration"]
    return settings, {name: Schedule.from_table(made["schedule"]) for name, made in found.items()}


def open_study(args: argparse.Namespace, settings: Settings) -> Study:
    """The study's model and sampling, with prompts of their own."""
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    engine = HFEngine(args.model, device=args.device, dtype=dtype, max_batch=settings.max_batch)
    asked = tasks.get(NAME).prompts("train", settings.level, VERIFICATION_SEED, args.prompts)
    measuring = MeasureSettings(
        max_new_tokens=settings.max_new_tokens,
        samples=args.samples,
        temperature=settings.temperature,
        top_k=settings.top_k,
        bin_tokens=settings.bin_tokens,
    )
    return Study(engine, Scorer(engine.model), PromptEncoder(engine.tokenizer).ids(asked), measuring)


def main() -> None:
    args, began = arguments(), time.perf_counter()
    register()
    quiet_transformers()
    try:
        settings, schedules = read_study(args)
        study, found = open_study(args, settings), {}
        for name, schedule in schedules.items():
            assert schedule.target is not None, f"{name} has no target"
            verified = verify(
                study,
                schedule,
                target=schedule.target["at_least"],
                notches=settings.budgets,
                out=args.out / name,
                most_rounds=args.rounds,
                on_progress=lambda done, total, what="": print(f"{done}/{total} {what}", flush=True),
            )
            found[name] = verified.table()
            print(f"{name}: {'met' if verified.met else 'missed in ' + ', '.join(verified.missed)}", flush=True)
            print("\n".join(f"  {note}" for note in verified.notes), flush=True)
    except UserError as error:
        sys.exit(f"error: {error}")
    config = settings.table() | {
        "model": Path(args.model).name,
        "model_sha256": model_sha256(args.model),
        "prompts": args.prompts,
        "samples": args.samples,
        "rounds": args.rounds,
        "prompt_stream": VERIFICATION_SEED,
    }
    seconds = time.perf_counter() - began
    path = args.out / "verified.json"
    records.write(path, "mismatch-study-verified", found, config=config, seed=0, wall_seconds=seconds)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
