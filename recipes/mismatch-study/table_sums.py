"""The study's task: sum the asked rows of a long table, in groups, with remarks. Arrays of token ids, many problems at
once; as a `sparroll` task its prompts are words. Nothing here runs a model.

prompt    table bado 4 7 1 0 ; kifu 1 2 9 9 ; ... find group n2 n3 : kifu bado lize ; group n1 n2 : ... ; ?
response  group n2 n3 : kifu bado lize ; n3 bado 4 7 1 0 = 4 7 1 0 bado bado ; n2 kifu 1 2 9 9 = 5 9 0 9 bado bado ; ...
          group n1 n2 : ... answer 3 0 8 2 <eos>

A group begins with the question's words for it, so that its operands stand nearby. An entry is count-down, operand, its
digits, the running total, two remarks. Each column is summed by itself, modulo 10, over all groups; the answer is the last
total. What is free: the order of the operands of a group, and the remarks, each of which is the operand that some group so
far began with. A remark's choice depends on tokens spread over the whole response, and nothing depends on it; it is one of
few, so that lists of 20 tokens hold it. What makes an answer wrong: an operand that is not asked in this group or was
already taken, a digit, a total.
"""

# B problems, R rows of the table, N names, E entries of the response, C columns, S tokens of prompt + response

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from zlib import crc32

import numpy as np

from sparroll import tasks
from sparroll.errors import UserError
from sparroll.types import Prompt

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
DIGITS = tuple("0123456789")
MARKS = ("table", "find", "group", "answer", ":", ";", "=", "?")
MOST_COUNTED = 32
COUNTS = tuple(f"n{count}" for count in range(MOST_COUNTED))
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aiou"][:28]
NAMES = tuple(first + second for first in _SYLLABLES for second in _SYLLABLES)
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *DIGITS, *MARKS, *COUNTS, *NAMES)
WORD_ID = {word: index for index, word in enumerate(VOCABULARY)}
FIRST_DIGIT, FIRST_COUNT, FIRST_NAME = WORD_ID["0"], WORD_ID["n0"], WORD_ID[NAMES[0]]

REMARKS = 2
NAME = "table_sums"


class Role(IntEnum):
    """What a response token is for."""

    FORM = 0
    """Fixed by what stands nearby: marks and count-downs."""
    OPERAND = 1
    DIGIT = 2
    """Looked up in the table."""
    TOTAL = 3
    REMARK = 4
    ANSWER = 5
    HEADER = 6
    """A group's operands, repeated from the question in its order."""


@dataclass(frozen=True)
class Shape:
    """What fixes the length of a problem, so that problems of one shape stack into an array without padding."""

    rows: int
    group_sizes: tuple[int, ...]
    """Operands of each group, in the order they are asked."""
    columns: int = 4

    def __post_init__(self) -> None:
        if (
            not self.group_sizes
            or not 0 < max(self.group_sizes) < MOST_COUNTED
            or len(self.group_sizes) >= MOST_COUNTED
        ):
            raise UserError(
                f"groups must be 1 to {MOST_COUNTED - 1} of 1 to {MOST_COUNTED - 1}, got {self.group_sizes}"
            )
        if not self.entries <= self.rows <= len(NAMES):
            raise UserError(f"rows must be {self.entries} (all operands) to {len(NAMES)} (all names), got {self.rows}")

    @property
    def entries(self) -> int:
        return sum(self.group_sizes)

    @property
    def prompt_tokens(self) -> int:
        return 1 + self.rows * (self.columns + 2) + 1 + 5 * len(self.group_sizes) + self.entries + 1

    @cached_property
    def response_tokens(self) -> int:
        return len(self.roles)

    @cached_property
    def roles(self) -> np.ndarray:
        """[response tokens] of Role, end-of-sequence included."""
        columns, form = self.columns, [Role.FORM]
        entry = [Role.FORM, Role.OPERAND, *[Role.DIGIT] * columns, Role.FORM, *[Role.TOTAL] * columns]
        entry += [*[Role.REMARK] * REMARKS, Role.FORM]
        roles: list[Role] = []
        for size in self.group_sizes:
            roles += form * 4 + [Role.HEADER] * size + form + entry * size
        return np.array(roles + form + [Role.ANSWER] * columns + form, dtype=np.uint8)

    @cached_property
    def entry_starts(self) -> np.ndarray:
        """[E] place of each entry's count-down in the response."""
        return np.flatnonzero(self.roles == Role.OPERAND) - 1

    @cached_property
    def group_of_entry(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.group_sizes)), self.group_sizes)


