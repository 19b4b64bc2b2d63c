"""An adapter alone, against the study's frozen model: how far does DistillSparse raise the tail, without rewards?

python recipes/mismatch-study/study_distill.py --study runs/study --out runs/study-distill --steps 40

Settings, schedule (of row `distill-kl`) and prompts are those of the study that --study was begun for. Held-out prompts are
measured before and after with the same draws; OUT/result.json is the record. Called again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from study_rows import Settings, rows, run_config  # noqa: E402
from table_sums import register  # noqa: E402

from sparroll import files  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import quiet_transformers  # noqa: E402
from sparroll.rounding import with_interval  # noqa: E402
from sparroll.train.config.distill import DistillConfig  # noqa: E402
from sparroll.train.config.file import distill_config_from  # noqa: E402
from sparroll.train.config.rollout import SamplingSection  # noqa: E402
from sparroll.train.config.training import StepsSection  # noqa: E402
from sparroll.train.distill.run import distill  # noqa: E402

ROW = "distill-kl"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True, help="folder of a study whose calibration is done")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, help="of the adapter; default: the study's distill_lr")
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--held-out", type=int, default=32, help="prompts measured before and after")
    parser.add_argument("--schedule", help="preset or file instead of the row's")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> DistillConfig:
    """The row's, with the adapter's own steps and rate."""
    hint = "--study takes the folder of a study whose calibration is done"
    settings = Settings.from_table(files.read_table(args.study / "settings.json", hint))
    row = run_config(settings, args.study, rows(settings)[ROW], args.seed).model_dump(mode="json")
    table = {name: row[name] for name in ("model", "engine", "attention", "mismatch", "distill", "checkpoint", "log")}
    table["task"] = row["task"] | {"train_prompts": args.steps * settings.prompts_per_step}
    table["rollout"] = {key: row["rollout"][key] for key in SamplingSection.model_fields}
    table["train"] = {key: row["train"][key] for key in StepsSection.model_fields}
    table["train"] |= {"steps": args.steps, "warmup_steps": args.warmup_steps}
    table["evaluate"] = {"prompts": args.held_out}
    if args.lr is not None:
        table["distill"] |= {"lr": args.lr}
    if args.schedule:
        table["attention"] = {"kind": "schedule", "name": args.schedule}
    return distill_config_from(table)


def main() -> None:
    args = arguments()
    register()
    quiet_transformers()
    try:
        config = configuration(args)
        resume = (args.out / "config.json").is_file()
        result = distill(
            config, args.out, resume, lambda done, total, what: print(f"{done}/{total} {what}", flush=True)
        )
    except UserError as error:
        sys.exit(f"error: {error}")
    assert result.before is not None and result.after is not None, "no held-out prompts"
    for when, found in (("before", result.before), ("after", result.after)):
        print(f"{when}: tail {with_interval(found.q05, found.q05_low, found.q05_high)}, KL {found.kl:.4f}")
    print(f"wrote {args.out / 'result.json'}")


if __name__ == "__main__":
    main()
