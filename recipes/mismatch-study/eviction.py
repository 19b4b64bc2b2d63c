"""How much can eviction drop on the study's task? Share of problems solved, by policy and budget; trains nothing.

python recipes/mismatch-study/eviction.py --model runs/study-model/folder --out runs/study-model/eviction.json

The prompt's tokens count towards the budget, as they do in the rows of the study. About half an hour on two CPU cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from study_rows import Settings  # noqa: E402
from table_sums import NAME, register  # noqa: E402

from sparroll import records, tasks  # noqa: E402
from sparroll.compression import make_compression  # noqa: E402
from sparroll.engines.hf.engine import HFEngine  # noqa: E402
from sparroll.engines.prompt_encoder import PromptEncoder  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import Progress, quiet_transformers  # noqa: E402

SEED = 20_000
"""Stream of problems that no run trains on or is evaluated on."""


def arguments() -> argparse.Namespace:
    study = Settings("")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that study_folder.py writes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--level", type=int, default=study.level)
    parser.add_argument("--temperature", type=float, default=study.temperature)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", default=["snap_kv", "r_kv"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 3072, 3584])
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        measure(args)
    except UserError as error:
        sys.exit(f"error: {error}")


def measure(args: argparse.Namespace) -> None:
    began = time.time()
    register()
    quiet_transformers()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    engine = HFEngine(args.model, device=args.device, dtype=dtype, max_batch=args.problems)
    task = tasks.get(NAME)
    prompts = task.prompts("train", args.level, SEED, args.problems)
    ids = PromptEncoder(engine.tokenizer).ids(prompts)
    most = Settings(args.model, level=args.level).max_new_tokens
    policies = [make_compression(kind, budget_tokens=budget) for kind in args.kinds for budget in args.budgets]
    rows = []
    with Progress() as bars:
        on_progress = bars.bar("policies")
        for policy in [None, *policies]:
            engine.set_compression(policy)
            engine.reset_report()
            rollouts = engine.generate(ids, max_new_tokens=most, temperature=args.temperature)
            texts = [engine.tokenizer.decode(rollout.response_ids) for rollout in rollouts]
            right = sum(task.reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
            report = engine.report()
            rows.append(
                {
                    "policy": policy.table() if policy else None,
                    "problems": args.problems,
                    "solved_share": right / args.problems,
                    "kv_read_share": report.kv_read_share,
                    "kv_saved_share": report.kv_saved_share,
                    "response_tokens_mean": sum(len(each.response_ids) for each in rollouts) / len(rollouts),
                }
            )
            on_progress(len(rows), 1 + len(policies))
    config = {name: value for name, value in vars(args).items() if name not in ("out", "model")}
    path = records.write(
        args.out, "study-eviction", {"runs": rows}, config=config, seed=SEED, wall_seconds=time.time() - began
    )
    for row in rows:
        policy = row["policy"]
        name = f"{policy['kind']} {policy['budget_tokens']}" if policy else "dense"
        print(f"{name:14}  solved {row['solved_share']:.2f}, memory saved {row['kv_saved_share']:.0%}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
