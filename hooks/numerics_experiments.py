"""The seeded experiments of `numerics`: each function measures one effect and yields its points.

Formulas, sources and what each one teaches are in docs/numerics.md; sizes are in introspect/numerics_record.py.
Errors are measured against the same computation in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from introspect import numerics_record as setup
from introspect.hooks.number_formats import TORCH_DTYPES, number_formats, round_to, round_to_grid
from introspect.hooks.summation import in_order, pairwise, tensor_core
from introspect.numerics_record import Measurement

BLOCKS: dict[str, tuple[int, int]] = {"tensor": (0, 0), "channel": (1, 0), "128x128": (128, 128), "1x128": (1, 128)}
"""Rows and columns that share a quantisation scale; 0 is all of them."""

SCALE_QUANTILES = 64
"""Scales kept of each measurement, each standing for an equal share of the elements."""

QUANTISED_FORMATS = ("int8", "fp8_e4m3fn", "fp8_e5m2", "int4", "fp4_e2m1")


def measure(experiment: str, seed: int) -> list[Measurement]:
    """The points of one experiment of `EXPERIMENTS`, from random numbers that depend on `seed` alone."""
    return list(_RUN[experiment](torch.Generator().manual_seed(seed)))


def _point(
    experiment: str, format: str, method: str, at: float | None, errors: Tensor, condition: float = 1.0
) -> Measurement:
    """A point whose value is the root mean square, and the largest, of `errors`; not-a-number gives None."""
    rms, worst = errors.double().square().mean().sqrt().item(), errors.abs().max().item()
    known = math.isfinite(rms)
    return Measurement(
        experiment=experiment,
        format=format,
        method=method,
        at=at,
        measured=rms if known else None,
        worst=worst if known else None,
        condition=condition,
    )


def swallowed_update(_: Generator) -> Iterator[Measurement]:
    """The largest u with 1 + u == 1 in each format, by bisection over u's bit patterns."""
    for format in ("fp32", "fp16", "bf16"):
        dtype = TORCH_DTYPES[format]
        carrier = torch.int32 if dtype.itemsize == 4 else torch.int16
        swallowed, changes = 0, int(torch.ones(1, dtype=dtype).view(carrier))
        while changes - swallowed > 1:
            middle = (swallowed + changes) // 2
            update = torch.tensor([middle], dtype=carrier).view(dtype)
            if (torch.ones(1, dtype=dtype) + update == 1).item():
                swallowed = middle
            else:
                changes = middle
        yield _point(
            "swallowed_update",
            format,
            "nearest even",
            None,
            torch.tensor([swallowed], dtype=carrier).view(dtype).double(),
        )


def update_drift(generator: Generator) -> Iterator[Measurement]:
    """Gain of weights that start at 1.0 after many equal small updates: bf16 rounded to nearest, bf16 rounded
    stochastically, and bf16 with an fp32 master copy."""
    nearest = torch.ones(setup.TRIALS, dtype=torch.bfloat16)
    stochastic = torch.ones(setup.TRIALS)
    master = torch.ones(setup.TRIALS)
    for step in range(1, max(setup.UPDATE_STEPS) + 1):
        nearest = nearest + setup.WEIGHT_UPDATE
        stochastic = _round_stochastically_to_bf16(stochastic + setup.WEIGHT_UPDATE, generator)
        master = master + setup.WEIGHT_UPDATE
        if step in setup.UPDATE_STEPS:
            yield _point("update_drift", "bf16", "nearest even", step, nearest.double() - 1)
            yield _point("update_drift", "bf16", "stochastic", step, stochastic.double() - 1)
            yield _point("update_drift", "bf16", "fp32 master copy", step, master.bfloat16().double() - 1)


