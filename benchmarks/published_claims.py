"""A row of docs/claims.md: what a paper says, what our records say, and the verdict. Measures nothing; render_claims.py
makes the tables.

What a paper says, and where we looked, is written here by hand. What we saw, the intervals and the verdicts are computed: a
claim names records and has parts, each with an estimate and a rule (published_rules.py). (Figures in sentences of other
pages are claims.py's.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from published_rules import Estimate, Rule, Verdict, combined
from record_tables import RESULTS

from sparroll import records
from sparroll.rounding import rounded_down, rounded_up

RUNNER = "python recipes/claims/run.py --out runs/claims --only"
STUDY = "study, 30.8M"
TINY = "tiny-reasoner"
SHAPE = "Qwen3-1.7B's shape, random weights"


def study_command(steps: int, *rows: str) -> str:
    """Trains these rows of the study again, with its schedules."""
    asked = f"--out runs/study-{steps} --engine vllm --steps {steps} --schedules-of runs/study/study.json"
    return f"python recipes/mismatch-study/study.py --model runs/study-model/folder {asked} --rows {' '.join(rows)}"


@dataclass(frozen=True)
class Part:
    """One figure that a claim's verdict rests on."""

    label: str
    estimate: Estimate
    rule: Rule
    decimals: int = 3
    unit: str = ""
    sign: bool = False
    """Whether a plus sign is shown: of changes and differences."""

    @property
    def verdict(self) -> Verdict:
        return self.rule.judge(self.estimate)

    def figure(self) -> str:
        return f"{self.label}: {rounded_down(self.estimate.value, self.decimals, self.sign)}{self.unit}"

    def interval(self) -> str:
        if not self.estimate.repeated:
            return "(single)"
        low = rounded_down(self.estimate.low, self.decimals, self.sign)
        high = rounded_up(self.estimate.high, self.decimals, self.sign)
        return f"[{low}, {high}]"


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
    """Parts from the results of the experiment's records, which take the place of `parts` once there are any."""
    untestable: str = ""
    """Why it cannot be tested here."""

    def found(self) -> Sequence[Part]:
        """Empty where a record is missing."""
        if settled := self.found_by_experiment():
            return settled
        if self.parts is None:
            if self.settled is None and (waiting := self.experiment_records()):
                raise ValueError(f"{waiting[0]} is there, but the claim {self.name} has no parts that read it")
            return ()
        missing = any(not (RESULTS / f"{name}.json").exists() for name in self.records)
        return () if missing else self.parts()

    def found_by_experiment(self) -> Sequence[Part]:
        """Empty where the experiment has not come to this claim yet."""
        ran = self.experiment_records()
        return self.settled([self._results(name) for name in ran]) if self.settled is not None and ran else ()

    def experiment_records(self) -> list[str]:
        pattern = f"claims-{self.experiment}-*.json"
        return [path.stem for path in sorted(RESULTS.glob(pattern))] if self.experiment else []

    def _results(self, name: str) -> Any:
        record = records.read(RESULTS / f"{name}.json", f"claims-{self.experiment}")
        if record["config"]["toy"]:
            raise ValueError(f"{name} was made with --toy, which shows that the code runs and nothing else")
        return record["results"]

    def verdict(self) -> Verdict:
        if self.untestable:
            return "not testable here"
        found = self.found()
        return combined([part.verdict for part in found]) if found else "not run yet"

    def row(self) -> list[str]:
        """Cells of the page's table, but for the commands."""
        found, verdict = self.found(), self.verdict()
        seen = self.untestable or "; ".join(f"{part.figure()} {part.interval()}" for part in found) or "-"
        return [f"`{self.name}`", f"**{verdict}**", self.says, seen, self.model, self.sources()[0]]

    def sources(self) -> tuple[str, list[str]]:
        """(The records that were read and those that are missing, in words; the commands that make both.)"""
        ran = self.experiment_records()
        if self.found_by_experiment():
            return ", ".join(f"`{name}`" for name in ran), [f"{RUNNER} {self.experiment}"]
        found = bool(self.found())
        used = [f"`{name}`" for name in self.records] if found else []
        commands = [self.command] if self.command and (found or not self.experiment) else []
        if self.experiment:
            used += [f"`{name}`: not in this verdict" for name in ran]
            used += [] if ran else [f"`claims-{self.experiment}-*`: not run yet"]
            commands.append(f"{RUNNER} {self.experiment}")
        return ", ".join(used) or "-", commands

    def rules(self) -> list[str]:
        """Cells of the table of rules; none without parts."""
        by_rule: dict[str, list[str]] = {}
        for part in self.found():
            by_rule.setdefault(part.rule.text, []).append(f"{part.label}: {part.verdict}")
        texts = [f"{text} ({'; '.join(labels)})" for text, labels in by_rule.items()]
        return [f"`{self.name}`", ". ".join(texts)] if texts else []
