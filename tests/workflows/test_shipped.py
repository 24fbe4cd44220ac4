# ruff: noqa: E501 - tables of texts read better unbroken
"""The workflows that ship: they load fast, say exactly what to answer, and are what their page says."""

import doctest
import importlib
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from srpo_env.describing import describe
from srpo_env.graph import compile_graph
from srpo_env.loading import load_workflow, set_params, workflow_files
from srpo_env.spec import schema
from srpo_env.templates import compile_template
from srpo_env.yaml_source import read_yaml

NAMES = sorted(workflow_files())
FULL = [name for name in NAMES if "/" not in name]


@pytest.mark.parametrize(
    "name", ["spec", "templates", "loading", "graph", "describing", "draw", "flow", "sets", "variables", "problems"]
)
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"srpo_env.{name}"), raise_on_error=False).failed == 0


def test_the_workflows_of_the_plan_ship() -> None:
    assert set(FULL) == {
        *("single_agent", "solver_verifier", "parallel_proposers", "proposers_verifier", "adaptive_router"),
        *("search_aggregator", "search_hierarchy", "debate", "tool_use"),
    }
    assert {f"tiny/{name}" for name in FULL} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_comes_back_from_its_own_dump(name: str) -> None:
    workflow = load_workflow(name)
    content, _, problems = read_yaml(workflow.to_yaml(), name)
    assert not problems
    assert load_workflow(content) == workflow
    assert workflow.description
    assert workflow.name == name.replace("/", "_")


@pytest.mark.parametrize("name", NAMES)
def test_every_param_can_take_its_least_and_greatest_value(name: str) -> None:
    workflow = load_workflow(name)
    for param, spec in workflow.params.items():
        assert spec.min is not None
        assert spec.max is not None
        for value in (spec.min, spec.max):
            compile_graph(set_params(workflow, {param: value}))


