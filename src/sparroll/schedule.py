"""A schedule says how many tokens of the KV cache a decode step may read at each context length, in all sparse layers alike
or in each group of layers. Load, check, look up, save.

Nothing here decides a budget (see calibrate/) or reads a cache (see attention/).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor

from sparroll import files
from sparroll.attention.selectors import PageMean, Selector, make_selector
from sparroll.attention.selectors.base import Counts
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError, nearest
from sparroll.layer_groups import LayerGroups, check_cover, check_groups, read_groups
from sparroll.mismatch.acceptance import ESTIMATORS
from sparroll.mismatch.divergence import NATS
from sparroll.models import packaged_name, trained_from
from sparroll.models.fingerprint import ModelFingerprint, of_model, weights_of
from sparroll.presets import is_inline, read_table
from sparroll.types import is_whole

FORMAT, GROUPED_FORMAT = 1, 2
"""Of files without and with groups of layers. A sparroll that knows no groups refuses the second by its number."""
MOST_TOKENS = 2**30
"""No context is longer than this, and no budget can be larger: lengths are 32-bit numbers on a GPU."""
_KEYS = [
    "format",
    "model",
    "fingerprint",
    "selector",
    "dense_layers",
    "layer_groups",
    "check",
    "target",
    "made_by",
    "steps",
]
_STEP_KEYS = ["from_context_tokens", "kv_budget_tokens", "measured"]
_OF_STATISTIC = {"acceptance": ("estimator", "top_k", "quantile", "at_least"), "impossible_share": ("nats", "at_most")}
"""The statistics that a target may be for, with the keys that only it has."""
_BESIDE = ("over_2_nats_at_most", "kl_at_most", "far_mass_at_most", "far_mass_nats")
"""Bounds that a calibration held beside the target."""
_TARGET_KEYS = ["statistic", *(key for keys in _OF_STATISTIC.values() for key in keys), *_BESIDE]
_FORCED = "Schedule.load(..., force=True)"


@dataclass(frozen=True)
class Step:
    """From this context length on (prompt + generated, the current token included), read at most this many tokens."""

    from_context_tokens: int
    kv_budget_tokens: int | tuple[int, ...]
    """One number holds in all sparse layers; several are those of the schedule's layer groups, in their order."""
    measured: dict[str, Any] | None = None
    """The tail measured under this budget: {"value", "low", "high", "tokens"}. None if nobody measured it, as in the
    published presets."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budgets as they are written: one, or one for each group."""
        return self.kv_budget_tokens if isinstance(self.kv_budget_tokens, tuple) else (self.kv_budget_tokens,)

    def of_group(self, place: int) -> Step:
        """The step as the layers of one group see it, without the figures, which are those of all groups together."""
        return Step(self.from_context_tokens, self.budgets[place if len(self.budgets) > 1 else 0])


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
        _check_steps(self.steps, self.selector, len(self.layer_groups))
        if list(self.dense_layers) != sorted({layer for layer in self.dense_layers if _is_count(layer)}):
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
        if isinstance(context_tokens, Tensor):
            if context_tokens.is_floating_point() or context_tokens.is_complex():
                raise UserError(f"context_tokens must be integers, got {context_tokens.dtype}")
            starts = torch.tensor(self._starts, device=context_tokens.device)
            budgets = torch.tensor(self._budgets, device=context_tokens.device)
            return budgets[(torch.bucketize(context_tokens, starts, right=True) - 1).clamp_min(0)]
        if isinstance(context_tokens, np.ndarray):
            if not np.issubdtype(context_tokens.dtype, np.integer):
                raise UserError(f"context_tokens must be integers, got {context_tokens.dtype}")
            steps = np.searchsorted(self._starts, context_tokens, side="right") - 1
            return np.array(self._budgets)[np.maximum(steps, 0)]
        if isinstance(context_tokens, float):
            raise UserError(f"context_tokens must be integers, got {context_tokens}")
        if context_tokens < 0:
            raise UserError(f"context_tokens must not be negative, got {context_tokens}")
        return self._budgets[bisect.bisect_right(self._starts, context_tokens) - 1]

    def read_tokens(self, context_tokens: Counts) -> Counts:
        """Tokens that one decode step attends to in a sparse layer at each context length [...], the current token
        included. Returns the kind and shape that it takes. A step is sparse if this is less than the context. Like
        `kv_budget_tokens`, this is for one group of layers.

        >>> Schedule.fixed(64).read_tokens(171)  # 11 units of 16 tokens, the last of which lacks 5
        59
        """
        return self.selector.read_tokens(context_tokens, self.kv_budget_tokens(context_tokens))

    def unread_tokens(self, context_tokens: Counts, layers: int) -> Counts:
        """Tokens that one decode step leaves out at each context length [...], summed over all layers of a model that
        has so many. Returns the kind and shape that it takes; 0 where every layer reads everything."""
        unread = context_tokens * 0
        for own, schedule in self.parts(layers):
            unread = unread + len(own) * (context_tokens - schedule.read_tokens(context_tokens))
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

    def checked(self, window_tokens: int = 64, floor: float = 0.01) -> Schedule:
        """The same schedule with its drafts checked by the dense policy (see draft_check.py), in place of the check that
        it may have."""
        check = DraftCheck(window_tokens, floor)
        bare = self.name if self.check is None else self.name.removesuffix(_checked_suffix(self.check))
        return dataclasses.replace(self, check=check, name=bare + _checked_suffix(check))

    @property
    def caveat(self) -> str | None:
        """What whoever looks at the schedule must know of it: "scaled, to be calibrated on the real model". None where
        its file says nothing of the kind in made_by."""
        told = (self.made_by or {}).get("caveat")
        return None if told is None else str(told)

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
        for key in table:
            if key not in _KEYS:
                raise UserError(f"unknown key {key!r}", nearest(key, _KEYS))
        if not is_whole(table.get("format")) or table["format"] not in (FORMAT, GROUPED_FORMAT):
            raise UserError(
                f"format must be {FORMAT} or {GROUPED_FORMAT}, got {table.get('format')!r}",
                "the file may come from another version of sparroll",
            )
        if "layer_groups" in table and table["format"] != GROUPED_FORMAT:
            raise UserError(
                f"layer_groups needs format = {GROUPED_FORMAT}, got {table['format']}", f"set format = {GROUPED_FORMAT}"
            )
        for key, kind in (("selector", dict), ("steps", list), ("dense_layers", list)):
            if not isinstance(table.get(key), kind):
                raise UserError(f"{key!r} is missing or not a {'table' if kind is dict else 'list'}")
        for key, type_, what in (
            ("model", str, "text"),
            ("fingerprint", dict, "a table"),
            ("check", dict, "a table"),
            ("target", dict, "a table"),
            ("made_by", dict, "a table"),
        ):
            if key in table and not isinstance(table[key], type_):
                raise UserError(f"{key} must be {what}, got {table[key]!r}")
        fingerprint = table.get("fingerprint")
        _check_target(table.get("target") or {})
        return Schedule(
            steps=tuple(_step(entry) for entry in table["steps"]),
            selector=make_selector(table["selector"]),
            dense_layers=tuple(table["dense_layers"]),
            layer_groups=read_groups(table["layer_groups"]) if "layer_groups" in table else (),
            check=DraftCheck.from_table(table["check"]) if "check" in table else None,
            model=table.get("model"),
            fingerprint=None if fingerprint is None else ModelFingerprint.from_table(fingerprint),
            target=table.get("target"),
            made_by=table.get("made_by"),
            name=name,
        )

    def table(self) -> dict[str, Any]:
        """The tables of the schedule's file; `from_table` gives the schedule back."""
        steps = [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in each.items()
                if value is not None
            }
            for each in map(dataclasses.asdict, self.steps)
        ]
        table = {
            "format": GROUPED_FORMAT if self.layer_groups else FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint.table() if self.fingerprint else None,
            "selector": self.selector.table(),
            "dense_layers": list(self.dense_layers),
            "layer_groups": [list(group) for group in self.layer_groups] or None,
            "check": self.check.table() if self.check else None,
            "target": self.target,
            "made_by": self.made_by,
            "steps": steps,
        }
        return {key: value for key, value in table.items() if value is not None}

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
        if self.any_model or (self.model is None and self.fingerprint is None):
            return
        if self.fingerprint is not None and found is None:
            found = of_model(model)
        if self.fingerprint is None or found is None:
            reason = None if not model or self._same_name(model) else ""
        else:
            reason = dataclasses.replace(self.fingerprint, weights=None).difference(found)
            if reason is None and not self._same_weights(model):
                reason = "its weights are others"
        if reason is not None:
            raise UserError(
                f"schedule {self.name!r} was made for {self.model or 'another model'}, not for "
                f"{trained_from(model) or 'this one'}{': ' if reason else ''}{reason}",
                f"calibrate one for this model, or force this one: --force-schedule, attention.force = true, {_FORCED}",
            )

    def _same_name(self, model: str) -> bool:
        return self.model is None or _short(trained_from(self.model)) in (_short(trained_from(model)), _short(model))

    def _same_weights(self, model: str) -> bool:
        """Whether the model has the weights that the fingerprint names, or its training began with them. True where the
        fingerprint names none, and for a module without a name."""
        assert self.fingerprint is not None
        if self.fingerprint.weights is None or not model:
            return True
        began = trained_from(model)
        known = [digest for name in (model, began) if (digest := weights_of(name)) is not None]
        if self.fingerprint.weights in known:
            return True
        if self.model is None:
            return not known
        # The schedule was made on a checkpoint of the same training, or the model that the training began with is not
        # on this machine any more.
        relatives = trained_from(self.model) != self.model or weights_of(began) is None
        return relatives and trained_from(self.model) == began

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


