"""What if full attention saw less: a sliding window with sink tokens, or local chunks.

window W with N sinks (StreamingLLM, arXiv:2309.17453): a query at position i sees its last W tokens and, beyond them,
the first N. chunk C (Llama 4's local layers): it sees its own chunk, i mod C + 1 tokens. Layers whose attention is
limited already keep their own pattern.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from introspect.analyzers._cache import Part
from introspect.analyzers._products import Product
from introspect.records import RunShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A limited attention. Exactly one of `window` (with `sinks`) and `chunk` is set."""

    window: int | None = None
    sinks: int = 0
    chunk: int | None = None

    @property
    def name(self) -> str:
        """As a row calls it: window 4096 + 4 sinks, chunk 8192."""
        if self.chunk is not None:
            return f"chunk {self.chunk}"
        return f"window {self.window}" + (f" + {self.sinks} sinks" if self.sinks else "")

    def keys(self, position: int) -> int:
        """Keys that a query at `position` (from 0) sees, its own included."""
        if self.chunk is not None:
            return position % self.chunk + 1
        assert self.window is not None
        return min(position + 1, self.window) + min(self.sinks, max(0, position + 1 - self.window))

    def pairs(self, length: int) -> int:
        """Sum of `keys` over the first `length` positions, in closed form."""
        if self.chunk is not None:
            whole, rest = divmod(length, self.chunk)
            return whole * _triangle(self.chunk) + _triangle(rest)
        assert self.window is not None
        beyond = max(0, length - self.window)
        with_sinks = _triangle(min(beyond, self.sinks)) + max(0, beyond - self.sinks) * self.sinks
        return _triangle(min(length, self.window)) + beyond * self.window + with_sinks

    def rows(self, context: int) -> int:
        """Tokens a full layer would keep after `context` of them."""
        if self.chunk is not None:
            return min(context, self.chunk)
        assert self.window is not None
        return min(context, self.window + self.sinks)

    def limit(self, products: Iterable[Product], run: RunShape) -> list[Product]:
        """The engine's products with full attention limited; a step of one prompt or of one new token."""
        return [self._limited(product, run) if product.attention is not None else product for product in products]

    def _limited(self, product: Product, run: RunShape) -> Product:
        call = product.attention
        assert call is not None
        full = run.batch * (_triangle(run.context + run.seq) - _triangle(run.context))
        if call.visible_pairs != full:
            return product
        seen = run.batch * (self.pairs(run.context + run.seq) - self.pairs(run.context))
        flops = product.masked_flops * seen // full
        bytes_read = product.rhs_bytes * seen // full if run.seq == 1 else product.rhs_bytes
        return replace(product, flops=flops, masked_flops=flops, rhs_bytes=bytes_read)

    def bytes_at(self, parts: Iterable[Part], context: int) -> int:
        """Cache bytes of one sequence when full layers keep only what they can still see."""
        return sum(
            part.bytes_at(context)
            if part.window is not None or part.kind == "compressed"
            else -(-self.rows(context) * part.row_bits // 8) + part.state_bytes
            for part in parts
        )


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
