"""Measure whether budgets that differ by KV head lose less than the same reading shared otherwise.

    python recipes/code-lm/head_budgets.py --model tiny-reasoner --out runs/code-lm/tiny-heads
    python recipes/code-lm/head_budgets.py --model study --out runs/code-lm/study-heads
    python recipes/code-lm/head_budgets.py --model tiny-reasoner --out runs/dry/heads --dry

A schedule may give each layer a budget of its own, and no head. This says what heads would add. On one set of sequences
each head, and each layer, loses so much alone at shares of the even budget (SHARES). From that follow budgets by head
and by layer with the even one's reading (head_choice.py). Of these, of budgets half as far from the even one, and of the
even one itself, those that lose least on the same set are taken: once by KL, once by mean acceptance. They are compared
on other sequences, as measure_cells.py compares: whole distributions, K and V of the sparse stream. Intervals are of
resampled sequences, the same for all budgets (cell_files.interval). CPU only: some 20 minutes of one core for each of the
two models.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from budget_ratio import equal_budget, straight  # noqa: E402
from cell_files import Measured, count, interval, resamplings  # noqa: E402
from cells import PUBLISHED, PUBLISHED_DENSE, Rule  # noqa: E402
from head_choice import Curve, Places, filled, halfway  # noqa: E402
from head_replay import Budgets, Replays  # noqa: E402
from measure_cells import differences  # noqa: E402
from texts import open_text  # noqa: E402

from sparroll import records  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.progress import OnProgress, Progress  # noqa: E402
from sparroll.types import Rollout  # noqa: E402

KIND = "head_budgets"
FINE = Rule("quantized_mean", 4, 4)
SHARES = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Of the even budget: where each head and each layer is measured alone."""
EVEN_SHARES = (0.75, 1.0, 1.25, 1.5)
"""Even budgets that are measured on the other sequences, for the one that loses as little."""
OBJECTIVES = ("kl", "acceptance")
"""What a choice makes small: KL(sparse || dense), or 1 - the mean acceptance, which a few tokens cannot decide."""
STEP_TOKENS = 16
LEAST_TOKENS = 500
"""Sequences with fewer tokens in the longest bin are left out."""
TOLERANCE_TOKENS = 1e-6
DRY_TOKENS = 80
"""Tokens of the bin in a dry run."""
PAYS = 0.15
"""Budgets by head pay where their KL is so much lower than that of budgets by layer, surely lower at all. With too few
sequences for an interval nothing is sure, and nothing is said of it."""
SETTINGS = {
    "tiny-reasoner": ((FINE, 384), (FINE, 512), (PUBLISHED, 896)),
    "study": ((FINE, 192), (FINE, 384), (PUBLISHED, 768)),
}
"""Selectors and even budgets of each model, whose tail lies between .7 and .95 in the longest bin."""
SEQUENCES = {"tiny-reasoner": (12, 20), "study": (3, 8)}
"""For the choice, and for the comparison."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SEQUENCES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", type=Path, help="also write the record here")
    parser.add_argument("--dry", action="store_true", help="one setting and three short sequences")
    return parser.parse_args(argv)


class Sequences:
    """Some sequences of a model, and how far any budgets are from dense on them."""

    def __init__(self, model: PreTrainedModel, rollouts: list[Rollout], rule: Rule, bins: tuple[int, int]) -> None:
        self.model, self.rollouts, self.bins = model, rollouts, bins
        self.selector = rule.selector()
        self.replays = [Replays(model, rollout, self.selector) for rollout in rollouts]
        dense: Budgets = (None,) * int(model.config.num_hidden_layers)
        self._dense = [replay.hidden(dense) for replay in self.replays]
        context_T = torch.cat([rollout.context_tokens for rollout in rollouts])
        self._context_T = context_T[(context_T >= bins[0]) & (context_T < bins[1])]

    def measure(self, budgets: Budgets, keep: bool = False) -> Measured:
        counted = []
        for rollout, replay, dense_TE in zip(self.rollouts, self.replays, self._dense, strict=True):
            values = differences(self.model, dense_TE, replay.hidden(budgets, keep))
            counted.append(count(values, rollout.context_tokens, self.bins))
        counts, sums = zip(*counted, strict=True)
        return Measured(torch.stack(counts), torch.stack(sums), 0.0)

    def losses(self, budgets: Budgets, keep: bool = False) -> dict[str, float]:
        """Each of OBJECTIVES."""
        measured, once = self.measure(budgets, keep), torch.ones(1, len(self.rollouts))
        kl, kept = (measured.statistic(name, once, 0).item() for name in ("kl_sparse_to_dense", "acceptance"))
        return {"kl": kl, "acceptance": 1 - kept}

    def reading(self, budget: int) -> float:
        """Tokens that one head reads under this budget, mean over the steps in the bin."""
        return self.selector.read_tokens(self._context_T, torch.tensor(budget)).double().mean().item()

    def reading_of(self, budgets: Budgets) -> float:
        """Of a sparse layer's head, on average."""
        return float(np.mean([self.reading(budget) for layer in budgets if layer is not None for budget in layer]))


