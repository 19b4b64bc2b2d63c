"""Measure how far sparse attention is from dense on sequences that the model knows, by selector and budget.

    python recipes/code-lm/measure_cells.py --model runs/code-lm/seed-0 --out runs/code-lm/seed-0/cells
    python recipes/code-lm/measure_cells.py --model study --out runs/code-lm/study
    python recipes/code-lm/measure_cells.py --model tiny-reasoner --out runs/code-lm/tiny
    python recipes/code-lm/measure_cells.py --model runs/dry --out runs/dry/cells --dry

Every position attends sparsely, with K and V of the sparse stream, as in a rollout, and both whole distributions are
compared. Each cell is a file in --out/cells. After --minutes no new cell is begun; called again, the command goes on
with those that are missing. It ends with the record (--out/cells.json) of all cells that have a file, which also holds
the ratios of budgets.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402
import hashlib  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from budget_ratio import STATISTICS, Ratio, in_words, ratios, smallest  # noqa: E402
from cell_files import LEAST_SEQUENCES, NATS, REPLICATES, Measured, count  # noqa: E402
from cells import BUDGETS, FEW_BUDGETS, PUBLISHED, Cell, Rule, grid, summed  # noqa: E402
from code_model import LONGEST_TOKENS  # noqa: E402
from texts import Text, open_text  # noqa: E402

from sparroll import records, resume  # noqa: E402
from sparroll.attention.masked.api import implementation  # noqa: E402
from sparroll.engines.hf.attention import ReplayStep  # noqa: E402
from sparroll.engines.scoring import last_hidden  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.mismatch import acceptance  # noqa: E402
from sparroll.progress import OnProgress, Progress  # noqa: E402
from sparroll.schedule import Schedule  # noqa: E402
from sparroll.types import Rollout, TokenBatch  # noqa: E402

KIND = "code_lm_cells"
LOGITS_AT_ONCE = 1 << 26
EVERYTHING = 1 << 24
"""A budget above all contexts."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="--out of train_code.py, or study, or tiny-reasoner")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="folder of the corpus; default: corpus/ beside --model")
    parser.add_argument("--record", type=Path, help="also write the record here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--sequences", type=int, default=8, help=f"with fewer than {LEAST_SEQUENCES} there are no intervals"
    )
    parser.add_argument("--tokens", type=int, default=LONGEST_TOKENS, help="of a held-out sequence")
    parser.add_argument("--minutes", type=float, default=8.0, help="from the start; then no new cell is begun")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="measure only the cells that have one of these names, or go on with a dash after one: quest-16 also means "
        "quest-16-64. The record has every cell that was ever measured",
    )
    parser.add_argument("--dry", action="store_true", help="short sequences and few cells, on the CPU")
    args = parser.parse_args(argv)
    if args.dry:
        args.device, args.sequences, args.tokens = "cpu", 3, 256
        args.only = args.only or [
            "page_mean-16-64",
            "page_mean-16-128",
            "quantized_mean-4x4-64",
            "quantized_mean-4x4-128",
        ]
    # A script's time counts from before its slow imports.
    args.began = BEGAN if argv is None else time.time()
    return args


class Comparison:
    """One model and one text: the dense hidden states are computed once, those of each cell anew."""

    def __init__(self, model: PreTrainedModel, text: Text, device: str) -> None:
        self.model, self.text, self.device = model.to(device).eval(), text, device
        self.layers = int(model.config.num_hidden_layers)
        # Through the same code as the cells, so that a budget above all contexts gives exactly these states.
        everything = Schedule.fixed(EVERYTHING, dense_layers=())
        self._dense = [self._hidden(rollout, everything) for rollout in text.sequences]

    def measure(self, schedule: Schedule) -> Measured:
        began = time.time()
        schedule.check_layers(self.layers)
        counts, sums = [], []
        for rollout, dense_TE in zip(self.text.sequences, self._dense, strict=True):
            values = differences(self.model, dense_TE, self._hidden(rollout, schedule))
            counts_BC, sums_BK = count(values, rollout.context_tokens, self.text.bins)
            counts.append(counts_BC)
            sums.append(sums_BK)
        return Measured(torch.stack(counts), torch.stack(sums), round(time.time() - began, 3))

    @torch.inference_mode()
    def _hidden(self, rollout: Rollout, schedule: Schedule) -> Tensor:
        """[T, E] final states at the positions that response tokens are drawn from."""
        batch = TokenBatch.from_rollouts([rollout], 0, self.device)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            hidden_SE = last_hidden(self.model, batch, schedule)[0]
        return hidden_SE[len(rollout.prompt_ids) - 1 : -1].float()


