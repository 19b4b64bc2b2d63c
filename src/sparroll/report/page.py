"""The HTML page around the sections: one file, without scripts, that loads nothing from elsewhere."""

from __future__ import annotations

from html import escape

from sparroll.report.data import Answer, Provenance, ReportData
from sparroll.report.evaluation import evaluations
from sparroll.report.measured import measurements
from sparroll.report.parts import items, table
from sparroll.report.savings import plans
from sparroll.report.style import CSS
from sparroll.report.training import training


def render(data: ReportData) -> str:
    """The whole page."""
    parts = [measurements(data.measured), training(data.runs), evaluations(data), plans(data)]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(data.title)}</title>\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n<header><h1>{escape(data.title)}</h1>{_subtitle(data)}</header>\n"
        f"{_unfinished(data)}{_answers(data.answers)}{_facts(data)}{body}\n{_footer(data)}\n</main>\n</body>\n</html>\n"
    )


def _subtitle(data: ReportData) -> str:
    if not data.models:
        return ""
    if len(data.models) == 1:
        return f"<p>model {escape(data.models[0])}</p>"
    listed = ", ".join(map(escape, data.models))
    return (
        f"<p>{len(data.models)} models: {listed}. Each section names its own; figures of two models do not compare.</p>"
    )


def _unfinished(data: ReportData) -> str:
    """Which runs have not ended, and what to do; empty where all have."""
    again = "Run the command that began it again; <code>sparroll train</code> and <code>distill</code> take --resume."
    said = [f"The run <b>{escape(name)}</b> is not finished, so it is not on this page." for name in data.unfinished]
    for run in data.runs:
        if run.gone_on:
            shown = f"it is shown up to its step {run.steps[-1]}"
            said.append(f"The run <b>{escape(run.name)}</b> was resumed and has not ended yet; {shown}.")
    return "".join(f"<p>{each} {again}</p>\n" for each in said)


def _answers(answers: tuple[Answer, ...]) -> str:
    parts = [
        f'<div class="verdict {each.level}"><h2>{escape(each.question)}</h2><p>{escape(each.answer)}</p>'
        f"{items(each.reasons)}</div>"
        for each in answers
    ]
    return f'<div class="verdicts">{"".join(parts)}</div>\n' if parts else ""


def _facts(data: ReportData) -> str:
    tiles = [
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in data.facts.items()
    ]
    return f'<div class="facts">{"".join(tiles)}</div>\n' if tiles else ""


def _footer(data: ReportData) -> str:
    if not data.provenance:
        return ""
    head = ["part", "file", "date", "commit", "machine", "versions", "seed"]
    rows = [[escape(str(cell)) for cell in _provenance(entry)] for entry in data.provenance]
    return f"<footer><h2>Where the figures come from</h2>{table(head, rows)}</footer>"


def _provenance(entry: Provenance) -> list[object]:
    record = entry.record
    commit, machine = record.get("commit") or {}, record.get("hardware") or {}
    code = "installed package"
    if commit.get("id"):
        code = commit["id"][:12] + (" + changes" if commit.get("dirty") else "")
    gpus = machine.get("gpus") or []
    device = f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
    if gpus:
        device = f"{len(gpus)} x {gpus[0]['name']}"
    versions = record.get("versions") or {}
    shown = [f"{name} {versions[name]}" for name in ("sparroll", "torch", "transformers") if name in versions]
    seed = "-" if record.get("seed") is None else record["seed"]
    return [entry.what, entry.file, record.get("date", "-"), code, device, ", ".join(shown), seed]
