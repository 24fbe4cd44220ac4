r"""One way of writing for what is written in many: `√2`, `2π`, `3rd`, `0.\overline{3}`, `\{x \mid x > 2\}`."""

from __future__ import annotations

import re
from fractions import Fraction

_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)"
_UNIT = rf"\s*{_TEXT}\{{[^{{}}]*\}}\s*"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = {
    "−": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": r"\div ",
    "±": r"\pm ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "°": r"^\circ ",
    "ℝ": r"\mathbb{R}",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
}
_SPELLINGS = [
    (re.compile(r"√\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(rf"{_TEXT}\s*\{{\s*[Ii]nf(?:inity)?\s*\}}"), r"\\infty "),
    (re.compile(r"(?<![A-Za-z\\])(?:[Ii]nf(?:inity)?|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(rf"{_TEXT}\s*\{{\s*([-+\d.,/]*\d)\s*\}}"), r"\1"),
    (re.compile(r"\\math(?:rm|it|bf)\s*\{\s*([eixyn])\s*\}"), r"\1"),
    (re.compile(rf"(?<=\d)\s*(?:\^\s*)?(?:\{{\s*)?{_TEXT}\s*\{{\s*(?:st|nd|rd|th)\s*\}}(?:\s*\}})?"), ""),
    (re.compile(r"(?<=\d)(?:\^\{)?(?:st|nd|rd|th)\b\}?"), ""),
    (re.compile(rf"(?<=[\d}}])(?:\s|\\[,;: ])*\\[dt]?frac\{{{_UNIT}\}}\{{{_UNIT}(?:\^\{{?\d\}}?)?\}}$"), ""),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (
        re.compile(
            r"\\\{\s*([A-Za-z])\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*R\s*\}?|\\R(?![A-Za-z])))?\s*(?:\\mid|\\vert|\||:|\\colon)"
            r"((?:(?!\\[{}]).)*\1(?:(?!\\[{}]).)*)\\\}",
            re.DOTALL,
        ),
        r"\2",
    ),
]
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")  # escaped twice; in a matrix it is a new line
_RAISED = re.compile(r"(?<=[\dA-Za-z)}])[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_REPEATING = re.compile(r"(?<![\d.])(\d{1,30})\.(\d{0,30})(?:\\overline|\\bar|\\dot)\s*\{?(\d{1,30})\}?")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")


def spelled(text: str) -> str:
    r"""Returns an answer in the spelling that the readers of mathematics know.

    >>> spelled("2√3 ≤ x"), spelled(r"0.1\overline{6}"), spelled(r"\sin 30^\circ"), spelled(r"3^{\text{rd}}")
    ('2\\sqrt{3} \\le  x', '\\frac{1}{6}', '\\sin (\\frac{30\\pi}{180})', '3')
    """
    if not text.isascii():
        text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    if r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    if not text.isascii():
        for sign, command in _SIGNS.items():
            text = text.replace(sign, command)
    text = _REPEATING.sub(_fraction, text)
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return text


def _fraction(match: re.Match[str]) -> str:
    r"""0.1\overline{6}: (16 - 1) / 90, for a period of one digit behind one that does not repeat."""
    whole, fixed, period = match.groups()
    above = int(whole + fixed + period) - int(whole + fixed)
    value = Fraction(above, (10 ** len(period) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
