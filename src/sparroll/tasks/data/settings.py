"""The settings of a task on real data, which are the fields of the configuration's section [data]."""

from __future__ import annotations

from datetime import date
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from sparroll.strict import Strict


class DataSettings(Strict):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    train: str | None = None
    """Set name or file of the training rows, for task.name = "data". NAME:SPLIT takes another split of a set."""
    eval: tuple[str, ...] = ()
    """Set names or files of the eval rows. Only a contest window filters them, so that their accuracy can be
    compared."""
    contest_from: date | None = None
    """Rows of contests before this day, e.g. 2024-08-01, are left out. For sets that have dates (LiveCodeBench)."""
    contest_before: date | None = None
    """Rows of contests on this day or later are left out."""
    holdout_rows: int = Field(default=0, ge=0)
    """How many training rows become eval rows. They are chosen by a checksum of their text, independent of the seed."""
    mirror: str | None = None
    """Folder with copies of hub sets, as org/name/... or in the layout of the hub's cache. Then nothing is
    downloaded."""
    prompt_template: str | None = None
    """Packaged name (math, code_stdin, code_function, code_complete, plain) or a file with {problem}. None: each row's
    own."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Training rows with a longer prompt are left out. Counted by the model's tokenizer, with prompt and chat
    template."""
    min_difficulty: float | None = None
    """Training rows with a lower difficulty are left out. It is on the data's own scale; "3/8" is 0.375."""
    max_difficulty: float | None = None
    """Training rows with a higher difficulty are left out."""
    difficulties: tuple[str, ...] = ()
    """Only training rows with one of these difficulties are used. Case does not matter. Empty: all rows."""
    dedup: bool = True
    """Leave out training rows with the same question as an earlier one, apart from case, spacing and Unicode form."""
    contamination: Literal["remove", "refuse", "count", "off"] = "remove"
    """What to do with training rows that share `ngram_words` consecutive words with an eval row. refuse: nothing
    starts."""
    ngram_words: int = Field(default=13, ge=2)
    """How many consecutive words count as shared. Fewer find more copies, but also phrases that many problems share."""
    max_tests: int | None = Field(default=None, ge=1)
    """At most so many tests of each training row are kept, spread evenly. Fewer are faster, but let more wrong programs
    pass."""

    test_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Time for each test of a program. None: what the set's official grader allows (LiveCodeBench 6, evalplus and TACO
    4), and 10 for your own files."""
    test_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Memory for each test of a program, in GiB. None: 4 for the published sets, and 1 for your own files. As many tests
    run at the same time as there are cores."""
    allow_unsafe_sandbox: bool = False
    """Run programs of code rows as plain processes if no sandbox works. They can then read and write whatever you
    can."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError(f"data.min_difficulty = {low} is above data.max_difficulty = {high}")
        first, end = self.contest_from, self.contest_before
        if first is not None and end is not None and first >= end:
            raise ValueError(f"data.contest_from = {first} is not before data.contest_before = {end}")
        return self
