"""Are answers to questions compared as the field compares them?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.rewards import Score
from srpo_env.tasks import Task
from srpo_env.tools.qa import exact, f1, given_answer, normalized, qa_exact_match


def score(answer: str | None, *golds: str) -> Score:
    return qa_exact_match(Task(id="t", problem="?", answers=golds), answer, ())


@pytest.mark.parametrize(
    ("gold", "prediction", "em", "f"),
    [
        ("Paris", "paris.", True, 1.0),
        ("The Beatles", "beatles", True, 1.0),
        ("the old man", "old man", True, 1.0),
        ("April 22, 1994", "april 22 1994", True, 1.0),
        ("1997–1998", "1997-1998", True, 1.0),
        ("“Heroes”", '"Heroes"', True, 1.0),
        ("Zürich", "Zu\u0308rich", True, 1.0),
        ("STRASSE", "straße", True, 1.0),
        ("A", "A", True, 1.0),
        ("A", "B", False, 0.0),
        ("A", "", False, 0.0),
        ("The The", "the the", True, 1.0),
        ("", "", False, 0.0),
        ("Oslo", "Oslo Oslo Oslo Oslo", False, 0.4),
        ("Oslo Norway", "Norway Oslo", False, 1.0),
        ("Hello, world!", "hello there world", False, 0.8),
        ("no", "yes", False, 0.0),
        ("Oslo", "not Oslo", False, pytest.approx(2 / 3)),
    ],
)
def test_exact_match_and_f1(gold: str, prediction: str, em: bool, f: float) -> None:
    assert (exact(gold, prediction), f1(gold, prediction)) == (em, f)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Oslo </answer>", "Oslo"),
        ("<answer>Oslo</answer> no, <answer>Bergen</answer>", "Bergen"),
        ("<think><answer>Oslo</answer></think>Bergen", "Bergen"),
        (r"The capital is \boxed{Paris}", "Paris"),
        (" Oslo\n", "Oslo"),
        ("<answer>Oslo", "<answer>Oslo"),
    ],
)
def test_the_answer_that_a_reply_gives(text: str, answer: str) -> None:
    assert given_answer(text) == answer


def test_the_best_of_several_golden_answers_counts() -> None:
    found = score("<answer>seven seasons</answer>", "7", "seven")
    assert (found.value, found.measures) == (0.0, {"f1": pytest.approx(2 / 3)})
    assert score("seven", "7", "seven") == Score(value=1.0, reason="right", measures={"f1": 1.0})


@pytest.mark.parametrize("answer", [None, "", "<answer></answer>", "?!"])
def test_no_answer_is_wrong_and_says_so(answer: str | None) -> None:
    assert score(answer, "Oslo") == Score(value=0.0, reason="no answer", measures={"f1": 0.0})


@pytest.mark.parametrize("golds", [(), ("",), ("?",)])
def test_without_a_golden_answer_nothing_can_be_scored(golds: tuple[str, ...]) -> None:
    assert score("Oslo", *golds) == Score(value=None, reason="no reference answer")


@given(st.text(), st.text())
def test_f1_is_symmetric_and_one_where_the_match_is_exact(first: str, second: str) -> None:
    assert f1(first, second) == f1(second, first)
    assert not exact(first, second) or f1(first, second) == 1.0


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalized(normalized(text)) == normalized(text)


def test_the_checker_cases_of_questions_get_their_figures(data_dir: Path) -> None:
    rows = [json.loads(line) for line in (data_dir / "checker_cases.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {
        row["id"]: {
            "qa_em": lambda row: exact(row["gold"], given_answer(row["prediction"])),
            "qa_f1": lambda row: f1(row["gold"], row["prediction"]),
            "qa_normalize": lambda row: normalized(row["prediction"]),
            "extract_qa_answer": lambda row: given_answer(row["prediction"]),
        }[row["kind"]](row)
        for row in rows
        if "qa_" in row["kind"]
    }
    assert found == {row["id"]: row["expected"] for row in rows if "qa_" in row["kind"]}
