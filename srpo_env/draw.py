"""A workflow as Mermaid text. Nodes show their sets, K and reducer; edges their conditions."""

from __future__ import annotations

from srpo_env.describing import edges_of, lines_of
from srpo_env.draw_svg import draw_svg
from srpo_env.flow import END
from srpo_env.graph import Graph

__all__ = ["draw_mermaid", "draw_svg"]


def draw_mermaid(graph: Graph) -> str:
    """Returns the graph as Mermaid text, which GitHub and most editors show as a picture.

    Example:
        >>> from srpo_env.graph import compile_graph
        >>> from srpo_env.loading import load_workflow
        >>> print(draw_mermaid(compile_graph(load_workflow("single_agent"))))
        flowchart TD
            start((" ")) --> n_solve
            n_solve["<b>solve</b><br>solver<br>K = 1"]
            n_solve --> finish
            finish(["end"])
    """
    drawn = ["flowchart TD", f'    start((" ")) --> n_{graph.workflow.first}']
    for name in graph.workflow.nodes:
        title, *lines = (_escaped(line) for line in lines_of(graph, name))
        drawn.append(f'    n_{name}["<b>{title}</b><br>{"<br>".join(lines)}"]')
    for source, target, label in edges_of(graph):
        goal = "finish" if target == END else f"n_{target}"
        drawn.append(f"    n_{source} -->" + (f'|"{_escaped(label)}"| ' if label else " ") + goal)
    return "\n".join([*drawn, '    finish(["end"])'])


def _escaped(text: str) -> str:
    """Text as Mermaid takes it in quotes, where entities begin with #."""
    return " ".join("".join(_ENTITIES.get(char, char) for char in text).split())


_ENTITIES = {"#": "#35;", "&": "#amp;", "<": "#lt;", ">": "#gt;", '"': "#quot;"}
