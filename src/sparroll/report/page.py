"""The HTML page around the figures: one file, without scripts, that loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from sparroll.calibrate.fit import MIN_TOKENS
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.report import figures
from sparroll.report.data import ReportData, thin
from sparroll.report.evaluation import evaluations
from sparroll.report.parts import items, section, table
from sparroll.rounding import rounded_down, with_interval
from sparroll.schedule import Schedule

_CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f5f7f8; color: #1f2933; font: 15px/1.55 "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 24px 64px; }
header h1 { margin: 0 0 4px; font-size: 26px; letter-spacing: -0.01em; }
header p { margin: 0; color: #66727f; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 24px 0 8px; }
.fact { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 12px 14px; }
.fact b { display: block; font-size: 21px; font-weight: 600; letter-spacing: -0.01em; }
.fact span { color: #66727f; font-size: 13px; }
section { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 20px 24px 24px; margin-top: 20px; }
h2 { margin: 0 0 6px; font-size: 18px; }
section > p { margin: 0 0 14px; color: #3e4c59; max-width: 100ch; }
.figure { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; margin-top: 14px; font-size: 13.5px; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid #e4e7eb; font-variant-numeric: tabular-nums; }
th { color: #66727f; font-weight: 600; border-bottom-color: #c3cbd3; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.thin { color: #9aa5b1; } .met { color: #0b7a75; } .missed { color: #c8553d; }
ul { margin: 10px 0 0; padding-left: 20px; color: #3e4c59; }
footer { margin-top: 28px; color: #66727f; font-size: 13px; }
footer table { font-size: 12.5px; }
code { font: 12.5px ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
.scroll { overflow-x: auto; }
"""


def render(data: ReportData) -> str:
    """The whole page."""
    parts = [_tail(data), _schedule(data), _plans(data), _training(data), evaluations(data)]
    body = "\n".join(part for part in parts if part)
    facts = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in data.facts.items()
    )
    top = f'<div class="facts">{facts}</div>\n' if facts else ""
    subtitle = f"<p>model {escape(data.model)}</p>" if data.model else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(data.title)}</title>\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n<main>\n<header><h1>{escape(data.title)}</h1>{subtitle}</header>\n"
        f"{top}{body}\n{_footer(data)}\n</main>\n</body>\n</html>\n"
    )


def _tail(data: ReportData) -> str:
    if not data.curves:
        return ""
    percent = f"{100 * data.quantile:g}th percentile of the acceptance"
    text = (
        f"Acceptance is the probability mass that sparse and dense decoding share at a token; 1 means the same policy. "
        f"The mean hides what makes training unstable, so this is the {percent}, by context length "
        f"(estimator <code>{escape(data.estimator)}</code>). Bands are 95 % intervals of a bootstrap over rollouts. "
        f"Hollow points and grey figures have fewer than {MIN_TOKENS} tokens or {LEAST_ROLLOUTS} rollouts. "
        f"The dense ceiling is the same statistic with dense rollouts: no budget can be expected to do better."
    )
    bins = sorted({(p.from_context_tokens, p.to_context_tokens) for curve in data.curves for p in curve.points})
    rows = []
    for curve in data.curves:
        found = {point.from_context_tokens: point for point in curve.points}
        cells = [_tail_cell(found.get(start), data.target) for start, _ in bins]
        rows.append([escape(curve.name), *cells])
    head = ["rollouts", *(f"{start:,} to {end:,}" for start, end in bins)]
    return section(
        "How far sparse decoding is from dense",
        text,
        figures.tail_by_length(data.curves, data.target, percent),
        table(head, rows),
    )


def _tail_cell(point: Any, target: float | None) -> str:
    if point is None:
        return "-"
    text = f"{rounded_down(point.value)} <small>[{rounded_down(point.low)}, {rounded_down(point.high)}]</small>"
    if thin(point):
        return f'<span class="thin">{text}</span>'
    if target is None:
        return text
    return f'<span class="{"met" if point.low >= target else "missed"}">{text}</span>'


