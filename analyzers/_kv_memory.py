"""Cache bytes at any context under what an engine may choose: element type, pages, a shared prefix, tensor parallelism.

A type of fewer bits may keep scales: fp8 one for a whole tensor (nothing per token), int8 and int4 one for each cached
vector (int4 a zero point too), fp4 one fp8 for 16 elements. States (recurrent, convolution, a fixed encoder context)
keep the model's own type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from introspect.analyzers._cache import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """Bits of an element, of the scales beside each vector, and elements per block scale of 8 bits (0: none)."""

    bits: int
    scale_bits_per_vector: int = 0
    elements_per_block_scale: int = 0
    scales: str = "no scales"


KV_FORMATS = {
    "fp32": KvFormat(bits=32),
    "bf16": KvFormat(bits=16),
    "fp16": KvFormat(bits=16),
    "fp8": KvFormat(bits=8, scales="one scale a tensor"),
    "int8": KvFormat(bits=8, scale_bits_per_vector=16, scales="an fp16 scale for each cached vector"),
    "int4": KvFormat(bits=4, scale_bits_per_vector=32, scales="an fp16 scale and zero point for each cached vector"),
    "fp4": KvFormat(bits=4, elements_per_block_scale=16, scales="an fp8 scale for 16 elements"),
}

HELD_BY_HEAD = ("MHA", "GQA", "MQA", "sliding")
"""Kinds whose cache is split by heads over tensor-parallel ranks; any other is held whole by each."""


def with_format(parts: Iterable[Part], name: str | None) -> tuple[Part, ...]:
    """The parts with cached keys and values in another type; `None` keeps the model's."""
    if name is None:
        return tuple(parts)
    return tuple(_converted(part, name, KV_FORMATS[name]) for part in parts)


def _converted(part: Part, name: str, kept: KvFormat) -> Part:
    if not part.row_vectors and not part.query_heads:
        return part
    bits = part.row_elements * kept.bits + part.row_vectors * kept.scale_bits_per_vector
    if kept.elements_per_block_scale:
        bits += part.row_elements * 8 // kept.elements_per_block_scale
    scale = bits / part.row_bits if part.row_bits else 1
    return replace(part, dtype=name, row_bits=bits, read_bits=round(part.read_bits * scale))


def per_rank(parts: Iterable[Part], tp: int) -> tuple[Part, ...]:
    """What one of `tp` ranks holds: its share of the cached heads, at least one; latents and states whole."""
    return tuple(_of_rank(part, tp) for part in parts)


def _of_rank(part: Part, tp: int) -> Part:
    if part.kind not in HELD_BY_HEAD or not part.kv_heads:
        return part
    heads = max(1, -(-part.kv_heads // tp))
    return replace(
        part,
        kv_heads=heads,
        row_bits=part.row_bits * heads // part.kv_heads,
        row_elements=part.row_elements * heads // part.kv_heads,
        row_vectors=part.row_vectors * heads // part.kv_heads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """Cache bytes of sequences that share their first `shared_prefix` tokens, in pages of `page_size`."""

    parts: tuple[Part, ...]
    page_size: int = 1
    shared_prefix: int = 0

    def bytes_at(self, context: int) -> int:
        """Bytes that one sequence alone holds."""
        return sum(part.bytes_at(context) for part in self.parts)

    def growth_at(self, context: int) -> int:
        """Bytes that one more token adds to a sequence of `context`."""
        return sum(part.growth_at(context) for part in self.parts)

    def reserved_bytes_at(self, context: int) -> int:
        """Bytes a paged engine reserves for it: whole pages, and as many for sliding layers as for full ones."""
        pages = -(-context // self.page_size) * self.page_size
        return sum(-(-pages * part.row_bits // 8) + part.state_bytes for part in self.parts)

    def prefix_bytes(self, context: int) -> int:
        """Bytes of the shared prefix, held once."""
        shared = min(self.shared_prefix, context)
        return sum(-(-part.rows(shared) * part.row_bits // 8) for part in self.parts)

    def own_bytes_at(self, context: int) -> int:
        """Bytes that each further sequence adds to the shared prefix."""
        own = max(0, context - self.shared_prefix)
        return sum(-(-min(own, part.rows(context)) * part.row_bits // 8) + part.state_bytes for part in self.parts)

    def total_bytes(self, context: int, sequences: int) -> int:
        """Bytes of all sequences."""
        return self.prefix_bytes(context) + sequences * self.own_bytes_at(context)
