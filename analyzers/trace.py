"""List every matrix product a model runs, with its FLOPs and bytes, and everything else beside it.

A product [m, k] x [k, n] is 2*m*k*n FLOPs. `weight_flops` are products with a parameter, `attention_flops` products of
two activations, dense as executed; `attention_flops_causal` counts only the pairs that the mask lets through.
`engine_flops` and `--view engine` show what a serving engine runs for the same step (see docs/conventions.md): masked
attention, the head on the last position, latent attention absorbed where cheaper, routed experts only, selected keys.
All other totals are of the executed step, but `gemm_bytes`, which sums the table that is shown.
Bytes of a product are its operands once and its result once; `weight_bytes_read` counts the distinct experts expected
under independent uniform routing. Equal products of equal layers share a row: `*` in `module`, `layers` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from introspect.analyzers._accounting import audit_notes
from introspect.analyzers._draw import draw
from introspect.analyzers._engine import engine_products
from introspect.analyzers._gemm_table import gemm_table
from introspect.analyzers._labels import Labels
from introspect.analyzers._op_table import executed_kernels, fused_kernels, op_table
from introspect.analyzers._products import Product, fuse, products
from introspect.analyzers._structure import Structure
from introspect.analyzers._traffic import activation_bytes, cache_traffic, peak_activation_bytes, weight_reads
from introspect.graph import Graph
from introspect.params import RunParams, Traces, option
from introspect.records import Repeat, Trace
from introspect.serialize import trace_to_json
from introspect.table import Result, Value, describe_model, describe_run

MODELS = "one"
FORMATS = ("mermaid", "dot", "record")
EXAMPLES = (
    "introspect trace meta-llama/Meta-Llama-3-8B --phase decode --batch 32 --fuse",
    "introspect trace deepseek-ai/DeepSeek-V3 --phase decode --view engine",
    "introspect trace mistralai/Mixtral-8x7B-v0.1 --seq 4096 --format csv -o gemms.csv --table gemms",
    "introspect trace google/gemma-2-2b --format mermaid",
    "introspect trace google/gemma-2-2b --phase decode --format record -o gemma.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams):
    """Which run, and how its products are shown."""

    view: Literal["executed", "engine"] = option(
        "executed", "products as the code runs them, or as a serving engine would", choices=("executed", "engine")
    )
    fuse: bool = option(False, "merge Linears of one parent module that read the same tensor")
    per_layer: bool = option(False, "one row for each layer instead of one for equal layers")
    format: str = option("table", "tables, a drawing of one layer of each kind, or the record", metavar="FORMAT")


def analyze(params: Params, traces: Traces) -> Result:
    """Totals, the table of products and the table of all other ops; or a drawing, or the record itself as JSON."""
    trace = traces(params.run_shape())
    structure = Structure(Graph(trace))
    executed = products(structure)
    engine = engine_products(structure, executed)
    labels = Labels(structure)
    shown = engine if params.view == "engine" else executed
    shown = fuse(shown) if params.fuse else shown
    notes = (*audit_notes(trace, executed), *_scan_note(trace))
    return Result(
        command="trace",
        model=describe_model(trace),
        run=describe_run(trace.run),
        totals=_totals(structure, labels, executed, engine, params.view),
        tables={
            "gemms": gemm_table(shown, structure.layers, per_layer=params.per_layer),
            "ops": op_table(labels),
        },
        assumptions=_assumptions(trace, executed),
        notes=notes,
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in trace.unclassified),
        text=_text(params.format, trace, lambda form: draw(structure, labels, shown, form, notes)),
    )


def _text(form: str, trace: Trace, drawn: Callable[[str], str]) -> str | None:
    """What stands in place of the tables; None where they are asked for."""
    if form == "record":
        return trace_to_json(trace)
    return drawn(form) if form in FORMATS else None


def _totals(
    structure: Structure, labels: Labels, executed: list[Product], engine: list[Product], view: str
) -> dict[str, Value]:
    graph = structure.graph
    weights = sum(p.flops * p.times for p in executed if p.weights)
    attention = sum(p.flops * p.times for p in executed if not p.weights)
    reads, cache = weight_reads(graph), cache_traffic(graph)
    merged = {p.op for p in fuse(executed) if p.op >= 0}
    return {
        "weight_flops": weights,
        "attention_flops": attention,
        "attention_flops_causal": sum(p.masked_flops * p.times for p in executed if not p.weights),
        "total_flops": weights + attention,
        "engine_flops": sum(p.flops * p.times for p in engine),
        "weight_bytes_read": reads.expected,
        "weight_bytes_read_floor": reads.floor,
        "weight_bytes_read_ceiling": reads.ceiling,
        "kv_bytes_read": cache.read,
        "kv_bytes_written": cache.written,
        "activation_bytes": activation_bytes(executed),
        "peak_activation_bytes": peak_activation_bytes(graph.trace),
        "gemm_bytes": sum(p.bytes * p.times for p in (engine if view == "engine" else executed)),
        "kernels": executed_kernels(graph),
        "kernels_fused": fused_kernels(labels, sum(graph.times[i] for i in merged)),
    }


def _scan_note(trace: Trace) -> tuple[str, ...]:
    steps = sum(op.count for op in trace.ops if isinstance(op, Repeat))
    if not steps:
        return ()
    return (
        f"a scan is run step by step, {steps:,} steps in all: kernels and activation_bytes are of that code, which "
        "transformers takes where no fused scan kernel is installed",
    )


def _assumptions(trace: Trace, executed: list[Product]) -> tuple[str, ...]:
    found = list(trace.assumptions)
    if any(product.experts for product in executed):
        found.append(
            f"routing: {trace.run.routing}; expert bytes read: distinct experts expected of independent choices"
        )
    return tuple(found)
