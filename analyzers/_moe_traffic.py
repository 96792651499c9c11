"""Bytes that expert parallelism moves in one MoE layer, beside what tensor parallelism would.

T tokens of the step, each sent to k routed experts, d wide; N ranks, each with T/N of the tokens and E/N experts.

    dispatch   T*k rows of d in the dispatch dtype (fp8 adds one fp32 scale for every 128 values)
    combine    T*k rows of d in the combine dtype
    TP         one all-reduce of T rows of d after the FFN: each rank sends 2(N-1)/N of it

Expert parallelism sends (N-1)/N of its rows to other ranks. With M nodes, a row that two experts of one node want
crosses the network once (DeepSeek-V3 report, 3.2.2): k rows meet as many nodes as _moe_nodes.py says, at most
`--max-nodes-per-token`, of which the own node is one in M.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from introspect.units import DTYPE_BITS

SCALE_BLOCK = 128  # values that share an fp32 scale when a row is sent in fp8
SENT = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "fp8_e4m3fn"}
"""Names of --dispatch-dtype and --combine-dtype and the element type they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One layer's exchange. Bytes are those of all ranks together."""

    tokens: int
    top_k: int
    width: int
    dispatch_dtype: str
    combine_dtype: str
    stream_dtype: str

    @property
    def pairs(self) -> int:
        """(token, routed expert) pairs, those of the own rank too."""
        return self.tokens * self.top_k

    @property
    def dispatch_bytes(self) -> int:
        """Payload to the experts, without scales."""
        return self._payload(self.dispatch_dtype)

    @property
    def combine_bytes(self) -> int:
        """Payload back from the experts, without scales."""
        return self._payload(self.combine_dtype)

    @property
    def scale_bytes(self) -> int:
        """Scales that travel with fp8 rows, both ways."""
        return sum(
            self.pairs * ceil(self.width / SCALE_BLOCK) * 4
            for dtype in (self.dispatch_dtype, self.combine_dtype)
            if dtype == "fp8"
        )

    @property
    def tp_allreduce_bytes(self) -> int:
        """The hidden states that tensor parallelism sums instead."""
        return self.tokens * self.width * DTYPE_BITS[self.stream_dtype] // 8

    def _payload(self, dtype: str) -> int:
        return self.pairs * self.width * DTYPE_BITS[SENT[dtype]] // 8

    def sent_by_rank(self, ranks: int) -> int:
        """Bytes one of `ranks` expert-parallel ranks sends to others, scales included."""
        moved = self.dispatch_bytes + self.combine_bytes + self.scale_bytes
        return -(-moved * (ranks - 1) // ranks // ranks)

    def tp_sent_by_rank(self, ranks: int) -> int:
        """Bytes one of `ranks` tensor-parallel ranks sends in a ring all-reduce."""
        return -(-2 * (ranks - 1) * self.tp_allreduce_bytes // ranks)

    def wins_from_degree(self) -> int:
        """Smallest number of ranks from which expert parallelism sends less than tensor parallelism; no batch matters:
        both grow with the tokens."""
        moved = self.dispatch_bytes + self.combine_bytes + self.scale_bytes
        return max(2, moved // (2 * self.tp_allreduce_bytes) + 1) if self.tp_allreduce_bytes else 2

    def between_nodes(self, nodes: int, met: float) -> int:
        """Bytes that cross between nodes, both ways: each row once for each other one of the `met` nodes it is for."""
        crossing = met * (nodes - 1) / nodes
        row_bits = self.width * (DTYPE_BITS[SENT[self.dispatch_dtype]] + DTYPE_BITS[SENT[self.combine_dtype]])
        return round(self.tokens * crossing * row_bits / 8)
