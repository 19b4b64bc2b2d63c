"""Building blocks that the sections of the page share. They take and return HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape


def section(title: str, text: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{text}</p>\n{''.join(parts)}\n</section>"


def figure(draw: Callable[[bool], str]) -> str:
    """A figure for wide screens and one for phones, of which a reader sees one. draw: narrow or not -> SVG."""
    return f'<div class="wide">{draw(False)}</div>\n<div class="narrow">{draw(True)}</div>\n'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. The cells of `rows` are HTML; those of `head` are plain text."""
    line = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{line}</tr></thead><tbody>{body}</tbody></table></div>'


def items(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def note(html: str) -> str:
    """A line under a figure or table that explains it."""
    return f'<p class="note">{html}</p>'
