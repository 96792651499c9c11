"""One rank of a sharded step: its products, parameters, cache, heads and transfers, by either route.

transformers: read from the record of a rank (hooks/sharding.py ran the model's own plan). megatron: the record of the
unsharded model, cut (_megatron.py). Both give the same kind of value, so that one can stand beside the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from typing import Literal

from introspect.analyzers._collectives import Transfer, recorded_transfers
from introspect.analyzers._cuts import (
    Limit,
    WeightCut,
    part_of,
    part_of_activations,
    part_of_attention,
    part_of_experts,
)
from introspect.analyzers._megatron import Degrees, Megatron
from introspect.analyzers._placement import stream_width
from introspect.analyzers._products import Product
from introspect.analyzers._roofline import Work, step_work
from introspect.analyzers._step import Step
from introspect.records import CacheTensor, Parameter, RunShape, Trace
from introspect.units import tensor_bytes

Route = Literal["transformers", "megatron"]
_STATES = ("conv", "recurrent", "ssm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One parameter as a rank holds it; `shared_bytes` of its part are on several ranks."""

    parameter: Parameter
    whole_shape: tuple[int, ...]
    shape: tuple[int, ...]
    shared_bytes: int = 0

    @property
    def whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self.shape == self.whole_shape

    @property
    def bytes(self) -> int:
        """Bytes of this rank's part."""
        return tensor_bytes(self.shape, self.parameter.dtype)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of it that are no part of this rank's own: all of a whole one, and KV heads that several ranks hold."""
        return self.bytes if self.whole else self.shared_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return tensor_bytes(self.whole_shape, self.parameter.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one rank does and holds. `growth`: cache layer -> bytes that one more token of one sequence takes there.
    `works` are its products as an engine runs them, for time bounds. `repeated`: KV heads that the weights make, and to
    how many the model's code repeats them before it attends."""

    route: Route
    step: Step
    products: list[Product]
    works: tuple[Work, ...]
    shares: tuple[Share, ...]
    transfers: tuple[Transfer, ...]
    growth: dict[int, int]
    query_heads: int | None
    kv_heads: int | None
    limits: frozenset[Limit] = frozenset()
    remarks: Mapping[str, set[str]] = field(default_factory=dict)
    repeated: frozenset[tuple[int, int]] = frozenset()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(share.bytes for share in self.shares)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of them that every rank holds, or several."""
        return sum(share.replicated_bytes for share in self.shares)

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Cache growth over all layers; None for a run that keeps no cache."""
        return sum(self.growth.values()) if self.step.trace.cache else None


def recorded_rank(trace: Trace) -> Rank:
    """The rank whose record this is."""
    step = Step(trace)
    calls = [op.attention for op in step.structure.graph.ops if op.attention is not None]
    return Rank(
        route="transformers",
        step=step,
        products=step.executed,
        works=step_work(step),
        shares=tuple(
            Share(parameter=p, whole_shape=p.global_shape or p.shape, shape=p.shape)
            for p in trace.parameters
            if not p.buffer and p.tied_to is None
        ),
        transfers=_as_needed(step, recorded_transfers(trace, stream_width(step.structure) or 0)),
        growth=whole_growth(trace),
        query_heads=max((call.query_heads for call in calls), default=None),
        kv_heads=max((call.kv_heads for call in calls), default=None),
    )


def megatron_rank(step: Step, degrees: Degrees) -> Rank:
    """The rank that a Megatron-style engine makes of an unsharded record."""
    trace = step.trace
    cut = Megatron(step.structure, step.executed, degrees)
    shares = tuple(_share(p, cut.cuts.get(p.path)) for p in trace.parameters if not p.buffer and p.tied_to is None)
    calls = [op.attention for op in step.structure.graph.ops if op.attention is not None]
    heads = [cut.heads_of(call) for call in calls]
    works = step_work(step, [_part(product, cut) for product in step.engine])
    return Rank(
        route="megatron",
        step=step,
        products=[_part(product, cut) for product in step.executed],
        works=tuple(_state_part(work, trace, cut) if work.kind == "state" else work for work in works),
        shares=shares,
        transfers=_as_needed(step, cut.placement.transfers),
        growth=_growth(trace, cut.cache_share),
        query_heads=max((query for query, _ in heads), default=None),
        kv_heads=max((kv for _, kv in heads), default=None),
        limits=frozenset(cut.limits),
        remarks=cut.remarks,
        repeated=frozenset(cut.repeated),
    )


def _share(parameter: Parameter, cut: WeightCut | None) -> Share:
    """A parameter as it is cut."""
    shape = parameter.shape if cut is None else cut.shape(parameter.shape)
    columns, shared = None if cut is None else cut.columns, 0
    if columns is not None and columns.shared:
        shared = tensor_bytes(shape, parameter.dtype) * columns.shared // columns.part
    return Share(parameter=parameter, whole_shape=parameter.shape, shape=shape, shared_bytes=shared)


def _as_needed(step: Step, transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """The transfers, with logits gathered for the last position alone, as an engine needs them after a prefill."""
    run, ops = step.trace.run, step.structure.graph.ops
    tokens = {ops[i].module: ops[i].gemms[0].m for i in step.structure.heads}
    return tuple(
        replace(t, needed_bytes=t.payload_bytes * run.batch // tokens[t.module])
        if run.phase == "prefill" and t.kind == "all_gather" and t.module in tokens
        else t
        for t in transfers
    )


def whole_growth(trace: Trace) -> dict[int, int]:
    """What one more token of one sequence takes in the whole cache of a record, by layer."""
    return _growth(trace, lambda tensor: Fraction(1))


def _part(product: Product, cut: Megatron) -> Product:
    if product.attention is not None:
        return part_of_attention(product, *cut.heads_of(product.attention))
    weight = cut.cut_of(product)
    if weight is None:
        if product.weights or not cut.cuts_activations(product):
            return product
        return part_of_activations(product, cut.degrees.tp)
    if product.kind == "grouped" and weight.groups is not None:
        return part_of_experts(
            product, cut.expert_calls[product.module], weight.groups, cut.degrees.ep // cut.degrees.tp
        )
    if product.batch > 1 and product.kind != "grouped" and weight.groups is None:  # absorbed: a product for each head
        return part_of_activations(product, cut.degrees.tp)
    return part_of(product, weight)


def _state_part(work: Work, trace: Trace, cut: Megatron) -> Work:
    tensor = next(t for t in trace.cache if work.module == f"cache.{t.layer}.{t.name}")
    return replace(work, cache_bytes=int(work.cache_bytes * cut.cache_share(tensor)))


def _growth(trace: Trace, share: Callable[[CacheTensor], Fraction]) -> dict[int, int]:
    """Bytes that one more token of one sequence takes, by cache layer; `share` of each tensor."""
    windowed = {tensor.layer for tensor in trace.cache if tensor.window is not None}
    found: dict[int, int] = {}
    for tensor in trace.cache:
        row = _row_bytes(tensor, trace.run, tensor.layer in windowed) * share(tensor)
        found[tensor.layer] = found.get(tensor.layer, 0) + int(row)
    return found


def _row_bytes(tensor: CacheTensor, run: RunShape, windowed: bool) -> Fraction:
    """What a token takes: the row a decode step added, or one of the rows a prefill left. A full window and a state add
    none; a layer that keeps a row for several tokens, their mean."""
    tokens, shape = run.context + run.seq, tensor.shape_after or ()
    state = tensor.name.startswith(_STATES)
    if tensor.shape_before is not None:
        grown = prod(shape) - prod(tensor.shape_before)
        if grown == 0:
            mean = windowed and tensor.window is None and not state
            return Fraction(tensor.bytes_before, run.batch * run.context) if mean else Fraction(0)
        if tensor.shape_before[-2:-1] == (run.context,) or run.context == 0:
            return Fraction(tensor.bytes_after - tensor.bytes_before, run.batch * run.seq)
        return Fraction(tensor.bytes_before, run.batch * run.context)
    if state or not shape or (tensor.window is not None and tokens >= tensor.window):
        return Fraction(0)
    keeps_tokens = shape[-2:-1] == (tokens,) or windowed
    return Fraction(tensor.bytes_after, run.batch * tokens) if keeps_tokens else Fraction(0)
