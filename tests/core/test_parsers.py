"""Is an output read as the rules say, and is nothing else ever taken for an answer?"""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.errors import UnknownName
from srpo_env.parsers import last_boxed, reader, tagged
from srpo_env.records import Parse
from srpo_env.spec import Parser

VERDICT = Parser(tag="verdict", choices=("approve", "reject"), fallback="reject")
ROUTE = Parser(use="text", choices=("solver", "judge"), fallback="judge")


# Verdicts: nothing but one plain approval approves.


@pytest.mark.parametrize(
    "text",
    [
        "<verdict>approve</verdict>",
        "Fine.\n<verdict> approve\n</verdict>",
        "<think><verdict>reject</verdict></think><verdict>approve</verdict>",
        "<think>hm</think> `x` <verdict>approve</verdict> ```y```",
        "`<verdict>reject</verdict>` no: <verdict>approve</verdict>",
    ],
)
def test_is_an_approval(text: str) -> None:
    assert reader(VERDICT)(text) == Parse(ok=True, value="approve")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param("approve", "no <verdict>", id="missing tag"),
        pytest.param("", "no <verdict>", id="empty"),
        pytest.param("<verdict>approve", "no <verdict>", id="unclosed"),
        pytest.param("<Verdict>approve</Verdict>", "no <verdict>", id="case of the tag"),
        pytest.param("<verdict>Approve</verdict>", "'Approve' is not one of", id="case of the value"),
        pytest.param("<verdict>approve it</verdict>", "'approve it' is not one of", id="more words"),
        pytest.param("<verdict></verdict>", "'' is not one of", id="empty tag"),
        pytest.param(
            "<verdict>approve</verdict> <verdict>reject</verdict>", "more than one", id="two tags that disagree"
        ),
        pytest.param("<verdict>approve</verdict> <verdict>approve</verdict>", "more than one", id="two equal tags"),
        pytest.param("<verdict>reject<verdict>approve</verdict>", "more than one", id="a tag in a tag"),
        pytest.param("Say `<verdict>approve</verdict>`?", "no <verdict>", id="in a code span"),
        pytest.param("```\n<verdict>approve</verdict>\n```", "no <verdict>", id="in a code block"),
        pytest.param("```\n<verdict>approve</verdict>", "no <verdict>", id="in an open code block"),
        pytest.param("<think><verdict>approve</verdict>", "no <verdict>", id="in an open thought"),
        pytest.param("<verdict>appr\ufffdove</verdict>", "is not one of", id="what was a lone surrogate"),
        pytest.param("<|im_start|>assistant\n<verdict>ok</verdict>", "'ok' is not one of", id="role markers"),
    ],
)
def test_is_no_approval(text: str, error: str) -> None:
    parse = reader(VERDICT)(text)
    assert (parse.ok, parse.value) == (False, "reject")
    assert error in str(parse.error)


def test_a_tags_content_keeps_its_quotes() -> None:
    assert reader(Parser(tag="code"))("<code>run `x` now</code>").value == "run `x` now"


@given(st.text(alphabet="<>/verdict`approve\n", max_size=60))
def test_whatever_stands_outside_one_pair_of_tags_approves_nothing(text: str) -> None:
    parse = reader(VERDICT)(text)
    assert parse.value in ("approve", "reject")
    if parse.ok:
        assert f"<verdict>{parse.value}</verdict>" in "".join(text.split())


# Routes.


@pytest.mark.parametrize(
    ("text", "ok", "value"),
    [
        (" solver\n", True, "solver"),
        ("judge", True, "judge"),
        ("Solver", False, "judge"),
        ("critic", False, "judge"),
        ("end", False, "judge"),
        ("", False, "judge"),
        ("solver or judge", False, "judge"),
        ("solve", False, "judge"),
    ],
)
def test_a_route_is_stripped_and_then_compared_exactly(text: str, ok: bool, value: str) -> None:
    parse = reader(ROUTE)(text)
    assert (parse.ok, parse.value) == (ok, value)


