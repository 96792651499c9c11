"""Answer a repeated op from its first answer: the shape kernels of the meta device cost more than all that is recorded.

Layers repeat, so most calls of a run equal an earlier one in everything a meta kernel may look at: op, shapes, strides,
dtypes and plain arguments. The result is then an empty tensor of the same layout. Not kept: views, writes, whatever
shares its storage, calls with real tensors (their values can matter) and arguments of unknown type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_TENSORS = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device}
)
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class _Unknown(Exception):
    """An argument that is no part of a key."""


class MetaKernels:
    """The op calls of one run and the layouts of their results."""

    def __init__(self) -> None:
        self._known: dict[Any, _Layout | None] = {}  # None: this call's result is no new tensor of its own
        self._repeatable: dict[torch._ops.OpOverload, bool] = {}

    def run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` gives."""
        repeatable = self._repeatable.get(func)
        if repeatable is None:
            repeatable = self._repeatable[func] = _is_repeatable(func)
        if not repeatable:
            return func(*args, **kwargs)
        key: list[Any] = [func, torch.get_default_dtype()]
        try:
            _describe(args, key)
            for name, value in kwargs.items():
                key.append(name)
                _describe((value,), key)
        except _Unknown:
            return func(*args, **kwargs)
        call = tuple(key)
        layout = self._known.get(call)
        if layout is not None:
            shape, stride, dtype = layout
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if call not in self._known:
            self._known[call] = _layout(out, (*args, *kwargs.values()))
        return out


def _is_repeatable(func: torch._ops.OpOverload) -> bool:
    """One of torch's own functions of tensors to one tensor, which is no view and writes nothing."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and not func.is_view
        and not schema.is_mutable
        and len(schema.returns) == 1
        and str(schema.returns[0].type) == "Tensor"
        and torch.Tag.dynamic_output_shape not in func.tags
    )


def _describe(values: Any, key: list[Any]) -> None:
    """Append all that a meta kernel can know of the values; raises _Unknown. Types tell 2 from 2.0 and True from 1."""
    for value in values:
        kind = type(value)
        key.append(kind)
        if kind in _TENSORS:
            if not value.is_meta:
                raise _Unknown
            key += (value.shape, value.stride(), value.dtype)
        elif kind in _PLAIN:
            key.append(value)
        elif kind is list or kind is tuple:
            key.append(len(value))
            _describe(value, key)
        else:
            raise _Unknown


def _layout(out: Any, operands: Any) -> _Layout | None:
    """Layout of a new tensor; None for one that is not simply empty memory of its own."""
    if type(out) is not torch.Tensor or not out.is_meta or out.is_conj() or out.is_neg() or out.storage_offset():
        return None
    storage = out.untyped_storage()
    shape, stride = tuple(out.shape), out.stride()
    twin = torch.empty_strided(shape, stride, dtype=out.dtype, device="meta")
    if twin.untyped_storage().nbytes() != storage.nbytes():
        return None
    return None if _shares(storage._cdata, operands) else (shape, stride, out.dtype)


def _shares(address: int, values: Any) -> bool:
    """Whether a tensor among `values` lies in the storage at `address`: _unsafe_view does not say that it is a view."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.untyped_storage()._cdata == address:
                return True
        elif isinstance(value, (list, tuple)) and _shares(address, value):
            return True
    return False