@torch.inference_mode()
def differences(model: PreTrainedModel, dense_TE: Tensor, sparse_TE: Tensor) -> dict[str, Tensor]:
    """[T] each of cell_files.SUMS but the tokens, from whole distributions in fp32."""
    head = model.get_output_embeddings().weight.float()
    rows = max(1, LOGITS_AT_ONCE // len(head))
    parts: list[dict[str, Tensor]] = []
    for dense, sparse in zip(dense_TE.split(rows), sparse_TE.split(rows), strict=True):
        logits = dense @ head.T, sparse @ head.T
        part = {"acceptance": acceptance(*logits)}
        dense_TV, sparse_TV = (each.log_softmax(-1) for each in logits)
        more_TV, drawn_TV = sparse_TV - dense_TV, sparse_TV.exp()
        part["kl_sparse_to_dense"] = (drawn_TV * more_TV).sum(-1).clamp_min(0)
        part["kl_dense_to_sparse"] = (dense_TV.exp() * -more_TV).sum(-1).clamp_min(0)
        for nats in NATS:
            part[f"over_{nats}_nats"] = (drawn_TV * (more_TV > nats)).sum(-1)
        parts.append({name: value.cpu() for name, value in part.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def measure_all(comparison: Comparison, cells: list[Cell], folder: Path, until: float, on_progress: OnProgress) -> None:
    """Write the files of those cells that have none yet, as many as can be begun until this time.time()."""
    for done, cell in enumerate(cells):
        path = file_of(folder, cell)
        if path.exists():
            on_progress(done + 1, len(cells), f"{cell.name}, measured before")
        elif time.time() < until:
            on_progress(done, len(cells), cell.name)
            measured = comparison.measure(cell.rule.schedule(cell.budget, comparison.layers))
            measured.save(path)
            on_progress(done + 1, len(cells), f"{cell.name}, {measured.seconds:.1f} s")


def file_of(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.safetensors"


def is_named(cell: Cell, names: list[str]) -> bool:
    """Whether a cell has one of these names, or one of them and then a dash.

    >>> is_named(Cell(Rule("quest", 16), 512), ["quest-16"]), is_named(Cell(Rule("quest", 16), 512), ["quest-1"])
    (True, False)
    """
    return any(f"{cell.name}-".startswith(f"{name}-") for name in names)


def refusal(rule: Rule, device: str) -> str | None:
    """Why the teacher-forced pass cannot run this rule here, as it says itself; None where it can."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sparse_layer, tokens = max(rule.dense_layers, default=-1) + 1, 192
    query, keys, values = (torch.ones(1, heads, tokens, 64, device=device, dtype=dtype) for heads in (4, 2, 2))
    try:
        schedule = rule.schedule(128, sparse_layer + 1)
        step = ReplayStep(schedule, torch.ones(1, dtype=torch.int64, device=device), implementation("auto", device))
        step.attend(sparse_layer, query, keys, values, 0.125)
    except UserError as error:
        return error.message
    return None


def results(
    text: Text, found: dict[Cell, Measured], rows: list[Ratio], in_grid: int, left_out: dict[str, str]
) -> dict[str, Any]:
    rules = dict.fromkeys(row.rule for row in rows)
    return {
        "text": text.about | {"name": text.name},
        "bins": text.bins,
        "cells_in_grid": in_grid,
        "left_out": left_out,
        "cells": [
            {**_described(cell), "seconds": measured.seconds, "bins": measured.rows(text.bins)}
            for cell, measured in found.items()
        ],
        "ratios": rows,
        "smallest": {rule: smallest(rows, rule) for rule in rules},
        "replicates": REPLICATES,
    }


def _described(cell: Cell) -> dict[str, Any]:
    rule = cell.rule
    return {
        "name": cell.name,
        "rule": rule.name,
        "budget": cell.budget,
        "selector": rule.selector().table(),
        "dense_layers": rule.dense_layers,
        "layer_budgets": rule.shape,
    }


def table(found: dict[Cell, Measured], rows: list[Ratio], text: Text) -> str:
    """Compact text: statistics of the longest bin against budget, then the smallest ratios over all bins."""
    place, every, lines = len(text.bins) - 2, torch.ones(1, len(text.sequences)), []
    budgets, rules = sorted({cell.budget for cell in found}), dict.fromkeys(cell.rule for cell in found)
    width = 2 + max(len(rule.name) for rule in rules)
    for statistic, digits in (("q05", ".3f"), ("kl_sparse_to_dense", ".4f"), ("over_10_nats", ".1e")):
        lines.append(f"{statistic} at contexts of {text.bins[-2]:,} and more")
        lines.append(f"{'rule':<{width}}" + "".join(f"{budget:>9,}" for budget in budgets))
        for rule in rules:
            row = [found.get(Cell(rule, budget)) for budget in budgets]
            told = [each and f"{each.statistic(statistic, every, place).item():{digits}}" for each in row]
            lines.append(f"{rule.name:<{width}}" + "".join(f"{each or '-':>9}" for each in told))
    lines.append("smallest ratio of budgets to page means, over lengths and budgets; -: none that is more than a bound")
    for rule in rules:
        if rule != PUBLISHED:
            told = [
                _told(statistic, smallest([row for row in rows if row.statistic == statistic], rule.name))
                for statistic in STATISTICS
            ]
            lines.append(f"{rule.name:<{width}}" + "   ".join(told))
    return "\n".join(lines)


def _told(statistic: str, least: Ratio | None) -> str:
    if least is None:
        return f"{statistic} -"
    return f"{statistic} {in_words(least)} at {least.published_budget:,} of {least.from_context_tokens:,}"


def run(args: argparse.Namespace, progress: Progress) -> tuple[Path, str]:
    model, text = open_text(args.model, args.sequences, args.tokens, args.corpus)
    refused = refusal(summed(Rule("quantized_mean", 4, 4)), args.device)
    left_out = {} if refused is None else {"remainder": refused}
    every = grid(max(text.bins), remainder=refused is None)
    cells = [cell for cell in every if not args.only or is_named(cell, args.only)]
    if not cells:
        raise UserError(
            f"no cell has the name {', '.join(args.only or [])}",
            f"a name, or the part of it before a dash, is meant: {every[0].name} to {every[-1].name}",
        )
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    asked = {"weights": digest.hexdigest(), "text": text.about, "device": args.device.partition(":")[0]}
    resume.begin_or_resume(args.out / "asked.json", asked, begun=(args.out / "cells").exists())
    comparison = Comparison(model, text, args.device)
    folder = args.out / "cells"
    measure_all(comparison, cells, folder, args.began + 60 * args.minutes, progress.bar("cells"))
    # The record is of the folder, whatever was measured now.
    found = {cell: Measured.load(path) for cell in every if (path := file_of(folder, cell)).exists()}
    config = asked | {"budgets": BUDGETS, "few_budgets": FEW_BUDGETS, "model": Path(args.model).name, "dry": args.dry}
    seconds = sum(each.seconds for each in found.values())
    if not found:
        raise UserError(f"no cell was begun in {args.minutes:g} minutes", "give more --minutes")
    rows = ratios(found, text.bins)
    summed_up = results(text, found, rows, len(every), left_out)
    for path in filter(None, (args.record, args.out / "cells.json")):
        records.write(path, KIND, summed_up, config=config, seed=0, wall_seconds=seconds)
    told = f"the record has {len(found)} of the grid's {len(every)} cells"
    left = sum(cell not in found for cell in cells)
    if left:
        told += f"; {left} of {len(cells)} that were asked for are left: call again"
    for what, why in left_out.items():
        told += f"; no cell has a {what}: {why}"
    return args.out / "cells.json", f"{table(found, rows, text)}\n{told}"


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    try:
        with Progress() as progress:
            path, told = run(args, progress)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{told}\nwrote {path}")


if __name__ == "__main__":
    main()