def test_solver_verifier_takes_at_most_30_lines() -> None:
    assert len(workflow_files()["solver_verifier"].read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", ["single_agent", "solver_verifier", "parallel_proposers", "proposers_verifier"])
def test_the_tiny_prompt_of_one_who_solves_is_the_problem_alone(name: str) -> None:
    name = f"tiny/{name}"
    for agent in load_workflow(name).agents.values():
        assert compile_template(agent.prompt).render({"task": {"problem": "37+58="}}) == "37+58="
        assert agent.parse.use == "answer"


@pytest.mark.parametrize("name", FULL)
def test_every_prompt_says_the_tag_or_box_that_its_parser_reads(name: str) -> None:
    for agent in load_workflow(name).agents.values():
        if agent.parse.tag is None:
            assert agent.parse.use == "boxed"
            assert r"\boxed{}" in agent.prompt
        else:
            assert f"<{agent.parse.tag}>" in agent.prompt
        for choice in agent.parse.choices or ():
            assert f"<{agent.parse.tag}>{choice}</{agent.parse.tag}>" in agent.prompt
        for tool in agent.tools:
            assert f"<{tool}>" in agent.prompt


def test_loading_and_checking_takes_less_than_60_ms_after_import() -> None:
    script = (
        "import time\n"
        "from srpo_env.loading import load_workflow\n"
        f"for name in {NAMES!r}:\n"
        "    started = time.process_time()\n"
        "    load_workflow(name)\n"
        "    print(name, time.process_time() - started)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds = dict(line.split() for line in run.stdout.splitlines())
    assert set(seconds) == set(NAMES)
    assert max(map(float, seconds.values())) < 0.060, seconds


def test_loading_imports_no_heavy_package() -> None:
    script = (
        "import sys; from srpo_env.loading import load_workflow; from srpo_env.graph import compile_graph; "
        "from srpo_env.draw import draw_svg; draw_svg(compile_graph(load_workflow('search_aggregator'))); "
        "print([name for name in ('torch', 'transformers', 'networkx', 'pandas', 'vllm', 'sympy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_page_shows_every_workflow_as_it_is(readme: ModuleType) -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert {match[1] for match in readme.BLOCK.finditer(text)} == set(FULL)
    assert text == readme.renewed(text), "run python tests/workflows/readme.py"


# The schema for editors.


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_accepts_what_ships(name: str) -> None:
    content, _, _ = read_yaml(workflow_files()[name].read_text(), name)
    jsonschema.validate(content, schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "change",
    [
        {"agents": {"a": {"promt": "x"}}},
        {"agents": {"a": {}}},
        {"nodes": {"n": {"agents": 3}}},
        {"nodes": {"n": {"agents": "a", "next": [{"too": "end"}]}}},
        {"limits": {"steps": -1}},
        {"nodess": {}},
        {"state": {"s": {"merge": "appendix"}}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(change: dict[str, Any]) -> None:
    healthy = {
        "name": "f",
        "agents": {"a": {"prompt": "x"}},
        "nodes": {"n": {"agents": "a"}},
        "answer": "n.text",
        "x-free": {"any": 1},
    }
    validator = jsonschema.Draft202012Validator(schema())
    assert validator.is_valid(healthy)
    assert not validator.is_valid({**healthy, **change})


def test_every_key_of_the_schema_is_described() -> None:
    for name, part in {"Workflow": schema(), **schema()["$defs"]}.items():
        for key, value in part.get("properties", {}).items():
            assert value.get("description"), f"{name}.{key}"


# What they can do.


@pytest.mark.parametrize(
    ("name", "params", "bounds", "longest"),
    [
        ("single_agent", {}, {"solve": (1, 1)}, 1),
        ("solver_verifier", {"rounds": 3}, {"solve": (1, 1), "verify": (1, 1)}, 6),
        ("parallel_proposers", {"proposers": 8}, {"propose": (8, 8)}, 1),
        ("proposers_verifier", {}, {"propose": (3, 3), "verify": (1, 1)}, 2),
        ("adaptive_router", {"team": 5}, {"route": (1, 1), "solve": (1, 5)}, 2),
        ("search_aggregator", {"searchers": 5, "rounds": 4}, {"search": (5, 5), "aggregate": (1, 1)}, 8),
        ("search_hierarchy", {}, {"verify": (1, 1), "search": (1, 1), "answer": (1, 1)}, 8),
        ("debate", {"debaters": 4, "rounds": 3}, {"debate": (4, 4)}, 3),
        ("tool_use", {}, {"solve": (1, 1)}, 5),
    ],
)
def test_active_sets_and_length_follow_the_params(
    name: str, params: dict[str, int], bounds: object, longest: int
) -> None:
    graph = compile_graph(load_workflow(name, params))
    assert graph.set_bounds == bounds
    assert describe(graph).longest == longest


@dataclass(frozen=True)
class View:
    """What a prompt sees of a node."""

    text: str = ""
    parsed: object = None
    ok: bool = True
    outputs: tuple[Any, ...] = ()


def rendered(name: str, agent: str, **scope: object) -> str:
    workflow = load_workflow(name)
    graph = compile_graph(workflow)
    every = {
        "task": {"problem": "1+1?"},
        "params": graph.params,
        "visits": dict.fromkeys(workflow.nodes, 0),
        "state": {"findings": []},
    }
    member = {"index": 0, "count": 3, "results": ()}
    return graph.prompts[agent].prompt.render({**dict.fromkeys(workflow.nodes), **every, "member": member, **scope})


def test_prompts_read_well() -> None:
    assert rendered("solver_verifier", "solver") == (
        "1+1?\nThink step by step. End with the final answer in \\boxed{}, such as \\boxed{42}."
    )
    assert "Your last solution was rejected. The reviewer wrote:\nno\nThink" in rendered(
        "solver_verifier", "solver", verify=View("no")
    )
    two = View(outputs=(View("first"), View("second")))
    assert "1+1?\n\nSolution 1:\nfirst\n\nSolution 2:\nsecond\n\nCompare" in rendered(
        "proposers_verifier", "verifier", propose=two
    )
    assert "Found so far:\n(nothing yet)\n\nDoes" in rendered("search_hierarchy", "verifier")
    assert "This was the last search" in rendered("search_aggregator", "aggregator", visits={"search": 2})
    assert "there will be another search" in rendered("search_aggregator", "aggregator", visits={"search": 1})
    assert rendered("tool_use", "solver", member={"results": ("408",)}).startswith("Result: 408\n\nGo on")


def test_a_debater_reads_the_others_and_not_itself() -> None:
    others = tuple(_Said(index, f"answer {index}") for index in range(3))
    text = rendered("debate", "debater", debate=View(outputs=others), member={"index": 1})
    assert "Agent 1: answer 0" in text
    assert "Agent 3: answer 2" in text
    assert "answer 1" not in text


@dataclass(frozen=True)
class _Said:
    index: int
    text: str
