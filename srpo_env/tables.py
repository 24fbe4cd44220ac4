"""How does a table of texts look, on a terminal and in Markdown?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, indent: str = "") -> Iterator[str]:
    """Yields lines: columns to the left, all but the last padded.

    >>> list(aligned([("set", "tasks"), ("nq", "300")]))
    ['set  tasks', 'nq   300']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


def markdown(rows: Rows) -> str:
    """Returns a Markdown table; the first row is its head.

    >>> print(markdown([("set", "tasks"), ("nq", "300")]), end="")
    | set | tasks |
    |---|---|
    | nq | 300 |
    """
    head, *body = ("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in rows)
    return "".join([head, "|" + "---|" * len(rows[0]) + "\n", *body])
