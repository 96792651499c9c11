"""One recorded step as a serving engine would run it: what the serving analyzers share.

Everything is derived once and on demand: the graph, its structure, the products as executed and as an engine runs them
(_engine.py), and what each layer keeps in the cache (_cache.py).
"""

from __future__ import annotations

from functools import cached_property

from introspect.analyzers._cache import Part, cache_parts, is_index
from introspect.analyzers._engine import engine_products
from introspect.analyzers._products import Product, products
from introspect.analyzers._structure import Structure
from introspect.analyzers._traffic import CacheTraffic, WeightReads, cache_traffic, weight_reads
from introspect.graph import Graph
from introspect.records import CacheTensor, Trace


class Step:
    """A trace and what follows from it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def structure(self) -> Structure:
        """The model's parts."""
        return Structure(Graph(self.trace))

    @cached_property
    def executed(self) -> list[Product]:
        """Products as the model's code runs them."""
        return products(self.structure)

    @cached_property
    def engine(self) -> list[Product]:
        """Products as an engine runs them."""
        return engine_products(self.structure, self.executed)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What each layer keeps (decode traces)."""
        return cache_parts(self.structure, self.engine)

    @cached_property
    def weight_reads(self) -> WeightReads:
        """Bytes of parameters the step reads."""
        return weight_reads(self.structure.graph)

    @cached_property
    def cache_traffic(self) -> CacheTraffic:
        """Bytes of the cache the step reads and writes."""
        return cache_traffic(self.structure.graph)

    @cached_property
    def states(self) -> tuple[CacheTensor, ...]:
        """Cache tensors of constant size that no attention reads as keys: recurrent and convolution states."""
        graph = self.structure.graph
        calls = [op.attention for op in graph.ops if op.attention is not None]
        attended = {graph.tensors[t].storage for call in calls for t in (call.k, call.v)}
        return tuple(
            tensor
            for tensor in self.trace.cache
            if tensor.shape_before == tensor.shape_after and tensor.window is None and tensor.storage not in attended
        )

    @cached_property
    def index_keys(self) -> tuple[CacheTensor, ...]:
        """Keys that a sparse attention's indexer scores, held beside the cache."""
        return tuple(tensor for tensor in self.trace.cache if is_index(tensor))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, tied ones once, in the dtype of the run."""
        return sum(p.bytes for p in self.trace.parameters if not p.buffer and p.tied_to is None)

    def weight_flops(self) -> int:
        """FLOPs of the engine's products with a weight."""
        return sum(product.flops * product.times for product in self.engine if product.weights)

    def attention_flops(self) -> int:
        """FLOPs of the engine's products of two activations."""
        return sum(product.flops * product.times for product in self.engine if not product.weights)
