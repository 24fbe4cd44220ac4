"""Pictures: each workflow has a golden file, text is escaped, and nothing lies over anything else."""

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest

from srpo_env.describing import describe
from srpo_env.draw import draw_mermaid, draw_svg
from srpo_env.graph import Graph, compile_graph
from srpo_env.loading import load_workflow, workflow_files

GOLDEN = Path(__file__).with_name("golden")
TWELVE = Path(__file__).with_name("twelve.yaml")
SOURCES: list[str | Path] = [*sorted(workflow_files()), TWELVE]


def graph_of(source: str | Path) -> Graph:
    return compile_graph(load_workflow(source))


def is_golden(name: str, text: str) -> None:
    """Compares with the golden file; GOLDEN=write renews it."""
    file = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{file} differs; look at it, then GOLDEN=write"


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_pictures_and_words_are_golden(source: str | Path) -> None:
    graph = graph_of(source)
    stem = graph.workflow.name
    is_golden(f"{stem}.mmd", draw_mermaid(graph) + "\n")
    is_golden(f"{stem}.svg", draw_svg(graph))
    is_golden(f"{stem}.txt", str(describe(graph)) + "\n")


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_an_svg_shows_each_node_with_its_agents_and_k(source: str | Path) -> None:
    graph = graph_of(source)
    texts = [
        text.text or "" for text in ElementTree.fromstring(draw_svg(graph)).iter("{http://www.w3.org/2000/svg}text")
    ]
    for node in describe(graph).nodes:
        assert node.name in texts
        assert any(text.startswith(f"K = {node.min_k}") for text in texts)
    assert all(any(agent in text for text in texts) for agent in graph.workflow.agents)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_no_box_lies_over_another(source: str | Path) -> None:
    boxes = [
        tuple(float(rect.attrib[side]) for side in ("x", "y", "width", "height"))
        for rect in ElementTree.fromstring(draw_svg(graph_of(source))).iter("{http://www.w3.org/2000/svg}rect")
        if "x" in rect.attrib
    ]
    for (x, y, width, height), (x2, y2, width2, height2) in combinations(boxes, 2):
        assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


def test_every_edge_is_drawn_with_its_condition() -> None:
    graph = graph_of(TWELVE)
    mermaid = draw_mermaid(graph)
    drawn = re.findall(r"^    n_(\w+) -->(?:\|.*\|)? (?:n_)?(\w+)$", mermaid, re.MULTILINE)
    assert len(drawn) == graph.nx.number_of_edges()
    svg = ElementTree.fromstring(draw_svg(graph))
    paths = [path for path in svg.iter("{http://www.w3.org/2000/svg}path") if path.get("class") == "edge"]
    assert len(paths) == graph.nx.number_of_edges() + 1  # and the one from the start


def test_text_of_a_workflow_is_never_markup() -> None:
    evil = "'<script>alert(1)</script>' in a.text and \"&quot;\" != '#35;]'"
    graph = compile_graph(
        load_workflow(
            {
                "name": "evil",
                "agents": {"x": {"prompt": "p"}},
                "nodes": {"a": {"agents": "x", "next": [{"if": evil, "to": "end"}, "b"]}, "b": {"agents": "x"}},
                "answer": "a.text",
            }
        )
    )
    svg, mermaid = draw_svg(graph), draw_mermaid(graph)
    assert "<script" not in svg
    assert "<script" not in mermaid
    assert "#lt;script#gt;" in mermaid
    assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_words_for_machines_are_plain_data() -> None:
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(describe(graph_of("adaptive_router")))))["k_max"] == 3


def test_visit_limits_bound_an_episode() -> None:
    loop = {
        "name": "loop",
        "agents": {"x": {"prompt": "p"}},
        "nodes": {
            "a": {"agents": "x", "next": "b"},
            "b": {"agents": "x", "next": [{"if": "visits.b < 9", "to": "a"}, "c"]},
            "c": {"agents": "x"},
        },
        "answer": "a.text",
        "limits": {"visits": {"b": 2}},
    }
    description = describe(compile_graph(load_workflow(loop)))
    assert description.longest_by == "limits.visits"
    assert description.longest is not None
    assert 5 <= description.longest <= 8  # a b a b c, and what the bound leaves open
