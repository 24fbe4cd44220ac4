# ruff: noqa: E501 - tables of texts read better unbroken
"""YAML is read with its places, and what its versions read differently is refused."""

import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.problems import Mark
from srpo_env.yaml_source import read_yaml, write_yaml


def read(text: str) -> Any:
    """The content of a text that has no problem."""
    content, _, problems = read_yaml(text, "file.yaml")
    assert not problems, problems
    return content


def faults(text: str) -> list[tuple[int | None, int | None, str]]:
    """Line, column and what, of every problem of a text."""
    return [(problem.line, problem.column, problem.what) for problem in read_yaml(text, "file.yaml")[2]]


@pytest.mark.parametrize("word", ["no", "No", "yes", "on", "off", "y"])
def test_words_that_were_booleans_are_text(word: str) -> None:
    assert read(f"choices: [{word}]") == {"choices": [word]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            ("true", True),
            ("False", False),
            ("null", None),
            ("~", None),
            ("", None),
            ("42", 42),
            ("-7", -7),
            ("0x1F", 31),
        ],
        *[
            ("1.5", 1.5),
            ("1e-6", 1e-6),
            ("3.0e-4", 3e-4),
            (".5", 0.5),
            ("1.2.3", "1.2.3"),
            ("'012'", "012"),
            ("12:x", "12:x"),
        ],
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert read(f"key: {text}") == {"key": value}


@pytest.mark.parametrize(
    "text", ["012", "0o17", "0b11", "1:30", "190:20:30", "2024-01-01", "2024-01-01T10:00:00", "1_000", ".nan", "-.inf"]
)
def test_what_the_versions_read_differently_is_refused(text: str) -> None:
    [(line, column, what)] = faults(f"a: 1\nkey: {text}\n")
    assert (line, column) == (2, 6)
    assert text in what


@pytest.mark.parametrize(
    ("key", "kind"), [("1", "a number"), ("true", "a boolean"), ("null", "null"), ("1.5", "a number")]
)
def test_a_key_is_text(key: str, kind: str) -> None:
    assert faults(f"a: 1\n{key}: 2") == [(2, 1, f"the key {key} is {kind}")]


def test_keys_1_and_quoted_1_do_not_pass_as_two_ids() -> None:
    assert {line for line, _, _ in faults("1: a\n'1': b")} == {1, 2}


def test_a_duplicate_key_names_the_key_and_both_lines() -> None:
    [problem] = read_yaml("agents:\n  a: {role: solver}\n  a: {role: judge}\n", "flow.yaml")[2]
    assert (problem.line, problem.column) == (3, 3)
    assert str(problem).startswith(
        "flow.yaml:3:3: the key 'a' is written twice; keys are unique (the first is on line 2)"
    )


def test_a_duplicate_key_inside_is_refused() -> None:
    assert faults("tools: {calc: {}, calc: {timeout: 1}}") == [(1, 19, "the key 'calc' is written twice")]


def test_a_merge_key_may_be_overridden() -> None:
    assert read("base: &base {temperature: 1, top: 2}\nb: {<<: *base, temperature: 0}")["b"] == {
        "temperature": 0,
        "top": 2,
    }


def test_of_several_merged_mappings_the_first_wins() -> None:
    assert read("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b], z: 3}")["c"] == {"z": 3, "x": 1, "y": 2}


def test_a_merge_of_something_else_is_refused() -> None:
    assert faults("a: &a 3\nb: {<<: *a}") == [(1, 4, "<< merges something else")]


def test_ordinary_anchors_load() -> None:
    assert read("a: &a [1, 2]\nb: *a\nc: *a") == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}


def test_an_alias_bomb_is_refused_at_once_and_in_little_memory() -> None:
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefg", "bcdefgh", strict=True)]
    tracemalloc.start()
    started = time.perf_counter()
    [(line, _, what)] = faults("\n".join(lines))
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert what == "the alias budget is exceeded"
    assert line == 5
    assert seconds < 1
    assert peak < 20e6


def test_a_recursive_alias_is_refused() -> None:
    assert faults("a: 1\nb: &b [1, *b]") == [(2, 11, "the alias *b is recursive")]


@pytest.mark.parametrize(
    "text", ["[" * 5000, "- " * 5000, "{a: " * 3000, "\n".join(" " * i + "a:" for i in range(500))]
)
def test_deep_nesting_is_refused(text: str) -> None:
    [(line, _, what)] = faults(text)
    assert line is not None
    assert "nest" in what


def test_tags_are_refused() -> None:
    assert faults("a: !!python/object/apply:os.system [x]")[0][:2] == (1, 4)


def test_an_empty_file_and_a_second_document_are_refused() -> None:
    assert faults("# nothing") == [(1, 1, "the file is empty")]
    assert faults("a: 1\n---\nb: 2") == [(2, 1, "a second document begins")]


def test_a_character_that_no_file_may_hold_has_a_place() -> None:
    assert faults("a: 1\nb: x\x07y")[0][:2] == (2, 5)


def test_an_unquoted_template_says_that_it_must_be_quoted() -> None:
    [problem] = read_yaml("prompt: {{ task.problem }}", "f")[2]
    assert "begins with {{ is quoted" in problem.hint


def test_every_key_and_value_has_its_place() -> None:
    _, positions, _ = read_yaml("a:\n  - x: 1\n    'y': [2, 3]\n", "f")
    assert positions.key(("a", 0, "y")) == Mark(3, 5)
    assert positions.value(("a", 0, "y", 1)) == Mark(3, 14)
    assert positions.value(("a", 0, "z", "w")) == Mark(2, 5)  # the nearest part around what is not there


@pytest.mark.parametrize("style", ["|", "|-", "|2", ">"])
def test_a_word_inside_a_block_has_its_place(style: str) -> None:
    _, positions, problems = read_yaml(f"a:\n  text: {style}\n    one\n\n    two {{{{ word.x }}}}\n  b: 1\n", "f")
    assert not problems
    assert positions.inside(("a", "text"), 3, "word") == Mark(5, 12)


def test_a_word_inside_quotes_and_lines_that_run_on_has_its_place() -> None:
    _, positions, _ = read_yaml('a: "one word.x"\nb: one\n  two word.x\n', "f")
    assert positions.inside(("a",), 1, "word") == Mark(1, 9)
    assert positions.inside(("b",), 1, "word") == Mark(3, 7)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="utf-8"))
    | st.sampled_from(["no", "1e3", "012", "1:30", "2024-01-01", "~", "a\nb", " x", "x ", "#", "{{ x }}", "- a", "<<", "0o7", "=", "\\boxed{}"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), PLAIN, min_size=1, max_size=5))
def test_what_is_written_is_read_back(data: dict[str, object]) -> None:
    content, _, problems = read_yaml(write_yaml(data), "f")
    assert not [problem for problem in problems if "of that length" not in problem.what]
    if not problems:
        assert content == data


@given(st.text(max_size=200))
def test_any_text_is_read_or_has_problems_with_a_place(text: str) -> None:
    _, _, problems = read_yaml(text, "f")
    assert all(problem.line is not None and problem.line >= 1 and problem.column is not None for problem in problems)
