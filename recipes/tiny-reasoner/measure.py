"""Measure a checkpoint: accuracy per kind and level, sampled and greedy, and the tail under block-sparse attention.

python recipes/tiny-reasoner/measure.py --weights runs/tiny-reasoner/model.safetensors --out runs/measure.json

Levels are independent: several processes, each with its own --levels, share one GPU well.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from folder import load_weights, new_config, new_model  # noqa: E402
from sampling import accuracy_table  # noqa: E402
from tail_probe import Setting, acceptance_by_bin  # noqa: E402

from sparroll.tasks.synthetic.kinds import KINDS  # noqa: E402
from sparroll.tasks.synthetic.task import LEVELS  # noqa: E402

BUDGETS = (64, 96, 128, 160, 192, 256, 320, 384, 512, 768)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS))
    parser.add_argument("--greedy-up-to-level", type=int, default=3)
    parser.add_argument("--problems", type=int, default=256, help="per kind and level")
    parser.add_argument("--tail-rollouts", type=int, default=12, help="per kind and level; 0 measures no tail")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--bin-tokens", type=int, default=250)
    parser.add_argument("--minutes", type=float, default=math.inf, help="measure nothing new after this long")
    args = parser.parse_args()
    least = Setting.first + Setting.recent
    if min(args.budgets) < least:
        parser.error(f"a budget of {min(args.budgets)} tokens is below the {least} that are always read")
    return args


def main() -> None:
    args = arguments()
    began, found = time.time(), {}
    deadline = began + 60 * args.minutes
    model = load_weights(new_model(new_config(), 0), load_file(args.weights)).to(args.device)
    kept = args.tail_rollouts
    found["accuracy"], samples = accuracy_table(model, args.levels, args.problems, args.kinds, deadline, keep=kept)
    settings = [(budget, page) for page in args.pages for budget in args.budgets]
    found["tail"] = []
    for (kind, level), pairs in samples.items():
        if pairs and time.time() < deadline:
            rows = acceptance_by_bin(model, pairs, settings, args.bin_tokens, 8, deadline)
            found["tail"] += [{"kind": kind, "level": level, **row} for row in rows]
    easy = [level for level in args.levels if level <= args.greedy_up_to_level]
    found["accuracy_greedy"], _ = accuracy_table(model, easy, args.problems, args.kinds, deadline, greedy=True)
    found["measure_seconds"] = round(time.time() - began, 1)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