def _checked_suffix(check: DraftCheck) -> str:
    """What the name of a checked schedule ends with."""
    return f"-checked-{check.window_tokens}-{check.floor:g}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _check_target(target: dict[str, Any]) -> None:
    """Raise UserError for a target that no run could be held to. That of an acceptance may lack any of its keys."""
    for key in target:
        if key not in _TARGET_KEYS:
            raise UserError(f"unknown key {key!r} in target", nearest(str(key), _TARGET_KEYS))
    statistic = target.get("statistic", "acceptance")
    if statistic not in _OF_STATISTIC:
        raise UserError(f"unknown target.statistic {statistic!r}", nearest(str(statistic), list(_OF_STATISTIC)))
    own = " and ".join(_OF_STATISTIC[statistic])
    for other, keys in _OF_STATISTIC.items():
        if other != statistic and (wrong := [key for key in keys if key in target]):
            raise UserError(
                f"target.{wrong[0]} belongs to the statistic {other!r}, and target.statistic is {statistic!r}",
                f"keys of {statistic!r} are {own}",
            )
    if statistic == "impossible_share" and (missing := [key for key in _OF_STATISTIC[statistic] if key not in target]):
        raise UserError(f"a target of {statistic!r} needs {missing[0]}", "for example nats = 10, at_most = 1e-4")
    for key, good, what in (
        ("nats", lambda value: _is_count(value) and value in NATS, f"one of {', '.join(map(str, NATS))}"),
        ("at_most", lambda value: _is_share(value) and 0 < value < 1, "between 0 and 1"),
        ("estimator", lambda value: value in ESTIMATORS, f"one of {', '.join(ESTIMATORS)}"),
        ("top_k", lambda value: _is_count(value) and value > 0, "a whole number of 1 or more"),
        ("quantile", lambda value: _is_share(value) and 0 < value < 1, "between 0 and 1"),
        ("at_least", lambda value: _is_share(value) and value > 0, "above 0 and at most 1"),
    ):
        if key in target and not good(target[key]):
            raise UserError(f"target.{key} must be {what}, got {target[key]!r}")


