"""The record: what one run of one model really did, as frozen values. Readable without torch.

Shape letters: B sequences, S new tokens a sequence, C cached tokens a sequence, H query heads, G key/value heads,
D head width, E experts.

A `Trace` is a dataflow graph. Its `tensors` table lists every distinct view (storage, offset, shape, dtype); ops name
their operands by index into it. Two operands are the same value when their storage, offset and shape agree and no op
wrote the storage in between; an op whose output storage is also an input storage, or is already known, writes in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from introspect.units import DTYPE_BITS, product_flops, tensor_bytes

SCHEMA_VERSION = 1

Phase = Literal["prefill", "decode", "train"]
Routing = Literal["balanced", "uniform", "zipf"]
Role = Literal["weight", "activation", "cache", "index", "constant"]
GemmKind = Literal["linear", "grouped", "attention_qk", "attention_pv", "conv", "scan", "einsum"]
Direction = Literal["forward", "dx", "dw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What was run. `seq` new tokens a sequence on top of `context` cached ones; decode has seq 1."""

    phase: Phase = "prefill"
    batch: int = 1
    seq: int = 2048
    context: int = 0
    dtype: str | None = None  # None: the config's own
    logits: Literal["all", "last"] = "all"
    routing: Routing = "balanced"
    seed: int = 0
    tp: int = 1
    ep: int = 1
    checkpointing: bool = False  # train: recompute each layer in the backward pass instead of keeping what it saved
    lora_rank: int = 0  # train: freeze the model and train adapters of this rank (0: train the model)
    lora_targets: tuple[str, ...] = ()  # patterns of the Linears that get one

    def with_(self, **changes: Any) -> RunShape:
        """The same run with some fields changed."""
        return replace(self, **changes)

    @property
    def tokens(self) -> int:
        """New tokens of the whole step, B x S."""
        return self.batch * self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Which model this is and where its config came from. `config`: the raw config as read, {} for a plain module."""

    id: str
    class_name: str
    source: str
    config_sha256: str
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter or buffer of the module tree. `touched`: some op of the run read it (itself or a tied name)."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    touched: bool
    buffer: bool = False
    tied_to: str | None = None  # the first path that shares this storage; None when this is the first
    global_shape: tuple[int, ...] | None = None  # sharded run: of the whole parameter; None where each rank has it all
    frozen: bool = False  # a parameter that takes no gradient: a fixed table, or a base under adapters

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in this dtype."""
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One view of a storage. `parameter` is the path when the storage is a parameter's or a buffer's."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    role: Role
    parameter: str | None = None
    storage_bytes: int = 0  # of the whole storage, for liveness

    @property
    def elements(self) -> int:
        """Elements of the view (an expanded view counts its elements as if they were stored)."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the view's elements, never more than its storage holds (an expanded view repeats none)."""
        full = tensor_bytes(self.shape, self.dtype)
        return min(full, self.storage_bytes) if self.storage_bytes else full

    @property
    def bits(self) -> int:
        """Bits per element."""
        return DTYPE_BITS[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One matrix product [m, k] x [k, n], `batch` independent times. For a grouped GEMM `batch` counts the experts with
    rows, `rows` is the sum of their rows and m their (rounded) mean. Operands are indices into Trace.tensors; None
    where the operand is never stored (the probabilities of fused attention)."""

    kind: GemmKind
    batch: int
    m: int
    k: int
    n: int
    lhs: int | None  # data: the operand with m rows
    rhs: int | None  # weight, keys, values, or the second activation
    out: int | None
    direction: Direction = "forward"
    rows: int | None = None

    @property
    def flops(self) -> int:
        """2*m*k*n for each product; a multiply and an add are two. A weight gradient sums over the rows."""
        if self.rows is not None and self.direction == "dw":
            return product_flops(1, self.m, self.rows, self.n)
        if self.rows is not None:
            return product_flops(1, self.rows, self.k, self.n)
        return product_flops(self.batch, self.m, self.k, self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One attention call before any head expansion: q [B, H, S, Dk], k [B, G, T, Dk], v [B, G, T, Dv].

    `visible_pairs`: (query, key) pairs the mask lets through, of one head, summed over the sequences of the batch;
    dense would be B*S*T. `window`: the largest number of keys any one query sees when that is less than T would allow
    under a causal mask; None for full attention. `assumed_pairs`: the mask depends on weights, and the pairs are the
    most there can be. Tensor indices point into Trace.tensors.
    """

    q: int
    k: int
    v: int
    out: int
    query_heads: int
    kv_heads: int
    visible_pairs: int
    causal: bool
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    assumed_pairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """One grouped product over experts: rows per expert under the run's routing policy."""

    experts: int  # experts held by this module
    top_k: int  # experts a token is sent to (0 when it cannot be told)
    tokens: int  # tokens that were routed
    rows: tuple[int, ...]  # rows of each expert, in order; their sum is what is multiplied
    # where the code multiplies every expert by every token: the rows that the policy would give each (None: `rows`)
    routed: tuple[int, ...] | None = None

    @property
    def routed_rows(self) -> tuple[int, ...]:
        """Rows of each expert that a token was routed to it for."""
        return self.rows if self.routed is None else self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a sharded run. `payload_bytes`: the whole reduced tensor of an all_reduce, the gathered one of
    an all_gather, the one to be scattered of a reduce_scatter, what a rank sends in an all_to_all (its own share
    included). `group`: "tp" or "ep"; `ranks` of it."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    payload_bytes: int
    group: str
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One dispatched op. `module` is the path of the innermost running module ("" is the root). `kind` is "gemm" for
    ops with products, otherwise a name of hooks/op_kinds.py; "unclassified" when no rule knows the op."""

    name: str
    module: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    gemms: tuple[Gemm, ...] = ()
    attention: AttentionCall | None = None
    experts: ExpertCall | None = None
    collective: Collective | None = None
    backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A body of ops that ran `count` times with the same shapes: a folded token or chunk scan."""

    body: tuple[Op | Repeat, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """One tensor that the model's own cache object holds. Shapes before and after the step; None: not there yet."""

    layer: int
    layer_class: str
    name: str  # keys, values, indexer_keys, conv_states.0, recurrent_states.0 ...
    dtype: str
    shape_before: tuple[int, ...] | None
    shape_after: tuple[int, ...] | None
    storage: int | None = None  # storage after the step, as in Trace.tensors
    window: int | None = None  # keys a sliding layer shows to one query, as the layer's class says

    @property
    def bytes_before(self) -> int:
        """Bytes held when the step began."""
        return 0 if self.shape_before is None else tensor_bytes(self.shape_before, self.dtype)

    @property
    def bytes_after(self) -> int:
        """Bytes held when the step ended."""
        return 0 if self.shape_after is None else tensor_bytes(self.shape_after, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A place where the model's code asked a tensor for its value. `answered`: "value" when it followed from real
    inputs alone, "policy" when from the routing policy, "assumed" when nothing could tell and a default was taken."""

    question: str  # the call, as "Tensor.item"
    answer: str
    answered: Literal["value", "policy", "assumed"]
    where: str  # file:line of the code that asked
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclassified:
    """An op for which no cost rule exists."""

    op: str
    module: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary frequencies of one rotary module as transformers' own initialiser gives them at this run's length."""

    module: str
    layer_type: str | None
    rope_type: str
    base: float
    dim: int
    training_length: int | None
    attention_factor: float
    inv_freq: tuple[float, ...]
    unscaled_inv_freq: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Everything one run did. `modules` maps each module path to its class name, in definition order; `linears` are
    those that adapters and quantisers know as a Linear."""

    model: ModelIdentity
    run: RunShape
    versions: dict[str, str]
    modules: dict[str, str]
    parameters: tuple[Parameter, ...]
    tensors: tuple[Tensor, ...]
    ops: tuple[Op | Repeat, ...]
    cache: tuple[CacheTensor, ...] = ()
    linears: tuple[str, ...] = ()
    saved_bytes: int | None = None  # train: unique storages saved for backward that are no parameter
    saved: tuple[int, ...] = ()  # those storages; () where they were counted by a fit over shorter runs
    recomputed_bytes: int | None = None  # train with checkpointing: the largest set saved while one layer is recomputed
    rope: tuple[Rope, ...] = ()
    decisions: tuple[Decision, ...] = ()
    assumptions: tuple[str, ...] = ()
    unclassified: tuple[Unclassified, ...] = ()

    def walk(self) -> Iterator[tuple[Op, int]]:
        """Every op with the number of times it ran, in order (a folded body once, times its count)."""
        yield from _walk(self.ops, 1)


def _walk(ops: tuple[Op | Repeat, ...], times: int) -> Iterator[tuple[Op, int]]:
    for op in ops:
        if isinstance(op, Repeat):
            yield from _walk(op.body, times * op.count)
        else:
            yield op, times
