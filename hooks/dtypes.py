"""torch dtypes by this package's short names, both ways."""

from __future__ import annotations

from functools import cache

import torch

_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
    "float8_e8m0fnu": "fp8_e8m0fnu",
    "float4_e2m1fn_x2": "fp4_e2m1fn_x2",
}
_TORCH = {short: getattr(torch, name) for name, short in _NAMES.items()}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The short name: bf16 for torch.bfloat16; integer types keep torch's name."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name or of torch's own name. Raises KeyError for an unknown one."""
    found = _TORCH.get(name, getattr(torch, name, None))
    if not isinstance(found, torch.dtype):
        raise KeyError(name)
    return found
