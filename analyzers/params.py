"""Count the parameters of a model: how many, in which part, which a token uses, which are never used.

The parts are told by structure and dataflow of a recorded run, not by names (docs/conventions.md): they add up to
`total`, and a bias belongs to its matrix's part. Tied parameters count once, under `embedding`. `active` is what one
token uses: top-k of E routed experts, the embedding whole, nothing that no op read; null where top-k could not be told.
`bias` are vectors added to a product (a LayerNorm's beta is `norm`). Rows fold equal layers of one kind; `layer_share`
is of one such layer, `used` says whether any op of the run read the parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from introspect.analyzers._accounting import audit_notes
from introspect.analyzers._components import COMPONENTS, Components, Placed
from introspect.analyzers._folding import LayerPaths, layer_ranges
from introspect.analyzers._labels import Labels
from introspect.analyzers._products import products
from introspect.analyzers._structure import Structure
from introspect.graph import Graph
from introspect.params import RunParams, Traces
from introspect.records import Trace
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
EXAMPLES = (
    "introspect params meta-llama/Meta-Llama-3-8B",
    "introspect params deepseek-ai/DeepSeek-V3 --table totals",
    "introspect params my_model.py:build --format csv",
)

UNITS = {
    "parameter": "",
    "layers": "",
    "component": "",
    "shape": "",
    "dtype": "",
    "count": "",
    "params": "",
    "bytes": "B",
    "share": "share",
    "layer_share": "share",
    "used": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams):
    """Which run tells what each parameter is for; any short one will do."""


def analyze(params: Params, traces: Traces) -> Result:
    """Totals and one row for each parameter of each kind of layer."""
    trace = traces(params.run_shape())
    structure = Structure(Graph(trace))
    placed = tuple(Components(Labels(structure)).placed())
    return Result(
        command="params",
        model=describe_model(trace),
        run=describe_run(trace.run),
        totals=_totals(trace, placed, structure.layers),
        tables={"parameters": _table(placed, structure.layers)},
        assumptions=trace.assumptions,
        notes=(*audit_notes(trace, products(structure)), *_unused_note(placed, structure.layers)),
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in trace.unclassified),
    )


def _totals(trace: Trace, placed: tuple[Placed, ...], paths: LayerPaths) -> dict[str, Value]:
    def count(chosen: Iterable[Placed]) -> int:
        return sum(one.parameter.count for one in chosen)

    parts: dict[str, Value] = {part: count(one for one in placed if one.component == part) for part in COMPONENTS}
    return {
        "total": count(placed),
        "active": _active(placed),
        **parts,
        "bias": count(one for one in placed if one.bias),
        "layers": count(one for one in placed if paths.layer_path(one.parameter.path)),
        "buffers": sum(p.count for p in trace.parameters if p.buffer and p.tied_to is None),
        "routed_experts": count(one for one in placed if one.routed),
        "shared_experts": count(one for one in placed if one.shared),
        "unused": count(one for one in placed if not one.parameter.touched),
        "weight_bytes": sum(one.parameter.bytes for one in placed),
    }


def _active(placed: tuple[Placed, ...]) -> int | None:
    used = [one for one in placed if one.parameter.touched]
    if not all(one.active_known for one in used):
        return None
    return sum(one.parameter.count * one.active_share[0] // one.active_share[1] for one in used)


def _table(placed: tuple[Placed, ...], paths: LayerPaths) -> Table:
    kinds = _layer_kinds(placed, paths)
    rows: dict[tuple[object, ...], list[Placed]] = {}
    for one in placed:
        kind = kinds.get(paths.layer_path(one.parameter.path))
        parameter = one.parameter
        pattern = paths.split(parameter.path)[0]
        key = (pattern, kind, one.component, parameter.shape, parameter.dtype, parameter.touched)
        rows.setdefault(key, []).append(one)
    total = sum(one.parameter.count for one in placed)
    of_kind: defaultdict[object, int] = defaultdict(int)
    for one in placed:
        of_kind[kinds.get(paths.layer_path(one.parameter.path))] += one.parameter.count
    return Table(units=UNITS, rows=tuple(_row(key, found, paths, total, of_kind) for key, found in rows.items()))


def _row(
    key: tuple[object, ...], found: list[Placed], paths: LayerPaths, total: int, of_kind: dict[object, int]
) -> dict[str, Value]:
    first = found[0]
    count = sum(one.parameter.count for one in found)
    return {
        "parameter": paths.split(first.parameter.path)[0],
        "layers": layer_ranges(paths.split(one.parameter.path)[1] for one in found),
        "component": first.component,
        "shape": list(first.parameter.shape),
        "dtype": first.parameter.dtype,
        "count": len(found),
        "params": count,
        "bytes": sum(one.parameter.bytes for one in found),
        "share": count / total if total else 0.0,
        "layer_share": None if key[1] is None else count / of_kind[key[1]],
        "used": first.parameter.touched,
    }


def _layer_kinds(placed: tuple[Placed, ...], paths: LayerPaths) -> dict[str | None, int]:
    """Layers with the same parameters are of one kind: layer path -> number of its kind."""
    contents: defaultdict[str, list[object]] = defaultdict(list)
    for one in placed:
        layer = paths.layer_path(one.parameter.path)
        if layer is not None:
            within = one.parameter.path.removeprefix(layer)
            contents[layer].append((within, one.component, one.parameter.shape, one.parameter.dtype))
    kinds: dict[object, int] = {}
    found: dict[str | None, int] = {}
    for layer, content in contents.items():
        signature = (paths.split(layer)[0], tuple(content))
        found[layer] = kinds.setdefault(signature, len(kinds))
    return found


def _unused_note(placed: tuple[Placed, ...], paths: LayerPaths) -> tuple[str, ...]:
    """What the forward never read, with its parameters, as the largest modules of which nothing was (vision towers)."""
    read = {prefix for one in placed if one.parameter.touched for prefix in _prefixes(one.parameter.path)}
    unread: Counter[str] = Counter()
    for one in placed:
        path = one.parameter.path
        if not one.parameter.touched:
            part = next((prefix for prefix in _prefixes(path) if prefix not in read), path)
            unread[paths.split(part)[0]] += one.parameter.count
    if not unread:
        return ("every parameter is read by the forward",)
    shown = ", ".join(f"{part} ({count:,})" for part, count in unread.most_common(8))
    return (f"never read by the forward: {shown}" + (f" and {len(unread) - 8} more" if len(unread) > 8 else ""),)


def _prefixes(path: str) -> list[str]:
    """ "a", "a.b" and "a.b.c" for "a.b.c"."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