def _full(operands: int, entries: int = 72, rows: int = 512) -> Shape:
    return Shape(rows, (operands,) * round(entries / operands))


LEVELS: dict[int, Shape] = {
    0: Shape(8, (2, 2)),
    1: Shape(24, (3, 3, 3)),
    2: Shape(96, (4,) * 6),
    **{operands: _full(operands) for operands in (3, 4, 5, 6, 7, 8)},
    **{
        100 + entries: _full(6, entries, rows)
        for entries, rows in ((24, 656), (36, 624), (48, 600), (60, 552), (90, 488))
    },
    **{200 + entries: _full(3, entries, rows) for entries, rows in ((24, 648), (36, 616), (48, 584))},
}
"""0 to 2 are short. From 3 on a level is the operands of a group: the more, the more often a draw goes wrong. 124 to 190 are
groups of six with 24 to 90 entries in all (responses of 390 to 1,430 tokens), 224 to 248 groups of three. All but the short
ones have contexts that end between 4,300 and 4,550 tokens."""


def draw(rng: np.random.Generator, shape: Shape, count: int) -> np.ndarray:
    """[B, S] int16 ids of `count` problems with a right response each; the first `shape.prompt_tokens` are the prompt."""
    names_BR = _distinct(rng, count, len(NAMES), shape.rows) + FIRST_NAME
    digits_BRC = rng.integers(0, 10, (count, shape.rows, shape.columns))
    asked_BE = _distinct(rng, count, shape.rows, shape.entries)
    taken_BE = np.take_along_axis(asked_BE, _shuffled_in_groups(rng, shape, count), 1)
    asked_name_BE = np.take_along_axis(names_BR, asked_BE, 1)
    prompt = _prompt(shape, names_BR, digits_BRC, asked_name_BE)
    name_BE = np.take_along_axis(names_BR, taken_BE, 1)
    digits_BEC = np.take_along_axis(digits_BRC, taken_BE[:, :, None], 1)
    return np.concatenate([prompt, _response(rng, shape, asked_name_BE, name_BE, digits_BEC)], 1).astype(np.int16)


def _distinct(rng: np.random.Generator, count: int, among: int, taken: int) -> np.ndarray:
    """[count, taken] different numbers below `among` in each row, in random order."""
    return rng.random((count, among), dtype=np.float32).argsort(1)[:, :taken]


def _shuffled_in_groups(rng: np.random.Generator, shape: Shape, count: int) -> np.ndarray:
    return (rng.random((count, shape.entries)) + shape.group_of_entry).argsort(1)


def _prompt(shape: Shape, names_BR: np.ndarray, digits_BRC: np.ndarray, asked_BE: np.ndarray) -> np.ndarray:
    count, entries = len(names_BR), 0

    def same(*words: str) -> np.ndarray:
        return np.tile([WORD_ID[word] for word in words], (count, 1))

    ends = np.full((count, shape.rows, 1), WORD_ID[";"])
    table = np.concatenate([names_BR[:, :, None], digits_BRC + FIRST_DIGIT, ends], 2).reshape(count, -1)
    parts = [same("table"), table, same("find")]
    groups = len(shape.group_sizes)
    for group, size in enumerate(shape.group_sizes):
        parts += [
            same("group", f"n{groups - group}", f"n{size}", ":"),
            asked_BE[:, entries : entries + size],
            same(";"),
        ]
        entries += size
    return np.concatenate([*parts, same("?")], 1)


