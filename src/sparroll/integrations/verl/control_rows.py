"""Which rows of verl's batch are of the control group, and what its rollouts are compared by. verl names a prompt by a
random id, and its rollouts by that and their number; so who was drawn is kept by these names until the step's batch comes.
No verl."""

# P prompts, N rollouts of each, B rows of a batch, T response tokens

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.train.sampling.control_group import ControlGroup
from sparroll.types import Rollout

FLAGS = "sparroll_dense"
"""The field of verl's batch of prompts that says which rollouts of a prompt are dense, [P, N]."""
READS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
"""The fields of verl's batch of rollouts that a comparison needs, nested: one row per rollout."""
SPARSE = "sparse"
"""Stands for whatever schedule is in force, in rollouts that were not asked to be dense."""


class ControlRows:
    """Goes through a step: `begin`, `draw` for each batch of prompts, then `compare` for each batch of rollouts.

    response_tokens, context_tokens: the longest response, and the longest prompt and response together; a rollout that
    reaches either was truncated.
    """

    def __init__(self, response_tokens: int, context_tokens: int):
        self._response_tokens, self._context_tokens = response_tokens, context_tokens
        self._group: ControlGroup | None = None
        self._drawn: dict[str, tuple[int, list[bool]]] = {}
        """By a prompt's name: its number within the step, and whether each of its rollouts is dense."""

    def begin(self, group: ControlGroup | None, step: int) -> None:
        """group: None where the step has no control group."""
        self._group, self._drawn = group, {}
        if group is not None:
            group.begin(step)

    def draw(self, names: Sequence[str]) -> Tensor | None:
        """FLAGS of these prompts, which come next in the step; None without a control group."""
        group = self._group
        if group is None:
            return None
        first, count = len(self._drawn), len(names)
        flags = group.flags(range(first, first + count), count, first)
        rows = [flags[start : start + group.samples] for start in range(0, len(flags), group.samples)]
        for number, (name, row) in enumerate(zip(names, rows, strict=True), first):
            self._drawn[name] = (number, row)
        return torch.tensor(rows, dtype=torch.bool)

    def dense_rows(self, keys: Sequence[str]) -> Tensor | None:
        """[B] bool, the rows of the control group; None without one. keys: verl's names of the rows. A row that only
        pads the batch belongs to no prompt, and counts as sparse."""
        if self._group is None:
            return None
        return torch.tensor([self._is_dense(key) for key in keys], dtype=torch.bool)

    def compare(self, keys: Sequence[str], fields: Mapping[str, Tensor]) -> None:
        """Show the group a batch's rollouts with their rewards. fields: those of READS. A prompt with a rollout that
        failed is left out."""
        if self._group is None:
            return
        rows = {name: fields[name].unbind() for name in READS}
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for row, key in enumerate(keys):
            name, sample = _of_rollout(key)
            if name in self._drawn:
                found[name][sample] = row
        numbers: list[int] = []
        rollouts: list[Rollout] = []
        rewards: list[float] = []
        for name, (number, flags) in self._drawn.items():
            if set(found[name]) != set(range(len(flags))):
                continue
            numbers.append(number)
            for sample, dense in enumerate(flags):
                of_row = {field: values[found[name][sample]].cpu() for field, values in rows.items()}
                rollouts.append(self._rollout(of_row, dense))
                rewards.append(float(of_row["rm_scores"].double().sum()))
        self._group.compare(numbers, rollouts, rewards)

    def _is_dense(self, key: str) -> bool:
        name, sample = _of_rollout(key)
        return name in self._drawn and self._drawn[name][1][sample]

    def _rollout(self, of_row: Mapping[str, Tensor], dense: bool) -> Rollout:
        prompt, response, sampled_T = of_row["prompts"], of_row["responses"], of_row["response_mask"].bool()
        cut = len(response) >= min(self._response_tokens, self._context_tokens - len(prompt))
        return Rollout(
            prompt.tolist(),
            response[sampled_T].tolist(),
            of_row["rollout_log_probs"][sampled_T].float(),
            "length" if cut else "stop",
            schedule_name=None if dense else SPARSE,
        )


def _of_rollout(key: str) -> tuple[str, int]:
    """(the prompt's name, the rollout's number) of a row that verl calls `{name}_{number}_{part}`. Raises UserError for a
    further part of a rollout."""
    name, sample, part = key.rsplit("_", 2)
    if part != "0":
        raise UserError(
            "the agent loop gives several outputs for one rollout, and a control group compares whole rollouts",
            "leave actor_rollout_ref.rollout.custom.sparroll.control_group out",
        )
    return name, int(sample)
