"""One layer of each kind as a graph, as Mermaid or Graphviz text: products and joined ops, a shape on every edge.

What is outside any layer (lookups, the last norm, the head) is one more box. Ops of a layer that is not drawn stand for
those of the layer like it, so that edges join the boxes and a stack of layers is a loop. Masks, positions and other
constants are left out; what comes from no drawn op comes "from outside".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from introspect.analyzers._folding import layer_ranges
from introspect.analyzers._labels import Labels
from introspect.analyzers._op_table import launches
from introspect.analyzers._products import Product
from introspect.analyzers._structure import Structure
from introspect.records import Tensor

_HIDDEN = ("setup", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """One box of text; its lines are a name and what it computes."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A layer (or the outside): a title and nodes in order; `entrance` is the node of what comes from outside."""

    title: str
    nodes: tuple[_Node, ...]
    entrance: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """Boxes, and edges (from, to, shape) between the names of their nodes."""

    boxes: tuple[_Box, ...]
    edges: tuple[tuple[str, str, str], ...]


_Parts = dict[int, tuple[tuple[str, ...], tuple[int, ...]]]


def draw(structure: Structure, labels: Labels, found: list[Product], form: str, notes: Iterable[str] = ()) -> str:
    """The drawing as text, the notes as comments at its end. `form`: "mermaid" or "dot"."""
    drawing = _drawing(structure, _parts(structure, labels, found))
    comment = "%%" if form == "mermaid" else "//"
    text = _mermaid(drawing) if form == "mermaid" else _dot(drawing)
    return "\n".join([text, *(f"{comment} {note}" for note in notes)])


def _drawing(structure: Structure, parts: _Parts) -> _Drawing:
    layers: dict[str | None, list[int]] = {}
    for i in parts:
        layers.setdefault(structure.layer_of(i), []).append(i)
    kinds: dict[object, list[str | None]] = {}
    for layer, firsts in layers.items():
        signature = tuple((_relative(parts[i][0][0], layer), *parts[i][0][1:]) for i in firsts)
        kinds.setdefault(signature, []).append(layer)
    node_of: dict[int, str] = {}  # op -> the node that is drawn for it or for its twin in the layer that is drawn
    entrance_of: dict[str, str] = {}
    for same in kinds.values():
        for layer in same:
            for first, twin in zip(layers[layer], layers[same[0]], strict=True):
                node_of |= dict.fromkeys(parts[first][1], f"n{twin}")
                entrance_of[f"n{twin}"] = f"in{layers[same[0]][0]}"
    edges = _edges(structure, node_of, entrance_of)
    starts = {start for start, _, _ in edges}
    return _Drawing(
        boxes=tuple(_box(structure, parts, layers[same[0]], same, starts) for same in kinds.values()), edges=edges
    )


def _edges(
    structure: Structure, node_of: dict[int, str], entrance_of: dict[str, str]
) -> tuple[tuple[str, str, str], ...]:
    graph = structure.graph
    widest: dict[tuple[str, str], Tensor] = {}  # parts of one value (rotated halves) are one edge
    for i, node in node_of.items():
        for slot, t in enumerate(graph.ops[i].inputs):
            if graph.input_nature(i, slot) != "data":
                continue
            producer = graph.producers[i][slot]
            start = node_of.get(producer, entrance_of[node])
            if start != node or (producer in node_of and structure.layer_of(producer) != structure.layer_of(i)):
                tensor = graph.tensors[t]
                widest[start, node] = max(widest.get((start, node), tensor), tensor, key=lambda x: x.elements)
    return tuple((start, end, " x ".join(map(str, tensor.shape))) for (start, end), tensor in widest.items())


def _parts(structure: Structure, labels: Labels, found: list[Product]) -> _Parts:
    """Each part to draw by its first op: its lines (name, then one for each product or what it is) and its ops."""
    graph = structure.graph
    parts: _Parts = {}
    for product in found:
        if product.op >= 0:
            lines, ops = parts.get(product.op, ((product.module,), product.ops))
            parts[product.op] = (*lines, _size(product)), ops
    for first, members in labels.groups().items():
        if labels.kind[first] not in _HIDDEN and any(launches(graph.ops[i]) for i in members):
            parts[first] = (graph.ops[first].module, labels.kind[first]), tuple(members)
    return dict(sorted(parts.items()))


def _size(product: Product) -> str:
    size = f"[{product.m} x {product.k}] [{product.k} x {product.n}]"
    call = product.attention
    heads = f", {call.query_heads} heads, {call.kv_heads} of keys" if call and product.kind == "attention_qk" else ""
    return f"{product.kind} {f'{product.batch} x ' if product.batch > 1 else ''}{size}{heads}"


def _relative(module: str, layer: str | None) -> str:
    if layer is None or not module.startswith(layer):
        return module
    return module.removeprefix(layer).removeprefix(".")


def _box(structure: Structure, parts: _Parts, firsts: list[int], same: list[str | None], starts: set[str]) -> _Box:
    nodes = []
    for first in firsts:
        name, *what = parts[first][0]
        nodes.append(_Node(name=f"n{first}", lines=tuple(filter(None, (_relative(name, same[0]), *what)))))
    paths = [structure.layers.split(path) for path in same if path is not None]
    title = f"{paths[0][0]} ({layer_ranges(layer for _, layer in paths)})" if paths else "outside the layers"
    entrance = f"in{firsts[0]}"
    return _Box(title=title, nodes=tuple(nodes), entrance=entrance if entrance in starts else None)


def _mermaid(drawing: _Drawing) -> str:
    lines = ["flowchart TB"]
    for number, box in enumerate(drawing.boxes):
        lines.append(f'  subgraph box{number}["{_plain(box.title)}"]')
        lines += [f'    {node.name}["{"<br/>".join(map(_plain, node.lines))}"]' for node in box.nodes]
        lines += [f'    {box.entrance}(["from outside"])'] if box.entrance else []
        lines.append("  end")
    return "\n".join([*lines, *(f'  {start} -->|"{shape}"| {end}' for start, end, shape in drawing.edges)])


def _dot(drawing: _Drawing) -> str:
    lines = ["digraph layers {", '  node [shape=box, fontname="sans-serif"];']
    for number, box in enumerate(drawing.boxes):
        lines += [f"  subgraph cluster_{number} {{", f'    label="{_plain(box.title)}";']
        lines += [_dot_node(node) for node in box.nodes]
        lines += [f'    {box.entrance} [label="from outside", shape=oval];'] if box.entrance else []
        lines.append("  }")
    edges = (f'  {start} -> {end} [label="{shape}"];' for start, end, shape in drawing.edges)
    return "\n".join([*lines, *edges, "}"])


def _dot_node(node: _Node) -> str:
    label = "\\n".join(map(_plain, node.lines))
    return f'    {node.name} [label="{label}"];'


def _plain(text: str) -> str:
    """Module names are letters, digits, dots and underscores; anything else must not end a label early."""
    return text.replace("\\", "/").replace('"', "'")
