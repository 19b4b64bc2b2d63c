"""Prompt templates: text files with {problem} and, for code, {starter_code}. Fills them in. Chat templates belong to
the tokenizer, and are not here."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from sparroll.errors import UserError, nearest
from sparroll.tasks.data.rows import Row

_PLACES = re.compile(r"\{(problem|starter_code)\}")


def template_names() -> list[str]:
    folder = resources.files("sparroll.tasks.data") / "templates"
    return sorted(path.name.removesuffix(".txt") for path in folder.iterdir() if path.name.endswith(".txt"))


@cache
def template(name: str) -> str:
    """The text of a packaged template or of a file. Raises UserError for an unknown name, and if {problem} is
    missing."""
    if name in template_names():
        text = (resources.files("sparroll.tasks.data") / "templates" / f"{name}.txt").read_text(encoding="utf-8")
    elif Path(name).is_file():
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the prompt template {name}: {error}") from None
    else:
        raise UserError(f"unknown prompt template {name!r}", f"{nearest(name, template_names())}; or give a file")
    if "problem" not in _PLACES.findall(text):
        raise UserError(
            f"the prompt template {name} has no {{problem}}", "write {problem} where the question should be"
        )
    return text.removesuffix("\n")


def filled(row: Row, name: str | None) -> Row:
    """The row with its question in the template `name`, or in the one that fits the row. In a chat, only the last turn
    goes into the template.

    Raises UserError if your own template has no place for the starter code that a row's tests need.
    """
    text = template(name or row.template)
    if name and row.starter_code and "starter_code" not in _PLACES.findall(text):
        raise UserError(f"the prompt template {name} has no {{starter_code}}, which {row.row_id} needs")
    last = row.question if isinstance(row.question, str) else row.question[-1][1]
    # One pass over the template, so that a question with "{starter_code}" in its text stays as it is.
    words = {"problem": last, "starter_code": row.starter_code}
    done = _PLACES.sub(lambda place: words[place[1]], text)
    return replace(row, question=done if isinstance(row.question, str) else (*row.question[:-1], ("user", done)))
