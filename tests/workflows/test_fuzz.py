"""Wrong files by the thousand: never an uncaught exception, never a hang, always a place."""

import time
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from srpo_env.describing import describe
from srpo_env.draw import draw_mermaid, draw_svg
from srpo_env.errors import InvalidWorkflow
from srpo_env.flow import END
from srpo_env.graph import Graph, compile_graph
from srpo_env.loading import load_workflow, workflow_files
from srpo_env.problems import InvalidWorkflowFile
from srpo_env.scopes import texts_of
from srpo_env.templates import TemplateError, compile_expression, compile_template

CASES = settings().max_examples
"""A few hundred; 10,000 with HYPOTHESIS_PROFILE=figures."""


def texts(mutations: ModuleType, number: int) -> list[str]:
    sources = [file.read_text() for file in workflow_files().values()]
    return [mutations.generated(seed) if seed % 3 == 0 else mutations.mutated(seed, sources) for seed in range(number)]


def test_a_wrong_file_gives_problems_with_places_and_nothing_else(mutations: ModuleType, problems: Any) -> None:
    slowest, loaded = 0.0, 0
    for seed, text in enumerate(texts(mutations, CASES)):
        started = time.process_time()
        found = problems(text)
        slowest = max(slowest, time.process_time() - started)
        loaded += not found
        for problem in found:
            assert problem.line is not None, (seed, problem)
            assert problem.column is not None, (seed, problem)
            assert 1 <= problem.line <= text.count("\n") + text.count("\r") + 2, (seed, problem)
            assert problem.what, (seed, problem)
    assert slowest < 2
    assert 0 < loaded < CASES


def test_what_loads_can_be_compiled_drawn_and_dumped(mutations: ModuleType, tmp_path: Any) -> None:
    file = tmp_path / "file.yaml"
    for seed, text in enumerate(texts(mutations, CASES)):
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            workflow = load_workflow(file)
        except InvalidWorkflowFile:
            continue
        graph = compile_graph(workflow)
        assert draw_svg(graph).endswith("</svg>\n"), seed
        assert draw_mermaid(graph), seed
        assert str(describe(graph)), seed
        file.write_text(workflow.to_yaml(), encoding="utf-8")
        assert load_workflow(file) == workflow, seed


def test_the_reported_line_is_the_faulty_one_in_all_200(single_faults: ModuleType, problems: Any) -> None:
    wrong = []
    for kind, text, line in single_faults.single_faults(200):
        lines = {problem.line for problem in problems(text)}
        if lines != {line}:
            wrong.append((kind, line, lines))
    assert not wrong


def test_the_generator_starts_from_healthy_files(single_faults: ModuleType, problems: Any) -> None:
    for seed in range(20):
        assert not problems(single_faults.File.healthy(Random(seed)).text())


@pytest.mark.parametrize("seed", range(40))
def test_a_mapping_of_anything_is_refused(mutations: ModuleType, seed: int) -> None:
    junk = mutations._Maker(Random(seed)).junk(3)
    with pytest.raises(InvalidWorkflow, match=r"\w"):
        load_workflow(junk if isinstance(junk, dict) else {"name": junk})


class View:
    """What any node shows, whatever is asked."""

    def __init__(self, rng: Random) -> None:
        self.text, self.parsed, self.ok, self.visits, self.acting = (
            "text",
            rng.choice(["x", "approve", None]),
            True,
            1,
            1,
        )
        self.agent, self.index, self.count, self.results, self.turn = "a", 0, 1, ("r",), 0
        self.outputs = (_Output(),)


class _Output:
    agent, index, count, text, parsed, ok, results, acting = "a", 0, 1, "text", "x", True, (), False


def walk(graph: Graph, rng: Random) -> None:
    """Walks along random edges, whatever their conditions, and evaluates every text that is due on the way."""
    workflow = graph.workflow
    due: dict[tuple[Any, ...], Any] = {
        text.path: text for text in texts_of(workflow, {n: list(graph.nx.successors(n)) for n in graph.nx})
    }
    scope: dict[str, Any] = dict.fromkeys(workflow.nodes)
    member = View(rng)
    scope |= {
        "task": {"id": "1", "problem": "p", "meta": {}},
        "params": graph.params,
        "state": dict.fromkeys(workflow.state, ""),
    }
    visits = dict.fromkeys(workflow.nodes, 0)
    node = workflow.first
    for _ in range(12):
        everything = {**scope, "visits": visits, "member": member}
        active = graph.sets[node]
        for agent in {slot.agent for group in (active.slots, *active.among.values()) for slot in group}:
            for field in ("system", "prompt"):
                _evaluate(due.get(("agents", agent, field)), everything)
        for path, text in due.items():
            if path[:2] == ("nodes", node) and path[2] != "next":
                _evaluate(text, everything)
        visits[node] += 1
        scope[node] = View(rng)
        for path, text in due.items():
            if path[:3] == ("nodes", node, "next"):
                _evaluate(text, {**everything, **scope})
        node = rng.choice(workflow.nodes[node].next).to
        if node == END:
            _evaluate(due[("answer",)], {**everything, **scope})
            return


def _evaluate(text: Any, scope: dict[str, Any]) -> None:
    if text is None:
        return
    try:
        compile_template(text.text).render(scope) if text.template else compile_expression(text.text).evaluate(scope)
    except TemplateError as error:
        message = str(error)
    else:
        return
    # Types are not checked at load; what is visited and what exists is.
    assert "not visited" not in message, (text, message)
    assert "is undefined" not in message, (text, message)


def test_a_workflow_that_loads_never_reads_a_node_that_was_not_visited(mutations: ModuleType, tmp_path: Any) -> None:
    file = tmp_path / "file.yaml"
    for seed, text in enumerate(texts(mutations, CASES)):
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            graph = compile_graph(load_workflow(file))
        except InvalidWorkflowFile:
            continue
        for attempt in range(3):
            walk(graph, Random(f"{seed}/{attempt}"))


@pytest.mark.parametrize("name", sorted(workflow_files()))
def test_a_shipped_workflow_never_reads_a_node_that_was_not_visited(name: str) -> None:
    for seed in range(20):
        walk(compile_graph(load_workflow(name)), Random(seed))
