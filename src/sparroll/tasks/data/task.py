"""A task on real rows: a finite number of prompts in an order that the seed determines. The rewards judge responses."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sparroll.errors import UserError
from sparroll.tasks.base import Split
from sparroll.tasks.data.catalog import named
from sparroll.tasks.data.contamination import Overlap, overlaps
from sparroll.tasks.data.load import Loaded, counted, load
from sparroll.tasks.data.rewards import RowReward, limits_for, reward_for
from sparroll.tasks.data.rows import Row
from sparroll.tasks.data.select import by_difficulty, held_out, in_window, once_each
from sparroll.tasks.data.settings import DataSettings
from sparroll.tasks.data.templates import filled
from sparroll.tasks.verdicts import Verdict
from sparroll.types import Prompt

_JUDGEABLE = "math rows need an answer that can be read as one, a number or an expression; code rows need tests"


class DataTask:
    """The rows of at most one training source and any number of eval sources.

    The order of prompts depends only on the rows and the seed. Training rows are shuffled once by the seed. Eval rows
    stay in the order of their files, source after source. `level` has no meaning here.
    """

    def __init__(self, name: str, settings: DataSettings, rewards: dict[str, RowReward] | None = None):
        """Loads every row. rewards: by a row's kind, instead of the packaged ones. Raises UserError for the reasons
        that `load` has, if the filters leave no rows, and if rows are contaminated and the settings refuse that."""
        self.name = name
        self.settings = settings
        self.removed: Counter[str] = Counter()
        """How many rows were left out, by reason: training rows by the filters, and any row whose answer no reward can
        read."""
        self.overlaps: list[Overlap] = []
        self.sources: list[Loaded] = []
        self.dated = False
        """Whether any row has a contest date, so that a contest window has an effect."""
        self._rewards = dict(rewards or {})
        train = self._train_rows(settings.train) if settings.train is not None else []
        evaluation = [row for source in settings.eval for row in self._read(source, "eval").rows]
        if settings.holdout_rows and not train:
            raise UserError("data.holdout_rows needs data.train")
        train, held = held_out(train, settings.holdout_rows)
        evaluation += held
        train = self._uncontaminated(train, evaluation)
        for kind in sorted({row.kind for row in [*train, *evaluation]} - self._rewards.keys()):
            self._rewards[kind] = reward_for(kind, settings)
        train, evaluation = self._judgeable(train, ""), self._judgeable(evaluation, " (eval)")
        self._check_left(train)
        self._rows: dict[Split, list[Row]] = {
            "train": [filled(row, settings.prompt_template) for row in train],
            "eval": [filled(row, settings.prompt_template) for row in evaluation],
        }
        self._by_id = {row.row_id: row for rows in self._rows.values() for row in rows}
        if len(self._by_id) < sum(map(len, self._rows.values())):
            twice = next(iter(Counter(row.row_id for rows in self._rows.values() for row in rows).most_common(1)))[0]
            raise UserError(f"the row {twice} is there twice", "name each source once, and give files different names")

    def prompts(self, split: Split, level: int, seed: int, count: int) -> list[Prompt]:
        """The first `count` prompts of the split; fewer if the data has fewer."""
        rows = self._rows[split]
        if not rows:
            field = "data.train" if split == "train" else "data.eval or data.holdout_rows"
            if self.removed and (split == "eval" and self.settings.eval):
                raise UserError(
                    f"the task {self.name!r} has no eval rows left; left out: {counted(self.removed)}",
                    f"{_JUDGEABLE}; `sparroll data show` shows the rows, and `sparroll rollout --prompts` samples without a "
                    "judge",
                )
            raise UserError(f"the task {self.name!r} has no {split} rows", f"set {field}")
        if split == "train":
            rows = list(rows)
            random.Random(f"data/{seed}").shuffle(rows)
        return [self._prompt(row) for row in rows[:count]]

    @property
    def eval_count(self) -> int:
        """The number of eval rows. An evaluation takes all of them if it asks for no number."""
        return len(self._rows["eval"])

    @property
    def gives_answers(self) -> bool:
        """Whether responses can vote on an answer."""
        return all(reward.gives_answers for reward in self._rewards.values())

    @property
    def answer_form(self) -> str | None:
        """What the rewards of the rows read as the answer; None if not all of them say so."""
        forms = [getattr(reward, "answer_form", None) for reward in self._rewards.values()]
        return " or ".join(sorted({form for form in forms if form})) if forms and all(forms) else None

    def reward(self, prompt: Prompt, response_text: str) -> float:
        """The reward of one response. Raises UserError if it cannot be judged; `verdicts` reports that without an
        error."""
        (verdict,) = self.verdicts([prompt], [response_text])
        if verdict.reward is None:
            raise UserError(f"no reward for a response to {prompt.prompt_id}: {verdict.status}", "use verdicts(...)")
        return verdict.reward

    def verdicts(self, prompts: Sequence[Prompt], response_texts: Sequence[str]) -> list[Verdict]:
        """A verdict for each response to the prompt at the same place. Rows of one kind are judged together."""
        rows = [self.row(prompt) for prompt in prompts]
        found: dict[int, Verdict] = {}
        for kind in dict.fromkeys(row.kind for row in rows):
            places = [place for place, row in enumerate(rows) if row.kind == kind]
            texts = [response_texts[place] for place in places]
            found |= zip(places, self._rewards[kind].judge([rows[place] for place in places], texts), strict=True)
        return [found[place] for place in range(len(rows))]

    def pooled(self, prompts: Sequence[Prompt], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The verdicts with one string for all answers to a prompt that mean the same, for a vote."""
        rows = [self.row(prompt) for prompt in prompts]
        found: dict[int, Verdict] = {}
        for kind in dict.fromkeys(row.kind for row in rows):
            places = [place for place, row in enumerate(rows) if row.kind == kind]
            mine = [rows[place] for place in places], [verdicts[place] for place in places]
            found |= zip(places, self._rewards[kind].pooled(*mine), strict=True)
        return [found[place] for place in range(len(rows))]

    def row(self, prompt: Prompt) -> Row:
        """The row behind a prompt. Raises UserError for prompts of another task."""
        if prompt.prompt_id not in self._by_id:
            raise UserError(f"the prompt {prompt.prompt_id!r} does not belong to the task {self.name!r}")
        return self._by_id[prompt.prompt_id]

    def limit_prompt_tokens(self, tokens: Callable[[Sequence[Prompt]], list[int]]) -> None:
        """Leave out training rows longer than `max_prompt_tokens`. tokens: returns the lengths of prompts as the model
        sees them."""
        most, rows = self.settings.max_prompt_tokens, self._rows["train"]
        if most is None or not rows:
            return
        lengths = tokens([self._prompt(row) for row in rows])
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= most]
        if len(kept) < len(rows):
            self.removed[f"longer than {most:,} tokens"] += len(rows) - len(kept)
        self._check_left(kept)
        self._rows["train"] = kept

    def limits_of_tests(self) -> list[dict[str, float]]:
        """What programs may use for one test, as plain data; one entry for each grader. Empty if no row has tests."""
        rows = [row for rows in self._rows.values() for row in rows if row.tests is not None]
        found = {limits_for(row, self.settings) for row in rows}
        table = [{"seconds": each.wall_seconds, "memory_gib": each.memory_bytes / 2**30} for each in found]
        return sorted(table, key=lambda each: sorted(each.items()))

    def fingerprint(self) -> str:
        """A digest of all rows that are left, in order. A run cannot be resumed on data with another fingerprint."""
        digest = hashlib.sha256()
        for split in ("train", "eval"):
            for row in self._rows[split]:
                packed = b"" if row.tests is None else row.tests.packed + (row.tests.unopened or "").encode()
                for part in (split, row.row_id, repr(row.question), row.answer):
                    digest.update(part.encode() + b"\0")
                digest.update(hashlib.sha256(packed).digest())
        return digest.hexdigest()

    def left_out(self) -> str:
        """How many rows were left out and why, in a sentence; empty where all are used."""
        reasons = sum((each.skipped for each in self.sources), self.removed.copy())
        if not reasons:
            return ""
        left, used = reasons.total(), sum(map(len, self._rows.values()))
        return f"{self.name}: {left:,} of {left + used:,} rows are not used: {counted(reasons)}"

    def report(self) -> dict[str, Any]:
        """What was read, left out and kept, for a record."""
        return {
            "sources": {each.source: {"rows": len(each.rows), "skipped": dict(each.skipped)} for each in self.sources},
            "removed": dict(self.removed),
            "contaminated": len(self.overlaps),
            "train_rows": len(self._rows["train"]),
            "eval_rows": len(self._rows["eval"]),
            "test_limits": self.limits_of_tests(),
            "fingerprint": self.fingerprint(),
        }

    def _read(self, source: str, role: Split) -> Loaded:
        most = self.settings.max_tests if role == "train" else None
        loaded = load(
            source,
            role,
            self.settings.mirror,
            keep=lambda row: _fewer_tests(row, most),
            in_window=lambda day: in_window(day, self.settings),
        )
        self.sources.append(loaded)
        self.dated |= loaded.dated
        if loaded.outside:
            self.removed["contest"] += loaded.outside
        return loaded

    def _train_rows(self, source: str) -> list[Row]:
        rows = by_difficulty(self._read(source, "train").rows, self.settings, self.removed)
        return once_each(rows, self.removed) if self.settings.dedup else rows

    def _uncontaminated(self, train: list[Row], evaluation: list[Row]) -> list[Row]:
        wish = self.settings.contamination
        if wish == "off" or not train or not evaluation:
            return train
        self.overlaps = overlaps(train, evaluation, self.settings.ngram_words)
        if self.overlaps and wish == "refuse":
            first = self.overlaps[0]
            raise UserError(
                f"{len(self.overlaps)} training rows share {self.settings.ngram_words} words in a row, or a whole "
                f"shorter row, with eval rows, the first {first.train_id} with {first.eval_id}",
                'data.contamination = "remove" leaves them out; `sparroll data check` lists them',
            )
        if wish == "count" or not self.overlaps:
            return train
        self.removed["contaminated"] += len(self.overlaps)
        found = {each.train_id for each in self.overlaps}
        return [row for row in train if row.row_id not in found]

    def _judgeable(self, rows: list[Row], said: str) -> list[Row]:
        """The rows that a response can be judged by. said: what stands behind the reason where rows are left out."""
        usable: dict[str, bool] = {}
        for kind, reward in self._rewards.items():
            mine = [row for row in rows if row.kind == kind]
            usable |= dict(zip((row.row_id for row in mine), reward.usable(mine) if mine else [], strict=True))
        if bad := len(rows) - sum(usable[row.row_id] for row in rows):
            self.removed[f"no response can be judged{said}"] += bad
        return [row for row in rows if usable[row.row_id]]

    def _check_left(self, train: list[Row]) -> None:
        if self.settings.train is not None and not train:
            judged = "; " + _JUDGEABLE if any("can be judged" in reason for reason in self.removed) else ""
            raise UserError(
                f"no training rows are left of {self.settings.train}", f"left out: {counted(self.removed)}{judged}"
            )

    def _prompt(self, row: Row) -> Prompt:
        return Prompt(row.row_id, row.text, row.answer, task=self.name, messages=row.messages)


