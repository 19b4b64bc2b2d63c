"""What do dense checks of sparse drafts do to the study's task? Samples held-out problems with each sampler; trains nothing.

python recipes/mismatch-study/study_checks.py --model runs/study-model/folder --out runs/study-checks
python recipes/mismatch-study/study_checks.py --quick --out runs/dry-checks        # a CPU, a minute, random weights
python recipes/mismatch-study/study_checks.py --model tiny-reasoner --task synthetic_add --level 3 --max-new-tokens 480 \
    --temperature 1.2 --page-tokens 4 --budgets 96 160 64 --device cpu --problems 96 --minutes 60 --out runs/tiny-checks

Dense, sparse under a budget everywhere, and the same with checks: all windows and floors at the first budget, and the
first floor with the middle window at the others. With --units, also small units of a few bits at the first budget, alone
and with that check: no layer is dense, and layers 0 and 1 read --wide-times as much. Every finished sampler is a file in
OUT/rows; a second call samples only what is missing, and after --minutes nothing new is begun. OUT/checks.json is the
record of all that is finished.

Nats off are log q~ - log p of the tokens as finally sampled, so their mean is an estimate of the KL to the dense policy.
"""

# B rollouts, T tokens of one of them, N tokens of all

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from study import write_dry_model  # noqa: E402
from study_rows import Settings, model_sha256  # noqa: E402
from table_sums import NAME, register  # noqa: E402
from torch import Tensor  # noqa: E402

from sparroll import files, records, tasks  # noqa: E402
from sparroll.attention.selectors import PageMean  # noqa: E402
from sparroll.draft_check import DraftCheck  # noqa: E402
from sparroll.engines.hf.engine import HFEngine  # noqa: E402
from sparroll.engines.prompt_encoder import PromptEncoder  # noqa: E402
from sparroll.engines.scoring import Scorer  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import quiet_transformers  # noqa: E402
from sparroll.resume import begin_or_resume  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402
from sparroll.types import Checks, Rollout, TopK  # noqa: E402

KIND = "study-checks"
SEED = 40_000
"""Stream of problems that no run trains on or is evaluated on, and seed of the rollouts."""
QUICK = {
    "device": "cpu", "task": NAME, "level": 0, "max_new_tokens": None, "problems": 4, "budgets": [24, 48],
    "units": ["4x4"], "windows": [4, 8], "floors": [0.01, 1.0], "page_tokens": 4, "first_tokens": 4, "recent_tokens": 8,
    "max_batch": 4,
}  # fmt: skip
SETTINGS = (
    "task", "level", "max_new_tokens", "temperature", "problems", "budgets", "units", "wide_times", "windows",
    "floors", "page_tokens", "first_tokens", "recent_tokens", "max_batch", "device", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Sampler:
    """One row: dense without a budget, sparse without a check."""

    kv_budget_tokens: int | None = None
    check: DraftCheck | None = None
    units: str = ""
    """Tokens x bits of small units, with more budget in layers 0 and 1; without them, pages and dense layers."""

    @property
    def name(self) -> str:
        if self.kv_budget_tokens is None:
            return "dense"
        read = f"{self.kv_budget_tokens}{self.units and f'-in-{self.units}'}"
        if self.check is None:
            return f"sparse-{read}"
        return f"verified-{read}-{self.check.window_tokens}-{self.check.floor:g}"

    def schedule(self, pages: PageMean, layers: int, wide_times: int) -> Schedule | None:
        """For a model of so many layers. pages: what is read without units; wide_times: see Settings, with units."""
        if self.kv_budget_tokens is None:
            return None
        first, recent = pages.first_tokens, pages.recent_tokens
        study = Settings("", layers=layers, first_tokens=first, recent_tokens=recent, wide_times=wide_times)
        if self.units:
            fixed = study.wide_schedule(self.kv_budget_tokens, study.small_units(self.units), self.units)
        else:
            fixed = Schedule.fixed(self.kv_budget_tokens, pages, study.dense_layers)
        return fixed if self.check is None else fixed.checked(self.check.window_tokens, self.check.floor)


def arguments() -> argparse.Namespace:
    study = Settings("")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder that study_folder.py writes; --quick makes one of random weights")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--task", default=NAME, help="of any model; the default is the study's")
    parser.add_argument("--max-new-tokens", type=int, help="default: what the study's task needs at this level")
    parser.add_argument("--level", type=int, default=study.level)
    parser.add_argument("--temperature", type=float, default=study.temperature)
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512, 64], help="the first with every check")
    parser.add_argument("--units", nargs="*", default=[], help="also small units at the first budget: 4x4 8x4 ...")
    parser.add_argument(
        "--wide-times", type=int, default=study.wide_times, help="as much in layers 0 and 1, of --units"
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--floors", type=float, nargs="+", default=[0.01, 0.001, 0.1, 1.0])
    parser.add_argument("--page-tokens", type=int, default=study.page_tokens)
    parser.add_argument("--first-tokens", type=int, default=study.first_tokens)
    parser.add_argument("--recent-tokens", type=int, default=study.recent_tokens)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=7.5, help="nothing new is begun after this time")
    parser.add_argument("--quick", action="store_true", help="few short problems and samplers, on a CPU")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    return args


