"""Which part of a response is its answer, and which signs mean the same."""

from __future__ import annotations

import pytest

from sparroll.tasks.math.answer import last_boxed, plain_signs

BOXES = [
    (r"so \boxed{5}.", "5"),
    (r"\boxed{3}, or rather \boxed{5}", "5"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{1 \} 2}", r"1 \} 2"),
    (r"\boxed {5}", "5"),
    (r"\boxed 5", "5"),
    (r"\boxed 5.", "5"),
    (r"$\boxed 5$", "5"),
    (r"\boxed -3.5, surely", "-3.5"),
    (r"\boxed\pi", r"\pi"),
    (r"\fbox{5}", "5"),
    (r"\boxed{5} and \fbox{6}", "6"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{5} then \boxed{}", "5"),
    (r"\boxed{ }", None),
    (r"\boxed{5} then \boxed{6", None),
    (r"\boxed{\frac{1}{2}", None),
    (r"\boxed{\sqrt{2\}}", r"\sqrt{2\}"),
    (r"<think>\boxed{4}</think>\boxed{5}", "5"),
    (r"<think>\boxed{5}</think> So it is 5.", None),
    (r"<think>I guess \boxed{5}", None),
    (r"\boxed{5}</think>", None),
    (r"so</think>\boxed{5}", "5"),
    (r"<think>a</think>\boxed{5}<think>\boxed{6}", "5"),
    (r"\boxedanswer{5}", None),
    (r"\boxed", None),
    ("the answer is 5", None),
    ("", None),
]


@pytest.mark.parametrize(("response", "answer"), BOXES)
def test_the_last_box_is_the_answer(response: str, answer: str | None) -> None:
    assert last_boxed(response) == answer


def test_a_box_beyond_a_million_characters_of_text_is_found_and_one_before_them_is_not() -> None:
    filler = "x" * 10_000_000
    assert last_boxed(filler + r"\boxed{5}") == "5"
    assert last_boxed(r"\boxed{5}" + filler) is None


@pytest.mark.parametrize("response", [r"\boxed{" * 500_000, r"\boxed" * 500_000, "{" * 10**6, "\\" * 10**6])
def test_a_response_of_nothing_but_openings_has_no_answer(response: str) -> None:
    assert last_boxed(response) is None


def test_a_box_around_many_boxes_is_read_once() -> None:
    assert last_boxed(r"\boxed{" * 400 + "5" + "}" * 400) == "5"


@pytest.mark.parametrize(
    ("signs", "plain"),
    [
        ("１２", "12"),
        ("−5", "-5"),
        ("x² + y¹⁰", "x^{2} + y^{10}"),
        ("x₁", "x_{1}"),
        ("½", r"\frac{1}{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("5\u200b", "5"),
        ("5\u00a0 \n6", "5 6"),
        ("a\x00b", "ab"),
        ("12\\,345", "12345"),
        ("0.3\u0305", r"0.\overline{3}"),
        ("€5", r"\euro 5"),
        ("0.3…", r"0.3\ldots"),
        ("\u4e09", "\\text{ \u4e09 }"),
        ("5\u5398\u7c73", "5\\text{ cm }"),
        ("\u03bb", r"\lambda"),
        ("\ud800", "\ud800"),
    ],
)
def test_a_sign_with_one_meaning_becomes_plain(signs: str, plain: str) -> None:
    assert plain_signs(signs) == plain


def test_a_response_that_repeats_a_box_within_itself_costs_linear_time() -> None:
    """If each of them were read to its end, this would take hours."""
    assert last_boxed(r"\boxed{" * 100_000 + "5" + "}" * 100_000) == "5"
    assert last_boxed(r"\boxed { \boxed{ 5 } } ") == "5" and last_boxed(r"\boxed{\boxed{5} + 1}") == r"\boxed{5} + 1"
