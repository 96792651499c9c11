"""The tables of `moe`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from introspect.analyzers._exchange import Contest, Way
from introspect.analyzers._experts import Block, Load, Parameters
from introspect.analyzers._folding import layer_ranges
from introspect.analyzers._products import Product
from introspect.analyzers._roofline import Machine
from introspect.analyzers._step import Step
from introspect.analyzers._traffic import expected_experts, rows_of_tokens
from introspect.records import RunShape
from introspect.table import Table, Value

EXPERT_UNITS = {
    "module": "",
    "layers": "",
    "kind": "",
    "experts": "",
    "rows_per_expert": "",
    "max_rows": "",
    "busy_experts": "",
    "k": "",
    "n": "",
    "count": "",
    "params": "",
    "flops": "FLOP",
}
POLICY_UNITS = {
    "policy": "",
    "mean_rows": "",
    "max_rows": "",
    "imbalance": "",
    "busy_experts": "",
    "expected_experts": "",
    "rank_max_rows": "",
    "rank_busy_experts": "",
    "rank_imbalance": "",
    "capacity_rows": "",
    "dropped_share": "share",
}
BATCH_UNITS = {
    "batch": "sequences",
    "tokens": "tokens",
    "expected_experts": "",
    "share": "share",
    "rows_per_busy_expert": "",
    "read_params": "",
    "read_bytes": "B",
}
EXCHANGE_UNITS = {
    "direction": "",
    "dtype": "",
    "payload_bytes": "B",
    "scale_bytes": "B",
    "remote_bytes": "B",
    "remote_bytes_per_rank": "B",
    "inter_node_bytes": "B",
    "inter_node_bytes_once": "B",
    "gpu": "",
    "seconds": "s",
}
CONTEST_UNITS = {
    "degree": "",
    "experts_per_rank": "",
    "ep_bytes_per_rank": "B",
    "tp_bytes_per_rank": "B",
    "ep_seconds": "s",
    "tp_seconds": "s",
    "less": "",
}
BATCHES = tuple(1 << power for power in range(12))


def expert_table(step: Step) -> Table:
    """Products of routers, shared and routed experts; equal layers folded. Rows are means over layers."""
    structure, layers = step.structure, step.structure.layers
    rows: defaultdict[tuple[str, str, int, int, int], list[Product]] = defaultdict(list)
    for product in step.executed:
        kind = _kind(step, product)
        if kind is not None and product.direction == "forward":
            experts = product.experts.experts if product.experts is not None else 1
            rows[layers.split(product.module)[0], kind, experts, product.k, product.n].append(product)
    sizes = {p.path: p.count for p in structure.graph.trace.parameters}
    return Table(
        units=EXPERT_UNITS,
        rows=tuple(
            {
                "module": module,
                "layers": layer_ranges(layers.split(product.module)[1] for product in same),
                "kind": kind,
                "experts": experts,
                "rows_per_expert": sum(_routed_rows(product) for product in same) / len(same) / experts,
                "max_rows": max(max(p.experts.rows) if p.experts is not None else p.m for p in same),
                "busy_experts": sum(_busy(product) for product in same) / len(same),
                "k": k,
                "n": n,
                "count": sum(product.times for product in same),
                "params": sum(sizes[path] for product in same for path, _ in product.weights),
                "flops": sum(product.flops * product.times for product in same),
            }
            for (module, kind, experts, k, n), same in rows.items()
        ),
    )


def _kind(step: Step, product: Product) -> str | None:
    structure = step.structure
    if not product.weights:
        return None
    if product.op in structure.experts:
        return "routed"
    if product.op in structure.router:
        return "router"
    return "shared" if product.op in structure.shared_experts else None


def _routed_rows(product: Product) -> int:
    call = product.experts
    if call is None:
        return product.m
    return rows_of_tokens(call) if call.top_k else sum(call.rows)


def _busy(product: Product) -> int:
    return 1 if product.experts is None else sum(1 for count in product.experts.rows if count)


def policy_table(loads: Mapping[str, Load], block: Block, factor: float | None) -> Table:
    """The load under each routing policy."""
    call = block.call
    return Table(
        units=POLICY_UNITS,
        rows=tuple(
            {
                "policy": policy,
                "mean_rows": load.mean_rows,
                "max_rows": load.max_rows,
                "imbalance": load.imbalance,
                "busy_experts": load.busy,
                "expected_experts": expected_experts(call.experts, call.top_k, call.tokens),
                "rank_max_rows": load.rank_rows,
                "rank_busy_experts": load.rank_busy,
                "rank_imbalance": load.rank_imbalance,
                "capacity_rows": None if factor is None else load.capacity(factor),
                "dropped_share": None if factor is None else load.dropped_share(factor),
            }
            for policy, load in loads.items()
        ),
    )


def batch_table(run: RunShape, block: Block, counted: Parameters) -> Table:
    """From the batch to the distinct experts expected and the weights a step reads."""
    experts, top_k = block.call.experts, block.call.top_k
    rows: list[dict[str, Value]] = []
    for batch in sorted({*BATCHES, run.batch}):
        tokens = batch * run.seq
        busy = expected_experts(experts, top_k, tokens)
        rows.append(
            {
                "batch": batch,
                "tokens": tokens,
                "expected_experts": busy,
                "share": busy / experts,
                "rows_per_busy_expert": tokens * top_k / busy if busy else None,
                "read_params": round(counted.read(tokens)),
                "read_bytes": round(counted.read_bytes(tokens)),
            }
        )
    return Table(units=BATCH_UNITS, rows=tuple(rows))


def exchange_table(sent: Sequence[Way], ranks: int, nodes: int, most: int | None, gpus: Sequence[Machine]) -> Table:
    """Dispatch and combine of one layer, all ranks together; `seconds` of one rank's share on each interconnect."""
    return Table(
        units=EXCHANGE_UNITS,
        rows=tuple(
            {
                "direction": way.direction,
                "dtype": way.dtype,
                "payload_bytes": way.payload_bytes,
                "scale_bytes": way.scale_bytes,
                "remote_bytes": round(way.remote_bytes(ranks)),
                "remote_bytes_per_rank": round(way.remote_bytes(ranks) / ranks),
                "inter_node_bytes": round(way.crossing_bytes(nodes)),
                "inter_node_bytes_once": round(way.crossing_bytes_once(nodes, most)),
                "gpu": machine.gpu.name,
                "seconds": _seconds(way.remote_bytes(ranks) / ranks, machine),
            }
            for machine in gpus
            for way in sent
        ),
    )


def contest_table(contest: Contest, tokens: int, machine: Machine) -> Table:
    """EP against TP at each power of two that the experts divide by: bytes one rank sends in one layer."""
    rows: list[dict[str, Value]] = []
    for degree in contest.degrees():
        if degree & (degree - 1):
            continue
        ep, tp = contest.ep_bytes(tokens, degree), contest.tp_bytes(tokens, degree)
        rows.append(
            {
                "degree": degree,
                "experts_per_rank": contest.block.call.experts // degree,
                "ep_bytes_per_rank": round(ep),
                "tp_bytes_per_rank": round(tp),
                "ep_seconds": _seconds(ep, machine),
                "tp_seconds": _seconds(tp, machine),
                "less": "EP" if ep < tp else "TP",
            }
        )
    return Table(units=CONTEST_UNITS, rows=tuple(rows))


def _seconds(sent: float, machine: Machine) -> float | None:
    rate = machine.gpu.interconnect_bytes_per_second
    return None if rate is None else sent / rate