def samplers(budgets: list[int], units: list[str], windows: list[int], floors: list[float]) -> list[Sampler]:
    """All rows; the most telling ones first, for a run that is cut."""
    first, *others = budgets
    middle = DraftCheck(sorted(windows)[len(windows) // 2], floors[0])
    grid = [Sampler(first, DraftCheck(window, floor)) for floor in floors for window in windows]
    plain = [Sampler(), *(Sampler(budget) for budget in budgets)]
    small = [Sampler(first, check, each) for each in units for check in (None, middle)]
    return [*plain, *(Sampler(budget, middle) for budget in others), *small, *grid]


def measured(engine: HFEngine, scorer: Scorer, args: argparse.Namespace, sampler: Sampler) -> dict[str, Any]:
    """The row of one sampler."""
    task, began = tasks.get(args.task), time.time()
    prompts = task.prompts("eval", args.level, SEED, args.problems)
    selector = PageMean(args.page_tokens, args.first_tokens, args.recent_tokens)
    engine.set_schedule(sampler.schedule(selector, engine.layers, args.wide_times))
    engine.reset_report()
    # Sparse drafts are compared with the dense policy over the whole vocabulary; checks do so themselves.
    lists = engine.vocabulary if sampler.kv_budget_tokens is not None and sampler.check is None else 0
    rollouts = engine.generate(
        PromptEncoder(engine.tokenizer).ids(prompts),
        max_new_tokens=args.max_new_tokens or Settings("", level=args.level).max_new_tokens,
        temperature=args.temperature,
        seed=SEED,
        top_k=lists,
    )
    sampling_seconds = time.time() - began
    rewards = torch.tensor([task.reward(p, r.text) for p, r in zip(prompts, rollouts, strict=True)])
    drafts_N, off = compared(scorer, rollouts, args.temperature)
    report = engine.report()
    return {
        "sampler": sampler.name,
        "kv_budget_tokens": sampler.kv_budget_tokens,
        "units": sampler.units or None,
        "window_tokens": sampler.check.window_tokens if sampler.check else None,
        "floor": sampler.check.floor if sampler.check else None,
        "problems": len(rollouts),
        "response_tokens": sum(len(each.response_ids) for each in rollouts),
        "reward": float(rewards.mean()),
        "reward_standard_error": float(rewards.std() / math.sqrt(len(rewards))),
        **far(off),
        "draft_acceptance_q05": None if drafts_N is None else float(drafts_N.quantile(0.05)),
        "draft_acceptance_mean": None if drafts_N is None else float(drafts_N.mean()),
        **(checked(report.checks) if sampler.check else {}),
        "kv_read_share": report.kv_read_share,
        "sampling_seconds": round(sampling_seconds, 2),
        "check_seconds": round(report.check_seconds, 2),
        "seconds": round(time.time() - began, 2),
    }


def compared(scorer: Scorer, rollouts: list[Rollout], temperature: float) -> tuple[Tensor | None, list[Tensor]]:
    """Acceptance of the drafts [N], None where nothing is drafted, and nats off of each rollout's tokens [T]."""
    if rollouts[0].checks is not None:
        drafts_N = torch.cat([each.draft_acceptance for each in rollouts])
        return drafts_N, [each.sparse_logp - each.dense_logp for each in rollouts]
    dense = scorer.dense(rollouts, temperature=temperature)
    off = [each.sparse_logp - scores.logp for each, scores in zip(rollouts, dense, strict=True)]
    if not isinstance(rollouts[0].top_k, TopK):
        return None, off
    return torch.cat(scorer.exact_acceptance(rollouts, temperature=temperature)), off


def far(off: list[Tensor]) -> dict[str, float]:
    """How far the sampled tokens are from the dense policy. The standard error of the KL is over rollouts."""
    off_N = torch.cat(off).double()
    tokens_B = torch.tensor([len(each) for each in off]).double()
    sums_B = torch.stack([each.double().sum() for each in off])
    kl = sums_B.sum() / tokens_B.sum()
    spread_B = (sums_B - kl * tokens_B) / tokens_B.mean()
    return {
        "kl": float(kl),
        "kl_standard_error": float(spread_B.std() / math.sqrt(len(off))),
        **{f"over_{nats}_nats_share": float((off_N > nats).double().mean()) for nats in (2, 10, 20)},
        "largest_nats": float(off_N.max()),
    }


def checked(checks: Checks) -> dict[str, float]:
    """What the checks took back. A draft is looked at unless one before it in its window was rejected."""
    looked_at = checks.drafted_tokens - checks.taken_back_tokens + checks.cut_windows
    return {
        "windows": checks.windows,
        "cut_share": checks.cut_share,
        "drafted_per_kept": checks.drafted_per_kept,
        "rejected_share": checks.cut_windows / looked_at,
    }


def sample_all(args: argparse.Namespace) -> Path:
    """Sample every row that is missing, and write the record after each."""
    config = {name: getattr(args, name) for name in SETTINGS}
    asked = samplers(args.budgets, args.units, args.windows, args.floors)
    folder = files.output_folder(args.out / "rows")
    begin_or_resume(
        args.out / "settings.json",
        config | {"model_sha256": model_sha256(args.model)},
        begun=any(folder.glob("*.json")),
    )
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    engine = HFEngine(args.model, device=args.device, dtype=dtype, max_batch=args.max_batch)
    scorer, began, record = Scorer(engine.model), time.time(), args.out / "checks.json"
    for sampler in asked:
        path = folder / f"{sampler.name}.json"
        if not path.exists():
            if time.time() - began > 60 * args.minutes:
                print(f"{sampler.name} and what follows waits for another call", flush=True)
                break
            files.write_json(path, measured(engine, scorer, args, sampler))
        row = files.read_table(path, f"delete {path} to sample it again")
        print(
            f"{row['sampler']:24} reward {row['reward']:.3f}, KL {row['kl']:.4f}, at most {row['largest_nats']:.1f} nats, "
            f"{row.get('drafted_per_kept', 1):.3f} drafted per kept, {row['seconds']} s",
            flush=True,
        )
        write_record(record, folder, asked, config | {"model_sha256": model_sha256(args.model)})
    return record


def write_record(path: Path, folder: Path, asked: list[Sampler], config: dict[str, Any]) -> None:
    found = [files.read_table(at, "") for each in asked if (at := folder / f"{each.name}.json").exists()]
    seconds = sum(row["seconds"] for row in found)
    missing = [each.name for each in asked if not (folder / f"{each.name}.json").exists()]
    records.write(path, KIND, {"rows": found, "missing": missing}, config=config, seed=SEED, wall_seconds=seconds)


def main() -> None:
    args = arguments()
    register()
    quiet_transformers()
    try:
        if args.model is None:
            if not args.quick:
                raise UserError("--model is missing", "study_folder.py writes the study's model, or try --quick")
            args.model = str(args.out / "model")
            if not Path(args.model).exists():
                write_dry_model(Path(args.model))
        print(f"wrote {sample_all(args)}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