def _fewer_tests(row: Row, most: int | None) -> Row:
    """The row with fewer tests. Called as soon as a row is read, because all tests of a large set would not fit into
    memory."""
    tests = row.tests
    if most is None or tests is None:
        return row
    fewer = replace(tests, limit=most)
    if tests.unopened is None:
        fewer = type(tests).of(
            tests.style, fewer.cases(), tests.entry_point, wrapped=tests.wrapped, rounded=tests.rounded
        )
    return replace(row, tests=fewer)


def task_settings(name: str, settings: DataSettings) -> DataSettings:
    """The settings of the task `name`. "data" takes them as they are; a set's name also chooses the rows of that
    set."""
    if name == "data":
        if settings.train is None and not settings.eval:
            raise UserError('task.name = "data" needs data.train or data.eval', "name sets or files")
        return settings
    if settings.train is not None:
        raise UserError(f"task.name = {name!r} and data.train = {settings.train!r} exclude each other", "leave one out")
    chosen = named(name)
    evaluation = settings.eval
    if chosen.eval is not None and (chosen.train is None or not (evaluation or settings.holdout_rows)):
        evaluation = (name, *(each for each in evaluation if each != name))
    train = name if chosen.train is not None else None
    return settings.model_copy(update={"train": train, "eval": evaluation})


def data_task(name: str, settings: DataSettings | None = None) -> DataTask:
    """The task "data", or a published set by its name."""
    return DataTask(name, task_settings(name, settings or DataSettings()))
