"""The section of the page about what the model gets right. Shows the figures of the record; it computes none."""

from __future__ import annotations

from html import escape
from typing import Any

from sparroll.evaluate.text import CUT_TAIL
from sparroll.report.data import Evaluated, ReportData
from sparroll.report.evaluation_figure import accuracy
from sparroll.report.parts import figure, items, section, table
from sparroll.rounding import percent_up, rounded_down, rounded_up


def evaluations(data: ReportData) -> str:
    """One section for each evaluation in the folder; empty if there is none."""
    several = len(data.evaluations) > 1
    parts = enumerate(data.evaluations)
    return "\n".join(_evaluation(each, number, f": {each.folder}" if several else "") for number, each in parts)


def _evaluation(evaluated: Evaluated, number: int, where: str) -> str:
    results = evaluated.results
    k = results["samples"]
    text = (
        f"Model <b>{escape(evaluated.model)}</b>. Each problem has {k} samples. Intervals are 95 % intervals of a bootstrap "
        f"over problems. pass@k is the unbiased estimate of the chance that at least one of k samples is right. majority@k "
        f"is the reward of the most frequent answer of k samples; if several answers tie, it is their mean reward. Dense "
        f"and sparse samples with the same number used the same random numbers. KV read is the share of the KV cache that "
        f"was read, cut the share of responses that reached the length limit."
    )
    if results["estimator"]:
        text += (
            f" The tail is the 5th percentile of the acceptance, the probability that sparse and dense decoding share at a "
            f"token (estimator <code>{escape(results['estimator'])}</code>); the dense row has the ceiling, which no sparse "
            f"row can be expected to exceed."
        )
        if results["top_p"] < 1:
            text += f" {CUT_TAIL.format(top_p=results['top_p'])}"
    rows = [
        _row(label, name, found, k)
        for label, task in results["tasks"].items()
        for name, found in task["policies"].items()
    ]
    head = [
        "task",
        "policy",
        "problems",
        f"mean@{k}",
        f"pass@{k}",
        f"majority@{k}",
        "tokens",
        "cut",
        "KV read",
        "tokens/s",
        "tail",
    ]
    parts = [figure(lambda narrow: accuracy(results, number, narrow)), table(head, rows)]
    differences = [
        _difference(label, name, found)
        for label, task in results["tasks"].items()
        for name, found in task["paired"].items()
        if found
    ]
    if differences:
        parts.append(table(["task", "difference", "mean [95 %]", "p", "test", "problems that differ"], differences))
    checks = [
        [
            escape(label),
            f"{did['windows']:,}",
            percent_up(did["cut_share"]),
            rounded_up(did["drafted_per_kept"], 2),
        ]
        for label, task in results["tasks"].items()
        for found in task["policies"].values()
        if (did := found.get("checks"))
    ]
    if checks:
        text += (
            " The dense policy checked the drafts of the sparse row. KV read counts all drafts and checks, so it may be "
            "above 100%."
        )
        parts.append(table(["checks of drafts", "windows", "windows cut", "drafted per kept"], checks))
    return section(f"What the model gets right{where}", text, *parts, items(_left_out(results)))


def _row(label: str, name: str, found: dict[str, Any], k: int) -> list[str]:
    tail = found["tail"]["overall"] if found["tail"] else None
    mean = found[f"mean@{k}"]
    return [
        escape(label),
        escape(name),
        "-" if mean is None else str(mean["problems"]),
        *(_estimate(found.get(f"{metric}@{k}")) for metric in ("mean", "pass", "majority")),
        f"{found['response_tokens']['mean']:,.0f}",
        percent_up(found["truncated_share"]),
        percent_up(found["kv_read_share"]),
        f"{found['tokens_per_second']:,.0f}",
        rounded_down(tail and tail["quantile_value"]),
    ]


def _difference(label: str, name: str, found: dict[str, Any]) -> list[str]:
    mean, test = found["mean"], found["mean"]["sign_flip"]
    method = "sign flips, exact" if test["method"] == "exact" else "sign flips, 100,000 drawn"
    shown = f"{mean['value']:+.3f} <small>[{mean['low']:+.3f}, {mean['high']:+.3f}]</small>"
    return [
        escape(label),
        escape(name),
        shown,
        f"{test['p']:.3g}",
        method,
        f"{test['different']} of {test['problems']}",
    ]


def _left_out(results: dict[str, Any]) -> list[str]:
    return [
        f"{label}, {name}: {count} samples have no verdict ({status}) and do not count in any mean"
        for label, task in results["tasks"].items()
        for name, found in task["policies"].items()
        for status, count in found["excluded_samples"].items()
    ]


def _estimate(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['value']:.3f} <small>[{found['low']:.3f}, {found['high']:.3f}]</small>"
