"""The section of the page about planned savings. Shows the predictions of the records; it makes none."""

from __future__ import annotations

from html import escape

from sparroll.report import figures
from sparroll.report.data import PlannedDecoding, ReportData
from sparroll.report.parts import figure, items, note, section, table
from sparroll.rounding import percent_up, rounded_down


def plans(data: ReportData) -> str:
    if not data.plans:
        return ""
    others = sorted({plan.model for plan in data.plans} - set(data.models))
    text = "A prediction from the model's configuration and the device's data sheet; nothing was run for it. "
    if others:
        text += f"<b>Other models than that of this page:</b> {escape(', '.join(others))}. "
    text += (
        "A decoding step takes the time to read weights and KV cache, or the time to compute, whichever is longer. This is "
        "what the hardware allows; measured rollouts gain less."
    )
    rows = [_cells(plan) for plan in data.plans]
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
    return section(
        "What the hardware would allow",
        text,
        figure(lambda narrow: figures.planned_speedups([plan.results for plan in data.plans], narrow)),
        note(
            "The lines are the speed-up at one context length. The figure behind a model's name, and the speed-up in the "
            "table, are for a batch whose contexts have the <b>lengths</b> of the table: a range such as 0-32768 means that "
            "they are spread evenly over it. <b>KV read</b> is the share of the KV cache that is read."
        ),
        table(head, rows),
        items(data.plans[0].results["assumptions"]),
    )


def _cells(plan: PlannedDecoding) -> list[str]:
    found = plan.results
    names = [found["model"]["name"], found["hardware"]["name"], found["schedule"], found["lengths"]]
    rates = [f"{found[side]['tokens_per_second']:,.0f}" for side in ("dense", "sparse")]
    shown = [str(found["batch"]), percent_up(found["kv_read_share"]), *rates]
    return [*map(escape, names), *shown, f"<b>{rounded_down(found['speedup'], 2)}x</b>"]