def _check_measured(measured: object) -> None:
    """Raise UserError for figures that no measurement gives."""
    if not isinstance(measured, dict):
        raise UserError(f"measured must be a table of figures, got {measured!r}")
    for key, value in measured.items():
        if key in ("value", "low", "high") and not _is_share(value):
            raise UserError(f"measured.{key} must lie in [0, 1], got {value!r}")
        if key in ("tokens", "rollouts") and not _is_count(value):
            raise UserError(f"measured.{key} must be a whole number, got {value!r}")


def _step(entry: Any) -> Step:
    if not isinstance(entry, dict):
        raise UserError(f"each entry of 'steps' must be a table, got {entry!r}")
    for key in entry:
        if key not in _STEP_KEYS:
            raise UserError(f"unknown key {key!r} in a step", nearest(key, _STEP_KEYS))
    start, budget = (entry.get(key) for key in _STEP_KEYS[:2])
    budgets: list[Any] = budget if isinstance(budget, list) else [budget]
    for key, value in ((_STEP_KEYS[0], start), *((_STEP_KEYS[1], each) for each in budgets)):
        if not _is_count(value):
            raise UserError(f"{key} must be a whole number of tokens, got {entry.get(key)!r}")
        if value > MOST_TOKENS:
            raise UserError(f"{key} must be at most {MOST_TOKENS:,}, got {value:,}")
    if "measured" in entry:
        _check_measured(entry["measured"])
    return Step(entry[_STEP_KEYS[0]], tuple(budgets) if isinstance(budget, list) else budgets[0], entry.get("measured"))


