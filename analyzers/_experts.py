"""Routed experts of a record: their blocks, how many rows each expert gets, and what the router leaves uneven."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from introspect.analyzers._components import Components
from introspect.analyzers._labels import Labels
from introspect.analyzers._step import Step
from introspect.analyzers._traffic import expected_experts, rows_of_tokens
from introspect.records import ExpertCall
from introspect.units import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer's experts: the call of their first product, and the widths of a row that goes in and comes out."""

    layer: str | None
    call: ExpertCall
    width_in: int
    width_out: int


def blocks(step: Step) -> tuple[Block, ...]:
    """The blocks in order of execution: grouped products of one layer that feed each other."""
    structure = step.structure
    found: dict[tuple[str | None, str], list[int]] = {}
    for i in sorted(structure.experts):
        op = structure.graph.ops[i]
        if op.experts is not None:
            owner = op.module.rpartition(".")[0] if op.module in _leaves(step) else op.module
            found.setdefault((structure.layer_of(i), owner), []).append(i)
    return tuple(_block(step, layer, ops) for (layer, _), ops in found.items())


def _leaves(step: Step) -> set[str]:
    """Modules that hold one matrix of experts each (JetMoe): their parent is the block."""
    graph = step.structure.graph
    counts: dict[str, int] = {}
    for i in step.structure.experts:
        counts[graph.ops[i].module] = counts.get(graph.ops[i].module, 0) + 1
    return {module for module, count in counts.items() if count == 1}


def _block(step: Step, layer: str | None, ops: list[int]) -> Block:
    graph = step.structure.graph
    call = graph.ops[ops[0]].experts
    assert call is not None
    return Block(layer=layer, call=call, width_in=graph.ops[ops[0]].gemms[0].k, width_out=graph.ops[ops[-1]].gemms[0].n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How evenly the rows of all blocks fall on experts, and on `ranks` that hold equally many neighbours each.

    Means are over blocks; an imbalance is the largest load over the mean one, what a step waits for.
    """

    rows: tuple[tuple[int, ...], ...]  # of each block, by expert
    ranks: int = 1

    @property
    def mean_rows(self) -> float:
        """Rows an expert gets."""
        return _mean(sum(rows) / len(rows) for rows in self.rows)

    @property
    def max_rows(self) -> int:
        """Most rows of any expert in any block."""
        return max(max(rows) for rows in self.rows)

    @property
    def busy(self) -> float:
        """Distinct experts with rows."""
        return _mean(sum(1 for count in rows if count) for rows in self.rows)

    @property
    def imbalance(self) -> float:
        """The busiest expert's rows over the mean."""
        return _mean(max(rows) * len(rows) / max(1, sum(rows)) for rows in self.rows)

    @property
    def rank_imbalance(self) -> float:
        """The slowest rank's rows over the mean."""
        return _mean(max(loads) * len(loads) / max(1, sum(loads)) for loads in map(self._by_rank, self.rows))

    @property
    def rank_rows(self) -> float:
        """Rows of the slowest rank."""
        return _mean(max(self._by_rank(rows)) for rows in self.rows)

    @property
    def rank_busy(self) -> float:
        """Distinct experts with rows on the rank that has most of them."""
        size = len(self.rows[0]) // self.ranks
        return _mean(
            max(sum(1 for count in rows[start : start + size] if count) for start in range(0, size * self.ranks, size))
            for rows in self.rows
        )

    def capacity(self, factor: float) -> int:
        """Rows an expert may take: the mean times the factor, rounded up."""
        return ceil(factor * self.mean_rows)

    def dropped_share(self, factor: float) -> float:
        """Share of rows beyond the capacity of their expert."""
        most, total = self.capacity(factor), sum(sum(rows) for rows in self.rows)
        return sum(max(0, count - most) for rows in self.rows for count in rows) / max(1, total)

    def _by_rank(self, rows: tuple[int, ...]) -> list[int]:
        size = len(rows) // self.ranks
        return [sum(rows[rank * size : (rank + 1) * size]) for rank in range(self.ranks)]


def load(found: Iterable[Block], ranks: int) -> Load:
    """The load of these blocks. Where every expert multiplies every token the routing is unknown and taken as even."""
    return Load(rows=tuple(_routed(block.call) for block in found), ranks=ranks)


def _routed(call: ExpertCall) -> tuple[int, ...]:
    routed = rows_of_tokens(call) if call.top_k else sum(call.rows)
    if routed == sum(call.rows):
        return call.rows
    share, extra = divmod(routed, call.experts)
    return tuple(share + (expert < extra) for expert in range(call.experts))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters by how a step reads them; counts and bytes of the run's dtypes.

    `looked_up`: widths of the tables of which a token reads one row. `routed`: those of experts, with E and k.
    """

    total: int
    active: int
    fixed: int
    fixed_bytes: int
    looked_up: tuple[tuple[int, int, int], ...]  # rows, width, bits
    routed: tuple[tuple[int, int, int, int], ...]  # count, bytes, experts, top_k

    def read(self, tokens: int) -> float:
        """Parameters that a step of so many tokens reads, with the distinct experts expected of independent choices."""
        rows = sum(min(tokens, count) * width for count, width, _ in self.looked_up)
        experts = sum(count * expected_experts(e, k, tokens) / e for count, _, e, k in self.routed)
        return self.fixed + rows + experts

    def read_bytes(self, tokens: int) -> float:
        """Their bytes."""
        rows = sum(min(tokens, count) * width * bits / 8 for count, width, bits in self.looked_up)
        experts = sum(size * expected_experts(e, k, tokens) / e for _, size, e, k in self.routed)
        return self.fixed_bytes + rows + experts


def parameters(step: Step) -> Parameters:
    """All parameters of a record, sorted by how a step reads them; what no op reads is in `total` alone."""
    multiplied = {path for product in step.executed for path, _ in product.weights}
    total = active = fixed = fixed_bytes = 0
    looked_up, routed = [], []
    for one in Components(Labels(step.structure)).placed():
        parameter = one.parameter
        total += parameter.count
        if not parameter.touched:
            continue
        active += parameter.count * one.active_share[0] // one.active_share[1]
        if one.routed:
            top_k, experts = one.active_share
            routed.append((parameter.count, parameter.bytes, experts, top_k))
        elif one.component == "embedding" and parameter.path not in multiplied and len(parameter.shape) == 2:
            looked_up.append((*parameter.shape, DTYPE_BITS[parameter.dtype]))
        else:
            fixed += parameter.count
            fixed_bytes += parameter.bytes
    return Parameters(
        total=total,
        active=active,
        fixed=fixed,
        fixed_bytes=fixed_bytes,
        looked_up=tuple(looked_up),
        routed=tuple(routed),
    )
