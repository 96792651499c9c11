"""What expert parallelism sends: tokens to the ranks of their experts (dispatch) and results back (combine).

A token is sent once for each of its k experts: T*k rows of the expert's input width, and as many of its output width
back. Of N ranks that hold equally many experts, uniform choices leave 1/N of the rows where they are. Over several
nodes a token may be sent once to each node it is needed on and spread there (DeepSeek-V3, arXiv:2412.19437, 3.2.2): of
n nodes a token with k choices reaches n*(1 - (1 - 1/n)^k), or at most the number its router allows.
TP instead sums partial results of all tokens in every rank: a ring all-reduce sends 2(N-1)/N of T rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from introspect.analyzers._experts import Block
from introspect.analyzers._traffic import rows_of_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """Bits of an element sent, and of the scale that every `elements_per_scale` of them share (0: none)."""

    bits: int
    scale_bits: int = 0
    elements_per_scale: int = 0


WIRE_FORMATS = {
    "fp32": WireFormat(bits=32),
    "bf16": WireFormat(bits=16),
    "fp16": WireFormat(bits=16),
    "fp8": WireFormat(bits=8, scale_bits=32, elements_per_scale=128),
    "fp4": WireFormat(bits=4, scale_bits=8, elements_per_scale=16),
}
"""fp8 with an fp32 scale for 128 elements, as DeepSeek-V3 sends it; fp4 with an fp8 scale for 16 (NVFP4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Dispatch or combine of one block: its rows, their width and format."""

    direction: str
    dtype: str
    rows: int
    tokens: int
    width: int

    @property
    def payload_bytes(self) -> int:
        """All rows, those that stay on their rank too; scales apart."""
        return self._bytes_of(self.rows, WIRE_FORMATS[self.dtype].bits)

    @property
    def scale_bytes(self) -> int:
        """Scales beside them."""
        kept = WIRE_FORMATS[self.dtype]
        if not kept.elements_per_scale:
            return 0
        return self.rows * -(-self.width // kept.elements_per_scale) * kept.scale_bits // 8

    @property
    def bytes(self) -> int:
        """Both."""
        return self.payload_bytes + self.scale_bytes

    def remote_bytes(self, ranks: int) -> float:
        """What leaves its rank under uniform choices."""
        return self.bytes * (ranks - 1) / ranks

    def crossing_bytes(self, nodes: int) -> float:
        """What leaves its node when every row is sent by itself."""
        return self.bytes * (nodes - 1) / nodes

    def crossing_bytes_once(self, nodes: int, most: int | None) -> float:
        """What leaves its node when a token is sent once to each node, to at most `most` of them."""
        chosen = self.rows / self.tokens
        reached = nodes * (1 - float((1 - 1 / nodes) ** chosen))
        reached = reached if most is None else min(reached, most)
        return self.bytes / chosen * reached * (nodes - 1) / nodes

    def _bytes_of(self, rows: int, bits: int) -> int:
        return rows * self.width * bits // 8


def ways(block: Block, tokens: int, dispatch: str, combine: str) -> tuple[Way, Way]:
    """Dispatch and combine of one block for `tokens` tokens."""
    per_token = rows_of_tokens(block.call) / block.call.tokens if block.call.top_k else sum(block.call.rows)
    rows = round(tokens * per_token)
    return (
        Way(direction="dispatch", dtype=dispatch, rows=rows, tokens=tokens, width=block.width_in),
        Way(direction="combine", dtype=combine, rows=rows, tokens=tokens, width=block.width_out),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """EP against TP for one block: bytes the busiest rank sends in one layer. `bits` of the all-reduced stream."""

    block: Block
    dispatch: str
    combine: str
    bits: int

    def ep_bytes(self, tokens: int, ranks: int) -> float:
        """Dispatch and combine of a rank's tokens, dealt out as evenly as whole tokens allow."""
        own = -(-tokens // ranks)
        return sum(way.remote_bytes(ranks) for way in ways(self.block, own, self.dispatch, self.combine))

    def tp_bytes(self, tokens: int, ranks: int) -> float:
        """A ring all-reduce of all tokens."""
        return 2 * (ranks - 1) / ranks * tokens * self.block.width_out * self.bits / 8

    def ep_wins(self, tokens: int, ranks: int) -> bool:
        """Whether EP sends less."""
        return self.ep_bytes(tokens, ranks) < self.tp_bytes(tokens, ranks)

    def degrees(self) -> Iterator[int]:
        """Numbers of ranks that hold equally many experts."""
        experts = self.block.call.experts
        return (ranks for ranks in range(2, experts + 1) if experts % ranks == 0)

    def winning_degree(self, tokens: int) -> int | None:
        """The fewest ranks with which EP sends less; None when it never does."""
        return next((ranks for ranks in self.degrees() if self.ep_wins(tokens, ranks)), None)

    def winning_tokens(self, ranks: int, most: int = 1 << 16) -> int | None:
        """The fewest tokens with which EP sends less on so many ranks; None when it does not below `most`."""
        return next((tokens for tokens in range(1, most) if self.ep_wins(tokens, ranks)), None)
