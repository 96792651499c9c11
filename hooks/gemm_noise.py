"""How far two correct kernels of one matrix product may lie apart, measured: orders of summation, and planted bugs.

Operands are standard normal numbers rounded to the dtype; kernels add in fp32 (as tensor cores are documented to for
every dtype here) and round the result once. The error of an output depends on k alone, so 64 x 64 outputs stand for all
of m x n, however many those are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from introspect.hooks.number_formats import TORCH_DTYPES, round_to
from introspect.hooks.summation import in_order
from introspect.numerics_record import GEMM_OUTPUT, GEMM_TILE, TRIALS, GemmNoise, KernelDifference

_SPLITS = 4


def measure_gemm(m: int, k: int, n: int, dtype: str, seed: int) -> GemmNoise:
    """Differences between kernels of [m, k] x [k, n] in `dtype` (a name of GEMM_OUTPUT), from a seeded sample."""
    generator = torch.Generator().manual_seed(seed)
    a, b = round_to(torch.randn((2, k, TRIALS), generator=generator), dtype)  # k first: it is what the sum runs over
    output = GEMM_OUTPUT[dtype]
    sizes = a.abs().double().T @ b.abs().double()
    exact = a.double().T @ b.double()
    rms = exact.square().mean().sqrt()
    reference = round_to(_in_order(a, b), output).double()
    bound = difference_bound(sizes, exact.abs(), k, output)
    kernels = tuple(
        _compare(name, correct, round_to(product, output).double() - reference, bound, rms)
        for name, correct, product in _kernels(a, b, dtype)
    )
    return GemmNoise(
        m=m,
        k=k,
        n=n,
        dtype=dtype,
        output_dtype=output,
        mean_ulp=(_ulp(exact, output).mean() / rms).item(),
        condition=(sizes.mean() / rms).item(),
        kernels=kernels,
    )


def difference_bound(sizes: Tensor, exact: Tensor, k: int, output: str) -> Tensor:
    """Largest difference of two fp32-accumulating kernels, for sizes = |A||B| and exact = |AB| of the same shape.

    Each sum is within k * 2^-24 * |A||B| of the exact product (Jeannerod and Rump 2013, any order); rounding to a
    narrower output adds its unit roundoff of each sum.
    """
    sum_error = k * torch.finfo(torch.float32).eps / 2 * sizes
    rounding = 0.0 if output == "fp32" else torch.finfo(TORCH_DTYPES[output]).eps / 2
    return 2 * sum_error + 2 * rounding * (exact + sum_error)


def _kernels(a: Tensor, b: Tensor, dtype: str) -> Iterator[tuple[str, bool, Tensor]]:
    """(name, is it correct, fp32 product) from a [k, m] and b [k, n]."""
    k = len(a)
    yield "reverse order", True, _in_order(a.flip(0), b.flip(0))
    yield f"k split in {_SPLITS}", True, _split(a, b)
    yield f"tiles of {GEMM_TILE}", True, _tiled(a, b)
    yield "torch.matmul", True, _torch_matmul(a, b, dtype)
    if k == 1:
        return  # nothing is added: a bug of the sum has no product left to differ in
    dropped = a.clone()
    dropped[k // 2] = 0
    yield "bug: one term of k dropped", False, _tiled(dropped, b)
    if k > GEMM_TILE:
        yield f"bug: last {GEMM_TILE} of k dropped", False, _tiled(a[:-GEMM_TILE], b[:-GEMM_TILE])
    if dtype in ("bf16", "fp16"):
        yield f"bug: {dtype} accumulator", False, _in_order(a, b, dtype)


def _in_order(a: Tensor, b: Tensor, accumulator: str = "fp32") -> Tensor:
    """One term after the other."""
    outer = (column[:, None] * row for column, row in zip(a, b, strict=True))
    ((_, total),) = in_order(outer, accumulator, (len(a),))
    return total.float()


def _split(a: Tensor, b: Tensor) -> Tensor:
    """k cut into equal parts that are summed apart, then added: a split-k kernel."""
    padding = (0, 0, 0, -len(a) % _SPLITS)
    a, b = (pad(operand, padding).unflatten(0, (_SPLITS, -1)).transpose(0, 1) for operand in (a, b))
    outer = (column[:, :, None] * row[:, None] for column, row in zip(a, b, strict=True))
    ((_, parts),) = in_order(outer, "fp32", (len(a),))
    ((_, total),) = in_order(parts.float(), "fp32", (_SPLITS,))
    return total.float()


def _tiled(a: Tensor, b: Tensor) -> Tensor:
    """Products of 16 terms, added one after the other: how a matrix instruction walks along k."""
    tiles = (part_a.T @ part_b for part_a, part_b in zip(a.split(GEMM_TILE), b.split(GEMM_TILE), strict=True))
    ((_, total),) = in_order(tiles, "fp32", (-(-len(a) // GEMM_TILE),))
    return total.float()


def _torch_matmul(a: Tensor, b: Tensor, dtype: str) -> Tensor:
    """torch's own CPU kernel: of the dtype where it has one, else in fp32 on the rounded operands."""
    native = TORCH_DTYPES[dtype] if dtype in ("bf16", "fp16") else torch.float32
    return (a.to(native).T @ b.to(native)).float()


def _compare(name: str, correct: bool, difference: Tensor, bound: Tensor, rms: Tensor) -> KernelDifference:
    return KernelDifference(
        kernel=name,
        correct=correct,
        rms_difference=(difference.square().mean().sqrt() / rms).item(),
        worst_difference=(difference.abs().max() / rms).item(),
        # An exact zero, as of fp8 operands that round to it, has a bound of zero, which a difference of zero keeps.
        worst_over_bound=torch.where(difference == 0, 0.0, difference.abs() / bound).max().item(),
        share_changed=(difference != 0).double().mean().item(),
    )


def _ulp(values: Tensor, format: str) -> Tensor:
    """Gap between `values` (fp64) and the next larger one of `format`."""
    _, exponent = torch.frexp(values)
    return torch.finfo(TORCH_DTYPES[format]).eps * torch.exp2((exponent - 1).double())