# Boxes and numbers.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \boxed{3} }", "3"),
        (r"\boxed{x = \boxed{3}}", r"x = \boxed{3}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{4", None),
        (r"\boxed{4} and \boxed{5", None),
        (r"\boxed{4} and {5", "4"),
        (r"put it in \boxed and stop", None),
        (r"\boxed 7.", "7"),
        (r"\fbox{7}", "7"),
        (r"= 5\\boxed{7}", "7"),
        (r"\boxed{\boxed{1}\boxed{2}}", r"\boxed{1}\boxed{2}"),
        (r"boxed{4}", None),
        (r"\boxed{}", ""),
        ("", None),
    ],
)
def test_the_last_complete_box_counts(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        ("text", "  a b \n", "a b"),
        ("boxed", r"<think>\boxed{1}</think>\boxed{2}", "2"),
        ("answer", "<think>3</think> 4 ", "4"),
        ("answer", "3 or so</think> 4 ", "4"),
        ("answer", r"it is \boxed{5}.", "5"),
        ("number", "first 3, then 14", 14),
        ("number", "x = -2.5.", -2.5),
        ("number", "17-3", 3),
        ("number", "= -3", -3),
        ("number", "it costs $1,234,567", 1234567),
        ("number", "the pair 1,2", 2),
        ("number", "about .5", 0.5),
        ("number", "<think>9</think> none but 8", 8),
    ],
)
def test_value_of(parser: str, text: str, value: object) -> None:
    assert reader(Parser(use=parser))(text) == Parse(ok=True, value=value)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("boxed", "4"),
        ("boxed", r"\boxed{}"),
        ("boxed", r"\boxed{4"),
        ("answer", " "),
        ("answer", r"\boxed{ }"),
        ("number", "none"),
        pytest.param("number", "9" * 5000, id="number-too-many-digits"),
    ],
)
def test_unreadable(parser: str, text: str) -> None:
    parse = reader(Parser(use=parser, fallback="f"))(text)
    assert (parse.ok, parse.value) == (False, "f")


@given(st.text(max_size=40), st.sampled_from(["text", "boxed", "answer", "number"]))
def test_a_parser_never_raises(text: str, name: str) -> None:
    reader(Parser(use=name))(text)


# Long texts: what is quadratic takes minutes here.

LONG = 300_000


@pytest.mark.parametrize(
    "parser",
    [VERDICT, Parser(use="boxed"), Parser(use="answer"), Parser(use="number")],
    ids=["tag", "boxed", "answer", "number"],
)
@pytest.mark.parametrize(
    "part",
    ["<verdict>", "</verdict>", "`", "```", "<think>", "</think>", r"\boxed{", r"\boxed", "{", "}", "1,234", "-", " "],
)
def test_a_long_text_is_read_in_linear_time(parser: Parser, part: str) -> None:
    text = part * (LONG // len(part))
    started = time.process_time()
    reader(parser)(text)
    assert time.process_time() - started < 2


def test_a_megabyte_is_read() -> None:
    assert reader(VERDICT)("x" * 1_000_000 + "<verdict>approve</verdict>").ok


# Pairs of tags.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<a>1</a><b>2</b>", [("a", "1"), ("b", "2")]),
        ("<a><b>1</b></a>", [("a", "<b>1</b>")]),
        ("<a>1<b>2</b>", [("b", "2")]),
        ("<a>1</b></a>", [("a", "1</b>")]),
        ("</a><a>1</a>", [("a", "1")]),
        ("<a><a>1</a>", [("a", "<a>1")]),
        ("<c>1</c>", []),
        ("<a>1</a", []),
    ],
)
def test_pairs_of(text: str, found: list[tuple[str, str]]) -> None:
    assert [(name, text[start:end]) for name, start, end in tagged(text, ["a", "b"])] == found


# Parsers of a user's own.


def test_a_users_parser_that_raises_is_a_failed_parse_that_names_it() -> None:
    parse = reader(Parser(use="fractions:Fraction", fallback="0"))("one half")
    assert (parse.ok, parse.value) == (False, "0")
    assert str(parse.error).startswith("parser fractions:Fraction raised ValueError")


def test_a_users_parser_reads_by_its_own_rules() -> None:
    assert reader(Parser(use="builtins:len"))("four").value == 4


@pytest.mark.parametrize(
    ("use", "fallback", "text"),
    [
        ("builtins:float", None, "nan"),
        ("builtins:ascii", None, "x"),
        ("fractions:Fraction", None, "1/2"),
        ("fractions:Fraction", "\ud835", "one \ud835 half"),
    ],
)
def test_what_a_parser_gives_is_what_a_check_would_make_of_it(use: str, fallback: str | None, text: str) -> None:
    parse = reader(Parser(use=use, fallback=fallback))(text)
    assert repr(Parse.model_validate(parse.model_dump())) == repr(parse)


def test_the_error_of_a_parser_is_text_that_a_file_can_hold(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def read(text):\n    raise ValueError(text)\n", encoding="utf-8")
    assert "raised ValueError: a \ufffd" in str(reader(Parser(use=f"{tmp_path}/own.py:read"))("a \ud835").error)


def test_an_unknown_parser_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"'boxd' is not known.*Did you mean 'boxed'"):
        reader(Parser(use="boxd"))
