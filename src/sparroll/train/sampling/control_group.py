"""The control group of a training loop, our own or another trainer's: which of this process's rollouts are decoded densely,
and what the prompts with rollouts of both kinds say. The draw and the comparison are those of control/; nothing is sampled
or judged here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sparroll.control.control_group import dense_flags
from sparroll.control.paired_prompts import REWARD, PairedPrompt, paired_prompts, prompt_name
from sparroll.control.reward_gap import RewardGap
from sparroll.rounding import rounded_up
from sparroll.train.sampling.rewards import Graded
from sparroll.types import Rollout, StepReport


def in_control_group(rollout: Rollout) -> bool:
    """Whether a rollout of an engine with a schedule or a compression was decoded densely because it was asked for. A
    sparse one that was so short that it read all of its context is none."""
    return rollout.schedule_name is None and rollout.compression_name is None


class ControlGroup:
    """Goes through a step with its rounds of sampling: `begin`, then `flags` and `add` for each round, then `pairs`.

    gather: the items of all processes, in the order of ranks, on every process; `list` where there is one.
    """

    def __init__(
        self, reward_gap: RewardGap, seed: int, samples_per_prompt: int, gather: Callable[[list[Any]], list[Any]]
    ):
        self.reward_gap, self.seed, self.samples, self.gather = reward_gap, seed, samples_per_prompt, gather
        self.begin(0)

    def begin(self, step: int) -> None:
        self.step = step
        self._rollouts = 0
        self._decode_steps = 0
        self._mine: list[PairedPrompt] = []

    def flags(self, mine: Iterable[int], prompts: int, first_prompt: int) -> list[bool]:
        """Whether each rollout of this process's prompts is decoded densely, prompt by prompt.

        mine: their numbers within the step.  prompts: of the whole round, over all processes, from number
        `first_prompt` on. A prompt's rollouts have the same flags in whichever process.
        """
        share = self.reward_gap.share(self.step)
        flags = dense_flags(self.seed, self.step, prompts, self.samples, share, first_prompt)
        self._rollouts += sum(flags)
        starts = [(number - first_prompt) * self.samples for number in mine]
        return [flag for start in starts for flag in flags[start : start + self.samples]]

    def add(self, mine: Sequence[int], rollouts: Sequence[Rollout], graded: Graded) -> None:
        """Compare the rollouts of one round. All of its prompts count, also those that dynamic sampling drops: to drop
        prompts by their rewards would bias a difference of rewards."""
        self.compare(mine, rollouts, graded.reward_GN.flatten().tolist())

    def compare(self, mine: Sequence[int], rollouts: Sequence[Rollout], rewards: Sequence[float]) -> None:
        """The same for the rollouts of these prompts, prompt by prompt, and a reward of each; NaN: it could not be
        graded."""
        names = {number: prompt_name(rollouts[place * self.samples].prompt_ids) for place, number in enumerate(mine)}
        dense = [in_control_group(rollout) for rollout in rollouts]
        self.compare_figures(names, dense, {REWARD: list(rewards)} | figures_of(rollouts))

    def compare_figures(
        self, names: Mapping[int, str], dense: Sequence[bool], figures: Mapping[str, Sequence[float]]
    ) -> None:
        """The same where only the figures of the rollouts are known, with those of `figures_of`. The arguments are those
        of `paired_prompts`."""
        self._mine += paired_prompts(self.step, names, dense, figures)
        lengths = zip(figures["length"], dense, strict=True)
        self._decode_steps += sum(int(length) - 1 for length, flag in lengths if flag)

    def pairs(self) -> tuple[PairedPrompt, ...]:
        """Those of the whole step and of all processes."""
        return tuple(self.gather(self._mine))

    def decode_steps(self) -> int:
        """How many decode steps the step's dense rollouts took at least, over all processes: each token but the first of
        a response is one."""
        return sum(self.gather([self._decode_steps]))

    def report(self) -> StepReport:
        return {"control/rollouts": float(self._rollouts)}


def figures_of(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """What is compared beside the reward. surprisal: minus the mean log-probability of the response's tokens under the
    policy that sampled them, in nats; an estimate of that policy's entropy per token that costs nothing."""
    return {
        "length": [float(len(rollout.response_ids)) for rollout in rollouts],
        "truncated": [float(rollout.finish_reason == "length") for rollout in rollouts],
        "surprisal": [-float(rollout.sparse_logp.double().mean()) for rollout in rollouts],
    }


def gap_in_words(report: StepReport) -> str:
    """The window's reward gap with its interval, for a line on a step; empty where the metrics have none.

    >>> gap_in_words({"control/reward_gap": 0.0121, "control/reward_gap_low": -0.02, "control/reward_gap_high": 0.04})
    '0.013 [-0.020, 0.040]'
    """
    gap = report.get("control/reward_gap")
    low, high = (report.get(f"control/reward_gap_{end}") for end in ("low", "high"))
    if gap is None or low is None or high is None:
        return ""
    return f"{rounded_up(gap)} [{rounded_up(low)}, {rounded_up(high)}]"
