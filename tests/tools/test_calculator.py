"""Is every value exact, every absurdity refused fast, and nothing but arithmetic ever computed?"""

import asyncio
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.errors import ToolError
from srpo_env.protocols import Tool
from srpo_env.registry import load
from srpo_env.toolcalls import run_calls
from srpo_env.tools.calculating import MOST_CHARS, MOST_DEPTH, calculator, evaluate, written


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("17 * 24", "408"),
        ("0.1 + 0.2", "0.3"),
        ("1/3 + 1/6", "0.5"),
        ("1/3", "1/3 (about 0.333333)"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("-2 ** 2", "-4"),
        ("2 ** -3", "0.125"),
        ("2 ^ 10", "1024"),
        ("2 ** 3 ** 2", "512"),
        ("(-1) ** 999999999999", "-1"),
        ("1 ** 10 ** 3", "1"),
        ("0 ** 0", "1"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("12 + 30 =", "42"),
        ("007 + .5 + 1.", "8.5"),
        ("-0.05", "-0.05"),
        ("sqrt(9/16)", "0.75"),
        ("abs(-3) + floor(2.9) + ceil(2.1) + max(1, 5, 3) - min(4, 2)", "11"),
        ("round(2.5) + round(-2.5)", "0"),
        ("round(2/3, 3)", "0.667"),
        ("10 ** 400 / 10 ** 399", "10"),
    ],
)
def test_a_value_is_exact(expression: str, result: str) -> None:
    assert asyncio.run(calculator(expression=expression)) == result


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("", "empty"),
        ("=", "empty"),
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "an exponent is a whole number"),
        ("sqrt(2)", "not rational; it is about 1.41421356237"),
        ("sqrt(-1)", "no square root"),
        ("2 +", "not an arithmetic expression"),
        ("(1", "not an arithmetic expression"),
        ("1,234 + 1", "write 1234567, not 1,234,567"),
        ("2(3 + 4)", r"write \* between"),
        ("x + 1", "'x' has no value"),
        ("sqr(4)", "Did you mean 'sqrt'?"),
        ("sqrt(1, 2)", "sqrt takes 1 numbers, not 2"),
        ("max()", "max takes 1 or more numbers, not 0"),
        ("round(1, 0.5)", "decimal places"),
        ("1 if 2 else 3", "not arithmetic"),
        ("not 1", "not arithmetic"),
        ("max(*(1, 2))", "not arithmetic"),
        ("1 + \u0663", "is not arithmetic"),
        ("1" * (MOST_CHARS + 1), "at most 1000"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
        ("-" * (MOST_DEPTH + 2) + "1", "nested too deeply"),
        ("-" * 999 + "1", "nested too deeply|not an arithmetic"),
    ],
)
def test_what_has_no_value_is_told_to_the_agent(expression: str, error: str) -> None:
    with pytest.raises(ToolError, match=error):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "9**9**9**9**9",
        "2**99999999999999999999",
        "(9**999)**999",
        "10**999 * 10**999",
        "(1/7)**100000",
        "2**-99999",
    ],
)
def test_what_is_too_large_is_refused_fast(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolError, match="too large"):
        evaluate(expression)
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize(
    "line",
    [
        "import ctypes; ctypes.CDLL(None).getpid()",
        "().__class__.__base__.__subclasses__()",
        "open('/etc/passwd').read()",
        "import os; os.environ",
        "__import__('socket').create_connection(('127.0.0.1', 80))",
        "abs.__self__",
        "[x for x in (1,)]",
        "(lambda: 1)()",
        "max(1, key=abs)",
        "eval(1)",
        "f(1)",
        "'9' * 10**9",
        "1 .real",
        "a := 1",
    ],
)
def test_nothing_but_arithmetic_is_computed(line: str) -> None:
    with pytest.raises(ToolError):
        evaluate(line)


@given(st.text(st.sampled_from("0123456789.+-*/%^(), abmx="), max_size=40) | st.text(max_size=40))
def test_any_text_gives_a_value_or_a_tool_error(text: str) -> None:
    try:
        value = evaluate(text)
    except ToolError:
        return
    assert isinstance(value, Fraction)


@given(st.fractions(max_denominator=10**6))
def test_what_is_written_is_the_value(value: Fraction) -> None:
    assert Fraction(written(value).partition(" (")[0]) == value


def test_the_calculator_is_registered_and_is_a_tool() -> None:
    assert load("tool", "calculator") is calculator
    assert isinstance(calculator, Tool)


def test_an_agent_calls_it_by_its_tag_or_in_json() -> None:
    text = '<calculator>2+3</calculator><tool_call>{"name": "calculator", "arguments": {"expression": "9**9**9"}}'
    first, second = asyncio.run(run_calls(text + "</tool_call>", {"calculator": calculator}))
    assert (first.result, first.ok, second.ok) == ("5", True, False)
    assert "too large" in second.result
