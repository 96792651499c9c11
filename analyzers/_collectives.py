"""What collectives move, and the least time that takes.

Bytes each of N ranks sends, with P the payload as records.Collective counts it:

    ring all-reduce                  2(N-1)/N x P      2(N-1) steps
    ring all-gather, reduce-scatter   (N-1)/N x P        N-1
    pairwise all-to-all               (N-1)/N x P        N-1     equal shares
    broadcast, send                          P            1

(Thakur, Rabenseifner and Gropp 2005; the ring's are the least any algorithm without reduction in the network can send.)
Time is bytes over the interconnect's rate in one direction; latency, which is per step, is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from introspect.gpus import Gpu
from introspect.records import RunShape, Trace
from introspect.units import number_text

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
_ALGORITHM: dict[str, tuple[str, int]] = {  # name, and how often each rank's share of the payload is sent
    "all_reduce": ("ring", 2),
    "all_gather": ("ring", 1),
    "reduce_scatter": ("ring", 1),
    "all_to_all": ("pairwise", 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective of one rank's step; it runs `times` times, after the product of `module` (several: " + " between).

    `tokens`: it sums or puts together the residual stream of all tokens, which sequence parallelism keeps scattered.
    `needed_bytes`: the payload of an engine where the model's code moves more (logits of all positions).
    """

    kind: Kind
    module: str
    payload_bytes: int
    ranks: int
    group: str = "tp"
    times: int = 1
    direction: Literal["forward", "backward"] = "forward"
    tokens: bool = False
    needed_bytes: int | None = None

    @property
    def algorithm(self) -> str:
        """How it is taken to run."""
        return _ALGORITHM.get(self.kind, ("direct", 0))[0]

    @property
    def steps(self) -> int:
        """Messages that must follow each other."""
        return _ALGORITHM.get(self.kind, ("direct", 0))[1] * (self.ranks - 1) or 1

    @property
    def wire_bytes(self) -> int:
        """Bytes a rank sends, one run; rounded up."""
        return self._wire_bytes_of(self.payload_bytes)

    def seconds(self, gpu: Gpu) -> float | None:
        """The least time of one run in an engine; None when the GPU's interconnect is unknown."""
        rate = gpu.interconnect_bytes_per_second
        needed = self.payload_bytes if self.needed_bytes is None else self.needed_bytes
        return None if rate is None else self._wire_bytes_of(needed) / rate

    def _wire_bytes_of(self, payload: int) -> int:
        if self.kind not in _ALGORITHM:
            return payload
        return -(-_ALGORITHM[self.kind][1] * (self.ranks - 1) * payload // self.ranks)


def recorded_transfers(trace: Trace, stream_width: int) -> Iterator[Transfer]:
    """The collectives of a sharded record, in order."""
    for op, times in trace.walk():
        if op.collective is not None:
            shape = trace.tensors[op.inputs[0]].shape
            yield Transfer(
                kind=op.collective.kind,
                module=op.module,
                payload_bytes=op.collective.payload_bytes,
                ranks=op.collective.ranks,
                group=op.collective.group,
                times=times,
                direction="backward" if op.backward else "forward",
                tokens=op.collective.kind in ("all_reduce", "all_gather") and shape[-1:] == (stream_width,),
            )


def sequence_parallel(transfers: Iterable[Transfer], run: RunShape) -> Iterator[Transfer]:
    """The same step with the residual stream scattered over the tokens between blocks (Korthikanti et al. 2022): each
    all-reduce of the stream is a reduce-scatter after the block and an all-gather before the next, and what only put
    scattered tokens together is left out. In the backward the two change places: each all-reduce is a reduce-scatter,
    and for each of the forward a gradient is gathered, and once more the next block's input, of which a rank has kept
    its own tokens alone. Tokens are padded to equal parts."""
    for transfer in transfers:
        if not transfer.tokens:
            yield transfer
            continue
        payload = scattered_bytes(transfer.payload_bytes, run.tokens, transfer.ranks) * transfer.ranks
        if transfer.kind != "all_reduce":
            continue
        yield replace(transfer, kind="reduce_scatter", payload_bytes=payload)
        if transfer.direction == "forward":
            gathered = replace(transfer, kind="all_gather", payload_bytes=payload)
            yield gathered
            if run.phase == "train":
                yield replace(gathered, direction="backward", times=2 * transfer.times)


def scattered_bytes(payload: int, tokens: int, ranks: int) -> int:
    """A rank's part of a value of so many tokens, padded to equal parts."""
    return payload // tokens * -(-tokens // ranks)


def interconnect_assumption(gpu: Gpu) -> str:
    """What times of transfers rest on."""
    rate = gpu.interconnect_bytes_per_second
    speed = "of unknown rate" if rate is None else f"{number_text(rate, 'B/s')} in one direction"
    return f"{gpu.name}: all ranks on one interconnect, {gpu.interconnect}, {speed}"
