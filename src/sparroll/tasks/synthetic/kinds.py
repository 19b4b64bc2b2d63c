"""The kinds of synthetic problem: how each is drawn, and a correct chain of thought for it. Only words; task.py makes
the splits.

The packaged model was trained on four kinds (recipes/tiny-reasoner) and learned two of them, walk and add. Only these
are tasks. chain and sort stay here because they are half of that model's training data and words of its vocabulary.

Every kind needs tokens from far back in the context. Each reference chain leaves some choices open: which variable
comes next, which item of a bucket, which operand, which earlier result to check. The reference chooses at random, so
that a policy that is trained on it keeps some entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
ANSWER = "answer"
KINDS = ("chain", "walk", "sort", "add")
"""Kinds of the packaged model's training data."""
TASK_KINDS = ("walk", "add")
"""Kinds that the packaged model can solve, which are tasks."""
MARKS = (*";:=+->,?", "find", "check", ANSWER, "start", "steps", "sum", "tens", "col", "put", "carry")
DIGITS = tuple("0123456789")
NAMES = tuple(consonant + vowel for consonant in "bcdfghjklmnpqrstvwyz" for vowel in "aeiou")
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *DIGITS, *KINDS, *MARKS, *NAMES)

PAIRS = tuple((str(n // 10), str(n % 10)) for n in range(100))
TRIPLES = tuple((str(n // 100), str(n // 10 % 10), str(n % 10)) for n in range(1000))

CHECK_SHARE = (0.0, 0.6)
"""Range from which each response draws the share of its steps after which it checks an earlier result."""


@dataclass(frozen=True)
class Problem:
    """A drawn problem. `facts` is what its kind needs to write the reference chain."""

    words: tuple[str, ...]
    answer: tuple[str, ...]
    facts: tuple


class Kind(Protocol):
    def draw(self, rng: Random, level: int) -> Problem: ...

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        """Words of a correct chain of thought, up to but not including the answer mark."""
        ...


class Chain:
    """Follow threads of sums and differences mod 100 to their ends; the answer is the values of the ends.

    prompt    chain du > li - ba ; ba 4 7 ; ki > du + ba ; ki 1 2 ; start ki find li ?
    response  ki > du + ba : ki 1 2 + ba 4 7 = du 5 9 ; du > li - ba : du 5 9 - ba 4 7 = li 1 2 ; answer 1 2 <eos>
    "ki > du + ba" leads from ki to du by adding ba.
    A step takes a variable whose value is known, and writes the one formula that continues from it. Any thread may be
    the next. Some steps are followed by a check: check ba 4 7 ;
    """

    threads = (2, 3, 3, 4, 4, 5, 6, 7, 8)
    constants = (4, 5, 6, 7, 8, 9, 10, 11, 12)
    formulas = (5, 11, 14, 19, 25, 34, 46, 62, 80)

    def draw(self, rng: Random, level: int) -> Problem:
        count, threads = self.constants[level], self.threads[level]
        order = rng.sample(NAMES, count + self.formulas[level])
        constants, variables = order[:count], order[count:]
        value = {name: rng.randrange(100) for name in constants}
        starts, step_after = constants[:threads], {}
        ends = list(starts)
        for index, name in enumerate(variables):
            thread = index if index < threads else rng.randrange(threads)
            left, sign, right = ends[thread], rng.choice("+-"), rng.choice(constants)
            step_after[left] = (name, sign, right)
            value[name] = (value[left] + (value[right] if sign == "+" else -value[right])) % 100
            ends[thread] = name
        statements: list[tuple[str, ...]] = [(name, *PAIRS[value[name]], ";") for name in constants]
        statements += [(left, ">", name, sign, right, ";") for left, (name, sign, right) in step_after.items()]
        rng.shuffle(statements)
        words = (word for statement in statements for word in statement)
        question = ("start", *rng.sample(starts, threads), "find", *ends, "?")
        facts = (step_after, value, constants, starts)
        answer = tuple(digit for name in ends for digit in PAIRS[value[name]])
        return Problem(("chain", *words, *question), answer, facts)

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        step_after, value, constants, starts = facts
        check_share = rng.uniform(*CHECK_SHARE)
        known, open_ends = list(constants), list(starts)
        words: list[str] = []
        while open_ends:
            left = open_ends.pop(rng.randrange(len(open_ends)))
            name, sign, right = step_after[left]
            words += (left, ">", name, sign, right, ":", left, *PAIRS[value[left]])
            words += (sign, right, *PAIRS[value[right]], "=", name, *PAIRS[value[name]], ";")
            known.append(name)
            if name in step_after:
                open_ends.append(name)
            if rng.random() < check_share:
                checked = rng.choice(known)
                words += ("check", checked, *PAIRS[value[checked]], ";")
        return words


class Walk:
    """Follow edges from a start for a number of steps; the answer is the sum of their costs mod 100.

    prompt    walk du > ba 1 2 ; ba > ki 4 7 ; start ba steps 0 2 ?
    response  0 1 ba > ki 4 7 sum 4 7 ; 0 2 ki > ... ; answer ...
    Some steps are followed by a check of an earlier edge: check ba > ki 4 7 ;
    """

    steps = (7, 16, 23, 30, 40, 54, 70, 85, 95)
    spare_share = 0.25

    def draw(self, rng: Random, level: int) -> Problem:
        steps = self.steps[level]
        order = rng.sample(NAMES, min(len(NAMES), steps + 1 + int(steps * self.spare_share)))
        edges = [(order[i], order[i + 1], rng.randrange(100)) for i in range(steps)]
        spare = [(name, rng.choice(order), rng.randrange(100)) for name in order[steps:]]
        listed = edges + spare
        rng.shuffle(listed)
        statements = [(here, ">", there, *PAIRS[cost], ";") for here, there, cost in listed]
        words = ("walk", *(w for s in statements for w in s), "start", order[0], "steps", *PAIRS[steps], "?")
        return Problem(words, PAIRS[sum(cost for _, _, cost in edges) % 100], (edges,))

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        (edges,) = facts
        check_share = rng.uniform(*CHECK_SHARE)
        words: list[str] = []
        total = 0
        for step, (here, there, cost) in enumerate(edges, start=1):
            total = (total + cost) % 100
            words += (*PAIRS[step], here, ">", there, *PAIRS[cost], "sum", *PAIRS[total], ";")
            if step < len(edges) and rng.random() < check_share:
                here, there, cost = edges[rng.randrange(step)]
                words += ("check", here, ">", there, *PAIRS[cost], ";")
        return words


class Sort:
    """Order named numbers by buckets of tens; the answer is the rank of the asked one.

    prompt    sort ba 4 7 ; ki 4 2 ; du 1 2 ; find ki ?
    response  tens 4 : ki 4 2 , ba 4 7 , ; tens 1 : du 1 2 , ; tens 0 : ; ... du 1 2 > 0 1 ; ki 4 2 > 0 2 ;
              ba 4 7 > 0 3 ; answer 0 2 <eos>
    The ten buckets and the items of a bucket come in any order. Some ranked items are followed by a check: check du 1 2
    ;
    """

    items = (6, 15, 22, 30, 40, 56, 74, 88, 99)

    def draw(self, rng: Random, level: int) -> Problem:
        items = self.items[level]
        listed = list(zip(rng.sample(NAMES, items), rng.sample(range(100), items), strict=True))
        ranked = sorted(listed, key=lambda item: item[1])
        rank = rng.randint(1, items)
        words = ("sort", *(w for name, n in listed for w in (name, *PAIRS[n], ";")), "find", ranked[rank - 1][0], "?")
        return Problem(words, PAIRS[rank], (ranked,))

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        (ranked,) = facts
        check_share = rng.uniform(*CHECK_SHARE)
        words: list[str] = []
        for tens in rng.sample(range(10), 10):
            bucket = [(name, n) for name, n in ranked if n // 10 == tens]
            rng.shuffle(bucket)
            words += ("tens", str(tens), ":", *(w for name, n in bucket for w in (name, *PAIRS[n], ",")), ";")
        for rank, (name, n) in enumerate(ranked, start=1):
            words += (name, *PAIRS[n], ">", *PAIRS[rank], ";")
            if rank < len(ranked) and rng.random() < check_share:
                checked, n = ranked[rng.randrange(rank)]
                words += ("check", checked, *PAIRS[n], ";")
        return words


class Add:
    """Add up some of many named numbers, column by column from the right; the answer is the digits of the sum.

    prompt    add ba 4 7 ; ki 1 2 ; du 9 9 ; li 5 0 ; find 0 2 : du ba ?
    response  col 0 : 0 2 ba 7 0 0 7 li ; 0 1 du 9 0 1 6 ba ; put 6 carry 0 1 ; col 1 : ... ; answer 1 4 6 <eos>
    An operand is written in a column as count-down, name, digit, running sum and remark; operands come in any order.
    The count-down shows where a column ends without looking far back. A remark is any name of the prompt; no name is
    used again before each has been used. So the choice of a remark depends on much of the context, and nothing depends
    on the remark. Leading zeros of the answer are dropped.
    """

    operands = (3, 4, 6, 7, 9, 11, 13, 15, 18)
    columns = (3, 5, 5, 6, 6, 7, 8, 9, 10)

    def draw(self, rng: Random, level: int) -> Problem:
        operands, columns = self.operands[level], self.columns[level]
        listed = [(name, rng.choices(range(10), k=columns)) for name in rng.sample(NAMES, 2 * operands)]
        asked = rng.sample(listed, operands)
        total = sum(int("".join(map(str, digits))) for _, digits in asked)
        rows = (word for name, digits in listed for word in (name, *map(str, digits), ";"))
        question = ("find", *PAIRS[operands], ":", *(name for name, _ in asked), "?")
        return Problem(("add", *rows, *question), tuple(str(total)), ([name for name, _ in listed], asked, columns))

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        listed, asked, columns = facts
        words: list[str] = []
        remarks: list[str] = []
        running = 0
        for column in range(columns):
            words += ("col", str(column), ":")
            for left, (name, digits) in zip(range(len(asked), 0, -1), rng.sample(asked, len(asked)), strict=True):
                digit = digits[columns - 1 - column]
                running += digit
                remarks = remarks or rng.sample(listed, len(listed))
                words += (*PAIRS[left], name, str(digit), *TRIPLES[running], remarks.pop(), ";")
            put, running = running % 10, running // 10
            words += ("put", str(put), "carry", *PAIRS[running], ";")
        return words


KIND: dict[str, Kind] = {"chain": Chain(), "walk": Walk(), "sort": Sort(), "add": Add()}
