"""A set's rows judged by the packaged rewards."""

from __future__ import annotations

from pathlib import Path

import data_files
from sparroll.tasks.data.settings import DataSettings
from sparroll.tasks.data.task import data_task


def test_math_rows_are_judged_by_the_boxed_answer_and_unreadable_gold_is_counted(tmp_path: Path) -> None:
    root = data_files.plain_mirror(tmp_path / "mirror", "gsm8k")
    own = data_files.write(
        tmp_path / "own.jsonl",
        [{"prompt": "Half of three?", "answer": 1.5}, {"prompt": "What?", "answer": "???"}],
    )
    made = data_task("gsm8k", DataSettings(mirror=str(root), eval=(str(own),)))
    first = next(prompt for prompt in made.prompts("train", 0, 0, 9) if prompt.answer == "1234")
    assert made.reward(first, "so \\boxed{1,234}") == 1 and made.reward(first, "1234") == 0
    (half,) = made.prompts("eval", 0, 0, 9)
    assert made.reward(half, "\\boxed{\\frac{3}{2}}") == 1 and made.reward(half, "\\boxed{2}") == 0
    assert made.report()["removed"] == {"no response can be judged": 1}
