"""The seconds of a round are those of its own optimizer steps, by a clock that the test sets."""

from __future__ import annotations

from sparroll.integrations.trl.round_clock import RoundClock


class Hands:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.clock = RoundClock(lambda: self.seconds)

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_round_of_one_step_takes_what_the_step_takes_the_first_one_too() -> None:
    hands = Hands()
    for step_seconds in (60.0, 5.0, 20.0):
        hands.clock.step_begins()
        assert hands.clock.round_begins() is None
        hands.pass_by(step_seconds)
        assert hands.clock.step_ends(over=True) == step_seconds
        # Logging and a checkpoint.
        hands.pass_by(300)


def test_an_evaluation_counts_neither_between_two_steps_nor_in_one() -> None:
    hands = Hands()
    for _ in range(2):
        hands.clock.step_begins()
        hands.clock.round_begins()
        hands.pass_by(4)
        with hands.clock.stopped():
            hands.pass_by(100)
        hands.pass_by(3)
        assert hands.clock.step_ends(over=True) == 7
        with hands.clock.stopped():
            hands.pass_by(100)


def test_a_round_that_serves_two_steps_takes_both_and_ends_with_the_second() -> None:
    hands = Hands()
    for _ in range(2):
        hands.clock.step_begins()
        hands.clock.round_begins()
        hands.pass_by(10)
        assert hands.clock.step_ends(over=False) is None
        with hands.clock.stopped():
            hands.pass_by(100)
        hands.clock.step_begins()
        hands.pass_by(2)
        assert hands.clock.step_ends(over=True) == 12


def test_two_rounds_of_one_step_share_its_time() -> None:
    hands = Hands()
    hands.clock.step_begins()
    assert hands.clock.round_begins() is None
    hands.pass_by(10)
    assert hands.clock.round_begins() == 10
    hands.pass_by(4)
    assert hands.clock.step_ends(over=True) == 4


def test_what_is_sampled_outside_of_a_step_takes_no_time() -> None:
    hands = Hands()
    hands.clock.round_begins()
    hands.pass_by(10)
    assert hands.clock.round_begins() == 0
    with hands.clock.stopped():
        hands.pass_by(10)
    assert hands.clock.step_ends(over=True) == 0
