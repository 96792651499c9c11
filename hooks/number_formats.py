"""Number formats read off their bit patterns, and rounding to any of them.

Nothing here is looked up: every pattern of a format (all of them up to 19 bits; for fp32 and fp64 every exponent with
the first, second and last mantissa) is turned into its value, and the properties are read off the values:
epsilon is the gap above 1; the smallest normal is the smallest value whose gap is epsilon times itself; what lies
below is subnormal. torch decodes the formats it has; the rest follow their specification:
OCP Microscaling Formats (MX) v1.0 for fp4 and fp6; NVIDIA's TF32 is fp32 without its last 13 mantissa bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from introspect.numerics_record import NumberFormat

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8fnuz_e4m3": torch.float8_e4m3fnuz,
    "fp8fnuz_e5m2": torch.float8_e5m2fnuz,
    "fp8_e8m0fnu": torch.float8_e8m0fnu,
}
"""Formats that torch decodes, by the names CONTRACT.md uses in the formats table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Definition:
    """A format's bits, where they come from, and a function that returns the fp64 values of its patterns."""

    name: str
    bits: int
    defined_by: str
    values: Callable[[], Tensor]


def _every_pattern(dtype: torch.dtype, bits: int) -> Tensor:
    """[2^bits] fp64 values of all patterns of an 8- or 16-bit torch dtype."""
    carrier = {8: torch.uint8, 16: torch.int16}[bits]
    return torch.arange(2**bits, dtype=torch.int32).to(carrier).view(dtype).double()


def _edge_patterns(dtype: torch.dtype, exponent_bits: int, mantissa_bits: int) -> Tensor:
    """fp64 values of both signs, every exponent, and the first, second and last mantissa of fp32 or fp64."""
    carrier = {32: torch.int32, 64: torch.int64}[1 + exponent_bits + mantissa_bits]
    exponents = torch.arange(2**exponent_bits, dtype=carrier)[:, None] << mantissa_bits
    mantissas = torch.tensor([0, 1, 2**mantissa_bits - 1], dtype=carrier)
    positive = (exponents | mantissas).flatten().view(dtype).double()
    return torch.cat([-positive, positive])


def _tf32_patterns() -> Tensor:
    """fp64 values of all 2^19 tf32 patterns: fp32 whose last 13 bits are zero."""
    return (torch.arange(2**19, dtype=torch.int64) << 13).to(torch.int32).view(torch.float32).double()


def _mx_patterns(exponent_bits: int, mantissa_bits: int) -> Tensor:
    """fp64 values of an OCP MX element format: no infinity, no NaN, bias 2^(e-1) - 1, subnormals at exponent 0."""
    codes = torch.arange(2 ** (1 + exponent_bits + mantissa_bits))
    mantissa = (codes & (2**mantissa_bits - 1)).double() / 2**mantissa_bits
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    sign: Tensor = 1.0 - 2.0 * (codes >> (exponent_bits + mantissa_bits)).double()
    normal = (exponent > 0).double()
    bias: int = 2 ** (exponent_bits - 1) - 1
    size: Tensor = (normal + mantissa) * torch.exp2((exponent.clamp(min=1) - bias).double())
    return sign * size


def _integers(low: int, high: int) -> Tensor:
    """fp64 values of an integer format."""
    return torch.arange(low, high + 1, dtype=torch.float64)


def _torch_format(name: str, dtype: torch.dtype) -> _Definition:
    """A format of at most 16 bits that torch decodes."""
    bits = dtype.itemsize * 8
    return _Definition(name=name, bits=bits, defined_by=str(dtype), values=partial(_every_pattern, dtype, bits))


