"""The tables of docs/claims.md: claims of the papers with their verdicts, and which statistic orders the runs of the study.
Measures nothing; render.py writes them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import predictors
import published_jackpot
import published_sparrow
import published_sparse_rl
from published_claims import PublishedClaim
from published_rules import COMBINED, VERDICTS, Verdict
from record_tables import results, table

from sparroll.rounding import rounded_down, rounded_up

PAPERS: dict[str, tuple[PublishedClaim, ...]] = {
    "sparrow": published_sparrow.CLAIMS,
    "sparse-rl": published_sparse_rl.CLAIMS,
    "jackpot": published_jackpot.CLAIMS,
    "others": published_jackpot.OTHERS,
}

HEAD = ("claim", "verdict", "what they say", "what we saw", "on which model", "record", "command")


IN_WORDS: dict[Verdict, str] = {
    "reproduced": "these claims hold on our models",
    "partly": "a part of each of these holds",
    "refuted": "these claims did not hold on our models",
    "undecided": "our intervals are too wide to tell whether these hold",
    "not run yet": "nobody has tried these here",
    "not testable here": "these need what we do not have",
}


def rows_of(claims: Sequence[PublishedClaim]) -> str:
    """The table of some claims. Commands are long and many claims share them, so a row has their numbers."""
    number = {command: place for place, command in enumerate(every_command(), 1)}
    rows = []
    for claim in claims:
        asked = ", ".join(f"[{number[command]}](#the-commands)" for command in claim.sources()[1])
        rows.append([*claim.row(), asked])
    return table(HEAD, rows)


def commands() -> str:
    return "\n" + "\n".join(f"{place}. `{command}`" for place, command in enumerate(every_command(), 1)) + "\n"


def every_command() -> list[str]:
    """Each once, in the order in which the page needs them."""
    return list(dict.fromkeys(command for claim in every_claim() for command in claim.sources()[1]))


def rules() -> str:
    """How each verdict follows from its figures, and what the intervals are of."""
    lines = [claim.rules() for claim in every_claim()]
    made = table(["claim", "rule, and the verdict of each part"], [line for line in lines if line])
    return f"\n{textwrap.fill(COMBINED, 120)}\n\n{made}"


def every_claim() -> list[PublishedClaim]:
    return [claim for claims in PAPERS.values() for claim in claims]


def summary() -> str:
    """A list for each verdict, of the claims that have it."""
    verdicts = {claim: claim.verdict() for claim in every_claim()}
    parts = []
    for verdict in VERDICTS:
        those = [f"- {claim.title} (`{claim.name}`)" for claim, found in verdicts.items() if found == verdict]
        if those:
            head = f"**{verdict.capitalize()}** ({len(those)} of {len(verdicts)}): {IN_WORDS[verdict]}:\n"
            parts.append("\n".join([head, *those]))
    return "\n" + "\n\n".join(parts) + "\n"


def correlations(when: str) -> str:
    """Rank correlations with the change of dense accuracy, a column for each selection of runs. Bold: surely a stronger one
    than that of the 5th percentile. In italics: surely a weaker one."""
    found = results("predictors", predictors.KIND)
    rows = [[name, *(_cell(each[when][name]) for each in found)] for name in predictors.STATISTICS]
    counts = [f"{each['selection']} ({each['runs']} runs, {each['rows']} rows)" for each in found]
    return table(["statistic", *counts], rows)


SPREAD = {
    "q05": "5th percentile of acceptance",
    "worst_bin_q05": "the same, worst bin",
    "q01": "1st percentile",
    "q10": "10th percentile",
    "mean": "mean acceptance",
    "cvar01": "mean of the worst 1 %",
    "cvar05": "mean of the worst 5 %",
    "skew": "skewness",
    "nearly_one_share": "share above .999",
    "kl": "KL sparse to dense",
    **{f"over_{nats}_nats": f"share of tokens more than {nats} nats off" for nats in (2, 5, 10, 20)},
    "reward_of_rollouts": "reward of the sparse rollouts",
    "reward_gap": "reward gap of the control group",
    "kv_read_share": "share of the cache that is read",
}
"""Statistics of the experiment predicts-training."""
FREE_WORDING = "claims-predicts-training-cpu"
NO_FREE_WORDING = "claims-predicts-training-walks-cpu"


def spread_correlations(record: str, task: str, *more: tuple[str, str]) -> str:
    """The same on a task of tiny-reasoner's, over rows that were chosen so that the statistics come apart; empty where a
    statistic is constant. more: further columns, each (among which runs, when)."""
    found = {
        (each["among"], each["statistic"]): each
        for each in results(record, "claims-predicts-training")["correlations"]
        if each["task"] == task
    }
    columns = [(among, when) for among in ("all", "no eviction") for when in ("first_step", "run_mean")]
    columns += more
    runs = {among: found[among, "q05"]["runs"] for among, _ in columns}
    rows = []
    for statistic, label in SPREAD.items():
        cells = []
        for among, when in columns:
            line = found[among, statistic]
            fewer = f" ({line['runs']} runs)" if line["runs"] < runs[among] else ""
            text = _beside(line[when], line[f"{when}_beyond_q05"])
            cells.append(text and text + fewer)
        rows.append([label, *cells])
    heads = {"first_step": "first step", "run_mean": "whole run"}
    names = [f"{heads[when]}, {'' if among == 'all' else among + ', '}{runs[among]} runs" for among, when in columns]
    return table(["statistic", *names], rows)


def _cell(of: dict[str, Any]) -> str:
    gained = of["gained"]
    return _beside([of["value"], of["low"], of["high"]], [gained["value"], gained["low"], gained["high"]])


def _beside(correlation: Sequence[float] | None, beyond: Sequence[float] | None) -> str:
    """[value, low, high], marked by how much stronger it is than that of the 5th percentile."""
    if correlation is None or beyond is None:
        return ""
    value, least, most = correlation
    text = f"{value:+.2f} [{rounded_down(least, 2, True)}, {rounded_up(most, 2, True)}]"
    return f"**{text}**" if beyond[1] > 0 else f"*{text}*" if beyond[2] < 0 else text


TABLES: dict[str, Callable[[], str]] = {
    "claims-summary": summary,
    **{f"claims-{paper}": partial(rows_of, claims) for paper, claims in PAPERS.items()},
    "claims-rules": rules,
    "claims-commands": commands,
    "predictors": partial(correlations, "run_mean"),
    "predictors-first-step": partial(correlations, "first_step"),
    "predictors-spread": partial(
        spread_correlations, FREE_WORDING, "remarks", ("5th percentile above .78", "run_mean")
    ),
    "predictors-walks": partial(spread_correlations, NO_FREE_WORDING, "walks"),
}
