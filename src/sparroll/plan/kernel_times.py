"""Seconds of the decode kernels of a sparse layer, from what they took on a GPU: scores, choice and attention of each
selector that was timed there. Arithmetic on kernel_times.json, which `python benchmarks/kernel_times.py` makes from records.

    scores      fixed + bytes of the index / rate
    choice      launch + what the request with the longest context takes beyond it, by its units and how many are wanted
    attention   fixed + bytes of the K and V that are read / rate

With a remainder attention also takes bytes of the K and V that are not read / a rate of their own: the rows of their groups
are read instead, and their number grows with them. It is estimated for each query head, so such times hold for the number of
query heads that a KV head had when they were taken, and for no other.

They were timed with 32 requests of 8 KV heads of 128 channels, so one program for each request and KV head: 256 of them
work on a choice at the same time. More are taken to need as much longer as the mean context of the batch says. What is not
counted: the rest of a step (projections, norms, the host), writing the cache, and that many requests of very different
lengths keep the programs of the scores less busy than equal ones do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from sparroll.attention.selectors import Selector
from sparroll.plan.length_mix import LengthMix

FILE = "kernel_times.json"


@dataclass(frozen=True)
class Linear:
    """seconds = fixed_seconds + bytes / bytes_per_second

    >>> Linear(6.0e-6, 4.0e12).seconds(4.0e6)
    7e-06
    """

    fixed_seconds: float
    bytes_per_second: float

    def seconds(self, moved_bytes: float) -> float:
        return self.fixed_seconds + moved_bytes / self.bytes_per_second


@dataclass(frozen=True)
class SelectorTimes:
    """What was timed of one selector."""

    scores: Linear
    attention: Linear
    unread_bytes_per_second: float | None
    """With a remainder: bytes of the K and V that are not read, for which it reads the rows of groups."""
    worst_layer_error: float
    """Largest |computed / timed - 1| over the layers that were timed as a whole."""

    def unread_seconds(self, unread_bytes: float) -> float:
        return 0.0 if self.unread_bytes_per_second is None else unread_bytes / self.unread_bytes_per_second


@dataclass(frozen=True)
class Choices:
    """How long a choice takes where every program has the same number of units to choose among, from timed ones. Between
    them lines, first over the wanted units and then over all; beyond the ends in proportion to the units."""

    launch_seconds: float
    """Of a choice in which every unit is read anyway."""
    timed: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
    """(units, ((wanted units, seconds), ...)), both rising."""

    def seconds(self, units: float, wanted_units: float) -> float:
        if units <= 0:
            return self.launch_seconds
        counts = [0, *(count for count, _ in self.timed)]
        seconds = [self.launch_seconds, *(_at(wanted_units, points) for _, points in self.timed)]
        beyond = max(1.0, units / counts[-1])
        return float(np.interp(units, counts, seconds)) * beyond


def _at(wanted_units: float, points: Sequence[tuple[int, float]]) -> float:
    wanted, seconds = zip(*points, strict=True)
    return float(np.interp(wanted_units, wanted, seconds)) * max(1.0, wanted_units / wanted[-1])


@dataclass(frozen=True)
class LayerLoad:
    """What one sparse layer has to do in a step of a batch."""

    index_bytes: float
    kv_bytes: float
    unread_bytes: float
    """Of K and V of the tokens that are not read."""
    longest_tokens: float
    longest_units: float
    """Of the longest context; 0 where that one is within its budget."""
    wanted_units: float
    """As many as its budget holds."""
    programs: float
    """Requests x KV heads."""
    mean_share: float
    """The mean context of the batch / the longest one."""
    gqa_ratio: float
    """Query heads per KV head."""


@dataclass(frozen=True)
class KernelTimes:
    """What was timed on one GPU."""

    gpu: str
    names: tuple[str, ...]
    """Of the hardware that this is."""
    copy_bytes_per_second: float
    """A large copy, bytes read and written: what weights are taken to be read at."""
    dense_bytes_per_second: float
    """What the dense layers of whole decode steps read K and V at."""
    programs: int
    """Of a timed choice, all of which work at the same time."""
    gqa_ratio: float
    """Query heads per KV head of what was timed."""
    choices: Choices
    selectors: dict[str, SelectorTimes]
    records: tuple[str, ...]
    """Names of the records of the kernels, of the choice without anything to choose, and of whole decode steps."""

    def layer(self, selector: Selector, load: LayerLoad) -> tuple[float, float] | None:
        """(seconds of scores and choice, seconds of attention) of a sparse layer; None where the selector was not timed."""
        known = self.of(selector, load.gqa_ratio)
        if known is None:
            return None
        choice = self.choices.launch_seconds + self._beyond_launch(load, load.mean_share)
        attention = known.attention.seconds(load.kv_bytes) + known.unread_seconds(load.unread_bytes)
        return known.scores.seconds(load.index_bytes) + choice, attention

    def added_seconds(self, selector: Selector, part: LayerLoad, batch_mix: LengthMix) -> float:
        """What a part of the batch's contexts adds to such a layer. All parts together and what a layer takes anyway (its
        three kernels started) are `layer`. part: with the contexts' weights in the whole batch."""
        known = self.of(selector, part.gqa_ratio)
        assert known is not None, "the kernels were timed"
        moved = part.index_bytes / known.scores.bytes_per_second + part.kv_bytes / known.attention.bytes_per_second
        moved += known.unread_seconds(part.unread_bytes)
        if part.longest_tokens < batch_mix.longest_tokens:
            return moved
        return moved + self._beyond_launch(part, batch_mix.mean_tokens / batch_mix.longest_tokens)

    def _beyond_launch(self, load: LayerLoad, mean_share: float) -> float:
        """Seconds of the choice beyond starting it."""
        waves = max(1.0, load.programs / self.programs * mean_share)
        return waves * (self.choices.seconds(load.longest_units, load.wanted_units) - self.choices.launch_seconds)

    def of(self, selector: Selector, gqa_ratio: float) -> SelectorTimes | None:
        """What is known of a selector in a model with so many query heads per KV head; None where it was not timed."""
        if selector.remainder is not None and gqa_ratio != self.gqa_ratio:
            return None
        return self.selectors.get(timed_as(selector))

    @staticmethod
    def from_table(table: dict[str, Any]) -> KernelTimes:
        """One entry of kernel_times.json."""
        choice = table["choice"]
        timed = tuple(
            (row["units"], tuple((each["wanted_units"], each["seconds"]) for each in row["timed"]))
            for row in choice["timed"]
        )
        return KernelTimes(
            gpu=table["gpu"],
            names=tuple(table["names"]),
            copy_bytes_per_second=table["copy_bytes_per_second"],
            dense_bytes_per_second=table["dense_bytes_per_second"],
            programs=choice["programs"],
            gqa_ratio=table["gqa_ratio"],
            choices=Choices(choice["launch_seconds"], timed),
            selectors={
                each["selector"]: SelectorTimes(
                    Linear(**each["scores"]),
                    Linear(**each["attention"]),
                    each.get("unread_bytes_per_second"),
                    each["worst_layer_error"],
                )
                for each in table["selectors"]
            },
            records=tuple(table["records"]),
        )


