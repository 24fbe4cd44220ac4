"""Writes the pictures and active sets of workflows/README.md: `python tests/workflows/readme.py`.

Between `<!-- NAME -->` and `<!-- /NAME -->` stands what is made from the workflow NAME; a test keeps it in step.
"""

from __future__ import annotations

import re
from pathlib import Path

from srpo_env.describing import describe
from srpo_env.draw import draw_mermaid
from srpo_env.graph import compile_graph
from srpo_env.loading import load_workflow
from srpo_env.workflows import folder

README = Path(folder()) / "README.md"
BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)


def made_from(name: str) -> str:
    """Returns a workflow's block: its picture and its active sets."""
    graph = compile_graph(load_workflow(name))
    description = describe(graph)
    rows = [
        f"| `{node.name}` | {_k(node.min_k, node.max_k)} | {' or '.join(node.sets)} |" for node in description.nodes
    ]
    longest = f"An episode has at most {description.longest} event{'' if description.longest == 1 else 's'}."
    table = "\n".join(["| node | K | active set |", "|---|---|---|", *rows])
    return f"<!-- {name} -->\n```mermaid\n{draw_mermaid(graph)}\n```\n\n{table}\n\n{longest}\n<!-- /{name} -->"


def _k(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def renewed(text: str) -> str:
    """Returns the page with every block made anew."""
    return BLOCK.sub(lambda match: made_from(match[1]), text)


if __name__ == "__main__":
    README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
