"""Which budget each length bin and each group of layers gets, so that a loss is as small as the time of a decode step
allows. Arithmetic on offers; where their seconds and losses come from is in tradeoff.py.

One budget is taken in every bin and group. A choice is worth looking at if no other one is at least as fast and as good;
these are found group by group and bin by bin, and together they are the answer for every time that a step may take. Where
there are more than MOST_CHOICES, neighbours in time are thinned out; with fewer the answer is exact.
"""

# B bins, G groups of layers, N choices so far, O offers, C columns: seconds, loss and what is taken of each bound

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparroll.errors import UserError
from sparroll.rounding import rounded_up

MOST_CHOICES = 2048
"""Then the seconds of a choice are off its best by less than a two-thousandth of their range, at each bin."""
_ROUNDING = 1e-12
"""How far a sum may lie above its limit, relative to it."""


@dataclass(frozen=True)
class Offer:
    """One budget that a group of layers may get in one bin.

    >>> Offer(kv_budget_tokens=1024, seconds=8.1e-5, loss=0.0021, takes=(0.04,))
    """

    kv_budget_tokens: int
    seconds: float
    """What it adds to the time of a decode step, weighted by how many steps are in this bin."""
    loss: float
    """What it adds to the statistic that is to be small, weighted in the same way."""
    takes: tuple[float, ...] = ()
    """What it takes of each of the bin's bounds, such as 1 - tail."""


