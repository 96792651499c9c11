"""Units and conventions: bits per element, FLOPs of a product, and the only place where numbers become text.

Sizes per element are in bits so that 4-bit formats stay integers. A multiply and an add are 2 FLOPs. Bytes are
decimal (GB = 1e9) where a vendor's figure is meant and binary (GiB = 2**30) only when the text says so.
"""

from __future__ import annotations

from math import prod

DTYPE_BITS: dict[str, int] = {
    "fp64": 64,
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8_e4m3fn": 8,
    "fp8_e5m2": 8,
    "fp8_e4m3fnuz": 8,
    "fp8_e5m2fnuz": 8,
    "fp8_e8m0fnu": 8,
    "fp4_e2m1fn_x2": 8,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "int4": 4,
    "uint64": 64,
    "uint32": 32,
    "uint16": 16,
    "uint8": 8,
    "bool": 8,
    "complex64": 64,
    "complex128": 128,
}
"""Bits one element takes in memory, by this package's short dtype names."""


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense tensor of `shape` and `dtype` (a name of DTYPE_BITS), rounded up to whole bytes."""
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def product_flops(batch: int, m: int, k: int, n: int) -> int:
    """FLOPs of `batch` independent products [m, k] x [k, n]: one multiply and one add per term, 2*batch*m*k*n."""
    return 2 * batch * m * k * n
