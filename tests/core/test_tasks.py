"""Do tasks come whole from where they are, and does each keep its own reward?"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from srpo_env.errors import InvalidInput, InvalidTask, MissingExtra, SrpoEnvError, UnknownName
from srpo_env.records import Event
from srpo_env.rewards import Score, exact_match
from srpo_env.tasks import Task, TaskSet, join, load_tasks, read_tasks

ROWS: dict[str, int] = {
    "aime24": 30,
    "aime25": 30,
    "aime_1983_2023_train_400": 400,
    "amc23": 40,
    "amc_2022_2023": 83,
    "gsm8k_test": 1319,
    "gsm8k_train_1000": 1000,
    "math500": 500,
    "math_train_2000": 2000,
    "minerva_math": 272,
    "olympiadbench": 675,
}


def half(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
    return Score(value=0.5, reason="half")


def value(tasks: TaskSet, task: Task, answer: str | None, events: Sequence[Event]) -> float | None:
    return asyncio.run(tasks.score(task, answer, events)).value


def write(folder: Path, *rows: Any, name: str = "some.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def a(id_: str = "1", **values: Any) -> Task:
    return Task(**({"id": id_, "problem": "p", "answers": ("4",)} | values))


# Files.


@pytest.mark.parametrize(("name", "rows"), ROWS.items())
def test_every_row_of_the_math_file_loads(data_dir: Path, name: str, rows: int) -> None:
    path = data_dir / "math" / f"{name}.jsonl"
    tasks = load_tasks(path).tasks
    assert len(tasks) == rows
    expected = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert [(t.id, t.problem, t.answers) for t in tasks] == [(e["id"], e["problem"], (e["answer"],)) for e in expected]


@pytest.mark.parametrize("name", ROWS)
def test_a_reference_answer_of_the_math_file_is_right(data_dir: Path, name: str) -> None:
    tasks = load_tasks(data_dir / "math" / f"{name}.jsonl")
    wrong = [task.id for task in tasks.tasks if value(tasks, task, f"\\boxed{{{task.answers[0]}}}", ()) != 1]
    assert wrong == []


def test_all_math_files_can_be_joined(data_dir: Path) -> None:
    tasks = load_tasks([data_dir / "math" / f"{name}.jsonl" for name in ROWS]).tasks
    assert len({task.id for task in tasks}) == len(tasks) == sum(ROWS.values())


def test_a_row_becomes_a_task_and_the_rest_of_it_meta(tmp_path: Path) -> None:
    path = write(tmp_path, {"id": "x", "problem": "1+1=", "answer": "2", "level": 5})
    assert read_tasks(path).tasks == (Task(id="x", problem="1+1=", answers=("2",), meta={"level": 5}, set="some"),)


@pytest.mark.parametrize(
    ("answer", "answers"),
    [("2", ("2",)), (2, ("2",)), (0, ("0",)), (-1.5, ("-1.5",)), (["2", 3], ("2", "3"))],
    ids=repr,
)
@pytest.mark.parametrize("key", ["answer", "answers"])
def test_an_answer_may_be_text_a_number_or_a_list(tmp_path: Path, key: str, answer: Any, answers: tuple[str]) -> None:
    path = write(tmp_path, {"id": "x", "problem": "p", key: answer})
    assert read_tasks(path).tasks[0].answers == answers


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = write(tmp_path, {"qid": 7, "question": "1+1=", "gold": "2"})
    columns = {"qid": "id", "question": "problem", "gold": "answer"}
    assert load_tasks(path, columns=columns).tasks == (Task(id="7", problem="1+1=", answers=("2",), set="some"),)


def test_a_row_without_an_id_is_named_by_its_line(tmp_path: Path) -> None:
    rows = {"problem": "p", "answer": "1"}, {"id": None, "problem": "p", "answer": "1"}
    assert [task.id for task in read_tasks(write(tmp_path, *rows)).tasks] == ["1", "2"]


def test_empty_lines_are_left_out_and_lines_counted_with_them(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "1"}
    assert [task.id for task in read_tasks(write(tmp_path, b"", row, b"  ", row, b"")).tasks] == ["2", "4"]


def test_a_line_separator_in_a_problem_does_not_cut_the_row(tmp_path: Path) -> None:
    line = json.dumps({"id": "x", "problem": "a\u2028b\u0085c", "answer": "1"}, ensure_ascii=False).encode()
    assert read_tasks(write(tmp_path, line)).tasks[0].problem == "a\u2028b\u0085c"


def test_a_byte_order_mark_is_no_part_of_the_row(tmp_path: Path) -> None:
    assert len(read_tasks(write(tmp_path, b'\xef\xbb\xbf{"id": "x", "problem": "p", "answer": "1"}'))) == 1


GOOD = {"id": "x", "problem": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        pytest.param(b'{"id": "y", ', r"not JSON \(", id="cut"),
        pytest.param(b"\xff\xfe{", r"not JSON \(", id="no utf-8"),
        pytest.param(b"[" * 100_000, r"not JSON \(", id="nested too deeply"),
        pytest.param(["y", "p", "1"], "a list; each line is one JSON object", id="a list"),
        pytest.param({"id": "y", "problem": "p"}, "no answer; .* Its keys are id, problem;", id="no answer"),
        pytest.param({"id": "y", "problem": "p", "answer": None}, "no answer", id="null"),
        pytest.param({"id": "y", "problem": "p", "answer": ""}, "no answer", id="empty answer"),
        pytest.param({"id": "y", "problem": "p", "answers": []}, "no answer", id="empty list"),
        pytest.param({"id": "y", "answer": "1"}, "no problem; .*`columns: {your_name: problem}`", id="no problem"),
        pytest.param({"id": "y", "problem": 5, "answer": "1"}, "problem: Input should be", id="problem is a number"),
        pytest.param({"id": "", "problem": "p", "answer": "1"}, "id: String should have", id="empty id"),
        pytest.param({"id": "y", "problem": "p", "answer": True}, "answers.0: Input", id="answer is a boolean"),
        pytest.param({"id": "y", "problem": "p", "answer": {"x": 1}}, "answers.0: Input", id="answer is a mapping"),
        pytest.param({"id": "y", "problem": "p", "answer": "1", "meta": 3}, "meta: ", id="meta is a number"),
        pytest.param(GOOD, "id 'x' stands in line 1 too", id="a repeated id"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, row: Any, why: str) -> None:
    path = write(tmp_path, GOOD, b"", row)
    with pytest.raises(InvalidTask, match=f"^{path}:3: {why}"):
        read_tasks(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=r"none.jsonl can't be read: No such file"):
        load_tasks(tmp_path / "none.jsonl")


@pytest.mark.parametrize("rows", [[], [b"", b" "]], ids=["empty", "blank lines"])
def test_a_file_without_rows_is_refused(tmp_path: Path, rows: list[bytes]) -> None:
    with pytest.raises(InvalidTask, match="has no rows"):
        load_tasks(write(tmp_path, *rows))


# Names.


def test_an_unknown_set_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"'arithmetics' is not known.* Did you mean 'arithmetic'?"):
        load_tasks("arithmetics")


def test_an_unknown_setting_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"unknown setting 'hihg'.* Did you mean 'high'?"):
        load_tasks("arithmetic", hihg=99)


def test_a_file_has_no_settings(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="unknown setting 'high'"):
        load_tasks(write(tmp_path, GOOD), high=9)


def test_a_function_of_a_users_own_gives_the_set(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from srpo_env import Task, TaskSet\n"
        "def numbers(*, split, most=2):\n"
        "    return TaskSet('numbers', [Task(id=f'{split}{i}', problem='?', answers='1') for i in range(most)])\n"
    )
    tasks = load_tasks(f"{tmp_path}/own.py:numbers", split="test", most=3)
    assert [task.id for task in tasks.tasks] == ["test0", "test1", "test2"]


def test_a_function_that_gives_no_task_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def numbers(*, split):\n    return [1]\n")
    with pytest.raises(InvalidInput, match=r"own.py:numbers' gave list; the function must return a TaskSet"):
        load_tasks(f"{tmp_path}/own.py:numbers")


@pytest.mark.parametrize("use", [a(), [a(), "arithmetic"], 5, [[3]]], ids=["a task", "a mixture", "a number", "deeper"])
def test_what_is_no_task_set_is_refused(use: Any) -> None:
    with pytest.raises(SrpoEnvError, match="a list holds either Tasks only"):
        load_tasks(use)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(InvalidTask, match="has no tasks"):
        load_tasks([])


def test_a_limit_keeps_the_first_tasks() -> None:
    assert [task.id for task in load_tasks([a("1"), a("2"), a("3")], limit=2).tasks] == ["1", "2"]


# Rewards.


def test_joined_sets_keep_their_own_rewards(tmp_path: Path) -> None:
    strict = TaskSet("strict", (a("1"),))
    generous = TaskSet("generous", (a("2"),), reward=half)
    joined = load_tasks([strict, generous])
    assert [value(joined, task, "5", ()) for task in joined.tasks] == [0.0, 0.5]


def test_a_set_that_was_joined_before_keeps_its_rewards() -> None:
    inner = join([TaskSet("a", (a("1"),), reward=half), TaskSet("b", (a("2"),))])
    outer = join([inner, TaskSet("c", (a("3"),))])
    assert [value(outer, task, "5", ()) for task in outer.tasks] == [0.5, 0.0, 0.0]


def test_ids_that_clash_get_the_name_of_their_set(tmp_path: Path) -> None:
    first = write(tmp_path, {"id": "1", "problem": "p", "answer": "1"}, name="first.jsonl")
    second = write(
        tmp_path, {"id": "1", "problem": "q", "answer": "1"}, {"id": "2", "problem": "q", "answer": "1"}, name="b.jsonl"
    )
    assert [task.id for task in load_tasks([first, second]).tasks] == ["first/1", "b/1", "2"]


def test_two_sets_of_the_same_name_are_not_joined() -> None:
    with pytest.raises(InvalidInput, match="called 'x'"):
        join([TaskSet("x", (a("1"),)), TaskSet("x", (a("2"),), reward=half)])


def test_a_given_reward_replaces_those_of_all_joined_sets() -> None:
    sets = [TaskSet("a", (a("1"),)), TaskSet("b", (a("2"),), reward=half)]
    found = load_tasks(sets, reward="srpo_env.rewards:exact_match")
    assert [value(found, task, "4", ()) for task in found.tasks] == [1.0, 1.0]


def test_extra_members_cost_the_same_in_all_joined_sets(event: Callable[..., Event]) -> None:
    sets = [TaskSet("a", (a("1"),)), TaskSet("b", (a("2"),), reward=half)]
    found = load_tasks(sets, extra_member_cost=0.125)
    three = event(event().members * 3)
    assert [value(found, task, "4", (three,)) for task in found.tasks] == [0.75, 0.25]


def test_without_a_cost_the_reward_is_the_set_s_own() -> None:
    assert load_tasks([a()], extra_member_cost=0.0).reward is exact_match


@pytest.mark.parametrize("cost", [0.0, 0.05])
def test_a_reward_that_gives_no_score_is_named(cost: float) -> None:
    reward: Any = lambda task, answer, events: 1.0  # noqa: E731
    tasks = load_tasks([a("7")], reward=reward, extra_member_cost=cost)
    with pytest.raises(InvalidInput, match=r"gave a float for task '7'; it returns an srpo_env.Score"):
        value(tasks, tasks.tasks[0], "4", ())


def test_without_a_reward_of_its_own_a_set_is_scored_by_exact_match() -> None:
    assert load_tasks([a()]).reward is exact_match


# CSV and Parquet.


def test_a_csv_file_holds_tasks(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text('id,question,answer,level\nx,"a, b\nc",4,5\n', encoding="utf-8")
    found = load_tasks(str(path), columns={"question": "problem"}).tasks
    assert found == (Task(id="x", problem="a, b\nc", answers=("4",), meta={"level": "5"}, set="some"),)


def test_a_csv_row_with_too_many_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("id,problem,answer\n1,p,4\n2,p,4,5\n", encoding="utf-8")
    with pytest.raises(InvalidTask, match=r"some.csv:3: more fields than the 3 columns"):
        load_tasks(str(path))


def test_a_parquet_file_holds_tasks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `datasets` is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"problem": ["p"], "answer": [4]}), tmp_path / "some.parquet")
    assert load_tasks(str(tmp_path / "some.parquet")).tasks == (Task(id="1", problem="p", answers=("4",), set="some"),)


def test_a_file_that_needs_a_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"some.parquet needs .*pip install 'srpo-env\[datasets\]'"):
        load_tasks(str(tmp_path / "some.parquet"))
