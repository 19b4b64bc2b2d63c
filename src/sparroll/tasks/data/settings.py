"""What a task on real data can be told: the fields of the configuration's section [data]."""

from __future__ import annotations

from datetime import date
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    train: str | None = None
    """Set name or file of the training rows, for task.name = "data". NAME:SPLIT takes another split of a set."""
    eval: tuple[str, ...] = ()
    """Set names or files of the eval rows; only a contest window filters them, so that their accuracy can be quoted."""
    contest_from: date | None = None
    """Rows of contests before this day are left out, e.g. 2024-08-01, of sets that have dates (LiveCodeBench)."""
    contest_before: date | None = None
    """Same for contests on this day or later."""
    holdout_rows: int = Field(default=0, ge=0)
    """Training rows kept apart as eval rows, chosen by a checksum of their text: the same rows whatever the seed."""
    mirror: str | None = None
    """Folder with copies of hub sets, as org/name/... or in the layout of the hub's cache. Nothing is fetched then."""
    prompt_template: str | None = None
    """Packaged name (math, code_stdin, code_function, code_complete, plain) or file with {problem}. None: by the row."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Training rows with a longer prompt are left out; tokens of the model's tokenizer, template and chat included."""
    min_difficulty: float | None = None
    """Training rows with a lower difficulty are left out. On the data's own scale; "3/8" is 0.375."""
    max_difficulty: float | None = None
    """Same for a higher one."""
    difficulties: tuple[str, ...] = ()
    """Only training rows with one of these difficulties, by name, in any case. Empty: all."""
    dedup: bool = True
    """Leave out training rows whose question was there before, up to case, spacing and Unicode forms."""
    contamination: Literal["remove", "refuse", "count", "off"] = "remove"
    """What happens to training rows that share `ngram_words` words in a row with an eval row. refuse: nothing starts."""
    ngram_words: int = Field(default=13, ge=2)
    """Words of an overlap that counts. Shorter finds more, and soon phrases that all problems share."""
    max_tests: int | None = Field(default=None, ge=1)
    """Tests kept of each training row, spread evenly over its list. Fewer are faster and let more wrong programs pass."""

    allow_unsafe_sandbox: bool = False
    """Run programs of code rows as plain processes where no sandbox works. They can read and write whatever you can."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError(f"data.min_difficulty = {low} is above data.max_difficulty = {high}")
        first, end = self.contest_from, self.contest_before
        if first is not None and end is not None and first >= end:
            raise ValueError(f"data.contest_from = {first} is not before data.contest_before = {end}")
        return self
