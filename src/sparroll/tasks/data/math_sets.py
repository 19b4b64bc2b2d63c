"""Rows of the published math sets. There is one function per schema, which takes a raw row and its id. It raises
Skipped for a row that cannot be used."""

from __future__ import annotations

from sparroll.tasks.data.answers import after_hashes, answer_text
from sparroll.tasks.data.rows import Raw, Row, required


def problem(raw: Raw, row_id: str) -> Row:
    """`problem` and `answer`: Polaris, DeepScaleR, AIME, AMC, MATH-500. The answer may be text, an int or a float."""
    difficulty = raw.get("difficulty", raw.get("level"))
    return Row(
        row_id,
        required(raw, "problem"),
        "math",
        answer=answer_text(raw.get("answer")),
        difficulty="" if difficulty is None else str(difficulty),
    )


def gsm8k(raw: Raw, row_id: str) -> Row:
    """`question` and `answer`, a solution that ends with "#### N"."""
    return Row(row_id, required(raw, "question"), "math", answer=after_hashes(raw.get("answer")))
