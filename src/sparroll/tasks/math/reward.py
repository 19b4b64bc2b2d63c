r"""Whether the boxed answer of a response is the gold answer. Verdicts have a status, come in batches, and are cached.

grading/ compares the answers, the gold one first, in worker processes (pool.py).
"""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Literal

from sparroll.errors import UserError
from sparroll.tasks.math.answer import last_boxed, plain_signs
from sparroll.tasks.math.golds import gold_text
from sparroll.tasks.math.pool import Pool, Reply
from sparroll.types import Prompt

Status = Literal["right", "wrong", "no_answer", "too_long", "timeout", "crashed", "unparsable_gold"]

ANSWER_CHARS = 1000
"""Longer answers are not read: no gold answer is nearly as long, and parsers are slow on long input."""
CACHED_VERDICTS = 200_000


@dataclass(frozen=True)
class MathVerdict:
    r"""The verdict on one response.

    >>> MathVerdict("right", r"\frac{1}{2}")
    """

    status: Status
    answer: str | None
    """The content of the last box; None if there is none."""

    @property
    def reward(self) -> float:
        """1.0 for a right answer, otherwise 0.0. Raises UserError if the gold answer does not parse."""
        if self.status == "unparsable_gold":
            raise UserError(
                "the gold answer of a prompt does not parse, so no response to it has a reward",
                "drop such prompts when they are loaded: MathReward.with_parsable_gold(prompts)",
            )
        return float(self.status == "right")


class MathReward:
    """Verdicts by grading/ and math-verify, with one process per core. Each pair of gold and answer is compared once.
    Any thread may ask.

    >>> MathReward().grade("0.5", r"... so the answer is \boxed{\frac{1}{2}}.").status
    'right'
    """

    def __init__(self, pool: Pool | None = None) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("math rewards need math-verify, which is not installed", "pip install -e '.[math]'")
        self.pool = shared_pool() if pool is None else pool
        self.counts: Counter[str] = Counter()
        """Verdicts given so far, by status."""
        self._cache: OrderedDict[bytes, Status] = OrderedDict()
        self._parsed_gold: set[bytes] = set()
        self._lock = threading.Lock()

    def grade(self, gold: Any, response_text: str) -> MathVerdict:
        """The verdict on one response. The gold answer may be text or a number of any type (golds.py)."""
        return self.grade_all([(gold, response_text)])[0]

    def grade_all(self, pairs: Sequence[tuple[Any, str]]) -> list[MathVerdict]:
        """A verdict for each (gold, response text), in order; all cores work on them."""
        answers = [last_boxed(response) for _, response in pairs]
        return self._record(answers, [_gold(gold) for gold, _ in pairs])

    def grade_answers(self, pairs: Sequence[tuple[Any, str]]) -> list[MathVerdict]:
        """The same for pairs of gold and answer, where the answer is given alone and without a box."""
        return self._record([answer for _, answer in pairs], [_gold(gold) for gold, _ in pairs])

    def unparsable_gold(self, golds: Sequence[Any]) -> list[bool]:
        """Whether each gold answer fails to parse, so that nothing can be compared with it."""
        return [status == "unparsable_gold" for status in self._statuses([(_gold(gold), None) for gold in golds])]

    def with_parsable_gold(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], int]:
        """The prompts whose gold answer parses, and how many were dropped."""
        bad = self.unparsable_gold([prompt.answer for prompt in prompts])
        kept = [prompt for prompt, dropped in zip(prompts, bad, strict=True) if not dropped]
        return kept, len(prompts) - len(kept)

    def _record(self, answers: list[str | None], golds: list[str]) -> list[MathVerdict]:
        asked = [(gold, answer) for gold, answer in zip(golds, answers, strict=True) if _readable(answer)]
        found = iter(self._statuses(asked))
        verdicts = []
        for answer in answers:
            if answer is None or not answer.strip():
                verdicts.append(MathVerdict("no_answer", None))
            elif not _readable(answer):
                verdicts.append(MathVerdict("too_long", answer[:ANSWER_CHARS]))
            else:
                verdicts.append(MathVerdict(next(found), answer))
        self.counts.update(verdict.status for verdict in verdicts)
        return verdicts

    def _statuses(self, pairs: Sequence[tuple[str, str | None]]) -> list[Status]:
        """The status of each (gold, answer). If the answer is None, it is the status of the gold answer: "right" if it
        parses."""
        plain = [(plain_signs(gold), None if answer is None else plain_signs(answer)) for gold, answer in pairs]
        keys = [_key(*pair) for pair in plain]
        known: dict[bytes, Status] = {}
        with self._lock:
            for key in keys:
                if key in self._cache:
                    self._cache.move_to_end(key)
                    known[key] = self._cache[key]
        for key, pair in zip(keys, plain, strict=True):
            if key not in known and (status := _without_worker(pair[0])) is not None:
                known[key] = status
        unknown = {key: pair for key, pair in zip(keys, plain, strict=True) if key not in known}
        replies = self.pool.ask([{"gold": gold, "answer": answer} for gold, answer in unknown.values()])
        for key, (gold, _), reply in zip(unknown, unknown.values(), replies, strict=True):
            known[key] = self._status(gold, reply)
        with self._lock:
            for key in unknown:
                # The reason of a crash may lie outside, so the question may be asked again.
                if known[key] != "crashed":
                    self._cache[key] = known[key]
            while len(self._cache) > CACHED_VERDICTS:
                self._cache.popitem(last=False)
        return [known[key] for key in keys]

    def _status(self, gold: str, reply: Reply) -> Status:
        status: Status
        gold_key = _key(gold, None)
        if reply.end == "answered":
            status = _STATUS[reply.lines[-1].removeprefix("= ")]
        elif "gold" in reply.lines:
            status = reply.end
        else:
            status = "unparsable_gold"
        if "gold" in reply.lines:
            self._parsed_gold.add(gold_key)
        # If the gold answer has ever parsed before, it is not to blame.
        elif gold_key in self._parsed_gold:
            return "timeout" if reply.end == "timeout" else "crashed"
        return status


@cache
def shared_pool() -> Pool:
    """The pool that all math rewards of this process share."""
    return Pool()


_STATUS: dict[str, Status] = {
    "right": "right",
    "wrong": "wrong",
    "timeout": "timeout",
    "unparsable_gold": "unparsable_gold",
}


def _gold(value: Any) -> str:
    """A gold answer as text; empty text, which does not parse, for what is no answer."""
    return gold_text(value) or ""


def _without_worker(gold: str) -> Status | None:
    """The status if nobody has to read the answer, because the gold one is empty or too long; otherwise None."""
    return "unparsable_gold" if not gold or len(gold) > ANSWER_CHARS else None


def _readable(answer: str | None) -> bool:
    return answer is not None and bool(answer.strip()) and len(answer) <= ANSWER_CHARS


def _key(gold: str, answer: str | None) -> bytes:
    joined = gold if answer is None else f"{len(gold)}\0{gold}{answer}"
    return blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()
