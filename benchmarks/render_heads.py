"""The table of budgets by KV head, from the records of recipes/code-lm/head_budgets.py. Measures nothing; render.py writes
it."""

from __future__ import annotations

from typing import Any

from record_tables import results, table

from sparroll.rounding import rounded_down, rounded_up

KIND = "head_budgets"
RECORDS = {"head-budgets-study-cpu": "study, 30.8M", "head-budgets-tiny-reasoner-cpu": "tiny-reasoner"}
"""Records by name, and the model that each is of."""
PAGES_OF = {"page_mean-16": "16 tokens (published)", "quantized_mean-4x4": "4 tokens, 4 bits"}
SHARED = ("even", "layer-kl", "head-kl")


def settings(record: str) -> list[dict[str, Any]]:
    """What was measured, by selector and even budget."""
    found: list[dict[str, Any]] = results(record, KIND)["settings"]
    return found


def heads() -> str:
    """KL and tail of three ways to share the same reading, and what sharing by head changes."""
    rows = []
    for record, model in RECORDS.items():
        for of in settings(record):
            told = [_told(of["budgets"][name]) for name in SHARED]
            changes = [changed(of, f"head-kl against {other}") for other in ("layer-kl", "even")]
            same = of["reading_of_the_even_budget_with_the_same_kl"]["head-kl"]
            rows.append([model, PAGES_OF[of["rule"]], str(of["budget"]), *told, *changes, _share(same)])
    head = ["model", "pages", "budget", "even", "by layer", "by head"]
    head += ["KL by head against by layer", "against even", "read, of an even budget with the same KL"]
    return table(head, rows)


def _told(row: dict[str, Any]) -> str:
    return f"{rounded_up(row['kl_sparse_to_dense'], 4)} ({rounded_down(row['q05'])})"


def changed(setting: dict[str, Any], pair: str) -> str:
    """The change of the KL in percent with its interval, all rounded up: a fall is not made larger.

    >>> changed(setting, "head-kl against layer-kl")
    '-9% [-15%, -4%]'
    """
    of = setting["pairs"][pair]
    value, low, high = (rounded_up(100 * each, 0, True) for each in (of["kl_change"], *of["kl_change_interval"]))
    return f"{value}% [{low}%, {high}%]"


def _share(of: dict[str, Any]) -> str:
    value, low, high = (rounded_up(100 * each, 0) for each in (of["read_share"], *of["interval"]))
    return f"{value}% [{low}%, {high}%]"


TABLES = {"head-budgets": heads}