def _response(
    rng: np.random.Generator, shape: Shape, asked_BE: np.ndarray, name_BE: np.ndarray, digits_BEC: np.ndarray
) -> np.ndarray:
    count, entries = name_BE.shape
    total_BEC = digits_BEC.cumsum(1) % 10
    out = np.empty((count, shape.response_tokens), dtype=np.int64)
    starts_E, columns, groups = shape.entry_starts, shape.columns, len(shape.group_sizes)
    left_E = np.concatenate([np.arange(size, 0, -1) for size in shape.group_sizes])
    out[:, starts_E] = left_E + FIRST_COUNT
    out[:, starts_E + 1] = name_BE
    out[:, starts_E + 2 + columns] = WORD_ID["="]
    for column in range(columns):
        out[:, starts_E + 2 + column] = digits_BEC[:, :, column] + FIRST_DIGIT
        out[:, starts_E + 3 + columns + column] = total_BEC[:, :, column] + FIRST_DIGIT
    first_entry_G = np.cumsum([0, *shape.group_sizes[:-1]])
    for remark in range(REMARKS):
        group_BE = (rng.random((count, entries)) * (shape.group_of_entry + 1)).astype(np.int64)
        earlier_BE = first_entry_G[group_BE]
        out[:, starts_E + 3 + 2 * columns + remark] = np.take_along_axis(name_BE, earlier_BE, 1)
    out[:, starts_E + 3 + 2 * columns + REMARKS] = WORD_ID[";"]
    out[:, shape.roles == Role.HEADER] = asked_BE
    sizes_G = np.array(shape.group_sizes)
    names_at_G = starts_E[first_entry_G] - 1 - sizes_G
    out[:, names_at_G - 4] = WORD_ID["group"]
    out[:, names_at_G - 3] = np.arange(groups, 0, -1) + FIRST_COUNT
    out[:, names_at_G - 2] = sizes_G + FIRST_COUNT
    out[:, names_at_G - 1] = WORD_ID[":"]
    out[:, names_at_G + sizes_G] = WORD_ID[";"]
    out[:, -2 - columns] = WORD_ID["answer"]
    out[:, -1 - columns : -1] = total_BEC[:, -1] + FIRST_DIGIT
    out[:, -1] = WORD_ID[EOS]
    return out


def problem(split: str, level: int, seed: int, index: int, name: str = NAME) -> np.ndarray:
    """[S] the problem at one place of one stream. Streams are independent; two full tables are never alike by chance."""
    if split not in ("train", "eval"):
        raise UserError(f"unknown split {split!r}", "use 'train' or 'eval'")
    if level not in LEVELS:
        raise UserError(f"{name} has no level {level!r}", f"levels are {', '.join(map(str, LEVELS))}")
    stream = crc32(f"{split}|{level}|{seed}".encode())
    return draw(np.random.default_rng([stream, index]), LEVELS[level], 1)[0]


def words(ids: np.ndarray) -> str:
    return " ".join(VOCABULARY[index] for index in ids)


class TableSums:
    """The task of `sparroll.tasks` (see tasks/base.py)."""

    def __init__(self, name: str = NAME) -> None:
        self.name = name

    def prompts(self, split: tasks.Split, level: int, seed: int, count: int) -> list[Prompt]:
        return [self._prompt(split, level, seed, index) for index in range(count)]

    def _prompt(self, split: tasks.Split, level: int, seed: int, index: int) -> Prompt:
        ids = problem(split, level, seed, index)
        shape = LEVELS[level]
        answer = words(ids[-1 - shape.columns : -1])
        return Prompt(
            f"{self.name}/{split}/{level}/{seed}/{index}", words(ids[: shape.prompt_tokens]), answer, self.name, level
        )

    def reward(self, prompt: Prompt, response_text: str) -> float:
        """1.0 if what follows the only answer mark, up to the end, is the sum."""
        _, mark, answer = response_text.partition("answer")
        return float(bool(mark) and answer.replace(EOS, "").replace(PAD, "").split() == prompt.answer.split())


def register() -> None:
    """Make `table_sums` known to sparroll in this process; again is no mistake."""
    if NAME not in tasks.names():
        tasks.register(NAME, TableSums)