def curves(sequences: Sequences, places: Places, even: int, tick: Callable[[], None]) -> dict[str, list[Curve]]:
    """What each place loses alone at SHARES of the even budget, while the others keep it; by objective."""
    budgets = [rounded(share * even) for share in SHARES]
    same = [even] * len(places.groups)
    base = sequences.losses(places.budgets(same), keep=True)
    found: dict[str, list[Curve]] = {name: [] for name in OBJECTIVES}
    for place, group in enumerate(places.groups):
        losses = []
        for budget in budgets:
            changed = [*same[:place], budget, *same[place + 1 :]]
            losses.append(base if budget == even else sequences.losses(places.budgets(changed)))
            tick()
        reading = tuple(len(group) * sequences.reading(budget) for budget in budgets)
        for name, curve in found.items():
            curve.append(Curve(tuple(budgets), reading, tuple(loss[name] for loss in losses)))
    return found


def choose(
    sequences: Sequences, places: Places, even: int, found: list[Curve], objective: str
) -> tuple[Budgets, dict[str, float]]:
    """The budgets to compare, and the loss of each candidate on the sequences of the choice."""
    whole = sum(len(group) for group in places.groups) * sequences.reading(even)
    target = whole
    while True:
        best = filled(found, target, STEP_TOKENS)
        # Between two measured budgets a head reads more than on the line between them, where contexts are short.
        over = _reading(sequences, places, best) - whole
        if over <= TOLERANCE_TOKENS:
            break
        target -= over
    half = halfway(best, even, STEP_TOKENS)
    candidates = {"filled": best, "even": [even] * len(best)}
    if _reading(sequences, places, half) <= whole + TOLERANCE_TOKENS:
        candidates["halfway"] = half
    losses = {name: sequences.losses(places.budgets(budgets))[objective] for name, budgets in candidates.items()}
    return places.budgets(candidates[min(losses, key=losses.__getitem__)]), losses


def _reading(sequences: Sequences, places: Places, budgets: list[int]) -> float:
    return sum(len(group) * sequences.reading(each) for group, each in zip(places.groups, budgets, strict=True))


def rounded(budget: float) -> int:
    return round(budget / STEP_TOKENS) * STEP_TOKENS


