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
from introspect.analyzers._structure import Structure
from introspect.errors import ShardingError, TraceShapeError
from introspect.params import Traces
from introspect.records import RunShape
from introspect.units import number_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The rank that is shown, both of them where both answer, and why it is this one. `whole`: the unsharded step,
    unless only a sharded one is stored."""

    chosen: Rank
    whole: Step | None
    executed: Rank | None = None
    megatron: Rank | None = None
    notes: tuple[str, ...] = ()

    def kv_replication(self, ranks: int) -> int | float | None:
        """How many of these ranks hold each cached head; None without attention, or without the unsharded record."""
        if self.whole is None or self.chosen.kv_heads is None:
            return None
        whole, part = sum(whole_growth(self.whole.trace).values()), self.chosen.kv_bytes_per_token
        if not (whole and part):
            calls = [op.attention for op in self.whole.structure.graph.ops if op.attention is not None]
            whole, part = max(call.kv_heads for call in calls), self.chosen.kv_heads
        held = Fraction(part * ranks, whole)
        return int(held) if held.denominator == 1 else float(held)


def find_routes(traces: Traces, run: RunShape, degrees: Degrees, engine: str | None) -> Routes:
    """The route asked for; without one, the executed where the plan shards attention and FFN, else Megatron's.

    Raises ShardingError when the route asked for, or both, refuse; TraceShapeError for a stored trace of another run.
    """
    megatron, problem = _megatron(traces, run, degrees)
    whole = None if megatron is None else megatron.step
    if whole is not None and degrees.ep > 1 and not whole.structure.experts:
        raise ShardingError(f"ep {degrees.ep}", "the model has no routed experts", "--ep 1")
    if whole is not None and engine == "transformers" and degrees.tp == degrees.ep == 1:
        return Routes(chosen=recorded_rank(whole.trace), whole=whole, megatron=megatron)
    if engine == "megatron" or degrees.tp == degrees.ep == 1:
        if problem is not None or megatron is None:
            raise problem or AssertionError
        return Routes(chosen=megatron, whole=whole, megatron=megatron)
    executed, refusal = _executed(traces, run, degrees, megatron)
    usable = megatron if problem is None else None
    if executed is None and (usable is None or engine == "transformers"):
        raise (refusal if engine == "transformers" else problem) or AssertionError
    gaps = () if executed is None else (*_gaps(executed, degrees), *_whole_attention(executed, whole, degrees))
    chosen = usable if usable is not None and engine is None and (gaps or executed is None) else executed
    assert chosen is not None
    named = [f"Megatron's rules: {gap}" for gap in gaps] if chosen is usable else [*gaps, *_whole_results(chosen)]
    notes = (*_refused(refusal, problem), *named)
    return Routes(chosen=chosen, whole=whole, executed=executed, megatron=usable, notes=notes)


def _refused(
    executed: ShardingError | TraceShapeError | None, megatron: ShardingError | TraceShapeError | None
) -> list[str]:
    """Why only one route answers."""
    if executed is not None:
        return [f"Megatron's rules, not the model's own plan: {executed}"]
    # a stored trace of a sharded run has no unsharded one beside it: that is no refusal
    return [f"the model's own plan, not Megatron's rules: {megatron}"] if isinstance(megatron, ShardingError) else []


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
    if degrees.tp > 1 and all(share.whole for share in rank.shares):
        return rank, ShardingError(f"tp {degrees.tp}", "no weight can be cut into as many parts", "a smaller --tp")
    return rank, None


def _executed(
    traces: Traces, run: RunShape, degrees: Degrees, megatron: Rank | None
) -> tuple[Rank | None, ShardingError | TraceShapeError | None]:
    """The rank that transformers makes, or its refusal with the sizes that do not divide."""
    all_limits = () if megatron is None else megatron.limits
    sized = [limit.size for limit in all_limits if limit.degree == "tp"]
    if sized and degrees.tp > max(sized):  # more ranks than columns: not worth a run with so many
        error = ShardingError(f"tp {degrees.tp}", "fewer heads and columns than ranks", "a smaller --tp")
    else:
        try:
            return recorded_rank(traces(run.with_(tp=degrees.tp, ep=degrees.ep))), None
        except TraceShapeError as stored:
            return None, stored
        except ShardingError as refused:
            error = refused
    for name, asked in (("ep", degrees.ep), ("tp", degrees.tp)):
        # transformers lets no two ranks hold one head; where the plan is empty no degree would do
        limits = [_unshared(limit) for limit in all_limits if limit.degree == name and f"{name} {asked}" in error.asked]
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
    more = f" (nor {'does 1 other size' if rest == 1 else f'do {rest} other sizes'})" if rest else ""
    return f"{first} do not divide by {asked}{more}"


def _nearest(name: str, limits: list[Limit], asked: int) -> str:
    near = nearest_degrees(limits, asked)
    return f"--{name} {' or '.join(map(str, near))}" if near else f"another --{name}"


# --- what the executed plan leaves whole ----------------------------------------------------------------------------


def _gaps(executed: Rank, degrees: Degrees) -> tuple[str, ...]:
    """Weights that the executed plan leaves whole on every rank, of what the degrees should share."""
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
            notes.append(f"the model's own plan leaves the {part}{_where(whole)} whole on every rank")
    return tuple(notes)


def _whole_attention(executed: Rank, whole: Step | None, degrees: Degrees) -> tuple[str, ...]:
    """Attention that every rank runs on all heads though its weights are cut: the plan gathers what they make."""
    if whole is None or degrees.tp == 1:
        return ()
    structure, unsharded = executed.step.structure, _mixing(whole.structure)
    gathered = _gathered(executed, structure.mixers)
    gathering = {structure.layers.split(module)[1] for module in gathered}
    layers = [
        layer for layer, work in _mixing(structure).items() if layer in gathering and unsharded.get(layer) == work
    ]
    if not layers:
        return ()
    made = ", ".join(dict.fromkeys(structure.layers.split(module)[0] for module in gathered))
    held = sum(executed.growth.values())
    is_cached = held and held == sum(whole_growth(whole.trace).values())
    cache = f", and so is the cache, {number_text(held, 'B')} a token" if is_cached else ""
    heads = "" if executed.query_heads is None else f" with its {executed.query_heads} query heads"
    return (
        f"the model's own plan cuts weights of the attention{_where(layers)} but gathers the results of {made}: "
        f"attention is whole on every rank{heads}{cache}",
    )


def _whole_results(executed: Rank) -> list[str]:
    """Results inside FFNs that the plan puts together on every rank."""
    structure = executed.step.structure
    made = dict.fromkeys(structure.layers.split(module)[0] for module in _gathered(executed, structure.ffn))
    return [f"the model's own plan gathers the results of {', '.join(made)} on every rank"] if made else []


def _gathered(executed: Rank, ops: set[int]) -> list[str]:
    """Modules of weight products, among these ops, whose cut results are put together on every rank."""
    structure = executed.step.structure
    made = {structure.graph.ops[i].module for i in ops & structure.matrices.keys() - structure.experts}
    sent = (t.module for t in executed.transfers if t.kind == "all_gather" and t.direction == "forward")
    return [module for module in dict.fromkeys(sent) if module in made]


def _mixing(structure: Structure) -> dict[Layer, int]:
    """FLOPs of each layer's products of activations that mix tokens: attention, scans."""
    graph, found = structure.graph, defaultdict[Layer, int](int)
    for i in structure.mixers - structure.matrices.keys():
        layer = structure.layers.split(graph.ops[i].module)[1]
        found[layer] += sum(gemm.flops for gemm in graph.ops[i].gemms)
    return {layer: flops for layer, flops in found.items() if flops}


def _where(layers: list[Layer]) -> str:
    return f" of layers {layer_ranges(layers)}" if any(layers) else ""
