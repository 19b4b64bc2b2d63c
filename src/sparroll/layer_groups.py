"""Groups of layers that a schedule gives budgets of their own: what a list of groups must look like, and how budgets of
several groups are written. Nothing here knows what a budget means (see schedule/)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparroll.errors import UserError
from sparroll.types import is_whole

LayerGroups = tuple[tuple[int, ...], ...]
"""Layer numbers of each group.

>>> ((1, 2, 3), (4, 5, 6, 7))
"""
_EXAMPLE = "layer_groups = [[1, 2, 3], [4, 5, 6, 7]]"


def read_groups(value: object) -> LayerGroups:
    """The groups from the lists of a schedule's file."""
    if not isinstance(value, list) or not value or not all(isinstance(group, list) for group in value):
        raise UserError(f"layer_groups must be a list of lists of layers, got {value!r}", f"for example {_EXAMPLE}")
    return tuple(tuple(group) for group in value)


def check_groups(layer_groups: LayerGroups, dense_layers: tuple[int, ...]) -> None:
    """Raise UserError for groups that no model could have."""
    for group in layer_groups:
        layers = [layer for layer in group if is_whole(layer) and layer >= 0]
        if not group or len(layers) < len(group) or layers != sorted(set(layers)):
            raise UserError(
                f"each of the layer_groups must be distinct layer numbers in rising order, got {list(group)}",
                f"for example {_EXAMPLE}",
            )
    seen: dict[int, int] = {}
    for place, group in enumerate(layer_groups):
        for layer in group:
            if layer in dense_layers:
                raise UserError(
                    f"layer {layer} is in dense_layers and in a group of layer_groups, and a dense layer has no budget",
                    "take it out of one of them",
                )
            if layer in seen:
                raise UserError(
                    f"layer {layer} is in two of the layer_groups: {list(layer_groups[seen[layer]])} and {list(group)}",
                    "name each layer once",
                )
            seen[layer] = place


def check_cover(layer_groups: LayerGroups, dense_layers: tuple[int, ...], layers: int) -> None:
    """Raise UserError unless the groups are together all sparse layers of a model of that many layers."""
    if not layer_groups:
        return
    grouped = {layer for group in layer_groups for layer in group}
    sparse = set(range(layers)) - set(dense_layers)
    if foreign := sorted(grouped - sparse):
        raise UserError(
            f"layer_groups names layer {foreign[0]}, but the model has layers 0..{layers - 1}",
            f"name layers from 0 to {layers - 1}; a schedule with others is for a deeper model",
        )
    if missing := sorted(sparse - grouped):
        raise UserError(
            f"layer_groups leaves out the layers {missing} of the model, which has layers 0..{layers - 1}",
            "put each of them into a group, or into dense_layers",
        )


@dataclass(frozen=True)
class Proportions:
    """Groups of layers whose budgets keep a fixed proportion, so that a single number says the budgets of all of them.

    >>> Proportions(((0, 1), (2, 3, 4, 5)), (4, 1)).budgets(512)
    (2048, 512)
    """

    layer_groups: LayerGroups
    """Together all sparse layers of the model."""
    times: tuple[int, ...]
    """How many times the budget each group reads; 1 for at least one of them."""

    def __post_init__(self) -> None:
        if len(self.times) != len(self.layer_groups):
            raise UserError(
                f"{len(self.layer_groups)} groups of layers and {len(self.times)} numbers of times: "
                f"{'/'.join(map(str, self.times))}",
                "give one number for each group, for example 4/1",
            )
        if not all(is_whole(each) and each >= 1 for each in self.times) or min(self.times, default=1) != 1:
            raise UserError(
                f"the proportion of budgets must be of whole numbers, the least of which is 1, got "
                f"{'/'.join(map(str, self.times))}",
                "for example 4/1: the first group reads four times what the second one does",
            )

    def budgets(self, kv_budget_tokens: int) -> tuple[int, ...]:
        """The budget of each group, where those that read least have this one."""
        return tuple(times * kv_budget_tokens for times in self.times)

    def table(self) -> dict[str, Any]:
        """Plain data."""
        return {"layer_groups": [list(group) for group in self.layer_groups], "times": list(self.times)}


def budgets_in_words(kv_budget_tokens: int | tuple[int, ...]) -> str:
    """A step's budget for a table: that of each group, in their order.

    >>> budgets_in_words((1024, 512))
    '1,024 / 512'
    """
    return " / ".join(f"{budget:,}" for budget in _each(kv_budget_tokens))


def _each(kv_budget_tokens: int | tuple[int, ...]) -> tuple[int, ...]:
    return kv_budget_tokens if isinstance(kv_budget_tokens, tuple) else (kv_budget_tokens,)
