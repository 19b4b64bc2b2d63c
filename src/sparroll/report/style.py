"""The look of the page, for wide screens and for phones."""

from __future__ import annotations

CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f5f7f8; color: #1f2933; font: 15px/1.55 "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 24px 64px; }
header h1 { margin: 0 0 4px; font-size: 26px; letter-spacing: -0.01em; }
header p { margin: 0; color: #66727f; }
.verdicts { margin-top: 24px; }
.verdict { background: #fff; border: 1px solid #e4e7eb; border-left-width: 6px; border-radius: 8px; padding: 14px 20px;
  margin-top: 10px; }
.verdict h2 { margin: 0; font-size: 14px; font-weight: 600; color: #66727f; }
.verdict p { margin: 2px 0 0; font-size: 18px; line-height: 1.4; max-width: 90ch; }
.verdict ul { margin: 6px 0 0; font-size: 14px; max-width: 100ch; }
.yes { border-left-color: #0b7a75; } .probably { border-left-color: #b7791f; }
.no { border-left-color: #c8553d; } .unknown { border-left-color: #9aa5b1; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 20px 0 8px; }
.fact { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 12px 14px; }
.fact b { display: block; font-size: 21px; font-weight: 600; letter-spacing: -0.01em; }
.fact span { color: #66727f; font-size: 13px; }
section { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 20px 24px 24px; margin-top: 20px; }
section h2 { margin: 0 0 6px; font-size: 18px; }
section > p { margin: 0 0 14px; color: #3e4c59; max-width: 100ch; }
section > p.note { margin: 8px 0 0; font-size: 13px; color: #66727f; }
.figure { width: 100%; height: auto; display: block; }
.narrow { display: none; }
table { border-collapse: collapse; width: 100%; margin-top: 14px; font-size: 13.5px; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid #e4e7eb; font-variant-numeric: tabular-nums; }
th { color: #66727f; font-weight: 600; border-bottom-color: #c3cbd3; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.thin { color: #66727f; font-style: italic; } .met { color: #0b7a75; } .near { color: #9a6312; } .missed { color: #b9432b; }
ul { margin: 10px 0 0; padding-left: 20px; color: #3e4c59; }
footer { margin-top: 28px; color: #66727f; font-size: 13px; }
footer h2 { margin: 0 0 6px; font-size: 16px; }
footer table { font-size: 12.5px; }
td small { white-space: nowrap; }
code { font: 12.5px ui-monospace, Menlo, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
@media (max-width: 700px) {
  main { padding: 20px 10px 40px; }
  header, footer { padding: 0 6px; }
  section, .verdict { padding: 14px 14px 16px; }
  .verdict p { font-size: 16px; }
  .facts { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  .fact { padding: 10px 12px; }
  .wide { display: none; }
  .narrow { display: block; }
  table { width: auto; min-width: 100%; }
  th, td { padding: 5px 8px; white-space: nowrap; }
  th:first-child, td:first-child { position: sticky; left: 0; background: #fff; padding-right: 10px; max-width: 38vw;
    min-width: 5.5em; white-space: normal; }
  .scroll::after { content: "swipe the table to see all of it"; position: sticky; left: 0; font-size: 12px; color: #66727f; }
  footer th:first-child, footer td:first-child { background: #f5f7f8; }
}
"""
