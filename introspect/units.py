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


SCALED_UNITS = ("B", "B/s", "FLOP", "FLOP/s", "OP/s", "s")
"""Units written with an SI prefix. Other units of a column: "share" (0.123 is 12.3 %), "FLOP/B", or "" and any word
("tokens") for plain numbers."""

_LARGE = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SMALL = ("", "m", "µ", "n", "p")


def unit_of(name: str) -> str:
    """The unit that a total's name carries: `kv_bytes_read` is in B, `extra_flops_share` is a share."""
    words = name.split("_")
    if words[-1] in ("share", "mfu", "hfu"):
        return "share"
    for phrase, unit in (("flop_per_byte", "FLOP/B"), ("bytes_per_second", "B/s"), ("flops_per_second", "FLOP/s")):
        if phrase in name:
            return unit
    for word, unit in (("bytes", "B"), ("flops", "FLOP"), ("seconds", "s")):
        if word in words:
            return unit
    return ""


def number_text(value: float, unit: str) -> str:
    """A number for people, four significant digits where it is no exact count: 16.06 GB, 4.478 ms, 12.3 %, 4,096."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if unit == "share":
        return _percent(100 * value)
    if unit in SCALED_UNITS:
        return _with_prefix(value, unit)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"


def _percent(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return "< 0.01 %" if value > 0 else "> -0.01 %"
    return f"{value:,.0f} %" if abs(value) >= 999.5 else f"{value:.3g} %"


def _with_prefix(value: float, unit: str) -> str:
    power = 0
    while abs(value) >= 999.95 and power < len(_LARGE) - 1:
        value, power = value / 1000, power + 1
    if unit == "s" and power == 0:
        while 0 < abs(value) < 0.99995 and -power < len(_SMALL) - 1:
            value, power = value * 1000, power - 1
    prefix = _LARGE[power] if power >= 0 else _SMALL[-power]
    return f"{value:.4g} {prefix}{unit}"