def compare(sequences: Sequences, even: int, chosen: dict[str, Budgets], places: Places) -> dict[str, Any]:
    """Statistics of all budgets on sequences that took no part in the choice, and of pairs of them."""
    evens = [rounded(share * even) for share in EVEN_SHARES]
    budgets = {str(each): places.budgets([each]) for each in evens}
    names = {"even": str(even)} | {name: name for name in chosen}
    measured = {name: sequences.measure(each, keep=not place) for place, (name, each) in enumerate(budgets.items())}
    measured |= {name: sequences.measure(each) for name, each in chosen.items()}
    reading = {name: sequences.reading_of(each) for name, each in (budgets | chosen).items()}
    weights_WN = resamplings(len(sequences.rollouts))
    reached = min(each.reached(0) for each in measured.values())

    def values(name: str, statistic: str) -> np.ndarray:
        return measured[name].statistic(statistic, weights_WN, 0).numpy()

    rows = {}
    for name, key in (*names.items(), *((f"even at {each}", str(each)) for each in evens if each != even)):
        kl_W, q05_W = values(key, "kl_sparse_to_dense"), values(key, "q05")
        rows[name] = {
            "read_tokens": round(reading[key], 3),
            "kl_sparse_to_dense": round(float(kl_W[0]), 9),
            "kl_sparse_to_dense_interval": interval(kl_W, reached, least=0.0),
            "q05": round(float(q05_W[0]), 6),
            "q05_interval": interval(q05_W, reached, 0.0, 1.0),
            "acceptance": round(float(values(key, "acceptance")[0]), 9),
            "over_10_nats": round(float(values(key, "over_10_nats")[0]), 9),
        }
    curve_MW = straight("kl", np.array([values(str(each), "kl_sparse_to_dense") for each in evens]))
    read_M = np.array([reading[str(each)] for each in evens])
    pairs = {}
    against = [(name, "even") for name in chosen] + [(f"head-{each}", f"layer-{each}") for each in OBJECTIVES]
    for one, other in against:
        kl_W = values(names[one], "kl_sparse_to_dense") / values(names[other], "kl_sparse_to_dense") - 1
        q05_W = values(names[one], "q05") - values(names[other], "q05")
        pairs[f"{one} against {other}"] = {
            "kl_change": round(float(kl_W[0]), 6),
            "kl_change_interval": interval(kl_W, reached, least=-1.0),
            "q05_change": round(float(q05_W[0]), 6),
            "q05_change_interval": interval(q05_W, reached, -1.0, 1.0),
        }
    worth = {}
    for name in chosen:
        equal_W = equal_budget(straight("kl", values(name, "kl_sparse_to_dense")), read_M, curve_MW)
        share_W = reading[name] / equal_W
        worth[name] = {"read_share": round(float(share_W[0]), 4), "interval": interval(share_W, reached, least=0.0)}
    return {"budgets": rows, "pairs": pairs, "reading_of_the_even_budget_with_the_same_kl": worth}


def run_setting(
    model: PreTrainedModel, rule: Rule, even: int, bins: tuple[int, int], sets: list[list[Rollout]], bar: OnProgress
) -> dict[str, Any]:
    shape = int(model.config.num_hidden_layers), int(model.config.num_key_value_heads)
    places = {by: Places.of(*shape, PUBLISHED_DENSE, by) for by in ("layer", "head", "all")}
    total = len(SHARES) * sum(len(places[by].groups) for by in ("layer", "head"))
    ticks = itertools.count(1)

    def tick() -> None:
        bar(next(ticks), total, f"{rule.name}-{even}")

    began = time.time()
    first = Sequences(model, sets[0], rule, bins)
    chosen: dict[str, Budgets] = {}
    choice = {}
    for by in ("layer", "head"):
        found = curves(first, places[by], even, tick)
        for objective in OBJECTIVES:
            budgets, losses = choose(first, places[by], even, found[objective], objective)
            chosen[f"{by}-{objective}"] = budgets
            choice[f"{by}-{objective}"] = {
                "budgets": budgets,
                "read_tokens": round(first.reading_of(budgets), 3),
                "loss_of_candidates": {name: round(loss, 9) for name, loss in losses.items()},
                "alone": [
                    {"places": group, "budgets": each.budgets, "loss": [round(loss, 9) for loss in each.loss]}
                    for group, each in zip(places[by].groups, found[objective], strict=True)
                ],
            }
    del first
    second = Sequences(model, sets[1], rule, bins)
    result = compare(second, even, chosen, places["all"])
    return {
        "rule": rule.name,
        "budget": even,
        "contexts": bins,
        "choice": choice,
        **result,
        "pays": pays(**result["pairs"]["head-kl against layer-kl"]),
        "seconds": round(time.time() - began, 1),
    }


