"""The section of the page about planned savings. Shows the predictions of the records; it makes none."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sparroll.report import figures
from sparroll.report.data import PlannedDecoding, ReportData, model_key, told_apart
from sparroll.report.parts import figure, items, note, section, table
from sparroll.rounding import percent_up, rounded_down

_BASES = {
    "data sheet": "A prediction from the model's configuration and the device's data sheet; nothing was run for it.",
    "measured rates": (
        "A prediction from the model's configuration and the device's rates, which were measured on it; no decoding "
        "step was run for it."
    ),
    "measured steps": "A prediction from the model's configuration and decoding steps that were timed on the device.",
}
_ROOFLINE = (
    "A decoding step takes the time to read weights and KV cache, or the time to compute, whichever is longer. This is "
    "what the hardware allows; measured rollouts gain less."
)
_FITTED = "A decoding step takes what a time model says that was fitted to the timed ones."
_CHECKED = (
    "Where the dense policy checks drafts, sparse tokens/s and the speed-up include the checks; the lines are without "
    "them."
)


def plans(data: ReportData) -> str:
    if not data.plans:
        return ""
    head = [
        "model",
        "device",
        "schedule",
        "lengths",
        "batch",
        "KV read",
        "dense tokens/s",
        "sparse tokens/s",
        "speed-up",
    ]
    checked = f" {_CHECKED}" if any(plan.checked for plan in data.plans) else ""
    return section(
        "What the hardware would allow",
        _text(data),
        figure(lambda narrow: figures.planned_speedups(data.plans, narrow)),
        note(
            "The lines are the speed-up at one context length. The figure behind a model's name, and the speed-up in the "
            "table, are for a batch whose contexts have the <b>lengths</b> of the table: a range such as 0-32768 means that "
            f"they are spread evenly over it. <b>KV read</b> is the share of the KV cache that is read.{checked}"
        ),
        table(head, [_cells(plan) for plan in data.plans]),
        items(_assumptions(data.plans)),
    )


def _text(data: ReportData) -> str:
    """What the predictions are made from; each plan is named where not all are made from the same."""
    bases: dict[str, list[str]] = {}
    for plan, name in zip(data.plans, told_apart(data.plans, model=True), strict=True):
        bases.setdefault(plan.basis, []).append(escape(name))
    said = [
        (f"<b>{', '.join(names)}:</b> " if len(bases) > 1 else "") + _BASES[basis] for basis, names in bases.items()
    ]
    known = {model_key(model) for model in data.models}
    others = sorted({plan.model for plan in data.plans if model_key(plan.model) not in known})
    if others:
        said.append(f"<b>Other models than that of this page:</b> {escape(', '.join(others))}.")
    said += [_ROOFLINE] if bases.keys() != {"measured steps"} else []
    said += [_FITTED] if "measured steps" in bases else []
    return " ".join(said)


def _assumptions(shown: Sequence[PlannedDecoding]) -> list[str]:
    """What all plans assume, then what only some do, with their names."""
    each = [plan.results["assumptions"] for plan in shown]
    common = [line for line in each[0] if all(line in lines for lines in each)]
    own = [
        f"{name}: {line}"
        for name, lines in zip(told_apart(shown, model=True), each, strict=True)
        for line in lines
        if line not in common
    ]
    return common + own


def _cells(plan: PlannedDecoding) -> list[str]:
    found = plan.results
    names = [found["model"]["name"], plan.device, found["schedule"], found["lengths"]]
    rates = [f"{rate:,.0f}" for rate in (found["dense"]["tokens_per_second"], plan.tokens_per_second)]
    shown = [str(found["batch"]), percent_up(found["kv_read_share"]), *rates]
    return [*map(escape, names), *shown, f"<b>{rounded_down(plan.speedup, 2)}x</b>"]
