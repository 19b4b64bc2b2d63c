"""Reads prompts to sample from: from a file that the user wrote, or from a built-in task. engines/prompt_encoder.py
turns them into token ids.

A file of rows is read as `sparroll data show` reads it, so one file means the same prompts to every command. Answers
may be missing, because nothing judges the responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sparroll.errors import CHECK_PATH, UserError
from sparroll.tasks.base import get
from sparroll.tasks.data.local import asked
from sparroll.tasks.data.read import FORMATS, bounded_lines, rows
from sparroll.tasks.data.rows import Skipped, check_text
from sparroll.tasks.data.templates import filled
from sparroll.types import Prompt

Message = dict[str, str]

TEXT = (".txt", ".text", ".md", "")
"""Suffixes of files with one prompt per line."""
LONGEST_LINE = 1 << 24
"""Characters of the longest prompt in a text file. No model's context holds as many."""

_WHAT_A_ROW_IS = (
    "a row needs prompt, problem or question: a text, or chat messages with role and content and no other keys, the "
    "last one from the user"
)


def read_prompts(path: Path | None, task: str | None, level: int, count: int, seed: int) -> list[Prompt]:
    """At most `count` prompts, either from the file or from the task. Raises UserError unless exactly one of them is
    given."""
    if (path is None) == (task is None):
        raise UserError("give either --prompts FILE or --task NAME", "for a first try: --task synthetic --level 3")
    if task is not None:
        return get(task).prompts("eval", level, seed, count)
    assert path is not None
    found = list(islice(_prompts(path), count))
    if not found:
        raise UserError(
            f"there are no prompts in {path}", "a text file has one prompt per line; rows have the key 'prompt'"
        )
    return found


def holds_more(path: Path, count: int) -> bool:
    """Whether a file holds more than the `count` prompts that `read_prompts` takes. Of a pipe, which can be read once, that
    is not known; and a row behind them that is no prompt is not the caller's matter."""
    if not path.is_file():
        return False
    try:
        return next(islice(_prompts(path), count, None), None) is not None
    except UserError:
        return False


def plain_prompt(prompt: Prompt) -> str | list[Message]:
    """A prompt as a record holds it: its text, or the messages of a chat."""
    return [{"role": role, "content": content} for role, content in prompt.messages] or prompt.text


def _prompts(path: Path) -> Iterator[Prompt]:
    suffix = path.suffix.lower()
    if suffix in TEXT:
        return _lines(path)
    if suffix in FORMATS:
        return _rows(path)
    raise UserError(
        f"cannot read prompts from {path}: unknown format {path.suffix!r}",
        f"known: .txt with one prompt per line, {', '.join(FORMATS)}",
    )


def _lines(path: Path) -> Iterator[Prompt]:
    try:
        with path.open(encoding="utf-8-sig") as source:
            for number, line in enumerate(bounded_lines(path, source, LONGEST_LINE), 1):
                if line.strip():
                    yield Prompt(f"{path.name}:{number}", line.strip(), answer="")
    except OSError as error:
        raise UserError(f"cannot read the prompts file {path}: {error.strerror}", CHECK_PATH) from None
    except UnicodeDecodeError as error:
        raise UserError(f"the prompts file {path} is not UTF-8: {error.reason}") from None


def _rows(path: Path) -> Iterator[Prompt]:
    for number, raw in enumerate(rows(path), 1):
        try:
            row = filled(asked(raw, f"{path.name}:{number}"), None)
            check_text(row)
        except Skipped as skipped:
            raise UserError(f"row {number} of {path} is no prompt: {skipped.reason}", _WHAT_A_ROW_IS) from None
        yield Prompt(row.row_id, row.text, answer=row.answer, messages=row.messages)
