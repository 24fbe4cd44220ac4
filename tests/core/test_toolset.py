"""Does every agent get the tools that its workflow names, and is what is missing told before anything runs?"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import srpo_env
from srpo_env.config import Recipe, load_recipe
from srpo_env.errors import InvalidInput, InvalidRecipe, UnknownName
from srpo_env.function_tools import FunctionTool
from srpo_env.jobs import Job
from srpo_env.loading import load_workflow
from srpo_env.spec import Agent, Node, Workflow
from srpo_env.toolset import load_tools, make_tool

CODE = '''
from srpo_env import tool

@tool
async def shout(text: str) -> str:
    """Says it louder."""
    return text.upper()

def whisper(text: str) -> str:
    """Says it in a low voice."""
    return text.lower()

class Echo:
    """Says it again."""
    name, description = "echo", "Says it again."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    def __init__(self, times):
        self.times = times
    @classmethod
    def from_config(cls, name, settings):
        return cls(settings["times"])
    async def __call__(self, text):
        return text * self.times

class NoSettings: pass
number = 5
'''


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the user's cache."""
    monkeypatch.setenv("SRPO_ENV_CACHE", str(tmp_path / "own_cache"))


@pytest.fixture
def code(tmp_path: Path) -> str:
    """A file of somebody's tools."""
    path = tmp_path / "mine.py"
    path.write_text(CODE, encoding="utf-8")
    return str(path)


def using(*tools: str) -> Workflow:
    agent = Agent(prompt="{{ task.problem }}", tools=tools)
    return Workflow(name="w", agents={"a": agent}, nodes={"n": Node(agents="a")}, answer="n.text")


def say(tool: Any, **arguments: Any) -> str:
    return str(asyncio.run(tool(**arguments)))


def test_a_registered_tool_is_loaded_by_its_name() -> None:
    tools = load_tools(using("calculator"))
    assert say(tools["calculator"], expression="17 * 24") == "408"


def test_a_workflow_without_tools_needs_none() -> None:
    assert load_tools(load_workflow("single_agent")) == {}


def test_what_is_given_comes_before_what_is_registered() -> None:
    mine = make_tool("calculator", {})
    assert load_tools(using("calculator"), given={"calculator": mine, "unused": mine}) == {"calculator": mine}


def test_a_tool_by_reference_is_loaded(code: str) -> None:
    tools = load_tools(using(f"{code}:shout", f"{code}:whisper"))
    assert [say(tool, text="Hello") for tool in tools.values()] == ["HELLO", "hello"]
    assert all(isinstance(tool, FunctionTool) for tool in tools.values())


def test_settings_make_the_tool(code: str) -> None:
    tools = load_tools(using("search"), given={"search": {"use": f"{code}:Echo", "times": 2}})
    assert say(tools["search"], text="ab") == "abab"


def test_tools_of_several_workflows_are_loaded_once() -> None:
    tools = load_tools(using("calculator"), using("calculator", "search"))
    assert list(tools) == ["calculator", "search"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"use": "calculater"}, "Did you mean 'calculator'?"),
        ({"use": "calculator", "digits": 5}, "tool 'calculator' has no settings, and digits is set"),
        ({"use": "CODE:number"}, "is a int and no tool"),
        ({"use": "CODE:NoSettings"}, "has no `from_config"),
        ({"use": "CODE:nothing"}, "can't be loaded"),
    ],
)
def test_what_makes_no_tool_is_refused(code: str, settings: dict[str, Any], error: str) -> None:
    settings["use"] = settings["use"].replace("CODE", code)
    with pytest.raises(InvalidInput, match=error):
        make_tool("mine", settings)


def test_a_tool_that_is_not_known_is_named_with_its_agent() -> None:
    with pytest.raises(UnknownName, match=r"agent 'a' of workflow 'w' may call tool 'serch'.*Did you mean 'search'"):
        load_tools(using("serch"))


# In an environment, a rollout and a recipe.


def test_an_environment_loads_the_tools_of_its_workflow() -> None:
    env = srpo_env.make("tool_use")
    env.reset(seed=0)
    *_, info = env.step(("<calculator>1/3 + 1/6</calculator>",))
    assert [call.result for call in info["event"].members[0].tool_calls] == ["0.5"]


def test_an_environment_takes_the_settings_of_a_tool(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "Oslo", "text": "It rains."}')
    env = srpo_env.make("search_aggregator", tools={"search": {"use": "bm25", "corpus": str(corpus)}}, searchers=1)
    env.reset(seed=0)
    observation, *_ = env.step(("<search>Oslo</search>",))
    assert "[1] Oslo\nIt rains." in observation["members"][0]["messages"][-1]["content"]


def test_a_tool_by_reference_is_called_by_its_own_name(code: str) -> None:
    env = srpo_env.make(using(f"{code}:shout"))
    env.reset(seed=0)
    *_, info = env.step(("<shout>hello</shout>",))
    assert [(call.tool, call.result) for call in info["event"].members[0].tool_calls] == [("shout", "HELLO")]


def test_a_rollout_loads_the_tools_of_its_workflow(scripted: Any) -> None:
    said = iter(["<calculator>2+3</calculator>", "\\boxed{5}"])
    log = srpo_env.rollout("tool_use", policies=scripted(lambda request: next(said)), episodes=1, group_size=1)
    assert [call.result for event in log for call in event.members[0].tool_calls] == ["5"]


def recipe(workflow: str, **values: Any) -> Recipe:
    base = {
        "workflow": workflow,
        "tasks": {"train": {"use": "arithmetic", "size": 4}},
        "policies": {"main": {"sample": {"backend": "scripted", "outputs": ["4"]}}},
    }
    return Recipe.model_validate(base | values)


def test_a_recipe_names_its_tools(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "text": "It rains."}')
    job = Job.prepare(recipe("search_aggregator", tools={"search": {"use": "bm25", "corpus": str(corpus), "top_k": 1}}))
    assert say(job.tools["search"], query="rains") == "[1] It rains."
    assert list(Job.prepare(recipe("tool_use")).tools) == ["calculator"]


def test_a_baseline_gets_its_tools_too() -> None:
    assert list(Job.prepare(recipe("single_agent", eval={"baseline": "tool_use"})).tools) == ["calculator"]


def test_a_recipe_does_not_search_in_the_demonstration_unless_it_says_so() -> None:
    with pytest.raises(InvalidInput, match=r"demonstration only; say under `tools` what to use"):
        Job.prepare(recipe("search_aggregator"))
    assert list(Job.prepare(recipe("search_aggregator", tools={"search": {}})).tools) == ["search"]


def test_a_bare_workflow_that_searches_is_tried_in_the_demonstration() -> None:
    assert list(Job.prepare("search_aggregator", bare_workflows=True).tools) == ["search"]


def test_another_tool_drops_the_settings_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    tools = {"search": {"use": "bm25", "corpus": "c.jsonl", "limit": 4}}
    path.write_text(json.dumps(json.loads(recipe("search_aggregator").model_dump_json()) | {"tools": tools}))
    assert load_recipe(path, ["tools.search.use=search"]).model_dump()["tools"] == {"search": {"use": "search"}}
    with pytest.raises(InvalidRecipe, match=r"tools\.search: "):
        load_recipe(path, ["tools.search=5"])
