"""Gold answers as text, from the types in which data sets keep them. Judges no answers."""

from __future__ import annotations

import math
import re
from typing import Any

from sparroll.tasks.data.rows import Skipped

NO_ANSWER = "no answer"
_WHOLE = re.compile(r"[-+]?\d+\.0*")


def answer_text(value: Any) -> str:
    """A gold answer as text. Whole numbers lose the zeros after the point: 142.0 and "142.0" become "142".

    Raises Skipped for None, NaN and empty text.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise Skipped(NO_ANSWER)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise Skipped(f"answer is a {type(value).__name__}")
    text = str(value).strip()
    if not text:
        raise Skipped(NO_ANSWER)
    return text.partition(".")[0] if _WHOLE.fullmatch(text) else text


def after_hashes(solution: Any) -> str:
    """The number after the last "####" of a GSM8K solution, without the commas between thousands."""
    if not isinstance(solution, str) or "####" not in solution:
        raise Skipped(NO_ANSWER)
    number = solution.rpartition("####")[2].strip().removeprefix("$")
    return answer_text(re.sub(r"(?<=\d),(?=\d{3})", "", number))
