"""Which route answers for a model and its degrees: the model's own plan as executed, or Megatron's rules.

Each may refuse. The executed one where the plan is empty or the model's code cannot run on the shards; Megatron's where
a head count or a width does not divide. A refusal names the dimension and the nearest degrees that work.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from introspect.analyzers._cuts import Limit, nearest_degrees
from introspect.analyzers._folding import Layer, layer_ranges
from introspect.analyzers._megatron import Degrees
from introspect.analyzers._rank import Rank, megatron_rank, recorded_rank, whole_growth
from introspect.analyzers._step import Step
from introspect.errors import ShardingError, TraceShapeError
from introspect.params import Traces
from introspect.records import RunShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The rank that is shown, both of them where both answer, and why it is this one."""

    chosen: Rank
    executed: Rank | None = None
    megatron: Rank | None = None
    notes: tuple[str, ...] = ()

    def kv_replication(self, ranks: int) -> int | float | None:
        """How many of these ranks hold each cached head; None without attention, or without the unsharded record."""
        if self.megatron is None or self.chosen.kv_heads is None:
            return None
        step = self.megatron.step
        whole, part = sum(whole_growth(step.trace).values()), self.chosen.kv_bytes_per_token
        if not (whole and part):
            calls = [op.attention for op in step.structure.graph.ops if op.attention is not None]
            whole, part = max(call.kv_heads for call in calls), self.chosen.kv_heads
        held = Fraction(part * ranks, whole)
        return int(held) if held.denominator == 1 else float(held)


def find_routes(traces: Traces, run: RunShape, degrees: Degrees, engine: str | None) -> Routes:
    """The route asked for; without one, the executed where the plan shards attention and FFN, else Megatron's.

    Raises ShardingError when the route asked for, or both, refuse; TraceShapeError for a stored trace of another run.
    """
    megatron, problem = _megatron(traces, run, degrees)
    if engine == "megatron" or degrees.tp == degrees.ep == 1:
        if problem is not None or megatron is None:
            raise problem or AssertionError
        return Routes(chosen=megatron, megatron=megatron)
    executed, refusal = _executed(traces, run, degrees, megatron)
    usable = megatron if problem is None else None
    if executed is None and (usable is None or engine == "transformers"):
        raise (refusal if engine == "transformers" else problem) or AssertionError
    if executed is None or usable is None or engine == "transformers":
        chosen = executed or usable
        assert chosen is not None
        notes = (f"Megatron's rules, not the model's own plan: {refusal}",) if executed is None else ()
        return Routes(chosen=chosen, executed=executed, megatron=usable, notes=notes)
    gaps = _gaps(executed, degrees)
    return Routes(chosen=usable if gaps else executed, executed=executed, megatron=usable, notes=gaps)


def _megatron(
    traces: Traces, run: RunShape, degrees: Degrees
) -> tuple[Rank | None, ShardingError | TraceShapeError | None]:
    """The rank, and why it cannot be (the rank is there all the same: its limits explain other refusals)."""
    try:
        rank = megatron_rank(Step(traces(run)), degrees)
    except TraceShapeError as error:
        return None, error
    for name, asked in (("ep", degrees.ep), ("tp", degrees.tp)):
        limits = [limit for limit in rank.limits if limit.degree == name]
        broken = sorted(limit for limit in limits if not limit.allows(asked))
        if broken:
            return rank, ShardingError(f"{name} {asked}", _words(broken, asked), _nearest(name, limits, asked))
    return rank, None


def _executed(
    traces: Traces, run: RunShape, degrees: Degrees, megatron: Rank | None
) -> tuple[Rank | None, ShardingError | TraceShapeError | None]:
    """The rank that transformers makes, or its refusal with the sizes that do not divide."""
    try:
        return recorded_rank(traces(run.with_(tp=degrees.tp, ep=degrees.ep))), None
    except TraceShapeError as error:
        return None, error
    except ShardingError as error:
        if megatron is None:
            return None, error
        for name, asked in (("ep", degrees.ep), ("tp", degrees.tp)):
            # transformers lets no two ranks hold one head
            limits = [_unshared(limit) for limit in megatron.limits if limit.degree == name]
            broken = sorted(limit for limit in limits if not limit.allows(asked))
            if broken:
                found = f"{_words(broken, asked)} ({error.found})"
                return None, ShardingError(error.asked, found, _nearest(name, limits, asked))
        return None, error


def _unshared(limit: Limit) -> Limit:
    """The limit for ranks that cannot share a head."""
    return Limit(what=limit.what, module=limit.module, size=limit.size, degree=limit.degree)


def _words(broken: list[Limit], asked: int) -> str:
    first, rest = broken[0], len(broken) - 1
    more = f" (nor do {rest} other sizes)" if rest else ""
    return f"{first} do not divide by {asked}{more}"


def _nearest(name: str, limits: list[Limit], asked: int) -> str:
    near = nearest_degrees(limits, asked)
    return f"--{name} {' or '.join(map(str, near))}" if near else f"another --{name}"


def _gaps(executed: Rank, degrees: Degrees) -> tuple[str, ...]:
    """What the executed plan leaves whole on every rank, of what the degrees should share."""
    structure = executed.step.structure
    sharded = {share.parameter.path for share in executed.shares if not share.whole}
    held: defaultdict[str, dict[Layer, bool]] = defaultdict(dict)
    for i, paths in structure.matrices.items():
        part = "attention" if i in structure.mixers else "FFN" if i in structure.ffn else ""
        if degrees.tp == 1:  # only experts are shared out
            part = "experts" if i in structure.experts else ""
        if part:
            layer = structure.layers.split(structure.graph.ops[i].module)[1]
            held[part][layer] = held[part].get(layer, False) or bool(paths & sharded)
    notes = []
    for part, layers in held.items():
        whole = [layer for layer, is_sharded in layers.items() if not is_sharded]
        if whole:
            where = f" of layers {layer_ranges(whole)}" if any(whole) else ""
            notes.append(f"Megatron's rules: the model's own plan leaves the {part}{where} whole on every rank")
    return tuple(notes)
