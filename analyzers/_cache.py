"""What each layer keeps between steps, read from the model's own cache object before and after one decode step.

A tensor that grew by a row keeps every token; one with a `window` keeps the last window - 1 of them; any other is a
state of constant size. Which attention call reads a tensor is read from the dataflow: a cache that a second call reads
is shared, and a call whose keys and values an engine can leave unexpanded is latent (MLA, _latent.py). Names of models
and config fields are never asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from introspect.analyzers._folding import Layer
from introspect.analyzers._latent import latent_attention
from introspect.analyzers._products import Product
from introspect.analyzers._structure import Structure
from introspect.records import AttentionCall, CacheTensor
from introspect.units import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one layer holds for one purpose, for one sequence.

    `row_bits` are the bits that one kept token takes, as `row_vectors` vectors (a key and a value of each cached head)
    of `row_elements` in all; `state_bytes` what does not depend on the tokens. `kind`: MHA, GQA or MQA by the heads in
    the cache; sliding; MLA; shared (reads another layer's, holds nothing); cross (a fixed encoder context); index (keys
    of a sparse-attention indexer); compressed (a row for several tokens); linear (a matrix per head), state (a vector
    per channel) or convolution. Widths are those the attention call works with. `flops_per_key` is what an engine
    spends on each key that a new token attends; `read_bits` what that key takes in the cache it is read from.
    `selected`: keys that a sparse attention keeps of all it could see.
    """

    kind: str
    layer: Layer
    dtype: str
    row_bits: int = 0
    row_elements: int = 0
    row_vectors: int = 0
    state_bytes: int = 0
    window: int | None = None
    selected: int | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    k_dim: int | None = None
    v_dim: int | None = None
    flops_per_key: int = 0
    read_bits: int = 0

    @property
    def group(self) -> int | None:
        """Query heads that read one cached head."""
        return self.query_heads // self.kv_heads if self.query_heads and self.kv_heads else None

    @property
    def flop_per_byte(self) -> float | None:
        """FLOPs of decode attention for each cached byte it reads; None where no attention reads it."""
        return 8 * self.flops_per_key / self.read_bits if self.flops_per_key and self.read_bits else None

    def rows(self, context: int) -> int:
        """Tokens it holds after `context` of them."""
        return context if self.window is None else min(context, self.window - 1)

    def bytes_at(self, context: int) -> int:
        """Bytes one sequence of `context` tokens holds here."""
        return -(-self.rows(context) * self.row_bits // 8) + self.state_bytes

    def growth_at(self, context: int) -> int:
        """Bytes that one more token adds to `context` of them."""
        return self.bytes_at(context + 1) - self.bytes_at(context)

    def keys_read(self, context: int) -> int:
        """Cached keys that the next token attends after `context` tokens."""
        keys = self.rows(context)
        return keys if self.selected is None else min(keys, self.selected)


def cache_parts(structure: Structure, engine: Iterable[Product]) -> tuple[Part, ...]:
    """The parts of every layer of a decode trace, in layer order; per sequence of its batch."""
    trace = structure.graph.trace
    reading = _Readers(structure, engine)
    groups: defaultdict[tuple[int, str], list[CacheTensor]] = defaultdict(list)
    windowed = {tensor.layer for tensor in trace.cache if tensor.window is not None}
    for tensor in trace.cache:
        groups[tensor.layer, _purpose(tensor, trace.run.context, tensor.layer in windowed)].append(tensor)
    parts: list[Part] = []
    for (layer, purpose), tensors in groups.items():
        calls = reading.of(tensors) if purpose not in ("index", "compressed") else []
        own = _held(purpose, (layer,), tensors, trace.run.batch, trace.run.context)
        if calls:
            own = _read_by(own, calls[0], tensors[0])
        parts.append(own)
        parts.extend(
            replace(
                _read_by(own, call, tensors[0]), kind="shared", row_bits=0, row_elements=0, row_vectors=0, state_bytes=0
            )
            for call in calls[1:]
        )
    return tuple(sorted(parts, key=lambda part: part.layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One attention call: its facts, the layer it runs in, and what the engine spends on one key."""

    attention: AttentionCall
    layer: Layer
    latent: bool
    k_dim: int
    v_dim: int
    flops_per_key: int
    keys: int  # that one new token attends


class _Readers:
    """Which attention calls read which cache tensors (by storage), in order."""

    def __init__(self, structure: Structure, engine: Iterable[Product]) -> None:
        self.structure, self.graph = structure, structure.graph
        self.storages = {tensor.storage for tensor in self.graph.trace.cache}
        self.latent = {latent.attention for latent in latent_attention(structure)}
        self.engine: defaultdict[int, list[Product]] = defaultdict(list)
        for product in engine:
            self.engine[product.op].append(product)
        self.calls: defaultdict[int, list[_Call]] = defaultdict(list)
        for i, op in enumerate(self.graph.ops):
            if op.attention is not None:
                call = self._call(i, op.attention)
                for storage in self._sources(i, op.attention.k):
                    self.calls[storage].append(call)

    def of(self, tensors: Iterable[CacheTensor]) -> list[_Call]:
        """Calls that read any of the tensors as keys, each once."""
        calls = [call for tensor in tensors if tensor.storage is not None for call in self.calls[tensor.storage]]
        return list({id(call): call for call in calls}.values())

    def _call(self, i: int, attention: AttentionCall) -> _Call:
        graph, heads = self.graph, attention.query_heads
        # an eager product may read the keys transposed, so their width is the query's
        k_dim, v_dim = (graph.tensors[t].shape[-1] for t in (attention.q, attention.v))
        products = [product for product in self.engine[i] if product.attention is not None]
        # what one (query, key) pair of all heads costs: k of the scores and n of the values, absorbed or not
        widths = [product.k if product.kind == "attention_qk" else product.n for product in products]
        per_key = 2 * heads * (sum(widths) if len(widths) == 2 else k_dim + v_dim)
        pairs = sum(product.flops for product in products) // per_key if len(widths) == 2 else attention.visible_pairs
        return _Call(
            attention=attention,
            layer=self.structure.layers.split(graph.ops[i].module)[1],
            latent=i in self.latent,
            k_dim=k_dim,
            v_dim=v_dim,
            flops_per_key=per_key,
            keys=pairs // graph.trace.run.batch,
        )

    def _sources(self, i: int, key: int) -> set[int]:
        """Cache storages that the keys of attention op i follow from."""
        graph = self.graph
        direct = graph.tensors[key].storage
        if direct in self.storages:
            return {direct}
        between = graph.back([graph.producer_of(i, key)], self._writes_cache)
        return {graph.tensors[t].storage for j in between for t in graph.ops[j].inputs} & self.storages

    def _writes_cache(self, i: int) -> bool:
        return any(self.graph.tensors[t].storage in self.storages for t in self.graph.ops[i].outputs)


def _purpose(tensor: CacheTensor, context: int, windowed: bool) -> str:
    """What a tensor is kept for. One that holds fewer rows than tokens and is no plain window is a compressed copy."""
    if tensor.name.startswith("cross."):
        return "cross"
    if is_index(tensor):
        return "index"
    grows = tensor.shape_before != tensor.shape_after
    whole_rows = grows and _rows_before(tensor) == context
    if len(tensor.shape_after or ()) == 4 and (tensor.window is not None or whole_rows):
        return "tokens"
    kept_for_a_state = tensor.name.startswith(("conv", "recurrent", "ssm"))
    return "compressed" if (grows or windowed) and not kept_for_a_state else "state"


def is_index(tensor: CacheTensor) -> bool:
    """Whether transformers' cache layer keeps it for a sparse attention's indexer."""
    return tensor.name.startswith("indexer")


def _held(purpose: str, layer: Layer, tensors: list[CacheTensor], batch: int, context: int) -> Part:
    if purpose in ("state", "cross"):
        state = sum(tensor.bytes_after for tensor in tensors) // batch
        kind = "cross" if purpose == "cross" else _state_kind(tensors)
        return Part(kind=kind, layer=layer, dtype=tensors[-1].dtype, state_bytes=state)
    if purpose == "compressed":  # it grows by a row every few tokens: the mean over the context
        bits = -(-sum(tensor.bytes_before for tensor in tensors) * 8 // (batch * max(1, context)))
        return Part(kind=purpose, layer=layer, dtype=tensors[0].dtype, row_bits=bits, read_bits=bits)
    bits = sum(_row_elements(tensor) * DTYPE_BITS[tensor.dtype] for tensor in tensors) // batch
    return Part(
        kind="index" if purpose == "index" else "attention",
        layer=layer,
        dtype=tensors[0].dtype,
        row_bits=bits,
        row_elements=sum(_row_elements(tensor) for tensor in tensors) // batch,
        row_vectors=sum(
            tensor.shape_after[1] for tensor in tensors if tensor.shape_after and len(tensor.shape_after) == 4
        ),
        window=next((tensor.window for tensor in tensors if tensor.window is not None), None),
        read_bits=bits,
    )


def _read_by(part: Part, call: _Call, keys: CacheTensor) -> Part:
    shape = keys.shape_after or ()
    kv_heads = shape[1] if len(shape) == 4 else call.attention.kv_heads
    return replace(
        part,
        kind=_attention_kind(part, call, kv_heads),
        layer=call.layer or part.layer,
        query_heads=call.attention.query_heads,
        kv_heads=kv_heads,
        k_dim=call.k_dim,
        v_dim=call.v_dim,
        flops_per_key=call.flops_per_key,
        selected=call.keys if part.window is None and call.keys <= _rows_before(keys) else None,
    )


def _rows_before(keys: CacheTensor) -> int:
    """Rows of a cached tensor when the step began."""
    return 0 if keys.shape_before is None or len(keys.shape_before) < 2 else keys.shape_before[-2]


def _attention_kind(part: Part, call: _Call, kv_heads: int) -> str:
    if part.kind != "attention":  # whatever holds a fixed number of keys is read as it is
        return "cross"
    if call.latent:
        return "MLA"
    if part.window is not None:
        return "sliding"
    if kv_heads == call.attention.query_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def _state_kind(tensors: list[CacheTensor]) -> str:
    """A matrix per head [B, H, Dk, Dv] is linear attention; [B, channels, N] a state space; else only a convolution."""
    recurrent = [tensor for tensor in tensors if not tensor.name.startswith("conv")]
    if not recurrent:
        return "convolution"
    return "linear" if any(len(tensor.shape_after or ()) == 4 for tensor in recurrent) else "state"


def _row_elements(tensor: CacheTensor) -> int:
    """Elements that one more token takes: what the step added, or one row of a window that is full."""
    before, after = prod(tensor.shape_before or (0,)), prod(tensor.shape_after or (0,))
    if after != before:
        return after - before
    shape = tensor.shape_after or (0, 1)
    return after // shape[-2]
