"""Does every call get its answer, and no output ever more than a failed call?"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from srpo_env.errors import InvalidInput, ToolError, ToolUnavailable
from srpo_env.graph import Graph
from srpo_env.records import ToolCall
from srpo_env.toolcalls import MOST_CALLS, MOST_RESULT_CHARS, require_tools, run_calls


class Tool:
    """A tool that does what a function does."""

    description = "A tool."

    def __init__(self, name: str, function: Callable[..., Any], *parameters: str) -> None:
        self.name = name
        self.parameters: Mapping[str, Any] = {"type": "object", "properties": {name: {} for name in parameters}}
        self._function = function

    async def __call__(self, **arguments: Any) -> Any:
        return self._function(**arguments)


def add(expr: str) -> str:
    return str(sum(int(part) for part in expr.split("+")))


def refuse(expr: str) -> str:
    raise ToolError(f"{expr!r} is not allowed.")


def break_down(expr: str) -> str:
    raise ToolUnavailable("nobody listens")


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("calculator", add, "expr"),
        Tool("refuser", refuse, "expr"),
        Tool("broken", break_down, "expr"),
        Tool("printer", lambda n: "".join(map(str, range(int(n)))), "n"),
        Tool("silent", lambda: None),
        Tool("pair", lambda a, b: f"{a} {b}", "a", "b"),
    )
}


def calls_of(text: str) -> list[ToolCall]:
    return list(asyncio.run(run_calls(text, TOOLS)))  # type: ignore[arg-type]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_call_in_json_is_run() -> None:
    (made,) = calls_of(call("calculator", '{"expr": "2+3"}'))
    assert (made.tool, made.arguments, made.result, made.ok) == ("calculator", {"expr": "2+3"}, "5", True)


def test_a_call_in_the_tools_own_tag_is_run() -> None:
    (made,) = calls_of("Let me see: <calculator> 2+3 </calculator>")
    assert (made.arguments, made.result, made.ok) == ({"expr": "2+3"}, "5", True)


def test_a_call_inside_another_tag_is_run() -> None:
    assert [made.result for made in calls_of("<reasoning>so <calculator>1+1</calculator></reasoning>")] == ["2"]


@pytest.mark.parametrize(
    "text",
    ["no call", "", "<think><calculator>1+1</calculator></think>", "<python>1</python>", "<calculator>1+1"],
    ids=["plain", "empty", "in a thought", "no tool of that name", "unclosed"],
)
def test_no_call(text: str) -> None:
    assert calls_of(text) == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param(
            '<tool_call>{"name": "calculator", "arguments": {"expr": "2+3"</tool_call>', "tool call is not", id="cut"
        ),
        pytest.param("<tool_call>{name: calculator}</tool_call>", "tool call is not", id="no quotes"),
        pytest.param("<tool_call></tool_call>", "tool call is not", id="empty"),
        pytest.param("<tool_call>[]</tool_call>", "tool call is not", id="a list"),
        pytest.param("<tool_call>" + "[" * 100_000 + "</tool_call>", "tool call is not", id="nested too deeply"),
        pytest.param('<tool_call>{"arguments": {}}</tool_call>', "tool call is not", id="no name"),
        pytest.param('<tool_call>{"name": ["x"]}</tool_call>', "no tool ['x']", id="a name that is no text"),
        pytest.param(call("calculater", "{}"), "Did you mean 'calculator'?", id="unknown tool"),
        pytest.param(call("calculator", '"2+3"'), "arguments of 'calculator' are a str", id="arguments are no object"),
        pytest.param(call("calculator", "{}"), "calculator failed: TypeError", id="argument missing"),
        pytest.param(
            call("calculator", '{"expr": "1", "x": 2}'), "calculator failed: TypeError", id="argument unknown"
        ),
        pytest.param(call("calculator", '{"expr": "one"}'), "calculator failed: ValueError", id="the tool raises"),
        pytest.param(call("refuser", '{"expr": "1"}'), "'1' is not allowed.", id="the tool refuses"),
        pytest.param(call("silent", "{}"), "the result is a NoneType", id="the tool gives no text"),
        pytest.param("<pair>1</pair>", "takes a, b; call it as <tool_call>", id="own tag of a tool with two arguments"),
    ],
)
def test_a_wrong_call_fails_and_says_why(text: str, error: str) -> None:
    (made,) = calls_of(text)
    assert not made.ok
    assert error in made.result


def test_a_wrong_call_does_not_harm_the_one_before() -> None:
    made = calls_of(call("calculator", '{"expr": "2+3"}') + "<tool_call>{</tool_call>")
    assert [each.ok for each in made] == [True, False]


class Slow:
    """Takes as many hundredths of a second as its argument says, and notes when it is done."""

    name, description = "slow", "Waits."
    parameters: ClassVar[dict[str, Any]] = {"properties": {"n": {}}}

    def __init__(self) -> None:
        self.done: list[str] = []

    async def __call__(self, n: str) -> str:
        await asyncio.sleep(int(n) / 100)
        self.done.append(n)
        return n


def test_results_stand_in_the_order_of_the_text_whatever_is_done_first() -> None:
    slow = Slow()
    made = asyncio.run(run_calls("<slow>3</slow><slow>1</slow>", {"slow": slow}))
    assert ([each.result for each in made], slow.done) == (["3", "1"], ["1", "3"])


def test_calls_beyond_the_most_are_not_run_and_say_so() -> None:
    made = calls_of("<calculator>1+1</calculator>" * (MOST_CALLS + 2))
    assert [each.ok for each in made] == [True] * MOST_CALLS + [False] * 2
    assert made[-1].result.startswith("not run")


@pytest.mark.parametrize("part", ["<calculator>", "</calculator>", "<tool_call>", "<x>"])
def test_a_long_text_is_searched_in_linear_time(part: str) -> None:
    started = time.process_time()
    calls_of(part * (300_000 // len(part)))
    assert time.process_time() - started < 2


def test_a_tool_that_is_not_given_is_named_with_its_agent(compiled: Callable[..., Graph]) -> None:
    graph = compiled(
        'name: w\nagents: {solver: {prompt: "?", tools: [calculator]}}\n'
        "nodes: {solve: {agents: solver}}\nanswer: solve.text\n"
    )
    with pytest.raises(InvalidInput, match=r"agent 'solver' .* tool 'calculator', which is not among.*\(search\)"):
        require_tools(graph.workflow, {"search": TOOLS["pair"]})  # type: ignore[dict-item]


def test_a_tool_that_cannot_answer_is_unavailable_and_the_others_are_not() -> None:
    broken, sound, refused = calls_of(
        call("broken", '{"expr": "1"}') + call("calculator", '{"expr": "2+3"}') + call("refuser", '{"expr": "1"}')
    )
    assert (broken.ok, broken.unavailable, broken.result) == (False, True, "nobody listens")
    assert [(each.ok, each.unavailable) for each in (sound, refused)] == [(True, False), (False, False)]


def test_a_long_result_keeps_its_beginning_and_its_end_and_says_how_much_is_left_out() -> None:  # B095
    (made,) = calls_of("<printer>100000</printer>")
    whole = "".join(map(str, range(100000)))
    half = MOST_RESULT_CHARS // 2
    assert made.cut == len(whole) - MOST_RESULT_CHARS
    assert made.result == f"{whole[:half]}\n[... {made.cut} characters cut ...]\n{whole[-half:]}"


def test_a_result_that_fits_is_whole() -> None:
    (made,) = calls_of("<printer>100</printer>")
    assert (made.cut, made.result) == (0, "".join(map(str, range(100))))
