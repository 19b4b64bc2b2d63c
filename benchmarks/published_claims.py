"""A row of docs/claims.md: what a paper says, what our records say, and the verdict. Measures nothing; render_claims.py
makes the tables.

What a paper says, and where we looked, is written here by hand. What we saw, the intervals and the verdicts are computed: a
claim names records and has parts, each with an estimate and a rule (published_rules.py). (Figures in sentences of other
pages are claims.py's.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from published_rules import Estimate, Rule, Verdict, combined
from record_tables import RESULTS, record

from sparroll.rounding import rounded_down, rounded_up

RUNNER = "python recipes/claims/run.py --out runs/claims --only"
STUDY = "study, 30.8M"
TINY = "tiny-reasoner"
SHAPE = "Qwen3-1.7B's shape, random weights"
MODEL_OF_TASK = {"table-sums": STUDY, "remarks": TINY, "walks": TINY}
"""Of recipes/claims."""


def study_command(steps: int, *rows: str) -> str:
    """Trains these rows of the study again, with its schedules."""
    asked = f"--out runs/study-{steps} --engine vllm --steps {steps} --schedules-of runs/study/study.json"
    return f"python recipes/mismatch-study/study.py --model runs/study-model/folder {asked} --rows {' '.join(rows)}"


@dataclass(frozen=True)
class Part:
    """One figure that a claim's verdict rests on."""

    label: str
    estimate: Estimate | None
    """None where a run that was cut did not come to it."""
    rule: Rule
    decimals: int = 3
    unit: str = ""
    sign: bool = False
    """Whether a plus sign is shown: of changes and differences."""
    missing: str = "not run yet"
    """What is shown where there is no estimate."""

    @property
    def verdict(self) -> Verdict:
        return "undecided" if self.estimate is None else self.rule.judge(self.estimate)

    def seen(self) -> str:
        """The figure with its interval."""
        if self.estimate is None:
            return f"{self.label}: {self.missing}"
        rounded = rounded_up if self.rule.low_is_good else rounded_down
        return f"{self.label}: {rounded(self.estimate.value, self.decimals, self.sign)}{self.unit} {self.interval()}"

    def interval(self) -> str:
        if self.estimate is None or math.isinf(self.estimate.low):
            return "(no interval)"
        if self.estimate.low == self.estimate.high:
            return "(single)"
        return f"[{self._end(self.estimate.low, rounded_down)}, {self._end(self.estimate.high, rounded_up)}]"

    def _end(self, value: float, rounded: Callable[[float, int, bool], str]) -> str:
        """With more decimals where it would look like 0 and is not, because verdicts ask on which side of 0 it lies."""
        decimals = self.decimals
        while value and decimals < 6 and float(rounded(value, decimals, self.sign)) == 0:
            decimals += 1
        return rounded(value, decimals, self.sign)


@dataclass(frozen=True)
class PublishedClaim:
    """One row of the page."""

    name: str
    """Unique on the page; links and tests use it."""
    title: str
    """In a few words, for the list of verdicts."""
    says: str
    """What the paper says, with its figure."""
    model: str
    """On which model we looked, or would look."""
    records: tuple[str, ...] = ()
    """That the parts are computed from."""
    parts: Callable[[], Sequence[Part]] | None = None
    command: str = ""
    """That made the records."""
    experiment: str = ""
    """Of recipes/claims, that will settle the claim or sharpen its verdict."""
    settled: Callable[[Sequence[Any]], Sequence[Part]] | None = None
    """Parts from the results of the experiment's records, which stand beside `parts`."""
    untestable: str = ""
    """Why it cannot be tested here."""

    def __post_init__(self) -> None:
        if bool(self.experiment) != (self.settled is not None):
            raise ValueError(f"the claim {self.name} needs both an experiment and what reads its records, or neither")

    def found(self) -> Sequence[Part]:
        """Empty where records are missing."""
        return [*self.found_in_records(), *self.found_by_experiment()]

    def found_in_records(self) -> Sequence[Part]:
        """Of `records`. Empty where one of them is missing."""
        if self.parts is None:
            return ()
        missing = any(not (RESULTS / f"{name}.json").exists() for name in self.records)
        return () if missing else self.parts()

    def found_by_experiment(self) -> Sequence[Part]:
        """Empty where the experiment has not come to this claim yet."""
        if self.settled is None or not (ran := self.experiment_records()):
            return ()
        parts = self.settled([self._results(name) for name in ran])
        return parts if any(part.estimate is not None for part in parts) else ()

    def experiment_records(self) -> list[str]:
        pattern = f"claims-{self.experiment}-*.json"
        return [path.stem for path in sorted(RESULTS.glob(pattern))] if self.experiment else []

    def _results(self, name: str) -> Any:
        return self._record(name)["results"]

    def _record(self, name: str) -> Any:
        found = record(RESULTS / f"{name}.json", f"claims-{self.experiment}")
        if found["config"]["toy"]:
            raise ValueError(f"{name} was made with --toy, which shows that the code runs and nothing else")
        return found

    def verdict(self) -> Verdict:
        if self.untestable:
            return "not testable here"
        found = self.found()
        return combined([part.verdict for part in found]) if found else "not run yet"

    def row(self) -> list[str]:
        """Cells of the page's table, but for the commands."""
        found, verdict = self.found(), self.verdict()
        seen = self.untestable or "; ".join(part.seen() for part in found) or "-"
        return [f"`{self.name}`", f"**{verdict}**", self.says, seen, self.models(), self.sources()[0]]

    def models(self) -> str:
        """With those of the experiment's tasks, where it ran."""
        ran = self.experiment_records() if self.found_by_experiment() else []
        tasks = dict.fromkeys(task for name in ran for task in self._record(name)["config"]["tasks"])
        more = [MODEL_OF_TASK[task] for task in tasks if MODEL_OF_TASK[task] not in self.model]
        return "; ".join([self.model, *more])

    def sources(self) -> tuple[str, list[str]]:
        """(The records that were read and those that are missing, in words; the commands that make both.)"""
        older, ran = self.found_in_records(), self.experiment_records()
        read = bool(self.found_by_experiment())
        used = [f"`{name}`" for name in self.records] if older else []
        commands = [self.command] if self.command and (older or not self.experiment) else []
        if self.experiment:
            used += [self._in_words(name) if read else f"`{name}`: not in this verdict" for name in ran]
            used += [] if ran else [f"`claims-{self.experiment}-*`: not run yet"]
            commands.append(f"{RUNNER} {self.experiment}")
        return ", ".join(used) or "-", commands

    def _in_words(self, name: str) -> str:
        """A record of the experiment, and how much of it there is."""
        found = self._results(name)
        done, missing = len(found["cells"]), len(found["missing"])
        return f"`{name}`" + (f" ({done} of {done + missing} cells)" if missing else "")

    def rules(self) -> list[str]:
        """Cells of the table of rules; none without parts."""
        by_rule: dict[str, list[str]] = {}
        for part in self.found():
            by_rule.setdefault(part.rule.text, []).append(f"{part.label}: {part.verdict}")
        texts = [f"{text} ({'; '.join(labels)})" for text, labels in by_rule.items()]
        return [f"`{self.name}`", ". ".join(texts)] if texts else []
