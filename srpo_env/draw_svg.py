"""A workflow as SVG: layers from the start to the end, edges routed between the nodes.

Layout after Sugiyama: back edges are turned round, nodes are layered by their longest path, every edge gets a point in
each layer that it crosses (in one, its label's box), layers are ordered by barycentres and spread without overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from textwrap import wrap
from xml.sax.saxutils import escape

from srpo_env.describing import edges_of, lines_of
from srpo_env.flow import END
from srpo_env.graph import Graph

START = "(start)"
CHAR, LINE, PAD, GAP_X, GAP_Y = 7.0, 17.0, 12.0, 26.0, 22.0
LABEL_CHARS, LABEL_LINES, NODE_CHARS = 30, 4, 44
SWEEPS = 24


@dataclass
class _Box:
    """A node, or the point where an edge crosses a layer (with its label, where it has one there)."""

    lines: list[str]
    layer: int
    kind: str = "node"
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    beside: float = 0.0
    """Room for self-loops at its right."""
    above: list[_Box] = field(default_factory=list)
    below: list[_Box] = field(default_factory=list)

    @property
    def span(self) -> float:
        return self.width + self.beside


@dataclass
class _Line:
    """An edge: its boxes from top to bottom, and whether it points up."""

    boxes: list[_Box]
    upward: bool
    label: str


def draw_svg(graph: Graph) -> str:
    """Returns the graph as an SVG picture."""
    edges = [(START, graph.workflow.first, ""), *edges_of(graph)]
    boxes, lines, loops = _layout(graph, edges)
    layers = _layers(boxes)
    _order(layers)
    _spread(layers)
    return _svg(graph, boxes, lines, loops)


# Layout.


def _layout(
    graph: Graph, edges: list[tuple[str, str, str]]
) -> tuple[list[_Box], list[_Line], list[tuple[_Box, list[str]]]]:
    names = [START, *graph.workflow.nodes, END]
    upward = _upward([(source, target) for source, target, _ in edges], names)
    layer = _longest_paths(edges, names, upward)
    layer[END] = max(layer.values(), default=0) + (0 if layer[END] == max(layer.values()) else 1)
    box = {name: _node_box(graph, name, 2 * layer[name]) for name in names}
    boxes, lines, loops = list(box.values()), [], []
    for source, target, label in edges:
        if source == target:
            loops.append((box[source], _wrapped(label)))
            continue
        up = (source, target) in upward
        first, last = (box[target], box[source]) if up else (box[source], box[target])
        chain = [_point(index) for index in range(first.layer + 1, last.layer)]
        if chain and label:
            middle = chain[len(chain) // 2 // 2 * 2]
            middle.lines, middle.kind = _wrapped(label), "label"
            middle.width = max(len(line) for line in middle.lines) * CHAR * 0.9 + PAD
            middle.height = len(middle.lines) * LINE * 0.9 + 4
        boxes += chain
        lines.append(_Line([first, *chain, last], up, label))
        for upper, lower in pairwise(lines[-1].boxes):
            upper.below.append(lower)
            lower.above.append(upper)
    for node, label_lines in loops:
        node.beside = 34 + max(len(line) for line in label_lines) * CHAR * 0.9 + PAD
    return boxes, lines, loops


def _upward(edges: list[tuple[str, str]], names: list[str]) -> set[tuple[str, str]]:
    """The edges that close a cycle in a depth-first walk from the start."""
    found: set[tuple[str, str]] = set()
    done: set[str] = set()
    successors = {name: [target for source, target in edges if source == name and target != name] for name in names}
    for root in names:
        stack: list[tuple[str, int]] = [] if root in done else [(root, 0)]
        path = {root}
        while stack:
            node, place = stack.pop()
            if place < len(successors[node]):
                stack.append((node, place + 1))
                target = successors[node][place]
                if target in path:
                    found.add((node, target))
                elif target not in done:
                    path.add(target)
                    stack.append((target, 0))
            else:
                path.discard(node)
                done.add(node)
    return found


def _longest_paths(edges: list[tuple[str, str, str]], names: list[str], upward: set[tuple[str, str]]) -> dict[str, int]:
    layer = dict.fromkeys(names, 0)
    pairs = [(t, s) if (s, t) in upward else (s, t) for s, t, _ in edges if s != t]
    for _ in names:
        for source, target in pairs:
            layer[target] = max(layer[target], layer[source] + 1)
    return layer


def _node_box(graph: Graph, name: str, layer: int) -> _Box:
    if name == START:
        return _Box([], layer, "start", width=14, height=14)
    if name == END:
        return _Box(["end"], layer, "end", width=64, height=30)
    lines = [part for line in lines_of(graph, name) for part in wrap(line, NODE_CHARS) or [line]]
    width = max(len(lines[0]) * CHAR * 1.25, *(len(line) * CHAR for line in lines)) + 2 * PAD
    return _Box(lines, layer, width=width, height=len(lines) * LINE + PAD)


def _point(layer: int) -> _Box:
    return _Box([], layer, "point", width=8)


def _wrapped(label: str) -> list[str]:
    lines = wrap(label, LABEL_CHARS) or [""]
    return lines if len(lines) <= LABEL_LINES else [*lines[: LABEL_LINES - 1], lines[LABEL_LINES - 1][:-3] + "..."]


def _layers(boxes: list[_Box]) -> list[list[_Box]]:
    layers: list[list[_Box]] = [[] for _ in range(1 + max(box.layer for box in boxes))]
    for box in boxes:
        layers[box.layer].append(box)
    return layers


def _order(layers: list[list[_Box]]) -> None:
    """Orders each layer by the mean place of its neighbours, downwards and upwards in turn; keeps the best."""
    best, fewest = [list(layer) for layer in layers], _crossings(layers)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            place = {id(box): index for row in layers for index, box in enumerate(row)}
            wanted = {}
            for box in layer:
                near = box.above if down else box.below
                wanted[id(box)] = _mean([place[id(other)] for other in near], place[id(box)])
            layer.sort(key=lambda box: wanted[id(box)])
        if (crossings := _crossings(layers)) < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    for layer, kept in zip(layers, best, strict=True):
        layer[:] = kept


def _crossings(layers: list[list[_Box]]) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        place = {id(box): index for index, box in enumerate(lower)}
        ends = [sorted(place[id(other)] for other in box.below) for box in upper]
        seen: list[int] = []
        for targets in ends:
            count += sum(target < other for target in targets for other in seen)
            seen += targets
    return count


def _mean(values: list[float] | list[int], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _spread(layers: list[list[_Box]]) -> None:
    """Gives every box its place: below the layer above, near its neighbours, never over another."""
    y = 16.0
    for layer in layers:
        height = max((box.height for box in layer), default=0)
        for box in layer:
            box.y = y + height / 2
            box.height = height if box.kind == "point" else box.height
        y += height + GAP_Y
    for layer in layers:
        _settle(layer, [0.0] * len(layer))
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = []
            for box in layer:
                near = box.above + box.below if sweep > 2 else box.above or box.below
                wanted.append(_mean([other.x for other in near], box.x))
            _settle(layer, wanted)


def _settle(layer: list[_Box], wanted: list[float]) -> None:
    """Places boxes as near to where they want to be as their order and widths allow (isotonic regression)."""
    offsets, edge = [], 0.0
    for box in layer:
        offsets.append(edge + box.width / 2)
        edge += box.span + GAP_X
    blocks: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        mean, size = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    shifts = [mean for mean, size in blocks for _ in range(size)]
    for box, offset, shift in zip(layer, offsets, shifts, strict=True):
        box.x = offset + shift


# Drawing.

_STYLE = """
    text { font: 13px ui-sans-serif, system-ui, Arial, sans-serif; text-anchor: middle; fill: #1f2937 }
    .name { font-weight: 600; font-size: 14px } .label { font-size: 11.5px; fill: #374151 }
    .node { fill: #eef2ff; stroke: #4f46e5; stroke-width: 1.2 }
    .end { fill: #ecfdf5; stroke: #059669; stroke-width: 1.2 }
    .start { fill: #1f2937 } .back { fill: #fff }
    .edge { fill: none; stroke: #6b7280; stroke-width: 1.3 } .head { fill: #6b7280 }"""
_HEAD = (
    '  <defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="head" d="M0 1 L10 5 L0 9 z"/></marker></defs>'
)


def _svg(graph: Graph, boxes: list[_Box], lines: list[_Line], loops: list[tuple[_Box, list[str]]]) -> str:
    left = min(box.x - box.width / 2 for box in boxes) - 16
    right = max(box.x + box.width / 2 + box.beside for box in boxes) + 16
    bottom = max(box.y + box.height / 2 for box in boxes) + 16
    for box in boxes:
        box.x -= left
    drawn = [_path(line) for line in lines]
    drawn += [_loop(box, label) for box, label in loops]
    drawn += [_drawn(box) for box in boxes if box.lines or box.kind == "start"]
    name = escape(graph.workflow.name)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right - left:.0f} {bottom:.0f}" '
            f'width="{right - left:.0f}" height="{bottom:.0f}" role="img">',
            f"  <title>{name}</title>",
            f"  <style>{_STYLE}",
            "  </style>",
            _HEAD,
            '  <rect class="back" width="100%" height="100%"/>',
            *drawn,
            "</svg>",
            "",
        ]
    )


def _port(box: _Box, other: _Box, *, below: bool) -> float:
    """Where an edge meets the side of a node: edges are spread in the order of where they come from."""
    if box.kind in ("point", "label", "start"):
        return box.x
    others = sorted(box.below if below else box.above, key=lambda each: each.x)
    place = next(index for index, each in enumerate(others) if each is other)
    return box.x + (place - (len(others) - 1) / 2) * min(24.0, (box.width - 16) / len(others))


def _path(line: _Line) -> str:
    first, second, *_ = line.boxes
    *_, before, last = line.boxes
    points = [(_port(first, second, below=True), first.y + first.height / 2)]
    for box in line.boxes[1:-1]:
        points += [(box.x, box.y - box.height / 2), (box.x, box.y + box.height / 2)]
    points.append((_port(last, before, below=False), last.y - last.height / 2))
    if line.upward:
        points.reverse()
    commands = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        commands.append(
            f"L{x1:.1f} {y1:.1f}" if x0 == x1 else f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
        )
    title = f"<title>{escape(line.label)}</title>" if line.label else ""
    return f'  <path class="edge" marker-end="url(#head)" d="{" ".join(commands)}">{title}</path>'


def _loop(box: _Box, label: list[str]) -> str:
    x, y, reach = box.x + box.width / 2, box.y, 30
    path = f"M{x:.1f} {y - 9:.1f} C{x + reach:.1f} {y - 22:.1f} {x + reach:.1f} {y + 22:.1f} {x:.1f} {y + 9:.1f}"
    middle = x + 30 + max(len(line) for line in label) * CHAR * 0.45
    return f'  <path class="edge" marker-end="url(#head)" d="{path}"/>\n' + _text(label, middle, y, "label", LINE * 0.9)


def _drawn(box: _Box) -> str:
    x, y = box.x - box.width / 2, box.y - box.height / 2
    if box.kind == "start":
        return f'  <circle class="start" cx="{box.x:.1f}" cy="{box.y:.1f}" r="7"/>'
    if box.kind == "label":
        back = f'  <rect class="back" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"/>\n'
        return back + _text(box.lines, box.x, box.y, "label", LINE * 0.9)
    corner = 15 if box.kind == "end" else 6
    place = f'x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="{corner}"'
    shape = f'  <rect class="{box.kind}" {place}/>\n'
    return shape + _text(box.lines, box.x, box.y, "", LINE, bold_first=box.kind == "node")


def _text(lines: list[str], x: float, y: float, kind: str, height: float, *, bold_first: bool = False) -> str:
    top = y - (len(lines) - 1) * height / 2 + 4.5
    drawn = []
    for index, line in enumerate(lines):
        style = "name" if bold_first and index == 0 else kind
        place = f'x="{x:.1f}" y="{top + index * height:.1f}"'
        drawn.append(f'  <text class="{style or "line"}" {place}>{escape(line)}</text>')
    return "\n".join(drawn)