def _schedule(data: ReportData) -> str:
    if data.schedule is None:
        return ""
    schedule = Schedule.from_table(data.schedule, data.schedule_name or "schedule")
    ends = [step.from_context_tokens for step in schedule.steps[1:]]
    points = [point.to_context_tokens for curve in data.curves for point in curve.points]
    longest = max([*points, *ends]) if points or ends else 32_768
    rows = []
    for step, end in zip(schedule.steps, [*ends, None], strict=True):
        measured = step.measured or {}
        tail = with_interval(measured["value"], measured["low"], measured["high"]) if measured else "-"
        kind = _origin(measured)
        rows.append(
            [
                f"{step.from_context_tokens:,} to {'...' if end is None else f'{end:,}'}",
                f"{step.kv_budget_tokens:,}",
                tail,
                kind,
            ]
        )
    selector = schedule.selector.table()
    text = (
        f"For each context length this is the smallest KV budget whose tail meets the target with its lower bound. The "
        f"selector is <code>{escape(selector['kind'])}</code> with pages of {selector['page_tokens']} tokens. Dense layers: "
        f"{', '.join(map(str, schedule.dense_layers)) or 'none'}."
    )
    return section(
        "The schedule", text, figures.schedule_budgets(schedule, longest),
        table(["context", "KV budget", "tail [95 %]", "where the tail is from"], rows), items(data.notes),
    )  # fmt: skip


def _origin(measured: dict[str, Any]) -> str:
    """Where a step's tail is from, in words."""
    if not measured:
        return "-"
    if measured.get("dense"):
        return "dense: the budget is as large as every context"
    if measured.get("verified"):
        return "measured with this schedule"
    return "interpolated between measured budgets" if measured.get("interpolated") else "measured at this budget"


def _plans(data: ReportData) -> str:
    if not data.plans:
        return ""
    rows = [_plan_cells(plan) for plan in data.plans]
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
    text = (
        "Predicted from the model's config and the device's data sheet: a decode step takes its memory time or its compute "
        "time, whichever is larger. This is what the hardware allows; measured rollouts gain less."
    )
    return section(
        "What it would save",
        text,
        figures.planned_speedups(data.plans),
        table(head, rows),
        items(data.plans[0]["assumptions"]),
    )


def _plan_cells(plan: dict[str, Any]) -> list[str]:
    names = [plan["model"]["name"], plan["hardware"]["name"], plan["schedule"], plan["lengths"]]
    rates = [f"{plan[side]['tokens_per_second']:,.0f}" for side in ("dense", "sparse")]
    figures = [str(plan["batch"]), f"{plan['kv_read_share']:.0%}", *rates, f"<b>{plan['speedup']:.2f}x</b>"]
    return [*map(escape, names), *figures]


def _training(data: ReportData) -> str:
    if not data.runs:
        return ""
    rows = []
    for run in data.runs:
        tails = [value for value in run.tail_q05 if value is not None]
        first, last = (run.accuracy[0], run.accuracy[-1]) if run.accuracy else (None, None)
        rows.append(
            [
                f"<b>{escape(run.name)}</b> <small>{escape(run.rollouts)}</small>",
                str(len(run.steps)),
                f"{run.reward[0]:.3f} to {run.reward[-1]:.3f}",
                _accuracy(first),
                _accuracy(last),
                rounded_down(min(tails, default=None)),
                f"{sum(run.kv_read_share) / len(run.kv_read_share):.0%}",
            ]
        )
    head = ["run", "steps", "reward", "dense accuracy before", "after", "lowest tail", "KV read"]
    text = (
        "The runs share model, prompts and seed; they differ only in what their rollouts read. Thin reward lines are single "
        "steps, thick ones the mean of the last five steps. Accuracy is always measured with dense attention."
    )
    events = [f"{run.name}: {event}" for run in data.runs for event in run.events]
    return section(
        "RL with these rollouts", text, figures.training(data.runs, data.target), table(head, rows), items(events)
    )


def _accuracy(point: Any) -> str:
    return "-" if point is None else f"{point.value:.3f} <small>[{point.low:.3f}, {point.high:.3f}]</small>"


def _footer(data: ReportData) -> str:
    if not data.provenance:
        return ""
    rows = []
    for entry in data.provenance:
        record = entry.record
        commit = record.get("commit") or {}
        code = (
            "installed package"
            if not commit.get("id")
            else commit["id"][:12] + (" + changes" if commit.get("dirty") else "")
        )
        machine = record.get("hardware") or {}
        gpus = machine.get("gpus") or []
        device = (
            f"{len(gpus)} x {gpus[0]['name']}"
            if gpus
            else f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
        )
        versions = record.get("versions") or {}
        shown = ", ".join(
            f"{name} {versions[name]}" for name in ("sparroll", "torch", "transformers") if name in versions
        )
        cells = (entry.what, entry.file, record.get("date", "-"), code, device, shown, record.get("seed", "-"))
        rows.append([escape(str(cell)) for cell in cells])
    head = ["part", "file", "date", "commit", "machine", "versions", "seed"]
    return f"<footer><h2>Where the figures come from</h2>{table(head, rows)}</footer>"
