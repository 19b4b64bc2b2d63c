"""An evaluation in seconds: a random tiny model, two tasks of which one has answers, verdicts that are not always possible.
Importable from a subprocess too."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.train_runs import WORDS
from sparroll import tasks
from sparroll.cli import main
from sparroll.tasks import Verdict
from sparroll.types import Prompt, Rollout

SAMPLES = 4


class FirstVowel:
    """Which vowel comes first? The answer is the response's first vowel; some prompts cannot be judged."""

    name = "first_vowel"
    gives_answers = True
    eval_count = 5

    def prompts(self, split: str, level: int, seed: int, count: int) -> list[Prompt]:
        drawn = []
        for index in range(count):
            rng = random.Random(f"first/{split}/{level}/{seed}/{index}")
            text = " ".join(rng.choices(WORDS[2:], k=rng.randint(70, 90)))
            answer = "" if index == 3 else rng.choice("aeiou")
            drawn.append(Prompt(f"first_vowel/{seed}/{index}", text, answer, task=self.name, level=level))
        return drawn

    def reward(self, prompt: Prompt, response_text: str) -> float:
        (verdict,) = self.verdicts([prompt], [response_text])
        return verdict.reward or 0.0

    def verdicts(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Verdict]:
        found = []
        for prompt, response in zip(prompts, responses, strict=True):
            answer = next((word for word in response.split() if word in "aeiou"), None)
            if not prompt.answer:
                found.append(Verdict(None, "unparsable_gold", answer))
            else:
                found.append(
                    Verdict(float(answer == prompt.answer), "right" if answer == prompt.answer else "wrong", answer)
                )
        return found


if "first_vowel" not in tasks.names():
    tasks.register("first_vowel", FirstVowel)


def short(prompt: Prompt, response_text: str, rollout: Rollout, most_tokens: int = 10) -> float | None:
    """A custom reward; a response of one token is not judged."""
    tokens = len(rollout.response_ids)
    return None if tokens == 1 else float(tokens <= most_tokens)


def anything(prompt: Prompt, response_text: str, rollout: Rollout, **settings: object) -> float:
    """Takes every setting."""
    return 0.0


def tokens(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
    return 2.0 + len(rollout.response_ids)


def command(model: str, out: Path, *more: str) -> list[str]:
    """Three chunks of problems for each policy and task: 4 batches of 2 hold two problems of 4 samples."""
    bins = [] if "--no-tail" in more else ["--bin-tokens", "50"]
    return [
        "evaluate", "--model", model, "--tasks", "first_vowel,vowels:0", "--count", "5", "--samples", str(SAMPLES),
        "--budget", "64", "--also-dense", "--max-new-tokens", "18", "--max-batch", "2", "--device", "cpu",
        "--out", str(out), *bins, *more,
    ]  # fmt: skip


def evaluate(model: str, out: Path, *more: str) -> dict[str, Any]:
    """Run it; the results without what depends on the clock."""
    assert main(command(model, out, *more)) == 0
    return results(out)


def results(out: Path) -> dict[str, Any]:
    found = json.loads((out / "evaluation.json").read_text())["results"]
    for task in found["tasks"].values():
        for policy in task["policies"].values():
            del policy["tokens_per_second"], policy["generate_seconds"]
    return found
