"""The four kinds of synthetic problem: how each is drawn, and a correct chain of thought for it. Words only; no seeds, no splits.

Every kind makes its reader look far back, and each reference chain leaves some order free (which ready variable, which item of a
bucket, which operand, which earlier result to check). The reference takes a free choice at random, so a policy trained on it is
not one-hot.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
ANSWER = "answer"
KINDS = ("chain", "walk", "sort", "add")
MARKS = (";", ":", "=", "+", "-", ">", ",", "?", "find", "check", ANSWER, "start", "steps", "sum", "tens", "col", "put", "carry")
DIGITS = tuple("0123456789")
NAMES = tuple(consonant + vowel for consonant in "bcdfghjklmnpqrstvwyz" for vowel in "aeiou")
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *DIGITS, *KINDS, *MARKS, *NAMES)

PAIRS = tuple((str(n // 10), str(n % 10)) for n in range(100))
TRIPLES = tuple((str(n // 100), str(n // 10 % 10), str(n % 10)) for n in range(1000))


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
    """Resolve variables from sums and differences mod 100, in any order that respects what depends on what.

    prompt    chain ba 4 7 ; ki = ba - du ; du 1 2 ; find ki ?
    response  ki = ba - du : ba 4 7 - du 1 2 = ki 3 5 ; answer 3 5 <eos>
    Every variable is needed for the one that is asked. After a step, sometimes: check du 1 2 ;
    """

    constants = (3, 4, 5, 6, 7, 8, 10, 12, 14)
    formulas = (5, 11, 15, 20, 27, 36, 48, 64, 84)
    check_share = 0.3

    def draw(self, rng: Random, level: int) -> Problem:
        constants, formulas = self.constants[level], self.formulas[level]
        order = rng.sample(NAMES, constants + formulas)
        value = {name: rng.randrange(100) for name in order[:constants]}
        merges = set(rng.sample(range(formulas), constants - 1))
        unused, definition = order[:constants], {}
        for step, name in enumerate(order[constants:]):
            left = unused.pop(rng.randrange(len(unused)))
            merge = step in merges
            right = unused.pop(rng.randrange(len(unused))) if merge else rng.choice([n for n in value if n != left])
            if rng.random() < 0.5:
                left, right = right, left
            sign = rng.choice("+-")
            definition[name] = (left, sign, right)
            value[name] = (value[left] + (value[right] if sign == "+" else -value[right])) % 100
            unused.append(name)
        target = order[-1]
        statements = [(name, *PAIRS[value[name]], ";") for name in order[:constants]]
        statements += [(name, "=", *definition[name], ";") for name in order[constants:]]
        rng.shuffle(statements)
        words = ("chain", *(word for statement in statements for word in statement), "find", target, "?")
        return Problem(words, PAIRS[value[target]], (definition, value, target))

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        definition, value, target = facts
        known = [name for name in value if name not in definition]
        resolved, waiting, words = set(known), dict(definition), []
        while True:
            ready = [n for n, (left, _, right) in waiting.items() if left in resolved and right in resolved]
            name = rng.choice(ready)
            left, sign, right = waiting.pop(name)
            words += (name, "=", left, sign, right, ":", left, *PAIRS[value[left]], sign, right, *PAIRS[value[right]])
            words += ("=", name, *PAIRS[value[name]], ";")
            if name == target:
                return words
            resolved.add(name)
            known.append(name)
            if rng.random() < self.check_share:
                checked = rng.choice(known)
                words += ("check", checked, *PAIRS[value[checked]], ";")


class Walk:
    """Follow edges from a start for a number of steps; the answer is the sum of their costs mod 100.

    prompt    walk du > ba 1 2 ; ba > ki 4 7 ; start ba steps 0 2 ?
    response  0 1 ba > ki 4 7 sum 4 7 ; 0 2 ki > ... ; answer ...
    After a step, sometimes, an edge already walked: check ba > ki 4 7 ;
    """

    steps = (7, 16, 22, 30, 40, 53, 69, 82, 95)
    spare_share = 0.25
    check_share = 0.4

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
        words, total = [], 0
        for step, (here, there, cost) in enumerate(edges, start=1):
            total = (total + cost) % 100
            words += (*PAIRS[step], here, ">", there, *PAIRS[cost], "sum", *PAIRS[total], ";")
            if step < len(edges) and rng.random() < self.check_share:
                here, there, cost = edges[rng.randrange(step)]
                words += ("check", here, ">", there, *PAIRS[cost], ";")
        return words


class Sort:
    """Order named numbers by buckets of tens; the answer is the name at the asked rank.

    prompt    sort ba 4 7 ; ki 4 2 ; du 1 2 ; find 0 2 ?
    response  tens 4 : ki 4 2 , ba 4 7 , ; tens 1 : du 1 2 , ; ... 0 1 du 1 2 ; 0 2 ki 4 2 ; 0 3 ba 4 7 ; answer ki <eos>
    The ten buckets and the items of a bucket come in any order. Between ranked items, sometimes: check ba 4 7 ;
    """

    items = (6, 15, 22, 30, 40, 54, 70, 90, 99)
    check_share = 0.3

    def draw(self, rng: Random, level: int) -> Problem:
        items = self.items[level]
        listed = list(zip(rng.sample(NAMES, items), rng.sample(range(100), items), strict=True))
        rank = rng.randrange(items // 2, items) + 1
        ranked = sorted(listed, key=lambda item: item[1])
        words = ("sort", *(w for name, n in listed for w in (name, *PAIRS[n], ";")), "find", *PAIRS[rank % 100], "?")
        return Problem(words, (ranked[rank - 1][0],), (ranked,))

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        (ranked,) = facts
        words: list[str] = []
        for tens in rng.sample(range(10), 10):
            bucket = [(name, n) for name, n in ranked if n // 10 == tens]
            rng.shuffle(bucket)
            words += ("tens", str(tens), ":", *(w for name, n in bucket for w in (name, *PAIRS[n], ",")), ";")
        for rank, (name, n) in enumerate(ranked, start=1):
            words += (*PAIRS[rank], name, *PAIRS[n], ";")
            if rank < len(ranked) and rng.random() < self.check_share:
                checked, n = ranked[rng.randrange(rank)]
                words += ("check", checked, *PAIRS[n], ";")
        return words


class Add:
    """Sum named numbers column by column, the rightmost column first; the answer is the digits of the sum.

    prompt    add ba 4 7 ; ki 1 2 ; du 9 9 ; ?
    response  col 0 : ki 2 0 0 2 ; ba 7 0 0 9 ; du 9 0 1 8 ; put 8 carry 0 1 ; col 1 : ... ; answer 1 5 8 <eos>
    Each operand enters a column as name, digit, running sum; in any order. Leading zeros of the answer are dropped.
    """

    operands = (3, 5, 7, 8, 11, 14, 17, 20, 24)
    columns = (3, 5, 5, 6, 6, 7, 8, 9, 10)

    def draw(self, rng: Random, level: int) -> Problem:
        operands, columns = self.operands[level], self.columns[level]
        rows = [(name, [rng.randrange(10) for _ in range(columns)]) for name in rng.sample(NAMES, operands)]
        total = sum(int("".join(map(str, digits))) for _, digits in rows)
        words = ("add", *(w for name, digits in rows for w in (name, *map(str, digits), ";")), "?")
        return Problem(words, tuple(str(total)), (rows, columns))

    def reference(self, facts: tuple, rng: Random) -> list[str]:
        rows, columns = facts
        words, running = [], 0
        for column in range(columns):
            words += ("col", str(column), ":")
            for name, digits in rng.sample(rows, len(rows)):
                digit = digits[columns - 1 - column]
                running += digit
                words += (name, str(digit), *TRIPLES[running], ";")
            put, running = running % 10, running // 10
            words += ("put", str(put), "carry", *PAIRS[running], ";")
        return words


KIND: dict[str, Kind] = {"chain": Chain(), "walk": Walk(), "sort": Sort(), "add": Add()}
