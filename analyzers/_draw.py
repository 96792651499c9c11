"""One layer of each kind as a graph, as Mermaid or Graphviz text: products and joined ops, a shape on every edge.

What is outside any layer (lookups, the last norm, the head) is one more box. Masks, positions and other constants are
left out; an edge that enters or leaves a box ends in a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """A layer (or the outside): a title, nodes in order, and edges (from, to, shape) between node names."""

    title: str
    nodes: tuple[_Node, ...]
    edges: tuple[tuple[str, str, str], ...]


def draw(structure: Structure, labels: Labels, found: list[Product], form: str, notes: Iterable[str] = ()) -> str:
    """The drawing as text, the notes as comments at its end. `form`: "mermaid" or "dot"."""
    boxes = list(_boxes(structure, labels, found))
    comment = "%%" if form == "mermaid" else "//"
    text = _mermaid(boxes) if form == "mermaid" else _dot(boxes)
    return "\n".join([text, *(f"{comment} {note}" for note in notes)])


def _boxes(structure: Structure, labels: Labels, found: list[Product]) -> Iterator[_Box]:
    parts = _parts(structure, labels, found)
    layers: dict[str | None, list[int]] = {}
    for i in parts:
        layers.setdefault(structure.layer_of(i), []).append(i)
    kinds: dict[object, list[str | None]] = {}
    for layer, firsts in layers.items():
        signature = tuple((_relative(parts[i][0][0], layer), *parts[i][0][1:]) for i in firsts)
        kinds.setdefault(signature, []).append(layer)
    for same in kinds.values():
        yield _box(structure, parts, layers[same[0]], same)


def _parts(
    structure: Structure, labels: Labels, found: list[Product]
) -> dict[int, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Each part to draw by its first op: its lines (name, then one for each product or what it is) and its ops."""
    graph = structure.graph
    parts: dict[int, tuple[tuple[str, ...], tuple[int, ...]]] = {}
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


def _box(
    structure: Structure,
    parts: dict[int, tuple[tuple[str, ...], tuple[int, ...]]],
    firsts: list[int],
    same: list[str | None],
) -> _Box:
    graph, layer = structure.graph, same[0]
    owner = {i: first for first in firsts for i in parts[first][1]}
    nodes: list[_Node] = []
    widest: dict[tuple[str, str], Tensor] = {}  # parts of one value (rotated halves) are one edge
    for first in firsts:
        lines, members = parts[first]
        nodes.append(_Node(name=f"n{first}", lines=tuple(filter(None, (_relative(lines[0], layer), *lines[1:])))))
        for i in members:
            for slot, t in enumerate(graph.ops[i].inputs):
                source = owner.get(graph.producers[i][slot])
                if graph.input_nature(i, slot) == "data" and source != first:
                    ends = (f"n{source}" if source is not None else f"in{firsts[0]}", f"n{first}")
                    widest[ends] = max(widest.get(ends, graph.tensors[t]), graph.tensors[t], key=lambda x: x.elements)
    paths = [structure.layers.split(path) for path in same if path is not None]
    title = f"{paths[0][0]} ({layer_ranges(layer for _, layer in paths)})" if paths else "outside the layers"
    edges = tuple((start, end, " x ".join(map(str, tensor.shape))) for (start, end), tensor in widest.items())
    return _Box(title=title, nodes=tuple(nodes), edges=edges)


def _mermaid(boxes: list[_Box]) -> str:
    lines = ["flowchart TB"]
    for number, box in enumerate(boxes):
        lines.append(f'  subgraph box{number}["{_plain(box.title)}"]')
        lines += [f'    {node.name}["{"<br/>".join(map(_plain, node.lines))}"]' for node in box.nodes]
        lines += [f'    {name}(["from outside"])' for name in _inputs(box)]
        lines += [f'    {start} -->|"{shape}"| {end}' for start, end, shape in box.edges]
        lines.append("  end")
    return "\n".join(lines)


def _dot(boxes: list[_Box]) -> str:
    lines = ["digraph layers {", '  node [shape=box, fontname="sans-serif"];']
    for number, box in enumerate(boxes):
        lines += [f"  subgraph cluster_{number} {{", f'    label="{_plain(box.title)}";']
        lines += [_dot_node(node) for node in box.nodes]
        lines += [f'    {name} [label="from outside", shape=oval];' for name in _inputs(box)]
        lines += [f'    {start} -> {end} [label="{shape}"];' for start, end, shape in box.edges]
        lines.append("  }")
    return "\n".join([*lines, "}"])


def _dot_node(node: _Node) -> str:
    label = "\\n".join(map(_plain, node.lines))
    return f'    {node.name} [label="{label}"];'


def _inputs(box: _Box) -> list[str]:
    return sorted({start for start, _, _ in box.edges if start.startswith("in")})


def _plain(text: str) -> str:
    """Module names are letters, digits, dots and underscores; anything else must not end a label early."""
    return text.replace("\\", "/").replace('"', "'")
