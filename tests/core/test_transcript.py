"""Can a person follow an episode, and can its text do no harm to the terminal?"""

from collections.abc import Callable
from typing import Any

import pytest

from srpo_env.records import Parse, ToolCall
from srpo_env.transcript import as_text, print_event

Make = Callable[..., Any]


def test_an_event_is_told_line_by_line(event: Make, member: Make) -> None:
    call = ToolCall(tool="search", arguments={"q": "x"}, result="none")
    first = event([member("hm", tool_calls=(call,))], terminated=False, reward=0.0, next_node="verify", value=3)
    assert as_text([first]).split("\n") == [
        "── step 0: solve (K = 1) ──",
        "solver[0] <- user: 2+2=",
        "solver[0] -> hm",
        "solver[0] called search {'q': 'x'}: none",
        "=> verify; value 3",
    ]


def test_a_failed_parse_is_told_with_its_fallback(event: Make, member: Make) -> None:
    unread = member("hm", parse=Parse(ok=False, value="reject", error="no tag"))
    assert "solver[0] could not be read (no tag); fallback 'reject'" in as_text([event([unread])])


def test_a_missing_output_is_told_with_its_reason(event: Make, member: Make) -> None:
    assert "solver[0] -> no output: 503" in as_text([event([member("", error="503")])])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"answer": "4", "score_reason": "right"}, "=> end; answer '4'; reward 1 (right)"),
        ({"reward": None, "score_reason": "policy error"}, "=> end; answer None; unscored (policy error)"),
        (
            {"terminated": False, "truncated": True, "truncated_by": "steps", "reward": 0.0, "score_reason": "wrong"},
            "=> truncated (steps); answer None; reward 0 (wrong)",
        ),
    ],
)
def test_an_end_is_told(event: Make, change: dict[str, Any], line: str) -> None:
    assert as_text([event(**change)]).split("\n")[-1] == line


def test_printed_text_steers_no_terminal(event: Make, member: Make, capsys: pytest.CaptureFixture[str]) -> None:
    print_event(event([member("a\x1b]0;title\x07\x1b[2Jb\x9bc\rd")]))
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(printed)
    assert "a\ufffd]0;title" in printed


def test_printed_text_is_no_markup(event: Make, member: Make, capsys: pytest.CaptureFixture[str]) -> None:
    print_event(event([member("[bold]x[/bold] [link=http://x]")]))
    assert "[bold]x[/bold] [link=http://x]" in capsys.readouterr().out
