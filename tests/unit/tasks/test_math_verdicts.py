"""Verdicts on answers that look right and are not, and on right ones beside them."""

from __future__ import annotations

import pytest

from sparroll.tasks.math.grading.compare import readable, same_answer

HEDGED = [
    ("yes", "yes, no"),
    ("no", "yes, no"),
    ("yes", "no, wait, yes"),
    ("yes", "yes. The answer is no."),
    ("yes", "yes no"),
    ("true", "true, false"),
    ("false", "true, false"),
    ("even", "even, odd"),
    ("odd", r"\text{even, odd}"),
    ("even", "even number, odd number"),
    ("even", "It is even. It is odd."),
    ("Alice", "Alice, Bob, Carol"),
    ("Carol", "Alice, Bob, Carol"),
    ("Alice", "Alice, or Bob"),
    ("Alice", "Alice (Bob)"),
    ("Alice and Bob", "Alice, Bob, Carol"),
    ("Monday", "Sunday, Monday, Tuesday, Wednesday, Thursday, Friday, Saturday"),
    ("red", "red blue green yellow"),
    ("right", "right acute obtuse"),
    ("circle", "the circle, the ellipse, the parabola"),
    ("always", "always, sometimes, never"),
    ("no solution", "no solution, infinitely many solutions"),
]
EXPLAINED = [
    ("yes", "Yes, correct."),
    ("yes", "Yes, it does not depend on n"),
    ("yes", "Yes. There is no such number."),
    ("no", "No, never."),
    ("no", r"\text{No, it doesn't.}"),
    ("no", "No, the series diverges."),
    ("impossible", "No, impossible."),
    ("even", "Even, since the sum of two odd numbers is even"),
    ("even", "even, not odd"),
    ("Alice", "Alice, since she has more"),
    ("Smith", "Mr. Smith"),
    ("Alice and Bob", "Bob, Alice"),
    ("increasing", "strictly increasing"),
    ("right triangle", "isosceles right triangle"),
    ("Monday", "Monday, July 4"),
    ("no solution", "none, no solutions"),
]
UNSOLVED = [
    ("0", "x^2-5x+6=0"),
    ("0", "0=x^2-4"),
    ("0", "x(x-2)=0"),
    ("0", "e^x-2=0"),
    ("10", "x^2+1=10"),
    ("1", "(x-2)^2=1"),
    ("4", "2x=4"),
    ("0", r"\text{The equation is } x^2-5x+6=0"),
]
SOLVED = [
    ("0", "x=0"),
    ("4", "x^2=4"),
    ("3", "3=x"),
    ("7", r"x+\frac{1}{x}=7"),
    ("1", r"\cos x=1"),
    ("0", "f(2)=0"),
    ("5", "|x|=5"),
    ("4", "x+y=4"),
    ("x^2-5x+6=0", "(x-2)(x-3)=0"),
]
QUANTITIES = [
    *((gold, answer) for gold in ("30 m/s", r"30\text{ m/s}") for answer in ("30", "30 m/s", r"30\ \mathrm{m/s}")),
    ("36 km/h", "36"),
    ("36 km/h", r"36\text{ km/h}"),
    ("36 km/h", "10 m/s"),
    ("9.8 m/s^2", "9.8"),
    ("9.8 m/s^2", r"9.8\text{ m/s}^2"),
    ("25 mi/h", r"25\text{ miles per hour}"),
    ("3m/s", "3 m/s"),
    ("3x/s", r"\frac{3x}{s}"),
]
TIMES = [
    ("13:20", "1:20", False),
    ("1:20", "13:20", False),
    ("0:30", "12:30", False),
    ("13:20", r"1:20\text{ am}", False),
    ("0:30", r"12:30\text{ pm}", False),
    ("7:30 am", "7:30 pm", False),
    ("13:20", r"1:20\text{ pm}", True),
    ("1:20 pm", "13:20", True),
    ("3:16 pm", "3:16", True),
    ("3:16", "3:16 am", True),
    ("24:00", "0:00", True),
    ("13:20", r"\frac{13}{20}", True),
    ("13:20", "26:40", True),
]
NATURAL_LOGARITHMS = [
    *((r"\ln 2", answer) for answer in (r"\log_e 2", r"\log_e2", r"\log_{e} 2", r"\log _e(2)", "log_e(2)")),
    (r"\log_e 2", r"\ln 2"),
    (r"x\ln x", r"x\log_e x"),
    (r"\ln x", r"\log_ex"),
    (r"1+\ln(x+1)", r"1+\log_e (x+1)"),
    (r"\ln^2 x", r"\log_e^2 x"),
    (r"2\log_2 e", r"\frac{2}{\log_e 2}"),
]
CALLED_FALSE = [
    ("0", r"x=0\text{ is false}"),
    ("0", r"x = 0 \text{ is untrue}"),
    ("3", r"\text{The answer is false: }3"),
    ("3", r"\text{The answer is false: } x=3"),
    ("3", "False: 3"),
    ("3", "3 (false)"),
    ("3", r"3\text{ (false)}"),
    ("3", r"3\text{ is false}"),
    (r"\frac{1}{2}", r"\text{false, }\frac{1}{2}"),
]
FALSE_AS_A_WORD = [
    ("false", "false"),
    ("false", r"\text{False}"),
    ("false", "The statement is false."),
    ("false", r"\text{False, since }2+2=4"),
    ("false", r"\text{False: }x=3\text{ does not solve it}"),
    ("3", r"\text{3 statements are false}"),
    ("3", r"\text{The number of false statements is }3"),
    ("0.05", r"\text{The false positive rate is }0.05"),
]


