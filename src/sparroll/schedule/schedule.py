"""The Schedule: look up what a step may read at a context length, and load and save."""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor

from sparroll import files
from sparroll.attention.selectors import PageMean, Selector
from sparroll.attention.selectors.base import Counts
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.layer_groups import LayerGroups, Proportions, check_cover, check_groups
from sparroll.models.fingerprint import ModelFingerprint
from sparroll.presets import is_inline, read_table
from sparroll.schedule.file_tables import fields_of, table_of
from sparroll.schedule.made_for import check_fits
from sparroll.schedule.steps import Step, check_steps, is_count
from sparroll.types import is_whole


@dataclass(frozen=True)
class Schedule:
    """Context length -> KV budget in tokens, in which the first and the recent tokens count. Immutable, and checked
    when made.

    >>> Schedule.load("qwen3-1.7b-0.86").kv_budget_tokens(17_000)
    3584

    Where groups of layers have budgets of their own, each group is a schedule:

    >>> grouped = Schedule((Step(0, (512, 256)),), dense_layers=(0,), layer_groups=((1, 2, 3), (4, 5, 6, 7)))
    >>> grouped.of_layer(4).kv_budget_tokens(17_000)
    256
    """

    steps: tuple[Step, ...]
    selector: Selector = field(default_factory=PageMean)
    dense_layers: tuple[int, ...] = (0, 1)
    """Layers that always read the whole context."""
    layer_groups: LayerGroups = field(default=(), kw_only=True)
    """Groups of layers with budgets of their own, together all sparse layers of the model. Empty: all of them have the
    same budgets."""
    check: DraftCheck | None = None
    """How the dense policy checks what is drafted under this schedule; None: it does not."""
    model: str | None = None
    """The model it was measured on; None fits any."""
    fingerprint: ModelFingerprint | None = None
    """What is known about that model. None: only its name."""
    target: dict[str, Any] | None = None
    """What it was calibrated to hold, e.g. {"estimator": "top_k_lower", "quantile": 0.05, "at_least": 0.86, ...} or
    {"statistic": "impossible_share", "nats": 10, "at_most": 1e-4}."""
    made_by: dict[str, Any] | None = None
    name: str = "unnamed"
    any_model: bool = field(default=False, compare=False)
    """Whether `check_model` accepts every model, because the user forced the schedule. Not saved."""
    _starts: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _budgets: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """Of the only group."""
    _groups: list[Schedule] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("steps", "dense_layers", "layer_groups"):
            if isinstance(held := getattr(self, name), list):
                object.__setattr__(self, name, tuple(tuple(each) if isinstance(each, list) else each for each in held))
        check_steps(self.steps, self.selector, len(self.layer_groups))
        if list(self.dense_layers) != sorted({layer for layer in self.dense_layers if is_count(layer)}):
            raise UserError(
                f"dense_layers must be distinct layer numbers in rising order, got {list(self.dense_layers)}"
            )
        check_groups(self.layer_groups, self.dense_layers)
        if self.check is not None and not self.selector.rewritable:
            raise UserError(
                f"the index of the selector {self.selector.kind!r} cannot be rewritten, which a check of drafts needs",
                "take another selector, or leave the check out",
            )
        self._starts.extend(step.from_context_tokens for step in self.steps)
        self._budgets.extend(step.budgets[0] for step in self.steps)
        for place in range(len(self.layer_groups)):
            steps = tuple(step.of_group(place) for step in self.steps)
            self._groups.append(dataclasses.replace(self, steps=steps, layer_groups=()))

    def of_layer(self, layer: int) -> Schedule:
        """The schedule of one sparse layer, in which all layers have that layer's budgets."""
        if layer in self.dense_layers:
            raise UserError(f"layer {layer} is dense under the schedule {self.name!r}, so it has no budget")
        return self._groups[self.group_of(layer)] if self.layer_groups else self

    def group_of(self, layer: int) -> int:
        """The place of a sparse layer's group among `layer_groups`; 0 where there are none."""
        for place, group in enumerate(self.layer_groups):
            if layer in group:
                return place
        if self.layer_groups:
            raise UserError(f"layer {layer} is in none of the layer_groups of the schedule {self.name!r}")
        return 0

    @property
    def groups(self) -> tuple[Schedule, ...]:
        """The schedule of each group of layers; without groups, this one alone."""
        return tuple(self._groups) or (self,)

    def parts(self, layers: int) -> tuple[tuple[tuple[int, ...], Schedule], ...]:
        """The sparse layers of a model of so many layers, by their budgets: (layers, the schedule of each of them), one
        for each group."""
        sparse = tuple(layer for layer in range(layers) if layer not in self.dense_layers)
        return tuple(zip(self.layer_groups or (sparse,), self.groups, strict=True))

    @property
    def kind(self) -> tuple[Selector, tuple[int, ...], DraftCheck | None]:
        """All but the budgets: what schedules have in common whose requests can decode in the same steps."""
        return self.selector, self.dense_layers, self.check

    def step_at(self, context_tokens: int) -> Step:
        """The step that is in force at a context length."""
        return self.steps[bisect.bisect_right(self._starts, context_tokens) - 1]

    def plain_budgets(self) -> list[list[Any]]:
        """[from_context_tokens, budget] of each step as plain data: equal for two schedules with the same budgets in the
        same groups. With groups, the budget is a list of [layers, budget]."""
        if not self.layer_groups:
            return [[step.from_context_tokens, step.budgets[0]] for step in self.steps]
        return [
            [
                step.from_context_tokens,
                [[list(group), *step.of_group(place).budgets] for place, group in enumerate(self.layer_groups)],
            ]
            for step in self.steps
        ]

    def kv_budget_tokens(self, context_tokens: Counts) -> Counts:
        """Budget in tokens at each context length [...]. Takes an int, or an array or tensor of integers, and returns
        the same kind and shape; for a tensor on the same device.

        Raises UserError where several groups of layers have budgets of their own: `of_layer` knows those.
        """
        if len(self.layer_groups) > 1:
            raise UserError(
                f"the schedule {self.name!r} has budgets for {len(self.layer_groups)} groups of layers, and no common one",
                "ask for a layer's: schedule.of_layer(4).kv_budget_tokens(...), or of_layer(4).read_tokens(...)",
            )
        lengths = _lengths(context_tokens)
        if isinstance(lengths, Tensor):
            starts = torch.tensor(self._starts, device=lengths.device)
            budgets = torch.tensor(self._budgets, device=lengths.device)
            return budgets[(torch.bucketize(lengths, starts, right=True) - 1).clamp_min(0)]
        if isinstance(lengths, np.ndarray):
            return np.array(self._budgets)[np.searchsorted(self._starts, lengths, side="right") - 1]
        return self._budgets[bisect.bisect_right(self._starts, lengths) - 1]

    def read_tokens(self, context_tokens: Counts) -> Counts:
        """Tokens that one decode step attends to in a sparse layer at each context length [...], the current token
        included. Returns the kind and shape that it takes. A step is sparse if this is less than the context. Like
        `kv_budget_tokens`, this is for one group of layers.

        >>> Schedule.fixed(64).read_tokens(171)  # 11 units of 16 tokens, the last of which lacks 5
        59
        """
        lengths = _lengths(context_tokens)
        return self.selector.read_tokens(lengths, self.kv_budget_tokens(lengths))

    def unread_tokens(self, context_tokens: Counts, layers: int) -> Counts:
        """Tokens that one decode step leaves out at each context length [...], summed over all layers of a model that
        has so many. Returns the kind and shape that it takes; 0 where every layer reads everything."""
        lengths = _lengths(context_tokens)
        unread = lengths * 0
        for own, schedule in self.parts(layers):
            unread = unread + len(own) * (lengths - schedule.read_tokens(lengths))
        return unread

    @staticmethod
    def fixed(
        kv_budget_tokens: int, selector: Selector | None = None, dense_layers: tuple[int, ...] = (0, 1)
    ) -> Schedule:
        """A schedule with the same budget at every length."""
        return Schedule(
            steps=(Step(0, kv_budget_tokens),),
            selector=selector or PageMean(),
            dense_layers=dense_layers,
            name=f"fixed-{kv_budget_tokens}",
        )

    def in_proportion(self, proportions: Proportions | None) -> Schedule:
        """The same schedule with groups of layers that read their number of times its budgets; None: it stays as it is.
        Raises UserError where it has groups already."""
        if proportions is None:
            return self
        if self.layer_groups:
            raise UserError(
                f"the schedule {self.name!r} has budgets by groups of layers already", "give a schedule without groups"
            )
        steps = tuple(
            Step(step.from_context_tokens, proportions.budgets(step.budgets[0]), step.measured) for step in self.steps
        )
        return dataclasses.replace(self, steps=steps, layer_groups=proportions.layer_groups)

    def checked(self, window_tokens: int = 64, floor: float = 0.01) -> Schedule:
        """The same schedule with its drafts checked by the dense policy (see draft_check.py), in place of the check that
        it may have."""
        check = DraftCheck(window_tokens, floor)
        bare = self.name if self.check is None else self.name.removesuffix(_checked_suffix(self.check))
        return dataclasses.replace(self, check=check, name=bare + _checked_suffix(check))

    @property
    def caveat(self) -> str | None:
        """What whoever looks at the schedule must know of it: "scaled, to be calibrated on the real model". None where
        its file says nothing of the kind in made_by. Where made_by has `caveat_at`, it is true only of these lengths."""
        made_by = self.made_by or {}
        told, where = made_by.get("caveat"), made_by.get("caveat_at")
        if told is None:
            return None
        return f"{told}, at {where}" if where else str(told)

    @staticmethod
    def load(source: str | Path | Mapping[str, Any], model: str | None = None, force: bool = False) -> Schedule:
        """A published preset by name, a TOML file by path, or the schedule itself: what `inline` returns, or the same
        as JSON, which is a text that starts with a brace.

        If `model` is given, a schedule that was made for another model is refused, unless `force` is set. A missing or
        broken file is an error; it is never replaced by another schedule.
        """
        table, name = read_table(source)
        try:
            schedule = Schedule.from_table(table, name)
        except UserError as error:
            raise UserError(
                f"schedule {name if is_inline(source) else source}: {error.message}",
                error.hint,
            ) from None
        if force:
            return dataclasses.replace(schedule, any_model=True)
        if model is not None:
            schedule.check_model(model)
        return schedule

    @staticmethod
    def from_table(table: dict[str, Any], name: str = "unnamed") -> Schedule:
        """A schedule from the tables of its file. Unknown and missing keys are errors."""
        return Schedule(**fields_of(table), name=name)

    def table(self) -> dict[str, Any]:
        """The tables of the schedule's file; `from_table` gives the schedule back."""
        return table_of(self)

    def inline(self) -> dict[str, Any]:
        """`table` with the schedule's name, for a configuration that is read on machines where a path would lead
        nowhere. It is plain data, JSON included, and `load` takes it."""
        return {"name": self.name, **self.table()}

    def save(self, path: str | Path) -> Path:
        """Write the TOML file, atomically."""
        return files.write_text(path, tomli_w.dumps(self.table()))

    def check_model(self, model: str, found: ModelFingerprint | None = None) -> None:
        """Raise UserError if the schedule was made for another model.

        Where the schedule has a fingerprint, it is compared with that of the model: `found`, or what the model's files
        on this machine say. Weights are compared where the fingerprint names them; a checkpoint then counts as the
        model that its training began with. Where one of the two fingerprints is not known, names are compared, without
        folder and case. An empty `model` stands for a module without a name, and no name is compared.
        """
        if not self.any_model:
            check_fits(self, model, found)

    def check_layers(self, layers: int) -> None:
        """Raise UserError if `dense_layers` names a layer that a model of that many layers does not have, or all of its
        layers, and if `layer_groups` are not together all others."""
        if self.dense_layers and self.dense_layers[-1] >= layers:
            raise UserError(
                f"dense_layers names layer {self.dense_layers[-1]}, but the model has layers 0..{layers - 1}"
            )
        if len(self.dense_layers) == layers:
            raise UserError(
                f"the schedule keeps all {layers} layers of the model dense, so nothing would be sparse",
                "name fewer dense_layers in the schedule; `sparroll calibrate` has --dense-layers",
            )
        check_cover(self.layer_groups, self.dense_layers, layers)


