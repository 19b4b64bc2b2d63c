"""Measure the pretrained model: accuracy by level and temperature, and the tail of sparse attention by budget and page.

python recipes/mismatch-study/measure.py --packed runs/study-model --out runs/study-model/measure.json

Everything on one GPU in about a minute; after --minutes nothing new is begun. The tail is teacher-forced on the model's
own samples at --tail-level and the first of --temperatures, those of the expected length. `harm` is what the two policies
do not share on tokens that an answer depends on, summed over a response: about the number of such tokens that go another
way.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from lean_qwen3 import sample  # noqa: E402
from study_folder import load_packed, new_config, small_config  # noqa: E402
from table_sums import EOS, LEVELS, WORD_ID, Role, TableSums, problem, words  # noqa: E402

from sparroll import files, records  # noqa: E402
from sparroll.attention.selectors import PageMean  # noqa: E402
from sparroll.engines.scoring import Scorer  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402
from sparroll.types import Rollout  # noqa: E402

SETTINGS = [(16, budget) for budget in (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072)]
SETTINGS += [(8, budget) for budget in (256, 512, 1024, 2048)] + [(4, budget) for budget in (256, 512, 1024, 2048)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packed", type=Path, required=True, help="folder with weights-N.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--levels", type=int, nargs="+", default=[6, 4, 8, 136])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.2, 1.1, 0.0])
    parser.add_argument("--problems", type=int, default=96, help="per level and temperature")
    parser.add_argument("--tail-level", type=int, default=6)
    parser.add_argument("--tail-rollouts", type=int, default=12)
    parser.add_argument("--bin-tokens", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=1.3)
    parser.add_argument("--small", action="store_true", help="weights of a dry run")
    parser.add_argument("--dry", action="store_true", help="short tables, few of everything, on a CPU")
    args = parser.parse_args()
    if args.dry:
        args.small, args.device, args.levels, args.temperatures, args.problems = True, "cpu", [0], [1.0, 0.0], 4
        args.tail_level, args.tail_rollouts, args.bin_tokens, args.minutes = 0, 4, 32, math.inf
    return args


def accuracy(model, level: int, temperatures: list[float], count: int) -> tuple[list[dict], list[tuple[list, list]]]:
    """A row per temperature, and (prompt ids, response ids) of the first temperature's samples."""
    shape, task, device, began = LEVELS[level], TableSums(), model.device, time.time()
    prompts = task.prompts("eval", level, 0, count)
    ids = torch.tensor(
        [problem("eval", level, 0, i)[: shape.prompt_tokens].tolist() for i in range(count)], device=device
    )
    each = torch.tensor(temperatures, device=device).repeat_interleave(count)
    most = round(shape.response_tokens * 1.1)
    out = sample(model, ids.repeat(len(temperatures), 1), each, most, WORD_ID[EOS]).cpu()
    rows, pairs = [], []
    for place, temperature in enumerate(temperatures):
        responses = [_cut(row) for row in out[place * count : (place + 1) * count].tolist()]
        right = sum(task.reward(prompt, words(row)) for prompt, row in zip(prompts, responses, strict=True))
        same = sum(len(row) == shape.response_tokens for row in responses)
        rows.append(
            {
                "level": level,
                "temperature": temperature,
                "problems": count,
                "accuracy": right / count,
                "prompt_tokens": shape.prompt_tokens,
                "response_tokens_mean": round(sum(map(len, responses)) / count, 1),
                "expected_length_share": same / count,
            }
        )
        if not place:
            pairs = list(zip(ids.tolist(), responses, strict=False))
    scores = "  ".join(f"T {row['temperature']}: {row['accuracy']:.3f}" for row in rows)
    print(f"level {level} ({time.time() - began:.1f} s): {scores}", flush=True)
    return rows, pairs


def _cut(row: list[int]) -> list[int]:
    end = WORD_ID[EOS]
    return row[: row.index(end) + 1] if end in row else row


