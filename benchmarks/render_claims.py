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


def _cell(of: dict[str, Any]) -> str:
    text = f"{of['value']:+.2f} [{rounded_down(of['low'], 2, True)}, {rounded_up(of['high'], 2, True)}]"
    gained = of["gained"]
    return f"**{text}**" if gained["low"] > 0 else f"*{text}*" if gained["high"] < 0 else text


TABLES: dict[str, Callable[[], str]] = {
    "claims-summary": summary,
    **{f"claims-{paper}": partial(rows_of, claims) for paper, claims in PAPERS.items()},
    "claims-rules": rules,
    "claims-commands": commands,
    "predictors": partial(correlations, "run_mean"),
    "predictors-first-step": partial(correlations, "first_step"),
}
