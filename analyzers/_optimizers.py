"""What optimisers keep for each parameter, as recipes: weights, gradients, fp32 master weights and moments.

Weights and gradients are in the parameter's own dtype. Where that is below fp32, mixed-precision recipes update an fp32
copy of it (Micikevicius et al. 2018). Sizes follow from each parameter's shape: factored and blocked states are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from introspect.records import Parameter
from introspect.units import DTYPE_BITS

ITEMS = ("weights", "gradients", "master_weights", "first_moment", "second_moment")
BLOCK = 256  # elements that share one fp32 scale in bitsandbytes' 8-bit optimisers
SMALLEST_QUANTISED = 4096  # elements below which they keep a moment in fp32
FP32 = 4


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter as an optimiser sees it. `hidden_matrix`: multiplied by inside a layer, so Muon orthogonalises it."""

    parameter: Parameter
    hidden_matrix: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or gradient."""
        return DTYPE_BITS[self.parameter.dtype] // 8


Moment = Callable[[Trained], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An optimiser as bytes: whether low-precision weights have an fp32 master, and the bytes of each moment."""

    description: str
    master: bool
    first: Moment
    second: Moment

    def bytes(self, trained: Iterable[Trained]) -> dict[str, int]:
        """Bytes of each of ITEMS over these parameters; one that takes no gradient (a fixed table) is weights alone."""
        sums = dict.fromkeys(ITEMS, 0)
        for one in trained:
            held = one.parameter.bytes
            if one.parameter.frozen:
                sums[ITEMS[0]] += held
                continue
            master = FP32 * one.parameter.count if self.master and one.element_bytes < FP32 else 0
            for item, count in zip(ITEMS, (held, held, master, self.first(one), self.second(one)), strict=True):
                sums[item] += count
        return sums


def _none(one: Trained) -> int:
    return 0


def _fp32(one: Trained) -> int:
    return FP32 * one.parameter.count


def _own_dtype(one: Trained) -> int:
    return one.parameter.bytes


def _blockwise_8bit(one: Trained) -> int:
    count = one.parameter.count
    return _fp32(one) if count < SMALLEST_QUANTISED else count + FP32 * -(-count // BLOCK)


def _factored(one: Trained) -> int:
    """Row and column means of the squared gradient of each matrix; vectors keep theirs whole."""
    *outer, rows, columns = one.parameter.shape if len(one.parameter.shape) > 1 else (1, one.parameter.count, 0)
    return FP32 * prod(outer) * (rows + columns)


def _unless_hidden_matrix(one: Trained) -> int:
    return 0 if one.hidden_matrix else _fp32(one)


RECIPES: dict[str, Recipe] = {
    "adam": Recipe(
        description="mixed-precision Adam: fp32 master, fp32 moments, 16 B a parameter (ZeRO, Rajbhandari et al. 2020)",
        master=True,
        first=_fp32,
        second=_fp32,
    ),
    "adam-bf16": Recipe(
        description="Adam wholly in the weights' dtype, no master: small updates are lost (see numerics)",
        master=False,
        first=_own_dtype,
        second=_own_dtype,
    ),
    "adam-8bit": Recipe(
        description="fp32 master, 8-bit moments with an fp32 scale per 256 (Dettmers et al. 2022)",
        master=True,
        first=_blockwise_8bit,
        second=_blockwise_8bit,
    ),
    "adafactor": Recipe(
        description="fp32 master, factored second moment, no first one (Shazeer and Stern 2018)",
        master=True,
        first=_none,
        second=_factored,
    ),
    "muon": Recipe(
        description="fp32 master, momentum alone for matrices inside layers, Adam for the rest (Jordan et al. 2024)",
        master=True,
        first=_fp32,
        second=_unless_hidden_matrix,
    ),
}
"""Optimisers by the name `--optimizer` takes."""

# What each ZeRO stage spreads over the data-parallel ranks; the rest is on every rank. FSDP's names for the same.
SHARDED_ITEMS: dict[str, frozenset[str]] = {
    "zero1": frozenset(ITEMS[2:]),
    "zero2": frozenset(ITEMS[1:]),
    "zero3": frozenset(ITEMS),
}
FSDP_NAMES = {"zero1": "", "zero2": "SHARD_GRAD_OP", "zero3": "FULL_SHARD"}


def bytes_per_rank(states: dict[str, int], stage: str, ranks: int) -> int:
    """Bytes of the states on one of `ranks` data-parallel ranks, shards rounded up."""
    shared = SHARDED_ITEMS[stage]
    return sum(-(-count // ranks) if item in shared else count for item, count in states.items())
