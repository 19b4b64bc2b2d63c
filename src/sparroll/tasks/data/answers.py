"""Gold answers of rows as text, and the reasons why a row has none. Types are converted in tasks/math/golds.py."""

from __future__ import annotations

import math
import re
from typing import Any

from sparroll.tasks.data.rows import Skipped
from sparroll.tasks.math.golds import gold_text

NO_ANSWER = "no answer"


def answer_text(value: Any) -> str:
    """A gold answer as text. Whole numbers lose the zeros after the point: 142.0 and "142.0" become "142".

    Raises Skipped for None, NaN, empty text and types that are no answers.
    """
    text = gold_text(value)
    if text is not None:
        return text
    if value is None or isinstance(value, str) or (isinstance(value, float) and math.isnan(value)):
        raise Skipped(NO_ANSWER)
    raise Skipped(f"answer is a {type(value).__name__}")


def after_hashes(solution: Any) -> str:
    """The number after the last "####" of a GSM8K solution, without the commas between thousands."""
    if not isinstance(solution, str) or "####" not in solution:
        raise Skipped(NO_ANSWER)
    number = solution.rpartition("####")[2].strip().removeprefix("$")
    return answer_text(re.sub(r"(?<=\d),(?=\d{3})", "", number))