def judged(gold: str, answer: str) -> bool:
    assert readable(gold)
    return same_answer(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), HEDGED)
def test_words_that_name_several_things_state_none_of_them(gold: str, answer: str) -> None:
    assert not judged(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), EXPLAINED)
def test_a_word_with_an_explanation_is_stated(gold: str, answer: str) -> None:
    assert judged(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), UNSOLVED)
def test_an_equation_that_is_still_to_be_solved_does_not_state_its_other_side(gold: str, answer: str) -> None:
    assert not judged(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), SOLVED)
def test_an_equation_that_says_what_a_variable_power_or_function_is_states_it(gold: str, answer: str) -> None:
    assert judged(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), QUANTITIES)
def test_a_unit_behind_a_stroke_is_a_unit_in_every_spelling(gold: str, answer: str) -> None:
    assert judged(gold, answer)


@pytest.mark.parametrize("answer", ["30 km/h", "30 m", "30 s", "31"])
def test_another_unit_or_value_is_not_the_gold_speed(answer: str) -> None:
    assert not judged("30 m/s", answer)


@pytest.mark.parametrize(("gold", "answer", "right"), TIMES)
def test_hours_of_24_are_not_those_of_twelve_without_am_or_pm(gold: str, answer: str, right: bool) -> None:
    assert judged(gold, answer) is right


@pytest.mark.parametrize(("gold", "answer"), NATURAL_LOGARITHMS)
def test_a_logarithm_to_the_base_e_is_the_natural_one(gold: str, answer: str) -> None:
    assert judged(gold, answer)


@pytest.mark.parametrize("answer", [r"\log_2 e", r"\log_{10} 2", r"\log_e 3"])
def test_another_logarithm_is_not_the_natural_one(answer: str) -> None:
    assert not judged(r"\ln 2", answer)


@pytest.mark.parametrize(("gold", "answer"), CALLED_FALSE)
def test_a_value_that_is_called_false_is_not_stated(gold: str, answer: str) -> None:
    assert not judged(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), FALSE_AS_A_WORD)
def test_false_is_an_answer_and_may_be_counted(gold: str, answer: str) -> None:
    assert judged(gold, answer)