def _round_stochastically_to_bf16(values: Tensor, generator: Generator) -> Tensor:
    """fp32 rounded up to a bf16 value with the probability that keeps the expectation: 16 random bits are added below
    the kept mantissa, then cut off."""
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, generator=generator)
    return ((values.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)


def exp_overflow(_: Generator) -> Iterator[Measurement]:
    """The smallest x of each format whose exponential is infinite, searched among all its positive values."""
    for format in ("fp16", "bf16"):
        dtype = TORCH_DTYPES[format]
        x = torch.arange(2**15, dtype=torch.int16).view(dtype)
        overflows = x[x.isfinite() & x.exp().isinf()]
        yield _point("exp_overflow", format, "exp(x)", None, overflows[:1].double())


def softmax_sum(_: Generator) -> Iterator[Measurement]:
    """Sum of a softmax over equal logits x, which should be 1: as written, and with the maximum subtracted first."""
    for format, subtract in (("fp16", False), ("bf16", False), ("fp16", True)):
        for x in setup.SOFTMAX_LOGITS:
            logits = torch.full((setup.SOFTMAX_WIDTH,), x, dtype=TORCH_DTYPES[format])
            powers = (logits - logits.max() if subtract else logits).exp()
            probabilities = powers / powers.sum()
            yield _point(
                "softmax_sum", format, "max subtracted" if subtract else "as written", x, probabilities.double().sum()
            )


def sum_error(generator: Generator) -> Iterator[Measurement]:
    """Relative error of a sum of k numbers of [0, 1) for each accumulator; the numbers are of its own format."""
    shape = (max(setup.TERMS), setup.TRIALS)
    for format in ("fp32", "bf16", "fp8_e4m3fn"):
        terms = round_to(torch.rand(shape, generator=generator), format)
        exact = terms.double().cumsum(0)
        for k, total in in_order(terms, format, setup.TERMS):
            yield _point("sum_error", format, "in order", k, total / exact[k - 1] - 1)
        if format != "fp8_e4m3fn":
            for k in setup.TERMS:
                yield _point("sum_error", format, "pairwise", k, pairwise(terms[:k], format) / exact[k - 1] - 1)
    factors = round_to(torch.rand((2, *shape), generator=generator), "fp8_e4m3fn")
    products = factors[0] * factors[1]
    exact = products.double().cumsum(0)
    for method, promote in setup.TENSOR_CORE_METHODS.items():
        for k, total in tensor_core(products.split(setup.TENSOR_CORE_GROUP), setup.TERMS, promote):
            yield _point("sum_error", "fp8_e4m3fn", method, k, total / exact[k - 1] - 1)


def gemm_error(generator: Generator) -> Iterator[Measurement]:
    """Error of a product of standard normal matrices over the root mean square of the product: what rounding the
    operands costs (the sum is exact), and what each accumulator adds on rounded operands."""
    a, b = torch.randn((2, max(setup.TERMS), setup.TRIALS), generator=generator)
    for format in ("fp16", "bf16", "fp8_e4m3fn"):
        rounded_a, rounded_b = round_to(a, format), round_to(b, format)
        for k in setup.TERMS:
            product = rounded_a[:k].double().T @ rounded_b[:k].double()
            yield _product_point(format, "operands rounded", k, product, a, b)
    a_half, b_half = round_to(a, "bf16"), round_to(b, "bf16")
    for accumulator in ("fp32", "bf16"):
        outer = (row_a[:, None] * row_b for row_a, row_b in zip(a_half, b_half, strict=True))
        for k, product in in_order(outer, accumulator, setup.TERMS):
            yield _product_point("bf16", f"{accumulator} in order", k, product, a_half, b_half)
    a_eighth, b_eighth = round_to(a, "fp8_e4m3fn"), round_to(b, "fp8_e4m3fn")
    for method, promote in setup.TENSOR_CORE_METHODS.items():
        for k, product in tensor_core(_outer_groups(a_eighth, b_eighth), setup.TERMS, promote):
            yield _product_point("fp8_e4m3fn", method, k, product, a_eighth, b_eighth)


def _outer_groups(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The products of a GEMM in groups [32, m, n] along k, from a [k, m] and b [k, n]."""
    size = setup.TENSOR_CORE_GROUP
    return (part_a[:, :, None] * part_b[:, None] for part_a, part_b in zip(a.split(size), b.split(size), strict=True))


def _product_point(format: str, method: str, k: int, product: Tensor, a: Tensor, b: Tensor) -> Measurement:
    """The error of `product` [m, n] against a' b in fp64, from a [k_max, m] and b [k_max, n] cut at k."""
    exact_a, exact_b = a[:k].double(), b[:k].double()
    exact = exact_a.T @ exact_b
    rms = exact.square().mean().sqrt()
    condition = (exact_a.abs().T @ exact_b.abs()).max() / rms
    return _point("gemm_error", format, method, k, (product - exact) / rms, condition.item())


def loss_scale(generator: Generator) -> Iterator[Measurement]:
    """Share of log-normal gradients that a format turns into zero, or into infinity, after scaling."""
    exponents = torch.randn(2**18, generator=generator) * setup.GRADIENT_LOG2_DEVIATION + setup.GRADIENT_LOG2_MEAN
    for scale in setup.LOSS_SCALES_LOG2:
        scaled = torch.exp2(exponents + scale)
        yield _point("loss_scale", "fp16", "lost to zero", scale, (scaled.half() == 0).double().mean())
        yield _point("loss_scale", "fp16", "overflowed", scale, scaled.half().isinf().double().mean())
        yield _point("loss_scale", "bf16", "lost to zero", scale, (scaled.bfloat16() == 0).double().mean())


def variance(generator: Generator) -> Iterator[Measurement]:
    """Relative error of an fp32 variance by three methods, on data with a growing mean (the sums are torch's own)."""
    standard = torch.randn((setup.VARIANCE_WIDTH, setup.TRIALS), generator=generator)
    for ratio in setup.VARIANCE_RATIOS:
        x = standard + ratio
        exact = x.double().var(0, correction=0)
        mean = x.mean(0)
        yield _point("variance", "fp32", "one pass", ratio, (x.square().mean(0) - mean.square()).double() / exact - 1)
        yield _point("variance", "fp32", "two passes", ratio, (x - mean).square().mean(0).double() / exact - 1)
        yield _point("variance", "fp32", "Welford", ratio, _welford(x).double() / exact - 1)


def _welford(x: Tensor) -> Tensor:
    """Population variance over the first axis by Welford's update, in x's own format."""
    mean, squares = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for count, value in enumerate(x, start=1):
        difference = value - mean
        mean = mean + difference / count
        squares = squares + difference * (value - mean)
    return squares / len(x)


def quantisation(generator: Generator) -> Iterator[Measurement]:
    """Error of the ordinary values (root mean square 1) of activations with outlier features, by the block of values
    that shares a scale. The scale maps the block's largest magnitude to the format's largest."""
    tokens, features = setup.QUANTISED_SHAPE
    x = torch.randn((tokens, features), generator=generator)
    outliers = torch.randperm(features, generator=generator)[: setup.OUTLIER_FEATURES]
    x[:, outliers] *= setup.OUTLIER_FACTOR
    ordinary = torch.ones(features, dtype=torch.bool)
    ordinary[outliers] = False
    known = {entry.name: entry for entry in number_formats()}
    for format in QUANTISED_FORMATS:
        magnitudes = torch.tensor([value for value in known[format].magnitudes if value <= known[format].max])
        for granularity, (rows, columns) in BLOCKS.items():
            scale = _block_maximum(x, rows or tokens, columns or features) / magnitudes[-1]
            error = (round_to_grid(x / scale, magnitudes) * scale - x)[:, ordinary]
            met = scale[:, ordinary].flatten()
            quantiles = met.quantile((torch.arange(SCALE_QUANTILES) + 0.5) / SCALE_QUANTILES)
            point = _point("quantisation", format, granularity, None, error)
            yield replace(point, scales=tuple(quantiles.tolist()), largest_scale=met.max().item())


def _block_maximum(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest magnitude of each element's block of `rows` x `columns`, in the shape of x."""
    blocks = x.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [R, rows, C, columns]
    largest: Tensor = blocks.amax((1, 3), keepdim=True).expand_as(blocks)
    return largest.flatten(2, 3).flatten(0, 1)


_RUN: dict[str, Callable[[Generator], Iterator[Measurement]]] = {
    "swallowed_update": swallowed_update,
    "update_drift": update_drift,
    "exp_overflow": exp_overflow,
    "softmax_sum": softmax_sum,
    "sum_error": sum_error,
    "gemm_error": gemm_error,
    "loss_scale": loss_scale,
    "variance": variance,
    "quantisation": quantisation,
}
