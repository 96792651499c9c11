"""Say which config field decides each dimension of each matrix, found by changing fields and building again.

Nothing is read from field names: one integer at a time is moved, the model built on meta and run on a few tokens, and a
dimension is a sum of products of the fields that move it (and of quotients, `(a // b) * c`) that gives the model as it
is and a change it was not fitted to (`confirmed`). `text_config.head_dim` is a field of a config inside the config.
`structural` fields add or remove matrices, `still` ones do nothing here, `joint` ones move only together with
others, `stuck` ones could not be moved at all. For an FFN width `ffn_widths` adds its ratio to the width of its own
input, the power of two in it, and whether rounding up multiplier * 2/3 * 4d to a multiple would give it: a guess at how
it was chosen, never a fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from introspect.analyzers._components import Components
from introspect.analyzers._labels import Labels
from introspect.analyzers._structure import Structure
from introspect.explain_record import Dimension, ExplainRecord, Term, pattern
from introspect.graph import Graph
from introspect.params import Traces, option
from introspect.records import RunShape, Trace
from introspect.table import Result, Table, Value, describe_model

MODELS = "one"
EXAMPLES = (
    "introspect explain meta-llama/Meta-Llama-3-8B",
    "introspect explain deepseek-ai/DeepSeek-V3 --module '*kv_a*'",
)
MULTIPLIERS = (1.0, 1.3)  # of Llama's training code: 1 unless given, 1.3 in the 70B models and Llama 3
MULTIPLES = (4096, 1024, 256)
SHORTEST_RUN = RunShape(phase="prefill", seq=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Which modules are shown."""

    module: str = option("*", "only modules that match this pattern", metavar="PATTERN")


def analyze(params: Params, traces: Traces) -> Result:
    """One row for each dimension of each kind of matrix."""
    trace = traces(SHORTEST_RUN)
    record: ExplainRecord = traces.gather("dimensions.gather_dimensions", raw=trace.model.config)
    shown = [d for d in record.dimensions if _matches(d.module, params.module)]
    return Result(
        command="explain",
        model=describe_model(trace),
        totals={
            "dimensions": len(shown),
            "confirmed": sum(d.confirmed for d in shown),
            "builds": record.builds,
        },
        tables={
            "dimensions": Table(units=UNITS, rows=tuple(_row(d) for d in shown)),
            "ffn_widths": Table(units=WIDTH_UNITS, rows=tuple(_width_rows(record.dimensions, trace))),
            "fields": Table(
                units={"field": "", "effect": ""},
                rows=tuple(_field_rows(record)),
            ),
        },
        assumptions=("the rule behind an FFN width is a guess",),
        notes=(
            f"{record.builds} changed models were built, one layer of each kind",
            *(() if shown else (f"no module matches {params.module!r}",)),
        ),
    )


UNITS = dict.fromkeys(("module", "dimension", "value", "expression", "fields", "confirmed"), "")
WIDTH_UNITS = dict.fromkeys(("module", "width", "hidden", "ratio", "power_of_two", "rule_guess"), "")


def _field_rows(record: ExplainRecord) -> Iterator[dict[str, Value]]:
    effects = (
        ("structural: adds or removes matrices", record.structural),
        ("still: moves no dimension", record.still),
        ("stuck: no change of it builds", record.stuck),
    )
    for effect, names in effects:
        for name in names:
            yield {"field": name, "effect": effect}
    for name, others in record.joint.items():
        yield {"field": name, "effect": f"joint: builds only when changed together with {', '.join(others)}"}


def _matches(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern)


def _row(dimension: Dimension) -> dict[str, Value]:
    return {
        "module": dimension.module,
        "dimension": dimension.dimension,
        "value": dimension.value,
        "expression": expression(dimension.terms),
        "fields": " ".join(dimension.fields),
        "confirmed": dimension.confirmed,
    }


def expression(terms: tuple[Term, ...] | None) -> str | None:
    """Terms as text, fields in alphabetical order: "kv_lora_rank + qk_rope_head_dim", "2 * moe_intermediate_size"."""
    if terms is None:
        return None
    text = ""
    for coefficient, names in terms:
        factors = [*([str(abs(coefficient))] if abs(coefficient) != 1 or not names else []), *names]
        if len(factors) > 1:
            factors = [f"({factor})" if "//" in factor else factor for factor in factors]
        sign = (" - " if coefficient < 0 else " + ") if text else ("-" if coefficient < 0 else "")
        text += sign + " * ".join(factors)
    return text or "0"


def _width_rows(dimensions: tuple[Dimension, ...], trace: Trace) -> Iterator[dict[str, Value]]:
    """Widths that a matrix opens from the width of its own input and another one closes back to it."""
    feeding, heads = _feeding(trace), _head_fields(dimensions)
    inputs = [d for d in dimensions if d.dimension == "k"]
    pairs = [(k, n) for k in inputs for n in dimensions if (n.module, n.dimension) == (k.module, "n")]
    readers = Counter((d.terms, d.value) for d in inputs)
    for hidden, opened in pairs:
        looks_so = opened.confirmed and not heads & (_keys(opened) - _keys(hidden))
        if not feeding.get(hidden.module, looks_so):
            continue
        closing = (k for k, n in pairs if feeding.get(k.module, looks_so) and _closes(k, n, hidden, opened))
        width = next(closing, None)
        # more matrices read the stream than what an FFN makes of it
        if width is not None and readers[hidden.terms, hidden.value] > readers[width.terms, width.value]:
            yield _width_row(opened.module, width.value, hidden.value)


def _closes(width: Dimension, back: Dimension, hidden: Dimension, opened: Dimension) -> bool:
    """Whether a matrix leads from the opened width back to the hidden one; a fused gate and up opens twice of it."""
    returns = (back.terms, back.value) == (hidden.terms, hidden.value)
    same = width.fields == opened.fields and opened.value in (width.value, 2 * width.value)
    return returns and same and (width.terms, width.value) != (hidden.terms, hidden.value)


def _feeding(trace: Trace) -> dict[str, bool]:
    """Whether the matrices that ran belong to an FFN; towers that the run left out are not in it."""
    placed = Components(Labels(Structure(Graph(trace)))).placed()
    return {
        pattern(one.parameter.path.removesuffix(".weight")): one.component == "ffn"
        for one in placed
        if one.parameter.touched
    }


def _head_fields(dimensions: tuple[Dimension, ...]) -> set[str]:
    """Keys of the fields that decide heads or their widths: in a tower that did not run they are called the same."""
    calls = ("query_heads", "kv_heads", "qk_head_dim", "v_head_dim")
    return {key for d in dimensions if d.dimension in calls for key in _keys(d)}


def _keys(dimension: Dimension) -> set[str]:
    return {field.rpartition(".")[2] for field in dimension.fields}


def _width_row(module: str, width: int, hidden: int) -> dict[str, Value]:
    return {
        "module": module,
        "width": width,
        "hidden": hidden,
        "ratio": width / hidden,
        "power_of_two": width & -width,
        "rule_guess": _rule_guess(width, hidden),
    }


def _rule_guess(width: int, hidden: int) -> str | None:
    if width == 4 * hidden:
        return "4d"
    for multiplier, multiple in product(MULTIPLIERS, MULTIPLES):
        target = int(multiplier * int(2 * 4 * hidden / 3))
        if -(-target // multiple) * multiple == width:
            return f"{multiplier:g} x 2/3 x 4d rounded up to {multiple}"
    return None
