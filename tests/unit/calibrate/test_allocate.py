"""The allocation of budgets: known answers by hand, and every choice tried on small grids."""

from __future__ import annotations

import itertools
import random

import pytest

from sparroll.calibrate.allocation import allocate as module
from sparroll.calibrate.allocation.allocate import Allocation, Offer, OfferedBin, frontier
from sparroll.errors import UserError


def allocate(bins: list[OfferedBin], seconds: float) -> Allocation:
    return frontier(bins).within(seconds)


def one(name: str, *offers: tuple[int, float, float], room: float | None = None, takes=()) -> OfferedBin:
    """A bin of one group. Offers are (budget, seconds, loss)."""
    taken = takes or [0.0] * len(offers)
    made = (Offer(*offer, takes=() if room is None else (share,)) for offer, share in zip(offers, taken, strict=True))
    return OfferedBin(name, (tuple(made),), () if room is None else (room,))


STEEP = one("steep", (64, 1.0, 9.0), (128, 2.0, 3.0), (256, 4.0, 1.0))
FLAT = one("flat", (64, 1.0, 2.0), (128, 2.0, 1.5), (256, 4.0, 1.0))


@pytest.mark.parametrize(
    ("seconds", "budgets", "loss"),
    [
        (2.0, ((64,), (64,)), 11.0),
        # The first second more buys 6 in the steep bin and .5 in the flat one, the next two buy 2 or 1.
        (3.0, ((128,), (64,)), 5.0),
        (4.0, ((128,), (128,)), 4.5),
        (5.0, ((256,), (64,)), 3.0),
        (6.0, ((256,), (128,)), 2.5),
        (100.0, ((256,), (256,)), 2.0),
    ],
)
def test_time_goes_where_a_second_buys_most(seconds, budgets, loss) -> None:
    found = allocate([STEEP, FLAT], seconds)
    assert found.budgets == budgets
    assert found.loss == loss and found.seconds <= seconds


def test_a_budget_off_the_hull_is_taken_where_the_time_is_just_enough_for_it() -> None:
    # 128 lies above the line from 64 to 256, so no price of a second would pick it; it is the best that 2 s can buy.
    bent = one("bent", (64, 1.0, 9.0), (128, 2.0, 8.0), (256, 3.0, 1.0))
    assert allocate([bent], 2.5).budgets == ((128,),)


def test_the_same_loss_costs_as_little_time_as_possible() -> None:
    assert allocate([one("same", (64, 1.0, 2.0), (128, 2.0, 2.0)), STEEP], 9.0).budgets == ((64,), (256,))


def test_a_bound_holds_in_every_bin_for_itself() -> None:
    held = one("held", (64, 1.0, 2.0), (128, 2.0, 1.5), (256, 4.0, 1.0), room=0.14, takes=(0.3, 0.14, 0.05))
    free = one("free", (64, 1.0, 9.0), (128, 2.0, 3.0), (256, 4.0, 1.0), room=0.14, takes=(0.1, 0.1, 0.1))
    assert allocate([held, free], 4.0).budgets == ((128,), (128,))
    assert frontier([held, free])[0].budgets == ((128,), (64,))
    with pytest.raises(UserError, match=r"takes 3000.0000 ms .* and 2500.0000 ms are left") as found:
        allocate([held, free], 2.5)
    assert "allow more time" in found.value.hint


def test_groups_of_a_bin_share_its_bounds() -> None:
    offers = (Offer(64, 1.0, 3.0, (0.1,)), Offer(128, 2.0, 1.0, (0.0,)))
    both = OfferedBin("0-2k", (offers, offers), (0.15,))
    assert frontier([both])[0].seconds == 3.0
    assert allocate([both], 4.0).budgets == ((128, 128),)
    assert sorted(allocate([both], 3.9).budgets[0]) == [64, 128]