_FLOATS: tuple[_Definition, ...] = (
    _Definition(
        name="fp64", bits=64, defined_by="torch.float64", values=partial(_edge_patterns, torch.float64, 11, 52)
    ),
    _Definition(name="fp32", bits=32, defined_by="torch.float32", values=partial(_edge_patterns, torch.float32, 8, 23)),
    _Definition(name="tf32", bits=19, defined_by="fp32 without 13 mantissa bits", values=_tf32_patterns),
    *(_torch_format(name, dtype) for name, dtype in TORCH_DTYPES.items() if dtype.itemsize <= 2),
    _Definition(name="fp6_e3m2", bits=6, defined_by="OCP MX v1.0", values=partial(_mx_patterns, 3, 2)),
    _Definition(name="fp6_e2m3", bits=6, defined_by="OCP MX v1.0", values=partial(_mx_patterns, 2, 3)),
    _Definition(name="fp4_e2m1", bits=4, defined_by="OCP MX v1.0", values=partial(_mx_patterns, 2, 1)),
)

_INTEGERS: tuple[_Definition, ...] = (
    _Definition(name="int8", bits=8, defined_by="two's complement", values=partial(_integers, -128, 127)),
    _Definition(name="uint8", bits=8, defined_by="unsigned", values=partial(_integers, 0, 255)),
    _Definition(name="int4", bits=4, defined_by="two's complement", values=partial(_integers, -8, 7)),
    _Definition(name="uint4", bits=4, defined_by="unsigned", values=partial(_integers, 0, 15)),
)


def number_formats() -> tuple[NumberFormat, ...]:
    """Every format this package knows, in the order the table shows them."""
    return tuple(_read_float(each) for each in _FLOATS) + tuple(_read_integer(each) for each in _INTEGERS)


def _read_float(definition: _Definition) -> NumberFormat:
    """The properties of a floating-point format, from the values of its patterns."""
    values = definition.values()
    finite = values[values.isfinite()].unique()
    positive = finite[finite > 0]
    gaps = positive.diff()
    epsilon = gaps[positive[:-1] == 1].item()
    mantissa_bits = round(-math.log2(epsilon))
    min_normal = positive[:-1][gaps / epsilon == positive[:-1]][0].item()  # exact, unlike the product
    smallest = positive[0].item()
    signed = bool((finite < 0).any())
    has_zero = bool((finite == 0).any())
    return NumberFormat(
        name=definition.name,
        bits=definition.bits,
        exponent_bits=definition.bits - int(signed) - mantissa_bits,
        mantissa_bits=mantissa_bits,
        min=finite[0].item(),
        max=finite[-1].item(),
        min_normal=min_normal,
        min_subnormal=smallest if smallest < min_normal else None,
        epsilon=epsilon,
        has_inf=bool(values.isinf().any()),
        has_nan=bool(values.isnan().any()),
        magnitudes=tuple(finite[finite >= 0].tolist()) if definition.bits <= 8 and has_zero else (),
        defined_by=definition.defined_by,
    )


def _read_integer(definition: _Definition) -> NumberFormat:
    """An integer format: its step is 1 everywhere, so nothing relative applies."""
    values = definition.values()
    return NumberFormat(
        name=definition.name,
        bits=definition.bits,
        exponent_bits=None,
        mantissa_bits=None,
        min=values[0].item(),
        max=values[-1].item(),
        min_normal=None,
        min_subnormal=None,
        epsilon=None,
        has_inf=False,
        has_nan=False,
        magnitudes=tuple(values[values >= 0].tolist()),
        defined_by=definition.defined_by,
    )


def round_to(values: Tensor, name: str) -> Tensor:
    """`values` (fp32) rounded to nearest, ties to even, in format `name`, returned as fp32. Overflow as torch has it.

    Formats torch cannot convert to (fp4, fp6, int) go through `round_to_grid`.
    """
    if name == "tf32":
        bits = values.contiguous().view(torch.int32)
        odd = (bits >> 13) & 1
        return ((bits + 0xFFF + odd) & ~0x1FFF).view(torch.float32)
    return values.to(TORCH_DTYPES[name]).float()


def round_to_grid(values: Tensor, magnitudes: Tensor) -> Tensor:
    """`values` rounded to the nearest of ±`magnitudes` (ascending, from 0), ties to the even code, saturating."""
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs()
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    return magnitudes[torch.where(below % 2 == 0, below, above)].copysign(values)
