"""Does every task set with a name load from where it lies, and say how to get it where it does not?"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from srpo_env.errors import InvalidInput, InvalidTask
from srpo_env.tasks import Task, load_tasks
from srpo_env.tools import math_tasks, qa_tasks
from srpo_env.tools.named_sets import NamedSet

SETS = {
    each.name: each for module in (math_tasks, qa_tasks) for each in vars(module).values() if isinstance(each, NamedSet)
}
ROWS = {
    ("gsm8k", "train"): 1000,
    ("gsm8k", "test"): 1319,
    ("math500", "test"): 500,
    ("aime24", "test"): 30,
    ("aime25", "test"): 30,
    ("amc23", "test"): 40,
    ("minerva", "test"): 272,
    ("olympiadbench", "test"): 675,
    ("nq", "test"): 300,
    ("triviaqa", "test"): 300,
    ("popqa", "test"): 300,
    ("hotpotqa", "train"): 100,
    ("hotpotqa", "dev"): 200,
    ("2wikimultihopqa", "train"): 500,
    ("2wikimultihopqa", "test"): 164,
    ("musique", "dev"): 292,
    ("bamboogle", "test"): 125,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and no `datasets`."""
    monkeypatch.setenv("SRPO_ENV_DATA", str(tmp_path))
    monkeypatch.setattr("srpo_env.tools.named_sets.find_spec", lambda name: None)
    return tmp_path


def write(path: Path, *rows: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.mark.parametrize(("name", "split"), ROWS)
def test_every_row_of_a_set_with_a_name_loads(data_dir: Path, name: str, split: str) -> None:
    assert len(load_tasks(name, split=split)) == ROWS[name, split]


@pytest.mark.parametrize("name", SETS)
def test_a_set_says_its_splits_its_licence_and_how_to_get_it(name: str) -> None:
    found = SETS[name]
    assert all(each in found.about for each in (*found.files, found.licence, found.hub, "$SRPO_ENV_DATA/"))


@pytest.mark.parametrize("name", SETS)
def test_a_set_that_is_nowhere_says_how_to_get_it(folder: Path, name: str) -> None:
    split = next(iter(SETS[name].files))
    with pytest.raises(InvalidTask, match=rf"{name}.*SRPO_ENV_DATA/.*pip install 'srpo-env\[datasets\]'"):
        load_tasks(name, split=split)


def test_a_split_that_a_set_has_not_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="'aime24': split 'train'; it has test"):
        load_tasks("aime24", split="train")


def test_a_file_of_several_splits_gives_one(folder: Path) -> None:
    rows = [{"id": each, "question": "?", "golden_answers": ["x", "y"], "split": each} for each in ("train", "dev")]
    write(folder / "search" / "hotpotqa.jsonl", *rows)
    assert [load_tasks("hotpotqa", split=each).tasks[0].id for each in ("train", "dev", "test")] == [
        "train",
        "dev",
        "dev",
    ]
    assert load_tasks("hotpotqa", split="train").tasks[0].answers == ("x", "y")


def test_a_file_without_a_row_of_the_split_does_not_hold_it(folder: Path) -> None:
    write(folder / "search" / "nq.jsonl", {"id": "1", "question": "q", "golden_answers": ["a"], "split": "test"})
    assert len(load_tasks("nq", split="test")) == 1
    with pytest.raises(InvalidTask, match="'nq', split 'train', is not here"):
        load_tasks("nq", split="train")


def test_references_that_can_not_be_compared_with_are_reported_when_a_set_is_loaded(folder: Path) -> None:
    rows = [{"id": str(i), "problem": "?", "answer": answer} for i, answer in enumerate(["4", "see figure", "2, 3"])]
    write(folder / "math" / "amc23.jsonl", *rows)
    with pytest.warns(UserWarning, match=r"'amc23', split 'test': 1 of 3 tasks .* unscored: 1\."):
        load_tasks("amc23", split="test")


def test_code_in_an_answer_of_minerva_gives_way_to_its_latex_form(folder: Path) -> None:
    rows = [
        {"id": "a", "problem": "?", "answer": "np.arcsin(10/13)", "answer_latex": r"\arcsin{\frac{10}{13}}"},
        {"id": "b", "problem": "?", "answer": "0.53", "answer_latex": "4.4e7"},
    ]
    write(folder / "math" / "minerva.jsonl", *rows)
    assert [task.answers for task in load_tasks("minerva", split="test").tasks] == [
        (r"\arcsin{\frac{10}{13}}",),
        ("0.53",),
    ]


def test_a_list_of_olympiadbench_is_no_grouped_number(folder: Path) -> None:
    row = {"id": "a", "problem": "?", "answer": "108,135", "is_multiple_answer": True, "error_tolerance": "1e-1"}
    write(folder / "math" / "olympiadbench.jsonl", row)
    (task,) = load_tasks("olympiadbench", split="test").tasks
    assert (task.answers, task.meta["error_tolerance"]) == (("108, 135",), "1e-1")


def test_a_problem_of_dapo_counts_once_and_without_the_form_that_it_asks_for(folder: Path) -> None:
    asked = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is\n\n1+1?\n\nRemember to put "
        'your answer on its own line after "Answer:".'
    )
    row = {"data_source": "math_dapo", "prompt": [{"content": asked}], "reward_model": {"ground_truth": "2"}}
    write(folder / "math" / "dapo_math.jsonl", *(row | {"extra_info": {"index": each}} for each in ("x", "y")))
    assert [(task.id, task.problem) for task in load_tasks("dapo_math").tasks] == [("x", "What is\n\n1+1?")]


def test_a_chat_of_dapo_becomes_a_problem(folder: Path) -> None:
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": "x"},
    }
    write(folder / "math" / "dapo_math.jsonl", row)
    assert load_tasks("dapo_math").tasks == (
        Task(id="x", problem="1+1?", answers=("2",), meta={"source": "math_dapo"}, set="dapo_math"),
    )


def test_a_set_that_is_in_no_file_comes_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [{"question": "1+1?", "answer": "so\n#### 2"}]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("srpo_env.tools.named_sets.find_spec", lambda name: importlib.util.find_spec("json"))
    (task,) = load_tasks("gsm8k", split="test").tasks
    assert asked == [("openai/gsm8k", "main", "test")]
    assert (task.id, task.problem, task.answers) == ("1", "1+1?", ("so\n#### 2",))
    assert load_tasks("datasets:openai/gsm8k:main", columns={"question": "problem"}).tasks[0].problem == "1+1?"
