"""Is what exact arithmetic decides about two answers right, and is the rest left open?"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.tools.math_exact import same
from srpo_env.tools.math_polynomials import Unreadable, polynomial
from srpo_env.tools.math_spelling import spelled


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{\sqrt{8}}{2}", r"\sqrt2"),
        (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
        (r"\sqrt{\frac{4}{9}}", r"\frac23"),
        (r"\sqrt[3]{27}", "3"),
        (r"2\frac{1}{3}", "7/3"),
        (r"\frac{\pi}{2}+\frac{\pi}{3}", r"\frac{5\pi}{6}"),
        ("(x-1)(x+1)", "x^2-1"),
        ("n(n+1)/2", r"\frac{n^2+n}{2}"),
        (r"\frac{a}{b}", "a/b"),
        ("2^{-3}", "1/8"),
        ("5!", "120"),
        ("3+4i", "4i+3"),
        ("0.5x", r"\frac{x}{2}"),
        ("(1, 2)", r"\left(1,\frac{4}{2}\right)"),
        ("(1,2),(3,4)", "(3,4), (1,2)"),
        (r"\{1,2,3\}", "3, 2, 1"),
        (r"\{1, 2\}", r"\{1, 2, 2\}"),
        (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
        ("x = 5", "5"),
        ("(x, y) = (1, 2)", "(1, 2)"),
        ("y = 2x + 1", "2x + 1"),
        ("f(x) = x^2", "x^2"),
        ("2x + 4y - 3 = 0", r"y = -\frac12 x + \frac34"),
        ("x^2 + y^2 = 4", "2x^2 + 2y^2 - 8 = 0"),
        ("x > 3", r"(3, \infty)"),
        (r"[-2, 7]", r"-2 \le x \le 7"),
        ("3 > x > 1", "1 < x < 3"),
        ("-x > -1", "x < 1"),
        (r"x \ne 2", r"(-\infty, 2) \cup (2, \infty)"),
        (r"x < 1 \text{ or } x > 3", r"(3, \infty) \cup (-\infty, 1)"),
        (r"x \in [0, 1)", "0 <= x < 1"),
        (r"\{x \mid x > 2\}", r"(2, \infty)"),
        (r"0 < f(x) < 1", "(0, 1)"),
        (r"\begin{pmatrix}\frac12 & x\\ 0 & 1\end{pmatrix}", r"\begin{bmatrix}0.5&x\\0&1\\\end{bmatrix}"),
    ],
)
def test_equal(gold: str, answer: str) -> None:
    assert same(gold, answer) is same(answer, gold) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"2\sqrt3", r"3\sqrt2"),
        (r"\sqrt2+\sqrt3", r"\sqrt5"),
        (r"\frac{1}{3^{80}}", r"\frac{1}{3^{79}}"),
        (r"\pi", r"\frac{22}{7}"),
        (r"2\frac{1}{3}", "2/3"),
        ("2x", "3x"),
        ("(1, 2)", "(2, 1)"),
        ("(1, 2, 3)", "(1, 2)"),
        ("1, 2", "1, 3"),
        ("1, 2", "1"),
        (r"\pm 17", "17"),
        ("x = 5", "y = 5"),
        ("2x - 5y + 3 = 0", "7x + y + 1 = 0"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        ("x > 3", "x < 3"),
        ("x > 3", r"x \ge 3"),
        ("[0, 1)", "(0, 1)"),
        (r"(-\infty, 1) \cup (3, \infty)", r"(-\infty, 1)"),
        (r"x < 1 \text{ or } x > 3", r"(-\infty, 1) \cup (4, \infty)"),
    ],
)
def test_different(gold: str, answer: str) -> None:
    assert same(gold, answer) is same(answer, gold) is False


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/3", "0.33"),  # a rounded number
        ("5m", "5"),  # a unit
        ("x + C", "x"),
        ("e", "3"),
        ("i^2", "-1"),
        ("1/2x", "0.5x"),  # (1/2)x for some, 1/(2x) for others
        ("1 000", "1000"),
        ("1,000", "1000"),
        ("f(2)", "2f"),
        ("ab", "ba"),
        ("x > 3", "y > 3"),
        ("(1, 2)", "1, 2"),
        ("[1, 2] \\cup [2, 3]", "[1, 3]"),
        ("x^2 = 4", "x = 2"),
        ("2^{n}", "2n"),
        ("12^34", "12^3"),
        (r"\sin x", "x"),
        (r"5\%", "5"),
        (r"90^\circ", "90"),
        ("(3, 1)", "(1, 3]"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1, 2)"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
        ("", ""),
    ],
)
def test_what_is_not_certain_is_left_open(gold: str, answer: str) -> None:
    assert same(gold, answer) is None


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9",
        "9^{999}^{9}",
        "(x+y+z)^{40}",
        "((10^9)!)!",
        "101!",
        "1/0",
        "0^{-1}",
        "(" * 500,
        "{" * 300 + "1" + "}" * 300,
    ],
)
def test_what_is_large_or_makes_no_sense_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        polynomial(text)


@given(st.lists(st.tuples(st.fractions(-1000, 1000, max_denominator=50), st.integers(1, 60)), min_size=1, max_size=4))
def test_a_sum_of_roots_has_one_form_whatever_its_order(terms: list[tuple[Fraction, int]]) -> None:
    """Against floating point: equal forms have equal values."""
    texts = [rf"({c.numerator}/{c.denominator})\sqrt{{{n}}}" for c, n in terms]
    first, second = polynomial("+".join(texts)), polynomial("+".join(reversed(texts)))
    assert first.same(second)
    assert first.value == pytest.approx(sum(float(c) * n**0.5 for c, n in terms), abs=1e-6)


PIECES = [*r"\{}()[]^_!/*+-=<>,;|0123456789.xy ", r"\frac", r"\sqrt", r"\pi", r"\pm"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_text_is_compared_without_an_error(text: str) -> None:
    assert same(text, "x+1") in {True, False, None}
    assert same(f"(0,{'9' * 399})", text) in {True, False, None}


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("√2", r"\sqrt{2}"),
        ("2*sqrt(3)", r"2*\sqrt{3}"),
        ("x²", "x^{2}"),
        ("10⁻³", "10^{-3}"),
        (r"3^{\text{rd}}", "3"),
        ("5th", "5"),
        (r"0.\overline{12}", r"\frac{4}{33}"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        (r"\sin 30^\circ", r"\sin (\frac{30\pi}{180})"),
        (r"30^\circ", r"30^\circ"),
        (r"\text{13}", "13"),
        (r"\text{13 or 14}", r"\text{13 or 14}"),
        (r"\mathrm{e}^2", "e^2"),
        (r"10 \frac{\text{m}}{\text{s}}", "10"),
        (r"\frac{\text{m}}{\text{s}}", r"\frac{\text{m}}{\text{s}}"),
        (r"\langle 1, 2\rangle", "( 1, 2)"),
        (r"\{x \mid x > 2\}", " x > 2"),
        (r"\{x, y\}", r"\{x, y\}"),
        (r"\pi", r"\pi"),
        ("pint", "pint"),
        (r"\begin{pmatrix}1\\a\end{pmatrix}", r"\begin{pmatrix}1\\a\end{pmatrix}"),
    ],
)
def test_the_spelling_of(text: str, plain: str) -> None:
    assert spelled(text) == plain
