"""Pipeline stages: which layers each of P stages runs, what it holds, and the share of time that stages wait.

Layers are dealt out in order of execution, equally many to a stage; of a remainder the stages before the last get one
more each, since the last also runs the head. What runs before the first layer belongs to the first stage, what runs
after the last to the last; a table that both use (tied) is held by both. With M microbatches of equal time each stage
waits (P-1)/(M+P-1) of the step, forward and backward alike (GPipe, Huang et al. 2019; the same for 1F1B).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from introspect.analyzers._collectives import Transfer, scattered_bytes
from introspect.analyzers._folding import layer_ranges
from introspect.analyzers._placement import stream_width
from introspect.analyzers._rank import Rank
from introspect.analyzers._roofline import Machine, total_seconds
from introspect.errors import ShardingError
from introspect.units import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: the part of a rank's work that lies in its layers. `seconds`: of its products, then its transfers."""

    layers: str
    rank: Rank

    def gemm_seconds(self, machine: Machine) -> float | None:
        """Lower bound on the time of its products; None when a rate is unknown."""
        return total_seconds(self.rank.works, machine)

    def transfer_seconds(self, machine: Machine) -> float | None:
        """Lower bound on the time of its transfers, not overlapped; None when the interconnect is unknown."""
        return transfer_seconds(self.rank.transfers, machine)

    def seconds(self, machine: Machine) -> float | None:
        """Both, one after the other."""
        parts = (self.gemm_seconds(machine), self.transfer_seconds(machine))
        return None if None in parts else sum(part for part in parts if part is not None)


def transfer_seconds(transfers: Iterable[Transfer], machine: Machine) -> float | None:
    """Time of all transfers, one after the other."""
    times = [(transfer.seconds(machine.gpu), transfer.times) for transfer in transfers]
    return None if any(one is None for one, _ in times) else sum((one or 0.0) * count for one, count in times)


def bubble_share(stages: int, microbatches: int) -> float:
    """Share of the step that each stage waits."""
    return (stages - 1) / (microbatches + stages - 1)


def pipeline(rank: Rank, stages: int, scattered: int = 1) -> tuple[Stage, ...]:
    """The rank's work dealt out to stages; the stream that they hand on is scattered over `scattered` ranks. Raises
    ShardingError when there are fewer layers than stages."""
    places = _Places(rank, stages)
    found = []
    for stage in range(stages):
        transfers = tuple(t for t in rank.transfers if places.of_module(t.module.split(" + ")[-1]) == stage)
        held = [number for number, of in places.numbers.items() if of == stage]
        part = replace(
            rank,
            products=[p for p in rank.products if places.of_module(p.module) == stage],
            works=tuple(w for w in rank.works if places.of_work(w.module) == stage),
            shares=tuple(s for s in rank.shares if stage in places.of_parameter(s.parameter.path)),
            transfers=(*transfers, *_sends(rank, stage, stages, scattered)),
            growth={layer: grown for layer, grown in rank.growth.items() if places.numbers.get(layer, 0) == stage},
        )
        found.append(Stage(layers=layer_ranges((number,) for number in held), rank=part))
    return tuple(found)


def _sends(rank: Rank, stage: int, stages: int, scattered: int) -> list[Transfer]:
    """The stream of this rank's tokens to the next stage, and in training its gradient to the one before."""
    run, width = rank.step.trace.run, stream_width(rank.step.structure)
    if width is None:
        return []
    payload = scattered_bytes(run.tokens * width * DTYPE_BITS[run.dtype or "bf16"] // 8, run.tokens, scattered)
    send = Transfer(kind="send", module="stream", payload_bytes=payload, ranks=2, group="pp")
    found = [send] if stage < stages - 1 else []
    if run.phase == "train" and stage > 0:
        found.append(replace(send, direction="backward"))
    return found


class _Places:
    """Which stage each layer, module and parameter belongs to."""

    def __init__(self, rank: Rank, stages: int) -> None:
        graph = rank.step.structure.graph
        self.layers, self.last = rank.step.structure.layers, stages - 1
        self.stage_of: dict[str, int] = {}  # layer path -> stage
        order = list(dict.fromkeys(path for op in graph.ops if (path := self.layers.layer_path(op.module))))
        if stages > len(order):
            found = f"{len(order)} layers"
            raise ShardingError(f"pp {stages}", found, f"at most {len(order)} stages, one layer each")
        for place, path in enumerate(order):
            self.stage_of[path] = _stage(place, len(order), stages)
        self.numbers = {self.layers.split(path)[1][0]: stage for path, stage in self.stage_of.items()}
        self._after: set[str] = set()  # modules outside the layers that run after some layer
        self._readers: dict[str, set[int]] = {}
        seen_layer = False
        for op in graph.ops:
            inside = self.layers.layer_path(op.module)
            seen_layer = seen_layer or inside is not None
            if inside is None and seen_layer:
                self._after.add(op.module)
            for t in op.inputs:
                path = graph.tensors[t].parameter
                if path is not None:
                    self._readers.setdefault(path, set()).add(self.of_module(op.module))

    def of_module(self, module: str) -> int:
        layer = self.layers.layer_path(module)
        if layer is not None:
            return self.stage_of.get(layer, 0)
        owners = [module, module.rpartition(".")[0]]  # a product may be named after its weight
        return self.last if any(owner in self._after for owner in owners if owner) else 0

    def of_work(self, name: str) -> int:
        """A cached state is named after its layer's number."""
        if name.startswith("cache."):
            return self.numbers.get(int(name.split(".")[1]), 0)
        return self.of_module(name)

    def of_parameter(self, path: str) -> set[int]:
        return self._readers.get(path) or {self.of_module(path)}


def _stage(place: int, layers: int, stages: int) -> int:
    """Stage of the layer at this place."""
    share, extra = divmod(layers, stages)
    counts = [share + (stages - 1 - extra <= stage < stages - 1) for stage in range(stages)]
    for stage, count in enumerate(counts):
        if place < count:
            return stage
        place -= count
    return stages - 1