def _check_steps(steps: tuple[Step, ...], selector: Selector, groups: int) -> None:
    if not steps:
        raise UserError("a schedule needs at least one step")
    if steps[0].from_context_tokens != 0:
        raise UserError(f"the first step must start at 0 tokens of context, got {steps[0].from_context_tokens}")
    for before, after in zip(steps, steps[1:], strict=False):
        if after.from_context_tokens <= before.from_context_tokens:
            raise UserError(
                "steps must start at strictly rising context lengths, "
                f"got {before.from_context_tokens} then {after.from_context_tokens}"
            )
    for step in steps:
        if isinstance(step.kv_budget_tokens, tuple) and (not groups or len(step.kv_budget_tokens) != groups):
            raise UserError(
                f"the step from {step.from_context_tokens} on has {len(step.kv_budget_tokens)} budgets, the schedule has "
                f"{groups or 'no'} layer_groups",
                "give one for each group, or a single number for all"
                if groups
                else "give a single number, or add groups",
            )
        for budget in step.budgets:
            check_budget(budget, selector)


def check_is_schedule(value: object) -> None:
    """Raise UserError for anything but a Schedule."""
    if not isinstance(value, Schedule):
        raise UserError(
            f"a schedule is a Schedule, a preset's name or a file, got {value!r}", "a budget is Schedule.fixed(512)"
        )


def check_budget(kv_budget_tokens: int, selector: Selector) -> None:
    """Raise UserError unless the budget is a multiple of the unit and leaves one unit to choose beside those always
    read."""
    unit, least = selector.unit_tokens, selector.least_budget_tokens
    if not is_whole(kv_budget_tokens):
        raise UserError(f"kv_budget_tokens must be a whole number of tokens, got {kv_budget_tokens!r}")
    if kv_budget_tokens > MOST_TOKENS:
        raise UserError(
            f"kv_budget_tokens must be at most {MOST_TOKENS:,}, got {kv_budget_tokens:,}",
            "a budget as large as the context is dense",
        )
    if kv_budget_tokens % unit:
        below = max(least, kv_budget_tokens // unit * unit)
        raise UserError(
            f"kv_budget_tokens must be a multiple of page_tokens ({unit}), got {kv_budget_tokens}",
            f"use {below} or {below + unit}",
        )
    if kv_budget_tokens < least:
        raise UserError(
            f"kv_budget_tokens must be at least {least} (first {selector.first_tokens} + recent "
            f"{selector.recent_tokens} + one unit of {unit}), got {kv_budget_tokens}",
            f"use {least} or more",
        )


def _short(model: str) -> str:
    return packaged_name(model).rstrip("/").rsplit("/", 1)[-1].lower()
