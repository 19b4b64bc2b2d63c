"""One job of the study in a process of its own: the calibration that rows share, or one run. study.py starts these.

python study_worker.py OUT calibrate
python study_worker.py OUT run ROW SEED
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from study_rows import Settings, rows, run_config  # noqa: E402
from table_sums import NAME, register  # noqa: E402

from sparroll import files, records, tasks  # noqa: E402
from sparroll.calibrate.measure import MeasureSettings, Mode, Study  # noqa: E402
from sparroll.calibrate.run import calibrate  # noqa: E402
from sparroll.calibrate.target import OutOfReach  # noqa: E402
from sparroll.engines.hf.engine import HFEngine  # noqa: E402
from sparroll.engines.prompt_encoder import PromptEncoder  # noqa: E402
from sparroll.engines.scoring import Scorer  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import quiet_transformers  # noqa: E402
from sparroll.train import train  # noqa: E402

CALIBRATION_SEED = 10_000
"""Stream of prompts that no run trains on or is evaluated on."""


def say(done: int, total: int, what: str = "") -> None:
    print(f"{done}/{total} {what}", flush=True)


def open_study(settings: Settings, seed: int, prompts: int, samples: int, mode: Mode) -> Study:
    """The study's model, sampling as its runs do, with prompts of the stream `seed`."""
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    engine = HFEngine(settings.model, device=settings.device, dtype=dtype, max_batch=settings.max_batch)
    asked = tasks.get(NAME).prompts("train", settings.level, seed, prompts)
    measuring = MeasureSettings(
        max_new_tokens=settings.max_new_tokens,
        mode=mode,
        samples=samples,
        temperature=settings.temperature,
        top_k=settings.top_k,
        bin_tokens=settings.bin_tokens,
    )
    return Study(engine, Scorer(engine.model), PromptEncoder(engine.tokenizer).ids(asked), measuring)


def run_calibration(settings: Settings, out: Path) -> None:
    """A schedule for each target from one sweep, teacher-forced on dense rollouts. A target that no budget reaches gets a
    file that says why, and its rows fail; the others go on. Any other error ends the calibration, which the next call
    runs again."""
    folder = out / "calibration"
    for target in settings.targets:
        (folder / f"calibrated-{target:.2f}.failed").unlink(missing_ok=True)
    study = open_study(
        settings, CALIBRATION_SEED, settings.calibration_prompts, settings.calibration_samples, mode="replay"
    )
    found = {}
    for target in settings.targets:
        name = f"calibrated-{target:.2f}"
        try:
            made = calibrate(
                study,
                out=folder / "sweep",
                budgets=settings.budgets,
                target=target,
                selector=settings.selector,
                dense_layers=settings.dense_layers,
                verify_rounds=0,
                made_by=records.made_by("recipes/mismatch-study/study.py"),
                name=name,
                on_progress=say,
            )
        except OutOfReach as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            files.write_text(folder / f"{name}.failed", str(error))
            continue
        found[name] = {"schedule": made.schedule.table(), "rows": made.rows(), "notes": list(made.notes)}
        files.write_text(folder / f"{name}.toml", made.path.read_text(encoding="utf-8"))
    # Last: whoever sees it knows that nothing more will come.
    files.write_json(folder / "calibration.json", found)


def run_one(settings: Settings, out: Path, row: str, seed: int) -> None:
    folder = out / "runs" / f"{row}-{seed}"
    config = run_config(settings, out, rows(settings)[row], seed)
    train(config, folder, resume=(folder / "config.json").is_file(), on_progress=say)
    if not settings.keep_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("job", choices=["calibrate", "run"])
    parser.add_argument("row", nargs="?")
    parser.add_argument("seed", nargs="?", type=int)
    args = parser.parse_args()
    settings = Settings.from_table(json.loads((args.out / "settings.json").read_text()))
    register()
    quiet_transformers()
    try:
        if args.job == "calibrate":
            run_calibration(settings, args.out)
        else:
            run_one(settings, args.out, args.row, args.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