def _lengths(context_tokens: Counts) -> Counts:
    """The same lengths as an int, or in 64 bits with a sign, so that differences of them are right whatever they came in.
    Raises UserError for anything but integers of 0 or more; those on a GPU are not looked at, because the host would have
    to wait for them."""
    if isinstance(context_tokens, Tensor):
        if context_tokens.is_floating_point() or context_tokens.is_complex() or context_tokens.dtype == torch.bool:
            raise UserError(f"context_tokens must be integers, got {context_tokens.dtype}")
        lengths = context_tokens.to(torch.int64)
        least = int(lengths.min()) if lengths.numel() and lengths.device.type == "cpu" else 0
    elif isinstance(context_tokens, np.ndarray):
        if not np.issubdtype(context_tokens.dtype, np.integer):
            raise UserError(f"context_tokens must be integers, got {context_tokens.dtype}")
        lengths = context_tokens.astype(np.int64, copy=False)
        least = int(lengths.min()) if lengths.size else 0
    else:
        if not is_whole(context_tokens):
            raise UserError(
                f"context_tokens must be integers, got {context_tokens!r}",
                "give one length, or an array or a tensor of them: numpy.array([1999, 2000])",
            )
        least = lengths = operator.index(context_tokens)
    if least < 0:
        raise UserError(f"context_tokens must not be negative, got {least}")
    return lengths


def _checked_suffix(check: DraftCheck) -> str:
    """What the name of a checked schedule ends with."""
    return f"-checked-{check.window_tokens}-{check.floor:g}"


def caveats_of(schedules: Iterable[Schedule | None]) -> list[str]:
    """A line about each of these schedules that has a caveat, each line once. Every command and run that takes a schedule
    begins with them."""
    told = (f"the schedule {each.name!r} is {each.caveat}" for each in schedules if each is not None and each.caveat)
    return list(dict.fromkeys(told))


def check_is_schedule(value: object) -> None:
    """Raise UserError for anything but a Schedule."""
    if not isinstance(value, Schedule):
        raise UserError(
            f"a schedule is a Schedule, a preset's name or a file, got {value!r}", "a budget is Schedule.fixed(512)"
        )
