"""Does the made-up world keep its promises: no name in both splits, every answer in the passages, one world a seed?"""

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import srpo_env
from srpo_env.agents import ScriptedPolicy
from srpo_env.errors import InvalidInput
from srpo_env.protocols import SampleRequest
from srpo_env.registry import load
from srpo_env.tasks import Task, load_tasks
from srpo_env.tools.tiny_world import WorldSearch, tiny_world, world
from srpo_env.toolset import make_tool

FEW = settings(max_examples=10, deadline=None)
SPLITS = ("train", "test")


def names(split: str, seed: int) -> set[str]:
    return set().union(*world(split, seed).kinds.values())


def answer_read(task: Task) -> tuple[str, list[str]]:
    """Answers a question from nothing but its words and the passages, and says which passages that took."""
    split = task.id.partition("-")[0]
    read = {passage.title: passage for passage in world(split, 0).passages.values()}
    at, *relations = task.problem.split("'s ")
    used = []
    for relation in relations:
        used.append(read[at].id)
        found = re.search(rf"\b{relation} (\w+)", read[at].text)
        assert found is not None
        at = found[1]
    return at, used


@FEW
@given(st.integers(0, 50), st.integers(0, 50))
def test_no_name_stands_in_both_splits_whatever_the_seeds(first: int, second: int) -> None:
    assert not names("train", first) & names("test", second)


@FEW
@given(st.integers(0, 50), st.sampled_from(SPLITS))
def test_every_person_company_city_and_river_has_a_name_of_its_own(seed: int, split: str) -> None:
    kinds = world(split, seed).kinds
    assert sum(map(len, kinds.values())) == len(names(split, seed))


def test_a_passage_and_a_question_about_it_by_hand() -> None:
    passages = world("test", 0).passages
    assert (passages["Rumex"].id, passages["Rumex"].text) == ("test/Rumex", "has employer Tudil, birthplace Dagex.")
    assert passages["Tudil"].text == "has seat Tevum, head Bokon."
    (task,) = [each for each in tiny_world(split="test").tasks if each.problem == "Rumex's employer's seat"]
    assert task.answers == ("Tevum", "seat Tevum")
    assert task.meta == {"hops": 2, "gold": ["test/Rumex", "test/Tudil"]}


@pytest.mark.parametrize(("split", "size"), [("train", 2400), ("test", 800)])
def test_every_answer_follows_from_the_gold_passages(split: str, size: int) -> None:
    for task in tiny_world(split=split, size=size).tasks:
        assert answer_read(task) == (task.answers[0], task.meta["gold"])


def test_half_of_the_questions_take_two_hops() -> None:
    assert [task.meta["hops"] for task in tiny_world(size=6).tasks] == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("split", SPLITS)
def test_no_answer_stands_in_its_question(split: str) -> None:
    assert not [task for task in tiny_world(split=split).tasks if task.answers[0] in task.problem]


def test_the_same_seed_gives_the_same_questions_and_another_seed_others() -> None:
    first, again, other = (load_tasks("tiny_world", split="test", seed=seed).tasks for seed in (3, 3, 4))
    assert first == again
    assert {task.problem for task in first} != {task.problem for task in other}


def test_a_name_finds_its_passage_first_in_either_world() -> None:
    search = WorldSearch()
    for split in SPLITS:
        for name, passage in world(split, 0).passages.items():
            assert search.index.search(name, 1)[0].id == passage.id


def test_a_blank_tool_finds_the_passages_and_shows_nothing_of_them() -> None:
    shown, blank = (
        asyncio.run(make_tool("search", {"use": "tiny_world", "blank": hidden})(query="Tudil"))
        for hidden in (False, True)
    )
    assert shown.startswith("[1] Tudil\nhas ")
    assert blank == "[1] \n\n[2] "


def look_up(request: SampleRequest) -> str:
    """Follows the question through what was found; searches for what was not, or says that more is needed."""
    prompt = request.messages[-1].content
    asked = re.search(r"(search|answer) (\w+)((?:'s \w+)+)$", prompt)
    assert asked is not None
    found = dict(re.findall(r"\[\d+\] (\w+)\nhas ([^.]*)\.", prompt))
    at, known = asked[2], True
    for relation in asked[3].split("'s ")[1:]:
        if not (known := at in found):
            break
        at = dict(fact.split(" ") for fact in found[at].split(", "))[relation]
    if asked[1] == "search":
        return f"<search>{at}</search>"
    return at if known else "more"


@pytest.mark.parametrize(("blank", "right"), [(False, 1.0), (True, 0.0)])
def test_who_looks_things_up_is_always_right_and_without_the_passages_never(blank: bool, right: float) -> None:
    log = srpo_env.rollout(
        "tiny/search_aggregator",
        tiny_world(split="test", size=40),
        policies=ScriptedPolicy(look_up),
        episodes=40,
        group_size=1,
        tools={"search": WorldSearch(blank=blank)},
    )
    rewards = [event.reward for event in log if event.terminated or event.truncated]
    assert rewards == [right] * 40


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"split": "dev"}, "split 'dev'; it has train, test"),
        ({"seed": "0"}, "seed '0', size 512; both are whole numbers"),
        ({"size": 0}, "size 0"),
        ({"size": 10**6}, "size 1000000"),
    ],
)
def test_a_wrong_setting_is_refused(values: dict[str, int | str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        load("task set", "tiny_world")(**values)


def test_a_wrong_setting_of_the_tool_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"tools\.search\.blanc: no such setting\. Did you mean 'blank'\?"):
        make_tool("search", {"use": "tiny_world", "blanc": True})
