"""Orders and formats of summation, imitated exactly: what an accumulator holds after k terms.

Terms are tensors [k, ...]; the sum runs over the first axis, all else is independent trials. Everything returns fp64
so that comparing with the exact sum adds no error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from introspect.hooks.number_formats import TORCH_DTYPES
from introspect.numerics_record import PROMOTION_INTERVAL, TENSOR_CORE_BITS, TENSOR_CORE_GROUP


def in_order(terms: Iterable[Tensor], format: str, read_at: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """(k, sum of the first k terms) for each k of `read_at`, rounding to `format` after every addition.

    fp8 has no arithmetic of its own: the addition is done in fp32 and rounded, which is the correctly rounded fp8 sum.
    """
    dtype = TORCH_DTYPES[format]
    arithmetic = torch.float32 if dtype.itemsize == 1 else dtype
    total = torch.zeros((), dtype=arithmetic)
    for index, term in enumerate(terms, start=1):
        total = total + term.to(arithmetic)
        if arithmetic != dtype:
            total = total.to(dtype).to(arithmetic)
        if index in read_at:
            yield index, total.double()


def pairwise(terms: Tensor, format: str) -> Tensor:
    """Sum by halves, rounding to `format` after every addition; the number of terms must be a power of two."""
    partial = terms.to(TORCH_DTYPES[format])
    while len(partial) > 1:
        partial = partial[0::2] + partial[1::2]
    return partial[0].double()


def tensor_core(terms: Iterable[Tensor], read_at: tuple[int, ...], promote: bool) -> Iterator[tuple[int, Tensor]]:
    """(k, sum of the first k products) as DeepSeek-V3's report describes Hopper's FP8 accumulation (an assumption).

    Each group of 32 products and the running sum are aligned to the largest exponent among them and cut (towards zero)
    to 14 bits, then added; so is the result. With `promote` the running sum moves into an fp32 total every 128 products
    and starts again from zero. `terms`: groups [32, ...] of exact products.
    """
    running: Tensor | None = None
    total = torch.zeros((), dtype=torch.float32)
    for index, group in enumerate(terms, start=1):
        running = torch.zeros_like(group[0], dtype=torch.float64) if running is None else running
        aligned = torch.cat([running[None], group.double()])
        running = _cut(_cut(aligned, aligned.abs().amax(0)).sum(0))
        count = index * TENSOR_CORE_GROUP
        if count in read_at:
            yield count, (total + running.float()).double()
        if promote and count % PROMOTION_INTERVAL == 0:
            total = total + running.float()
            running = torch.zeros_like(running)


def _cut(values: Tensor, largest: Tensor | None = None) -> Tensor:
    """`values` cut towards zero to 14 bits below the exponent of `largest` (default: their own magnitude)."""
    _, exponent = torch.frexp(values.abs() if largest is None else largest)
    unit = torch.exp2((exponent - TENSOR_CORE_BITS).double())
    return (values / unit).trunc() * unit
