"""Is the answer found where it stands, and is what needs no algebra settled rightly?"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.tools.math_answers import answer_of, number, reference_of, settle


def found(text: str) -> str | None:
    answer = answer_of(text)
    return None if answer is None else answer.text


def settled(gold: str, prediction: str, tolerance: float = 0.0) -> str | None:
    verdict = settle(reference_of(gold), answer_of(prediction), tolerance)
    return None if verdict is None else verdict[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{8} is no prime, so \boxed{7}", "7"),
        (r"\boxed{7}. " + "And so on. " * 500, "7"),
        (r"\boxed{1} and \boxed{-2}", "1, -2"),
        (r"$\boxed{2}, \boxed{3}, \boxed{5}$", "2, 3, 5"),
        (r"\boxed{(2,2)} \quad \text{and} \quad \boxed{(6,2)}", "(2,2), (6,2)"),
        (r"\boxed{615}, \boxed{615}", "615"),
        (r"Hence \boxed{5}. To sum up: \boxed{6}", "6"),
        (r"<think>\boxed{1}</think>It is \boxed{2}", "2"),
        (r"perhaps \boxed{1}</think>It is \boxed{2}", "2"),
        (r"<think>\boxed{1}</think>", None),
        (r"<think>\boxed{1}", None),
        (r"\boxed{3}, no: \boxed{", None),
        (r"\boxed{}", None),
        (r"\fbox{7}", "7"),
        ("9 * 2 = 18\n#### 18", "18"),
        ("#### 10\nno\n#### 20\nthat is all", "20"),
        ("<answer> 12 </answer>", "12"),
        ("<answer>5</answer>\n<answer>6</answer>", "6"),
        ("42", "42"),
        ("  $42$. ", "42"),
        ("**42**", "42"),
        (r"\(x + 1\)", "x + 1"),
        ("[4.0]", "4.0"),
        ("x = 3", "x = 3"),
        ("First 3 = 3.\n\nFinal Answer: **73**", "73"),
        ("The answer is $1,234. I hope it is correct.", "$1,234"),
        ("42<|im_end|>\n<|im_start|>user\n43", "42"),
        ("plain 42", None),
        ("Chapter 7", None),
        ("", None),
    ],
)
def test_answer_found(text: str, answer: str | None) -> None:
    assert found(text) == answer


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("The answer is 72, in total.", "72"),
        ("So there are 12 ways.\nI hope this helps.", "12"),
        ("First 3 = 3.\n\nFinal Answer: **73** or so", "73"),
        ("The answer is 4 or 5.", "4 or 5"),
        ("The profit is $200,000 - $130,000 = $70,000.", "70,000"),
        ("The angle is [90].", "90"),
    ],
)
def test_a_sentence_that_states_an_answer_is_handed_on_and_not_taken_for_the_answer(text: str, part: str) -> None:
    answer = answer_of(text)
    assert answer is not None
    assert part in answer.text
    assert not answer.stated


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("1000", "1,000"),
        ("1000", "1{,}000"),
        ("1000", r"1\,000"),
        ("1000", "1 000"),
        ("1000.0", "1,000"),
        ("1000.5", "1000,5"),
        ("0,25", "0.25"),
        ("0.5", ".5"),
        ("1/2", r"\frac{1}{2}"),
        ("1/2", r"\dfrac{2}{4}"),
        ("-5", "−5"),
        ("3", "3."),
        ("18.90", r"\$18.90"),
        ("3.83e35", r"3.83 \times 10^{35}"),
        ("0.333333", "1/3"),
        (r"\text{Evelyn}", "Evelyn"),
        ("yes", r"\text{Yes}"),
        (r"\text{no solution}", "No solution"),
        ("yes", "The answer is yes."),
        ("E", r"\boxed{\text{E}}"),
        ("E", r"\boxed{E: polygenic risk}"),
        ("E", r"\boxed{(E)}"),
        ("E", "e"),
        ("C", "So the correct answer is (C)."),
        ("10:30", "10:30"),
        (r"1, 2, \ldots, 9", r"1, 2, \dots, 9"),
        (r"\emptyset", r"\varnothing"),
        ("3/2", "1 1/2"),
        ("10:30 AM", "10:30 a.m."),
        ("x+1", "1+x"),
        (r"\sqrt{4}", "2"),
    ],
)
def test_settled_as_right(gold: str, prediction: str) -> None:
    assert settled(gold, prediction) == "right"


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("1", "21"),
        ("1", "1.5"),
        ("12000023", "12000024"),
        ("1e-10", "2e-10"),
        ("123456.7", "123456.8"),
        ("A", "BANANA"),
        ("E", r"\boxed{Either}"),
        ("C", "The answer is option D."),
        ("even", "odd"),
        (r"\text{no solution}", r"\boxed{5}"),
        (r"\text{east}", "The answer is west."),
        ("10:30", "11:30"),
        (r"1, 3, 5, \ldots, 99", "1, 3, 5, 99"),
        ("10:30 AM", "10:30 PM"),
        ("0,7", "07"),
        ("23,45", "2345"),
        ("2,4,6", "246"),
        (r"2, 4, 6, \ldots", r"1, 3, 5, \ldots"),
        ("42", "plain 42"),
        ("42", ""),
    ],
)
def test_settled_as_wrong(gold: str, prediction: str) -> None:
    assert settled(gold, prediction) == "wrong"


@pytest.mark.parametrize("gold", ["", " ", "see figure", "Answer is forty two.", r"\boxed{}"])
@pytest.mark.parametrize("prediction", ["", "5", "see figure", "Answer is forty two."])
def test_a_reference_that_nothing_can_be_compared_with_is_unscorable(gold: str, prediction: str) -> None:
    assert settled(gold, prediction) == "unscorable"


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("0,111", "111"),
        (r"\sin^2 x", r"1-\cos^2 x"),
        ("50\\%", "50"),
        ("5/2", "1 3/2"),
        ("12:30", "12"),
    ],
)
def test_what_needs_algebra_is_left_open(gold: str, prediction: str) -> None:
    assert settled(gold, prediction) is None


def test_a_tolerance_widens_what_is_equal() -> None:
    assert [settled("4.2", "4.15", tolerance) for tolerance in (0.0, 0.1, 0.01)] == ["wrong", "right", "wrong"]
    assert [settled("4", r"3\sqrt{2}", tolerance) for tolerance in (0.0, 0.3)] == ["wrong", None]


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_two_whole_numbers_are_settled_exactly(gold: int, prediction: int) -> None:
    assert settled(str(gold), f"{prediction:,}") == ("right" if gold == prediction else "wrong")


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_is_read_exactly(value: Fraction) -> None:
    assert number(f"{value.numerator}/{value.denominator}") == (value, False)


@given(st.text(st.sampled_from("\\{}$()[]0123456789.,/^ abisx=*\n"), max_size=40), st.text(max_size=40))
def test_any_text_is_read_without_an_error(first: str, second: str) -> None:
    assert settled(first, second) in {"right", "wrong", "unscorable", None}
    assert settled(second, first) in {"right", "wrong", "unscorable", None}


@pytest.mark.parametrize(
    "piece",
    ["(", r"\(", "$", ". ", "5 a", " ", "answer ", "[", "**", r"\boxed{", "{}", "1,", r"\text{", "answer is  *"],
)
def test_long_texts_take_linear_time(piece: str) -> None:
    """What is quadratic takes minutes here."""
    text = piece * (200_000 // len(piece))
    for reply in (text, rf"\boxed{{{text}}}"):
        assert settled(r"\text{yes}", reply) in {"wrong", None}