def pays(kl_change: float, kl_change_interval: list[float | None], **_: object) -> bool | None:
    """Whether budgets by head pay, from how they change the KL of budgets by layer. None where there is no interval."""
    high = kl_change_interval[1]
    return None if high is None else kl_change <= -PAYS and high < 0


def shortened(rollout: Rollout, tokens: int) -> Rollout:
    """The first tokens of prompt and response."""
    response = rollout.response_ids[: tokens - len(rollout.prompt_ids)]
    return Rollout(rollout.prompt_ids, response, torch.zeros(len(response)), "length")


def split(rollouts: list[Rollout], begin: int, sizes: tuple[int, int], least_tokens: int) -> list[list[Rollout]]:
    """Sequences for the choice and for the comparison, of those that reach the longest bin."""
    long = [each for each in rollouts if int((each.context_tokens >= begin).sum()) >= least_tokens]
    assert len(long) >= sum(sizes), f"only {len(long)} of {len(rollouts)} sequences are long enough for {sizes}"
    return [long[: sizes[0]], long[sizes[0] : sum(sizes)]]


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'KL and tail':<26}{'even':>16}{'by layer':>16}{'by head':>16}   KL by head against by layer"]
    for each in results:
        rows = [each["budgets"][name] for name in ("even", "layer-kl", "head-kl")]
        told = "".join(f"{row['kl_sparse_to_dense']:>10.4f} {row['q05']:.3f}" for row in rows)
        pair = each["pairs"]["head-kl against layer-kl"]
        low, high = pair["kl_change_interval"]
        ends = "" if low is None else f" [{low:+.1%}, {high:+.1%}]"
        name = f"{each['rule']}-{each['budget']}"
        lines.append(f"{name:<26}{told}   {pair['kl_change']:+.1%}{ends}")
    return "\n".join(lines)


def run(args: argparse.Namespace, progress: Progress) -> tuple[Path, str]:
    began = time.time()
    settings, sizes = SETTINGS[args.model], SEQUENCES[args.model]
    # Of four sums in a row, two are long enough.
    count = 2 * sum(sizes) + 2 if args.model == "tiny-reasoner" else sum(sizes)
    if args.dry:
        settings, sizes, count = ((FINE, 96),), (1, 2), 3
    model, text = open_text(args.model, count, 0)
    bar = progress.bar(args.model)
    if args.dry:
        begin = max(len(each.prompt_ids) for each in text.sequences)
        rows, end = [shortened(each, begin + DRY_TOKENS) for each in text.sequences], begin + DRY_TOKENS + 1
    else:
        (begin, end), rows = text.bins[-2:], text.sequences
    sets = split(rows, begin, sizes, DRY_TOKENS if args.dry else LEAST_TOKENS)
    results = [run_setting(model, *setting, (begin, end), sets, bar) for setting in settings]
    config = {
        "model": args.model, "text": text.name, "sequences": {"choice": sizes[0], "comparison": sizes[1]},
        "contexts": [begin, end], "dense_layers": PUBLISHED_DENSE, "shares": SHARES, "even_shares": EVEN_SHARES,
        "step_tokens": STEP_TOKENS, "pays_at": PAYS, "threads": torch.get_num_threads(), "dry": args.dry,
    }  # fmt: skip
    for path in filter(None, (args.record, args.out / "head-budgets.json")):
        records.write(path, KIND, {"settings": results}, config=config, seed=0, wall_seconds=time.time() - began)
    return args.out / "head-budgets.json", table(results)


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