@dataclass(frozen=True)
class OfferedBin:
    """The offers of one bin, and how much of each bound its groups may take together."""

    name: str
    groups: tuple[tuple[Offer, ...], ...]
    """For each group of layers the offers to choose one of."""
    room: tuple[float, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """The chosen offers, [B][G], and their sums."""

    chosen: tuple[tuple[Offer, ...], ...]
    seconds: float
    loss: float

    @property
    def budgets(self) -> tuple[tuple[int, ...], ...]:
        """[B][G] tokens."""
        return tuple(tuple(offer.kv_budget_tokens for offer in groups) for groups in self.chosen)


@dataclass(frozen=True, eq=False)
class Frontier:
    """Every choice that holds the bounds and is not beaten in seconds and in loss at once, the fastest first."""

    bins: tuple[OfferedBin, ...]
    seconds_N: np.ndarray
    loss_N: np.ndarray
    picks_NG: np.ndarray
    """The place of the chosen offer in each group of each bin, bin after bin."""

    def __len__(self) -> int:
        return len(self.seconds_N)

    def __getitem__(self, place: int) -> Allocation:
        picks = iter(self.picks_NG[place].tolist())
        chosen = tuple(tuple(group[next(picks)] for group in each.groups) for each in self.bins)
        return Allocation(chosen, float(self.seconds_N[place]), float(self.loss_N[place]))

    def within(self, seconds: float) -> Allocation:
        """The choice with the least loss in that time. Raises UserError where every choice takes longer."""
        fitting = int(np.searchsorted(self.seconds_N, seconds + _ROUNDING * abs(seconds), side="right"))
        if not fitting:
            raise UserError(
                f"what holds every bound takes {rounded_up(1e3 * self[0].seconds, 4)} ms a step for its sparse reads at "
                f"least, and {max(0.0, 1e3 * seconds):.4f} ms are left for them",
                "allow more time, or lower the target",
            )
        return self[fitting - 1]

    def spread(self, count: int) -> list[Allocation]:
        """Up to `count` choices from the fastest to the best, at about equal steps of time."""
        wanted = np.linspace(self.seconds_N[0], self.seconds_N[-1], count)
        places = np.searchsorted(self.seconds_N, wanted * (1 + _ROUNDING), side="right") - 1
        return [self[place] for place in sorted(set(places.tolist()))]


def frontier(bins: Sequence[OfferedBin], bounds: Sequence[str] = ()) -> Frontier:
    """The choices of one offer in every group of every bin, of which no bin takes more of a bound than its room.

    bounds: a name for each entry of `room`, for the error. Raises UserError where a bin has no choice within its room.
    """
    if not bins or any(not offers for each in bins for offers in each.groups):
        raise ValueError("every bin and group needs at least one offer")
    sums_N2, picks = np.zeros((1, 2)), np.zeros((1, 0), dtype=np.int32)
    for each in bins:
        of_bin_NC, of_bin_picks = _within_bin(each, bounds)
        sums_N2, left, right = _joined(sums_N2, of_bin_NC[:, :2])
        picks = np.concatenate([picks[left], of_bin_picks[right]], axis=1)
    return Frontier(tuple(bins), sums_N2[:, 0], sums_N2[:, 1], picks)


def _within_bin(each: OfferedBin, bounds: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The sums [N, C] and the picks [N, G] of the choices in one bin that stay within its room."""
    room = np.array(each.room, dtype=np.float64)
    columns = [
        np.array([(offer.seconds, offer.loss, *offer.takes) for offer in group], dtype=np.float64)
        for group in each.groups
    ]
    sums_NC, picks = np.zeros((1, 2 + len(room))), np.zeros((1, 0), dtype=np.int32)
    for number, offers_OC in enumerate(columns):
        least_later = sum((later[:, 2:].min(0) for later in columns[number + 1 :]), np.zeros(len(room)))
        sums_NC, left, right = _joined(sums_NC, offers_OC, room - least_later)
        picks = np.concatenate([picks[left], right[:, None].astype(np.int32)], axis=1)
        if not len(picks):
            raise _no_room(each, bounds)
    return sums_NC, picks


def _joined(
    one_NC: np.ndarray, other_NC: np.ndarray, room: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sums of every pair of rows that stay within the room and are not beaten, by rising seconds, and the place of
    each one's parts."""
    sums_NC = (one_NC[:, None] + other_NC[None]).reshape(-1, one_NC.shape[1])
    places = np.arange(len(sums_NC))
    if room is not None:
        places = places[(sums_NC[:, 2:] <= room + _ROUNDING).all(1)]
    places = places[_unbeaten(sums_NC[places])]
    places = places[_thinned(sums_NC[places])]
    return sums_NC[places], places // len(other_NC), places % len(other_NC)


def _unbeaten(sums_NC: np.ndarray) -> np.ndarray:
    """The places of the rows that no other row equals or undercuts in all columns, by rising seconds."""
    order = np.lexsort(sums_NC.T[::-1])
    if sums_NC.shape[1] == 2:
        loss = sums_NC[order, 1]
        before = np.minimum.accumulate(np.concatenate([[np.inf], loss[:-1]]))
        return order[loss < before]
    kept_NC, kept = np.empty((len(order), sums_NC.shape[1] - 1)), list[int]()
    for place in order.tolist():
        # Rows before it are no slower.
        row = sums_NC[place, 1:]
        if not (kept_NC[: len(kept)] <= row).all(1).any():
            kept_NC[len(kept)] = row
            kept.append(place)
    return np.array(kept, dtype=np.int64)


def _thinned(sums_NC: np.ndarray) -> np.ndarray:
    """Places of at most MOST_CHOICES rows: the ends, and of each stretch of time the row with the least of one column,
    the columns taking turns."""
    if len(sums_NC) <= MOST_CHOICES:
        return np.arange(len(sums_NC))
    seconds = sums_NC[:, 0]
    edges = np.linspace(seconds[0], seconds[-1], MOST_CHOICES - 1)
    stretch = np.searchsorted(edges, seconds, side="right")
    by_column = [np.lexsort((column, stretch)) for column in sums_NC.T[1:]]
    starts = np.flatnonzero(np.diff(stretch, prepend=-1))
    turns = np.arange(len(starts)) % len(by_column)
    firsts = np.stack([order[starts] for order in by_column])
    return np.unique(np.concatenate([[0], firsts[turns, np.arange(len(starts))], [len(sums_NC) - 1]]))


def _no_room(each: OfferedBin, bounds: Sequence[str]) -> UserError:
    """Why no choice of a bin holds its bounds."""
    names = [*bounds, *(f"bound {number}" for number in range(len(bounds), len(each.room)))]
    broken = []
    for number, room in enumerate(each.room):
        least = sum(min(offer.takes[number] for offer in group) for group in each.groups)
        if least > room:
            broken.append(f"{names[number]} is {rounded_up(least, 6)} at its best, {rounded_up(room, 6)} is the most")
    why = "; ".join(broken) or f"no choice holds {' and '.join(names)} together"
    return UserError(
        f"no budget that was measured holds the bounds at {each.name}: {why}",
        "measure larger budgets, take more rollouts, or ask for less: a lower target, a larger share",
    )