def references(level: int, count: int) -> list[tuple[list, list]]:
    prompt_tokens = LEVELS[level].prompt_tokens
    whole = [problem("eval", level, 0, index).tolist() for index in range(count)]
    return [(ids[:prompt_tokens], ids[prompt_tokens:]) for ids in whole]


def tails(
    model, level: int, pairs: list, settings: list, bin_tokens: int, deadline: float, temperature: float
) -> list[dict]:
    """A row per (page, budget, context bin), and one over all bins with `from_context` None. Only responses of exactly the
    expected length count: in those each token has its role. temperature: that of the samples, for both policies."""
    shape = LEVELS[level]
    whole = [pair for pair in pairs if len(pair[1]) == shape.response_tokens]
    rollouts = [Rollout(prompt, response, torch.zeros(len(response)), "stop") for prompt, response in whole]
    if not rollouts:
        print("no response of the expected form: no tails", flush=True)
        return []
    scorer, rows = Scorer(model), []
    role_T = torch.from_numpy(shape.roles)
    context_T = shape.prompt_tokens + torch.arange(shape.response_tokens)
    for page, budget in settings:
        if time.time() > deadline:
            break
        selector = PageMean(page_tokens=page, first_tokens=16, recent_tokens=32)
        schedule = Schedule.fixed(budget, selector)
        found = torch.stack(scorer.exact_replay(rollouts, schedule, temperature=temperature))
        for start in [None, *(context_T // bin_tokens).unique().tolist()]:
            inside_T = (
                torch.ones_like(context_T, dtype=torch.bool) if start is None else context_T // bin_tokens == start
            )
            about = {"page": page, "budget": budget, "from_context": None if start is None else start * bin_tokens}
            about |= {"temperature": temperature}
            rows.append(about | _tail(found[:, inside_T], role_T[inside_T]))
        print(f"page {page} budget {budget}: {rows[-1 - len((context_T // bin_tokens).unique())]}", flush=True)
    return rows


def _tail(acceptance_BT: torch.Tensor, role_T: torch.Tensor) -> dict:
    values, free_T = acceptance_BT.flatten().sort().values, role_T == Role.REMARK
    q05 = values[int(0.05 * (len(values) - 1))].item()
    under_BT = acceptance_BT <= q05
    row = {"tokens": len(values), "q05": q05, "mean": values.mean().item()}
    row["remarks_under_q05"] = (under_BT[:, free_T].sum() / under_BT.sum()).item()
    row["harm"] = (1 - acceptance_BT[:, ~free_T]).sum(1).mean().item()
    roles = (Role.OPERAND, Role.DIGIT, Role.TOTAL, Role.REMARK)
    row |= {f"mean_{role.name.lower()}": acceptance_BT[:, role_T == role].mean().item() for role in roles}
    return {name: value if isinstance(value, int) else round(value, 4) for name, value in row.items()}


def main() -> None:
    args, began, found = arguments(), time.time(), {"accuracy": [], "tail": []}
    deadline = began + 60 * args.minutes
    torch.set_float32_matmul_precision("high")
    # Every level has a shape of its own, and cuDNN's attention plans anew for each.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = load_packed(args.packed, small_config() if args.small else new_config()).to(args.device)
    settings = [(4, 56), (4, 96)] if args.dry else SETTINGS
    levels = [args.tail_level, *(level for level in args.levels if level != args.tail_level)]
    with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
        for level in levels:
            if time.time() > deadline:
                break
            rows, pairs = accuracy(model, level, args.temperatures, args.problems)
            found["accuracy"] += rows
            if level == args.tail_level:
                # An untrained model writes nothing that could be measured.
                kept = references(level, args.tail_rollouts) if args.dry else pairs[: args.tail_rollouts]
                enough = began + 60 * args.minutes * 0.6
                found["tail"] = tails(model, level, kept, settings, args.bin_tokens, enough, args.temperatures[0])
            found["measure_seconds"] = round(time.time() - began, 1)
            # A bin may hold no token of a role; its mean is null.
            files.write_json(args.out, records.plain(found))
    print(f"wrote {args.out} after {found['measure_seconds']} s", flush=True)


if __name__ == "__main__":
    main()