def test_a_bin_that_no_budget_holds_is_named_with_its_figure() -> None:
    lost = one("4k-6k", (64, 1.0, 2.0), (128, 2.0, 1.0), room=0.14, takes=(0.3, 0.2))
    with pytest.raises(UserError, match="holds the bounds at 4k-6k: 1 - tail is 0.2.* at its best, 0.14.* is the most"):
        frontier([STEEP, lost], bounds=["1 - tail"])
    split = OfferedBin("0-2k", ((Offer(64, 1.0, 1.0, (0.0, 0.2)), Offer(128, 1.0, 1.0, (0.2, 0.0))),), (0.1, 0.1))
    with pytest.raises(UserError, match="no choice holds 1 - tail and impossible tokens together"):
        frontier([split], bounds=["1 - tail", "impossible tokens"])
    with pytest.raises(ValueError, match="at least one offer"):
        allocate([OfferedBin("empty", ((),))], 1.0)


def brute(bins: list[OfferedBin], seconds: float) -> float | None:
    """The least loss of all choices that are allowed."""
    groups = [(place, group) for place, each in enumerate(bins) for group in each.groups]
    best = None
    for chosen in itertools.product(*(group for _, group in groups)):
        taken = [[0.0] * len(each.room) for each in bins]
        for (place, _), offer in zip(groups, chosen, strict=True):
            taken[place] = [a + b for a, b in zip(taken[place], offer.takes, strict=True)]
        held = all(a <= b for each, sums in zip(bins, taken, strict=True) for a, b in zip(sums, each.room, strict=True))
        if held and sum(offer.seconds for offer in chosen) <= seconds:
            loss = sum(offer.loss for offer in chosen)
            best = loss if best is None else min(best, loss)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_every_choice_tried_gives_the_same_loss(seed) -> None:
    draw = random.Random(seed)

    def offers() -> tuple[Offer, ...]:
        seconds, losses = (
            sorted(draw.random() for _ in range(4)),
            sorted((draw.random() for _ in range(4)), reverse=True),
        )
        takes = sorted((draw.random() for _ in range(4)), reverse=True)
        return tuple(Offer(64 << i, seconds[i] * 1e-4, losses[i] * 1e-3, (takes[i], draw.random())) for i in range(4))

    bins = [OfferedBin(str(number), (offers(), offers()), (1.2, 1.6)) for number in range(3)]
    for seconds in (1e-4, 2e-4, 3e-4, 4e-4, 6e-4):
        best = brute(bins, seconds)
        if best is None:
            with pytest.raises(UserError):
                allocate(bins, seconds)
        else:
            found = allocate(bins, seconds)
            assert found.loss == pytest.approx(best) and found.seconds <= seconds
            assert sum(offer.seconds for groups in found.chosen for offer in groups) == pytest.approx(found.seconds)


def test_thinning_loses_little_and_keeps_the_ends(monkeypatch) -> None:
    draw = random.Random(3)
    bins = []
    for number in range(6):
        seconds, losses = (
            sorted(draw.random() for _ in range(8)),
            sorted((draw.random() for _ in range(8)), reverse=True),
        )
        bins.append(one(str(number), *((64 << i, seconds[i], losses[i]) for i in range(8))))
    whole = frontier(bins)
    monkeypatch.setattr(module, "MOST_CHOICES", 60)
    thin = frontier(bins)
    assert len(thin) <= 60 < len(whole)
    assert thin[0] == whole[0] and thin[-1 + len(thin)].loss == pytest.approx(whole[len(whole) - 1].loss)
    for seconds in (2.0, 2.5, 3.0):
        assert whole.within(seconds).loss <= thin.within(seconds).loss <= 1.03 * whole.within(seconds).loss


def test_a_picture_goes_from_the_fastest_choice_to_the_best() -> None:
    shown = frontier([STEEP, FLAT]).spread(4)
    assert shown[0].budgets == ((64,), (64,)) and shown[-1].budgets == ((256,), (256,))
    assert [each.seconds for each in shown] == [2.0, 4.0, 6.0, 8.0]