def if_timed(kernels: KernelTimes | None, selector: Selector, gqa_ratio: float) -> KernelTimes | None:
    """The kernels of a prediction; None where it uses none, or where the selector's were not timed for such a model."""
    return None if kernels is None or kernels.of(selector, gqa_ratio) is None else kernels


def timed_as(selector: Selector) -> str:
    """The name under which a selector's kernels are timed: its kind, the tokens of a unit, its bits, and its remainder. The
    tokens that are always read cost the same under all of them."""
    bits, remainder = getattr(selector, "bits", None), selector.remainder
    name = f"{selector.kind} {selector.unit_tokens}" + (f", bits {bits}" if bits is not None else "")
    if remainder is None:
        return name
    return f"{name}, remainder of {remainder.group_tokens} in {remainder.values}"


@cache
def _shipped() -> tuple[KernelTimes, ...]:
    text = (resources.files("sparroll.plan") / FILE).read_text(encoding="utf-8")
    return tuple(KernelTimes.from_table(each) for each in json.loads(text)["gpus"])


def kernel_times_of(hardware: str) -> KernelTimes | None:
    """What was timed on the GPU of that name ("H200", "NVIDIA H200"); None where nothing was."""
    return next((each for each in _shipped() if hardware.lower() in map(str.lower, each.names)), None)
