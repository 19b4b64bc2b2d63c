"""The section of the page about what the model gets right. Shows the figures of the record; it computes none."""

from __future__ import annotations

from html import escape
from typing import Any

from sparroll.evaluate.text import CUT_TAIL
from sparroll.report.data import ReportData
from sparroll.report.evaluation_figure import accuracy
from sparroll.report.parts import items, section, table
from sparroll.rounding import rounded_down


def evaluations(data: ReportData) -> str:
    """One section for each evaluation in the folder; empty if there is none."""
    return "\n".join(_evaluation(results, number) for number, results in enumerate(data.evaluations))


def _evaluation(results: dict[str, Any], number: int) -> str:
    k = results["samples"]
    text = (
        f"Each problem has {k} samples. Intervals are 95 % intervals of a bootstrap over problems. pass@k is the unbiased "
        f"estimate of the chance that at least one of k samples is right. majority@k is the reward of the most frequent "
        f"answer of k samples; if several answers tie, it is their mean reward. Dense and sparse samples with the same "
        f"number used the same random numbers."
    )
    if results["estimator"]:
        text += (
            f" The tail is the 5th percentile of the acceptance (estimator <code>{escape(results['estimator'])}</code>); "
            f"the dense row has the ceiling."
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
    parts = [accuracy(results, number), table(head, rows)]
    differences = [
        _difference(label, name, found)
        for label, task in results["tasks"].items()
        for name, found in task["paired"].items()
        if found
    ]
    if differences:
        parts.append(table(["task", "difference", "mean [95 %]", "p", "test", "problems that differ"], differences))
    return section("What the model gets right", text, *parts, items(_left_out(results)))


def _row(label: str, name: str, found: dict[str, Any], k: int) -> list[str]:
    tail = found["tail"]["overall"] if found["tail"] else None
    mean = found[f"mean@{k}"]
    return [
        escape(label),
        escape(name),
        "-" if mean is None else str(mean["problems"]),
        *(_estimate(found.get(f"{metric}@{k}")) for metric in ("mean", "pass", "majority")),
        f"{found['response_tokens']['mean']:,.0f}",
        f"{found['truncated_share']:.0%}",
        f"{found['kv_read_share']:.0%}",
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
